"""Phrase lists: the text files of `phrases/`, each read once, when first needed.

A file holds sections with one phrase per line, in the template language of `grammar`:

    # A line that begins with a hash sign is a remark; blank lines separate groups for the reader only.
    [questions]
    What is {idea}?
    Why do {animals} <sleep so much|make noise>?

    [rules]
    animals: dogs | cats | elephants
        | dolphins

The section `rules` holds `name: alternative | alternative`; a line that begins with `|` continues the rule above.
Phrases are drawn by position, so the texts of a seed depend on the order of phrases. A phrase that is listed twice is
drawn twice as often.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from .grammar import Grammar, pick

FOLDER = Path(__file__).parent / "phrases"


@dataclass(frozen=True)
class Phrasebook:
    """The phrases of one file by section, and a grammar of its rules and the shared names."""

    name: str
    sections: Mapping[str, tuple[str, ...]]
    grammar: Grammar

    def __getitem__(self, section: str) -> tuple[str, ...]:
        """The phrases of a section, unexpanded. Raises KeyError if the file has no such section."""
        if section not in self.sections:
            raise KeyError(f"{self.name}.txt has no section [{section}]")
        return self.sections[section]

    def write(self, random: Random, section: str, bound: dict[str, str] | None = None) -> str:
        """Write one text of a section; `bound` holds remembered draws as in `Grammar.expand`."""
        return self.grammar.expand(random, pick(random, self[section]), bound)


@cache
def phrasebook(name: str) -> Phrasebook:
    """Load the phrasebook of a file; its rules override the rules of `names`."""
    sections, rules = read(FOLDER / f"{name}.txt")
    return Phrasebook(name, sections, Grammar(names(), rules))


@cache
def names() -> dict[str, tuple[str, ...]]:
    """Rules for people, places and times that several domains share."""
    _, rules = read(FOLDER / "names.txt")
    return {**rules, "given": rules["woman"] + rules["man"]}


def read(path: Path) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Read the phrases by section, without `rules`, and the alternatives by rule.

    Raises ValueError with file and line for a phrase before the first section, a repeated section or rule, an empty
    section or rule, and a line of `rules` that neither begins nor continues a rule.
    """
    sections: dict[str, list[tuple[str, str]]] = {}  # (file:line, phrase)
    section = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line, where = line.strip(), f"{path.name}:{number}"
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
            if section in sections:
                raise ValueError(f"{where}: section [{section}] occurs twice")
            sections[section] = []
        elif not section:
            raise ValueError(f"{where}: a phrase before the first [section]")
        else:
            sections[section].append((where, line))
    rules = _rules(sections.pop("rules", []))
    phrases = {name: tuple(line for _, line in lines) for name, lines in sections.items()}
    if empty := [name for name, texts in (phrases | rules).items() if not texts]:
        raise ValueError(f"{path.name}: no phrases under {', '.join(empty)}")
    return phrases, rules


def _rules(lines: list[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    rules: dict[str, tuple[str, ...]] = {}
    name = ""
    for where, line in lines:
        if not line.startswith("|"):
            name, colon, line = (part.strip() for part in line.partition(":"))
            if not colon:
                raise ValueError(f"{where}: expected `name: alternative | …`, or a line that continues a rule with `|`")
            if name in rules:
                raise ValueError(f"{where}: rule {name!r} is defined twice")
            rules[name] = ()
        elif not name:
            raise ValueError(f"{where}: continues a rule with `|`, but there is no rule above")
        rules[name] += tuple(" ".join(text.split()) for text in line.split("|") if text.strip())
    return rules
