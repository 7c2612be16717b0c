"""Docstrings, comments and pages are plain English: constructions that must be read twice stay rare.

A hit of a pattern is a place to look at, not an error, so each package has a budget. Budgets may only fall.
"""

import re
from pathlib import Path

import pytest

from tests.test_maps import remarks

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "specctl/README.md", ".github/CONTRIBUTING.md")
BUDGET = 1.0  # hits per 1,000 words of a package
THINGS = "(?:nobody|somebody|everybody|whoever|whatever|whichever)"
PATTERNS = {
    "a pronoun for a thing": rf"(?i:\b{THINGS})(?:'s)?\b",
    "a clause without its noun": r"\bwhat (?:is|are|was|were|has|have|had|it|they|there|comes|came|must|may|can)\b",
    "a demonstrative without its noun": r"\b(?:those|the ones?) (?:of|behind|before|beside|which|that|in|on|who)\b",
    "whose": r"\bwhose\b",
    "a number without a name": r"\bso (?:many|much)\b(?! as)",
    "behind for after": r"\bbehind (?:it|them|that|those|a|an|the|each|every|all|which)\b",
    "as it is": r"\bas (?:it|they) (?:is|are|was|were|stands?|do|does|did)\b",
    "an opening without its noun": r"(?:^|[.:;] )(?:The same|Those|What|Which|But for|None|Nobody|Such|Else)\b",
}
BRITISH = re.compile(
    r"(?<!`)\b(?:learnt|spelt|licences?|colours?|behaviours?|centres?|labelled|modelled|signalled"
    r"|(?:initial|normal|optim|penal|quant|random|recogn|special|synchron|token|util)is(?:e[ds]?|ing|ation))\b",
    re.IGNORECASE,
)
COMPILED = {name: re.compile(pattern, re.MULTILINE) for name, pattern in PATTERNS.items()}


def prose_of(path: Path) -> list[str]:
    """Return docstrings, attribute docstrings and comments of a module, or paragraphs of a page without code and
    tables."""
    text = path.read_text()
    if path.suffix == ".md":
        lines = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("|")]
    return [line.lstrip("# ") for line in remarks(text)]


def hits(text: str) -> list[str]:
    return [f"{name}: {found.group()!r}" for name, pattern in COMPILED.items() for found in pattern.finditer(text)]


def packages() -> dict[str, list[Path]]:
    """Map each package to its modules, and add `pages` and `guides`."""
    found: dict[str, list[Path]] = {"pages": [ROOT / page for page in PAGES]}
    for path in sorted((ROOT / "specctl").rglob("*.py")):
        found.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    found["guides"] = sorted((ROOT / "specctl/guides").glob("*.md"))
    return found


def test_prose_is_plain():
    over = {}
    for package, paths in packages().items():
        texts = [(path.name, text) for path in paths for text in prose_of(path)]
        words = sum(len(text.split()) for _, text in texts)
        found = [f"{name}: {hit}" for name, text in texts for hit in hits(text)]
        if len(found) > max(1, BUDGET * words / 1000):
            over[package] = found
    assert not over, "\n".join(f"{package}: {found}" for package, found in over.items())


def test_words_are_spelled_as_in_american_english():
    """One page said "learned", a table "learnt". Keys that users keep, such as `learnt`, stand between backticks."""
    texts = [(path.name, text) for paths in packages().values() for path in paths for text in prose_of(path)]
    assert [(name, hit.group()) for name, text in texts for hit in BRITISH.finditer(text)] == []
    assert BRITISH.search("The learnt weights") and BRITISH.search("It is normalised.")


@pytest.mark.parametrize(
    "riddle",
    [
        "Everybody.",
        "Those behind the state are what is kept.",
        "A drafter whose rounds are the host's.",
        "The same, where texts stay as they are.",
        "At most so many tokens.",
    ],
)
def test_a_hard_sentence_is_noticed(riddle):
    """Negative control of the test above."""
    assert hits(riddle)


def test_plain_sentences_pass():
    plain = "Return the longest accepted path per row. Raises DataError if the prompt is empty."
    assert hits(plain) == []
