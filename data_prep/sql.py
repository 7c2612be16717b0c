"""SQL prompts: a question over one table (in two layouts), or over a database of several tables (`sql_university`)."""

import re
from functools import cache
from random import Random

from . import sql_questions, sql_university
from .domain import Domain, PublicSet
from .grammar import pick
from .phrasebook import phrasebook

_TABLE = (
    "Given the table and its columns, write one SQL query that answers the question.\n\n"
    "Table: {}\nColumns: {}\n\nQuestion: {}"
)
_SCHEMA = "Given the database schema, write one SQL query that answers the question.\n\nSchema:\n{}\n\nQuestion: {}"
_BRACKETED = re.compile(r"[^a-z0-9_]|^\d")


@cache
def _topic(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    noun, _, columns = text.partition(": ")
    pairs = (column.rpartition(" = ") for column in columns.split("; "))
    return noun, tuple((heading, rule) for heading, _, rule in pairs)


def _columns(random: Random, most: tuple[int, ...]) -> tuple[str, list[tuple[str, str]]]:
    book = phrasebook("sql_tables")
    noun, columns = _topic(pick(random, book["topics"]))
    kept = sorted(random.sample(range(len(columns)), min(pick(random, most), len(columns))))
    return noun, [(book.grammar.expand(random, columns[i][0]), columns[i][1]) for i in kept]


def identifier(heading: str) -> str:
    """Convert a table heading to a schema column: lower case, underscores, brackets if a bare name would not parse."""
    name = heading.lower().replace(".", "").replace(" ", "_")
    return f"[{name}]" if _BRACKETED.search(name) else name


def _number(random: Random) -> str:
    return f"{10 + int(random.random() ** 2 * 20)}{int(random.random() * 10 ** pick(random, (4, 5, 5, 6, 6, 6))):04d}"


def _sample(random: Random) -> str:
    layout = random.random()
    if layout < 0.2:
        return _SCHEMA.format(sql_university.schema(random), sql_university.question(random))
    table = pick(random, (1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20))
    if layout < 0.44:
        noun, columns = _columns(random, (5, 5, 6, 6, 6, 7, 7, 8, 9, 11))
        question = sql_questions.ask(random, noun, columns, style=1)
        return _TABLE.format(f"1-{_number(random)}-{table}", ", ".join(heading for heading, _ in columns), question)
    style = 1 if random.random() < 0.28 else 2
    noun, columns = _columns(random, (4, 4, 4, 5, 5, 5, 5, 6, 6, 7))
    random.shuffle(columns)
    question = sql_questions.ask(random, noun, columns, style)
    declared = ", ".join(identifier(heading) for heading, _ in columns)
    return _SCHEMA.format(f"CREATE TABLE table_{style}_{_number(random)}_{table} ({declared});", question)


DOMAIN = Domain(
    name="sql",
    description="questions over tables and database schemas, answered by one SQL query",
    public=PublicSet(
        id="b-mc2/sql-create-context",
        config=None,
        split={"train": "train[:95%]", "test": "train[95%:]"},
        columns={"context": "context", "question": "question"},
        template=_SCHEMA.format("{context};", "{question}"),
        licence="CC-BY-4.0",
        citation="b-mc2, sql-create-context (2023), built on WikiSQL (Zhong et al., 2017) and Spider (Yu et al., 2018)",
    ),
    sample=_sample,
)
