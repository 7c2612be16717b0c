"""Questions over one table: phrasings that combine a column, conditions and an aggregate."""

import re
from functools import cache
from random import Random

from .grammar import pick
from .phrasebook import phrasebook

_ODD = re.compile(r"\s*[(\[].*?[)\]]|[#.?*]")
_MORE = ("larger than", "greater than", "more than", "higher than", "over", "bigger than", "after", "above")
_LESS = ("smaller than", "less than", "fewer than", "lower than", "under", "before", "below")


@cache
def _cells() -> dict[str, list[str]]:
    """Cell rules by section of phrasings. A section fits cells of its rules, in addition to the section `any`."""
    lines = (line.partition(": ") for line in phrasebook("sql_phrasings")["cells"])
    return {section: rules.split(", ") for section, _, rules in lines}


def _spoken(random: Random, heading: str) -> str:
    """A column's name as a question would say it: mostly in lower case, often without odd characters."""
    name = " ".join(_ODD.sub("", heading).replace("_", " ").split()) if random.random() < 0.7 else heading
    name = name or heading
    return name.lower() if random.random() < 0.65 else name


def _condition(random: Random, column: str, rule: str, value: str, compare: bool) -> tuple[str, str]:
    """One condition as a clause ("the year is 1990") and as an attribute ("a year of 1990")."""
    if compare and rule in _cells()["much"]:
        order = pick(random, _MORE if random.random() < 0.5 else _LESS)
        return f"the {column} is {order} {value}", f"a {column} {order} {value}"
    said = value if rule != "title" or random.random() < 0.6 else value.strip('"')
    clause = pick(random, ("the {} is {}", "the {} is {}", "{} is {}", "the {} was {}", '{} is "{}"')).format(
        column, said
    )
    return clause, pick(random, ("{} of {}", "a {} of {}", "a {} of {}", "{} {}", "{} being {}")).format(column, said)


def ask(random: Random, noun: str, columns: list[tuple[str, str]], style: int) -> str:
    """Write a question over `columns` (heading, rule).

    `style` 1: mostly one condition, and counting questions; 2: more conditions, comparisons, sums, lower-case values.
    """
    grammar, phrasings = phrasebook("sql_tables").grammar, phrasebook("sql_phrasings")
    order = random.sample(columns, len(columns))
    bound = {"s": _spoken(random, order[0][0]), "noun": noun}
    if style == 1 and random.random() < 0.02:
        return _finish(random, grammar.expand(random, pick(random, phrasings["unconditional"]), bound))
    many = random.choices((1, 2, 3), (90, 9, 1) if style == 1 else (57, 34, 9))[0]
    lower = style == 2 and random.random() < 0.55
    clauses, attributes = [], []
    for heading, rule in order[1 : 1 + many]:
        value = grammar.draw(random, rule)
        value = value.lower() if lower else value
        column = _spoken(random, heading)
        clause, attribute = _condition(random, column, rule, value, style == 2 and random.random() < 0.6)
        clauses.append(clause)
        attributes.append(attribute)
        bound.setdefault("c", column)
        # A bare number says nothing without its column.
        bound.setdefault("v", f"{value} {column}" if rule in _cells()["much"] else value)
    bound["when"] = " and ".join(clauses)
    joint = pick(random, (" and ", " and ", ", and ", ", "))
    bound["with"] = joint.join(attributes)
    bound["has"] = pick(random, ("has ", "had ", "have ")) + joint.join(attributes)
    section = _section(random, order[0], order[1][1], style, many)
    return _finish(random, grammar.expand(random, pick(random, phrasings[section]), bound))


def _section(random: Random, column: tuple[str, str], given: str, style: int, many: int) -> str:
    """Choose the section of phrasings for the wanted column; `given` is the rule of the first condition."""
    heading, wanted = column
    draw = random.random()
    if draw < (0.19 if style == 1 else 0.05):
        return "count"
    if wanted in _cells()["much"] and draw < (0.35 if style == 1 else 0.7):
        return pick(random, ("max", "min") if style == 1 else ("max", "min", "avg", "sum"))
    if (own := f"column {heading}") in phrasebook("sql_phrasings").sections and random.random() < 0.5:
        return own
    if many == 1 and given in _cells()["who"] and random.random() < 0.5:
        return "of person"
    special = next((section for section, rules in _cells().items() if wanted in rules), "any")
    return special if random.random() < 0.45 else "any"


def _finish(random: Random, question: str) -> str:
    """Add the carelessness of real questions: a missing question mark, a lower-case start."""
    if question.endswith("?") and random.random() < 0.06:
        question = question[:-1] + pick(random, ("", "", ".", " ?"))
    return question[:1].lower() + question[1:] if random.random() < 0.05 else question
