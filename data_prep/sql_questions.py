"""Questions over one table: how a column, conditions and an aggregate come together in one of `sql_phrasings`."""

from __future__ import annotations

import re
from random import Random

from .grammar import Grammar, pick
from .sql_cells import LOCAL, NUMERIC, PERSONAL, RULES, TEMPORAL
from .sql_phrasings import AGGREGATES, ANY, MUCH, OF_PERSON, UNCONDITIONAL, VERBS, WHEN, WHERE, WHO

GRAMMAR = Grammar(RULES)
_ODD = re.compile(r"\s*[(\[].*?[)\]]|[#.?*]")
_MORE = ("larger than", "greater than", "more than", "higher than", "over", "bigger than", "after", "above")
_LESS = ("smaller than", "less than", "fewer than", "lower than", "under", "before", "below")


def _spoken(random: Random, heading: str) -> str:
    """How a question names a column: mostly in lower case, often without its odd characters."""
    name = " ".join(_ODD.sub("", heading).replace("_", " ").split()) if random.random() < 0.7 else heading
    name = name or heading
    return name.lower() if random.random() < 0.65 else name


def _condition(random: Random, column: str, rule: str, value: str, compare: bool) -> tuple[str, str]:
    """One condition as a clause ("the year is 1990") and as an attribute ("a year of 1990")."""
    if compare and rule in NUMERIC:
        order = pick(random, _MORE if random.random() < 0.5 else _LESS)
        return f"the {column} is {order} {value}", f"a {column} {order} {value}"
    said = value if rule != "title" or random.random() < 0.6 else value.strip('"')
    clause = pick(random, ("the {} is {}", "the {} is {}", "{} is {}", "the {} was {}", '{} is "{}"')).format(
        column, said
    )
    return clause, pick(random, ("{} of {}", "a {} of {}", "a {} of {}", "{} {}", "{} being {}")).format(column, said)


def ask(random: Random, noun: str, columns: list[tuple[str, str]], style: int) -> str:
    """A question over `columns` (heading, rule).

    `style` 1: one condition as a rule, counting questions; 2: more conditions, comparisons, sums, lower-case values.
    """
    order = random.sample(columns, len(columns))
    bound = {"s": _spoken(random, order[0][0]), "noun": noun}
    if style == 1 and random.random() < 0.02:
        return _finish(random, GRAMMAR.expand(random, pick(random, UNCONDITIONAL), bound))
    many = random.choices((1, 2, 3), (90, 9, 1) if style == 1 else (57, 34, 9))[0]
    lower = style == 2 and random.random() < 0.55
    clauses, attributes = [], []
    for heading, rule in order[1 : 1 + many]:
        value = GRAMMAR.draw(random, rule)
        value = value.lower() if lower else value
        column = _spoken(random, heading)
        clause, attribute = _condition(random, column, rule, value, style == 2 and random.random() < 0.6)
        clauses.append(clause)
        attributes.append(attribute)
        bound.setdefault("c", column)
        # A bare number says nothing without its column.
        bound.setdefault("v", f"{value} {column}" if rule in NUMERIC else value)
    bound["when"] = " and ".join(clauses)
    joint = pick(random, (" and ", " and ", ", and ", ", "))
    bound["with"] = joint.join(attributes)
    bound["has"] = pick(random, ("has ", "had ", "have ")) + joint.join(attributes)
    template = pick(random, _templates(random, order[0], order[1][1], style, many))
    return _finish(random, GRAMMAR.expand(random, template, bound))


def _templates(random: Random, column: tuple[str, str], given: str, style: int, many: int) -> tuple[str, ...]:
    heading, wanted = column
    draw = random.random()
    if draw < (0.19 if style == 1 else 0.05):
        return AGGREGATES["count"]
    if wanted in NUMERIC and draw < (0.35 if style == 1 else 0.7):
        return AGGREGATES[pick(random, ("max", "min") if style == 1 else ("max", "min", "avg", "sum"))]
    if heading in VERBS and random.random() < 0.5:
        return VERBS[heading]
    if many == 1 and given in PERSONAL and random.random() < 0.5:
        return OF_PERSON
    kinds = ((PERSONAL, WHO), (TEMPORAL, WHEN), (LOCAL, WHERE), (NUMERIC, MUCH))
    special = next((templates for rules, templates in kinds if wanted in rules), ANY)
    return special if random.random() < 0.45 else ANY


def _finish(random: Random, question: str) -> str:
    """The carelessness of real questions: no question mark, a lower-case start."""
    if question.endswith("?") and random.random() < 0.06:
        question = question[:-1] + pick(random, ("", "", ".", " ?"))
    return question[:1].lower() + question[1:] if random.random() < 0.05 else question
