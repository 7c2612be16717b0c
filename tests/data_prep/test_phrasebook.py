"""Phrase lists: reading, refusals, and the completeness of the shipped files."""

import re
import string
from random import Random

import pytest
from specctl.data_prep.code_formulas import tasks
from specctl.data_prep.grammar import Choice, Slot, parse
from specctl.data_prep.phrasebook import FOLDER, Phrasebook, names, phrasebook, read

FILES = sorted(path.stem for path in FOLDER.glob("*.txt"))
BOOKS = [name for name in FILES if name != "names"]


def parsed(tmp_path, text: str):
    path = tmp_path / "fruit.txt"
    path.write_text(text, encoding="utf-8")
    return read(path)


def test_sections_and_rules_keep_their_order(tmp_path):
    """Draws pick by position, so another order would change every prompt."""
    lists = "# A remark.\n\n[b]\n  two <x|y>\none\n\ntwo <x|y>\n[a]\n#no\nMüller\n"
    sections, rules = parsed(tmp_path, f"{lists}[rules]\nfruit: fig |  red   apple\n  | kiwi |\n")
    assert list(sections.items()) == [("b", ("two <x|y>", "one", "two <x|y>")), ("a", ("Müller",))]
    assert rules == {"fruit": ("fig", "red apple", "kiwi")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\n[a]\n", r"fruit\.txt:1: a phrase before the first \[section\]"),
        ("[a]\none\n\n[a]\ntwo\n", r"fruit\.txt:4: section \[a\] occurs twice"),
        ("[rules]\nfruit: fig\nkiwi\n", r"fruit\.txt:3: expected `name: alternative"),
        ("[rules]\n| fig\n", r"fruit\.txt:2: continues a rule with `\|`, but there is no rule above"),
        ("[rules]\nfruit: fig\nfruit: kiwi\n", r"fruit\.txt:3: rule 'fruit' is defined twice"),
        ("[a]\none\n[b]\n", r"fruit\.txt: no phrases under b$"),
        ("[rules]\nfruit:\n", r"fruit\.txt: no phrases under fruit$"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        parsed(tmp_path, text)


def test_a_file_is_read_once():
    assert phrasebook("chat") is phrasebook("chat") and names() is names()


def test_a_missing_section_is_named():
    with pytest.raises(KeyError, match=r"chat\.txt has no section \[question\]"):
        phrasebook("chat")["question"]


def test_write_fills_slots_and_remembers_draws():
    bound: dict[str, str] = {}
    text = phrasebook("biochem").write(Random(0), "terms", bound)
    assert text.startswith("In ") and "{" not in text
    bound = {"n": "Zoe", "her": "her"}
    assert any("Zoe" in phrasebook("math_stories").write(Random(seed), "hero scenes", bound) for seed in range(20))


def slots(pieces) -> list[Slot]:
    """Return all slots of a template, including slots inside choices."""
    inside = [slots(part) for piece in pieces if isinstance(piece, Choice) for part in piece.alternatives]
    return [piece for piece in pieces if isinstance(piece, Slot)] + [slot for part in inside for slot in part]


def unknown(book: Phrasebook, extra: set[str]) -> set[str]:
    """Return the slots of a book that are no rules, not remembered by its phrases, and not in `extra`."""
    texts = [text for phrases in (*book.sections.values(), *book.grammar.rules.values()) for text in phrases]
    found = [slot for text in texts for slot in slots(parse(text))]
    known = {*book.grammar.rules, *extra, *(slot.name for slot in found)}
    sources = {slot.source for slot in found if isinstance(slot.source, str) and not slot.source.startswith("=")}
    return {source for source in sources if source not in known and source[:1].lower() + source[1:] not in known}


# slots filled by code: draws shared between the texts of a prompt, heroes and their pronouns
FILLED = {
    "medical": {"p", "t", "o", "m"},
    "abstracts": {"p", "m", "k", "name"},
    "math_stories": {"hero", "n", "she", "her", "him"},
    "math_chains": {"hero", "she", "her", "him", *phrasebook("math_stories").grammar.rules},
    "sql_phrasings": {"s", "c", "v", "noun", "when", "with", "has"},
}


@pytest.mark.parametrize("name", BOOKS)
def test_every_slot_of_a_file_is_known(name):
    """Otherwise a rare prompt would raise."""
    assert unknown(phrasebook(name), FILLED.get(name, set())) == set()


def test_an_unknown_slot_is_noticed():
    """Negative control, with a slot inside a choice."""
    book = phrasebook("chat")
    wrong = Phrasebook("wrong", {"a": ("<one|{nothing}> {animal} {x=fruit} {X}",)}, book.grammar)
    assert unknown(wrong, set()) == {"nothing"}


@pytest.mark.parametrize("name", FILES)
def test_files_have_no_invisible_characters(name):
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert text.endswith("\n") and not re.search(r"\t|[ ]$|\r|\n\n\n", text, re.MULTILINE)
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert text.startswith("# ") and text[2] in string.ascii_uppercase


@pytest.mark.parametrize("section", ["formulas", "list operations"])
def test_every_task_runs_on_its_examples(section):
    """The lists refer to tasks, ranges and types of Python solutions."""
    for task in tasks(section):
        random = Random(task.name)
        results = [task.run(*task.arguments(random)) for _ in range(20)]
        kinds = {type(result).__name__ for result in results}
        assert task.returns.partition("[")[0] in kinds | {"NoneType"}, (task.name, kinds)
