"""Multi-table questions: a university's advising database and what students ask it.

Prompts show some of the tables, always COURSE, in any order.
"""

from __future__ import annotations

from functools import cache
from random import Random

from .grammar import capitalized
from .phrasebook import phrasebook

# How often a table is shown: those that most questions join.
_JOINED = {"COURSE_OFFERING": 6, "SEMESTER": 5, "PROGRAM_COURSE": 3, "INSTRUCTOR": 3, "OFFERING_INSTRUCTOR": 3}


@cache
def _tables() -> dict[str, list[str]]:
    """The columns by table, as they are declared."""
    declared = (line.partition(": ") for line in phrasebook("sql_university")["tables"])
    return {name: columns.split(", ") for name, _, columns in declared}


def schema(random: Random) -> str:
    """CREATE TABLE lines of three to eight tables."""
    size = random.choices(range(2, 8), (13, 19, 34, 18, 14, 2))[0]
    others = [name for name in _tables() if name != "COURSE"]
    weights = [_JOINED.get(name, 1) for name in others]
    tables = {"COURSE"}
    while len(tables) <= size:
        tables.update(random.choices(others, weights))
    names = sorted(tables)  # sets have no order of their own: without this the text would depend on PYTHONHASHSEED
    random.shuffle(names)
    return "\n".join(f"CREATE TABLE {name} ({_columns(random, _tables()[name])});" for name in names)


def _columns(random: Random, columns: list[str]) -> str:
    """The columns, most of the optional ones (in parentheses) among them."""
    return ", ".join(
        column.removeprefix("(").removesuffix(")") if column.startswith("(") else column
        for column in columns
        if not column.startswith("(") or random.random() < 0.8
    )


def question(random: Random) -> str:
    """One question to an advisor."""
    return capitalized(phrasebook("sql_university").write(random, "questions"))
