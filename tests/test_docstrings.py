"""Docstrings of the package start with a noun or a verb, which makes them readable without the name of the object."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "specctl"
RIDDLES = ("Of", "Those", "That", "Which", "What")


def riddles(source: str) -> list[str]:
    """Return docstrings, including those after attributes, that start with a word of `RIDDLES`."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    texts = (node.value.value for node in nodes if isinstance(node.value, ast.Constant))
    return [text for text in texts if isinstance(text, str) and text.partition(" ")[0] in RIDDLES]


def test_docstrings_start_with_a_noun_or_a_verb():
    wrong = {path.relative_to(PACKAGE).as_posix(): riddles(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {path: texts for path, texts in wrong.items() if texts} == {}


@pytest.mark.parametrize("word", RIDDLES)
def test_a_bad_start_is_noticed(word):
    """Negative control for a module, a function and an attribute."""
    text = f'"""{word} the others are."""'
    assert len(riddles(f"{text}\nx = 1\n{text}\n\n\ndef f():\n    {text}\n")) == 3
    assert riddles('"""A module."""\n\n\ndef f():\n    """Whatever is left."""\n') == []
