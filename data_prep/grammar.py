"""Seeded text templates, on which all prompt generators are built.

A template is plain text with two kinds of holes:

    <one|two|>        one of the alternatives (an empty one makes the text optional); alternatives may hold slots
                      and choices
    {fruit}           a fresh draw from the rule `fruit`; {Fruit} is the same draw with a capital first letter
    {3-12} {10-90/5}  an integer in the range, both ends included, in steps
    {n=3-9} {x=fruit} a draw that is printed and remembered; {n}, {x}, {X} print it again
    {!n=3-9}          a draw that is only remembered
    {=n*4+k}          arithmetic on remembered integers, evaluated strictly from left to right

Rules map a name to alternatives, which are templates themselves. All randomness comes from a `random.Random`, so a text
is a function of the seed in every process and on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from random import Random
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_HOLE = re.compile(r"<|\{[^{}]*\}")
_RANGE = re.compile(r"(\d+)-(\d+)(?:/(\d+))?")
_TERM = re.compile(r"([+*-]?)(\w+)")
_SPARE = re.compile(r" +(?=[ .,?])")
# An "a" before a vowel sound. Words that are written with a vowel but spoken with a consonant keep their "a".
_ARTICLE = re.compile(r"\b([Aa]) (?=(?!uni|one\b|one-|use|eu)[aeiou]|8\b|11\b|18\b|8\d\b|hour|honest)")


class Range(NamedTuple):
    """An integer from `low, low + step, …`, with `size` possible values."""

    low: int
    step: int
    size: int


class Slot(NamedTuple):
    """A slot `{…}`: the source of its value, the name that remembers it, and whether it is printed."""

    source: str | Range
    name: str | None
    printed: bool


class Choice(NamedTuple):
    """A choice `<…|…>`: compiled alternatives."""

    alternatives: tuple[tuple[str | Slot | Choice, ...], ...]


Piece = str | Slot | Choice


def pick(random: Random, items: Sequence[T]) -> T:
    """Draw one item, uniformly."""
    # Several times faster than `random.choice`; a 53-bit float has no visible bias over a word list.
    return items[int(random.random() * len(items))]


def tidy(text: str) -> str:
    """Drop the spaces that empty alternatives leave: doubled spaces, and spaces before punctuation."""
    return _SPARE.sub("", text)


def capitalized(text: str) -> str:
    """The text with a capital first letter and no other change."""
    return text[:1].upper() + text[1:]


def articles(text: str) -> str:
    """Correct `a apple` to `an apple`: a template cannot know the word after its article."""
    return _ARTICLE.sub(r"\1n ", text)


@cache
def parse(template: str) -> tuple[Piece, ...]:
    """Compile a template to pieces, once. A `<` without its `>` is text."""
    pieces: list[Piece] = []
    end = 0
    while (hole := _HOLE.search(template, end)) is not None:
        if hole.start() > end:
            pieces.append(template[end : hole.start()])
        if hole.group() != "<":
            pieces.append(_slot(hole.group()[1:-1]))
            end = hole.end()
        elif (cuts := _alternatives(template, hole.start())) is None:
            pieces.append("<")
            end = hole.end()
        else:
            pieces.append(Choice(tuple(parse(template[a + 1 : b]) for a, b in pairwise(cuts))))
            end = cuts[-1] + 1
    if end < len(template):
        pieces.append(template[end:])
    return tuple(pieces)


def _alternatives(template: str, start: int) -> list[int] | None:
    """Positions that divide the choice that opens at `start`: its `<`, its own `|`s, its `>`; or None if it never
    closes."""
    cuts, depth = [start], 0
    for position in range(start, len(template)):
        character = template[position]
        depth += (character == "<") - (character == ">")
        if depth == 0 or (depth == 1 and character == "|"):
            cuts.append(position)
        if depth == 0:
            return cuts
    return None


def _slot(text: str) -> Slot:
    if text.startswith("="):
        return Slot(text, None, True)
    printed = not text.startswith("!")
    name, bound, source = text.lstrip("!").partition("=")
    return Slot(_source(source), name, printed) if bound else Slot(_source(name), None, printed)


def _source(text: str) -> str | Range:
    if (number := _RANGE.fullmatch(text)) is None:
        return text
    low, high, step = int(number[1]), int(number[2]), int(number[3] or 1)
    return Range(low, step, (high - low) // step + 1)


def _evaluate(expression: str, bound: Mapping[str, str]) -> str:
    total = 0
    for sign, term in _TERM.findall(expression):
        value = int(term if term.isdigit() else bound[term])
        total = total * value if sign == "*" else total - value if sign == "-" else total + value
    return str(total)


class Grammar:
    """Rules by name, and the expansion of templates with these rules.

    Expansion raises KeyError for a slot that is neither a rule nor a remembered name: a mistake in a template.
    """

    def __init__(self, *rules: Mapping[str, Sequence[str]]):
        self.rules: dict[str, tuple[str, ...]] = {
            name: tuple(texts) for group in rules for name, texts in group.items()
        }

    def expand(self, random: Random, template: str, bound: dict[str, str] | None = None) -> str:
        """Write one text from a template. `bound` holds remembered draws: pass the same dict to share them between
        texts."""
        return self._expand(random, parse(template), {} if bound is None else bound)

    def draw(self, random: Random, rule: str, bound: dict[str, str] | None = None) -> str:
        """Write one text from a rule."""
        return self.expand(random, pick(random, self.rules[rule]), bound)

    def _expand(self, random: Random, pieces: tuple[Piece, ...], bound: dict[str, str]) -> str:
        texts: list[str] = []
        for piece in pieces:
            if isinstance(piece, str):
                texts.append(piece)
            elif isinstance(piece, Choice):
                texts.append(self._expand(random, pick(random, piece.alternatives), bound))
            else:
                value = self._value(random, piece.source, bound)
                if piece.name is not None:
                    bound[piece.name] = value
                if piece.printed:
                    texts.append(value)
        return "".join(texts)

    def _value(self, random: Random, source: str | Range, bound: dict[str, str]) -> str:
        if isinstance(source, Range):
            return str(source.low + source.step * int(random.random() * source.size))
        if source in bound:
            return bound[source]
        if source in self.rules:
            return self._expand(random, parse(pick(random, self.rules[source])), bound)
        if source.startswith("="):
            return _evaluate(source[1:], bound)
        lowered = source[:1].lower() + source[1:]
        if lowered == source:
            raise KeyError(f"slot {{{source}}} is neither a rule nor a remembered name")
        return capitalized(self._value(random, lowered, bound))
