"""Questions over several tables: a university's advising database, and the questions that students ask.

Prompts show some of the tables, always including COURSE, in any order.
"""

from functools import cache
from random import Random

from .grammar import capitalized
from .phrasebook import phrasebook

# Weights of the tables that most questions join; all other tables have weight 1.
_JOINED = {"COURSE_OFFERING": 6, "SEMESTER": 5, "PROGRAM_COURSE": 3, "INSTRUCTOR": 3, "OFFERING_INSTRUCTOR": 3}


@cache
def _tables() -> dict[str, list[str]]:
    """Column declarations by table."""
    declared = (line.partition(": ") for line in phrasebook("sql_university")["tables"])
    return {name: columns.split(", ") for name, _, columns in declared}


def schema(random: Random) -> str:
    """Write CREATE TABLE lines for three to eight tables."""
    size = random.choices(range(2, 8), (13, 19, 34, 18, 14, 2))[0]
    others = [name for name in _tables() if name != "COURSE"]
    weights = [_JOINED.get(name, 1) for name in others]
    tables = {"COURSE"}
    while len(tables) <= size:
        tables.update(random.choices(others, weights))
    names = sorted(tables)  # the order of a set would make the text depend on PYTHONHASHSEED
    random.shuffle(names)
    return "\n".join(f"CREATE TABLE {name} ({_columns(random, _tables()[name])});" for name in names)


def _columns(random: Random, columns: list[str]) -> str:
    """Join the columns, with most of the optional ones (in parentheses)."""
    return ", ".join(
        column.removeprefix("(").removesuffix(")") if column.startswith("(") else column
        for column in columns
        if not column.startswith("(") or random.random() < 0.8
    )


def question(random: Random) -> str:
    """Write one question to an advisor."""
    return capitalized(phrasebook("sql_university").write(random, "questions"))
