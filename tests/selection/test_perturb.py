"""Perturbed prompts: as strong as declared, and the same for the same seed."""

from random import Random
from typing import get_args

import pytest

from specctl.lab.routing.perturb import PHRASES, perturb
from specctl.lab.train_router.recipe import Perturbation

TEXT = "Write one SQL query:\n\n  how many pets are older than 3?\tShow the columns of the table."
FOREIGN = ["Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."]


@pytest.mark.parametrize("kind", get_args(Perturbation))
def test_strength_zero_returns_the_text_unchanged(kind):
    """White space included: a rule that splits and joins words would change every prompt."""
    for text in (TEXT, "", " ", "ß→\n"):
        assert perturb(text, kind, 0.0, Random(0), FOREIGN) == text


@pytest.mark.parametrize("kind", get_args(Perturbation))
def test_the_same_seed_gives_the_same_text(kind):
    first, again = (perturb(TEXT, kind, 0.5, Random(7), FOREIGN) for _ in range(2))
    assert first == again != TEXT


def test_character_noise_is_as_strong_as_declared():
    """Binomial(10000, 0.1) is outside of 850..1150 with probability 1e-6."""
    text = "x" * 10_000
    assert 850 < len(text) - len(perturb(text, "drop", 0.1, Random(0))) < 1150
    assert 850 < len(perturb(text, "insert", 0.1, Random(0))) - len(text) < 1150
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + 10_000)))
    swapped = perturb(letters, "swap", 0.1, Random(0))
    assert sorted(swapped) == sorted(letters)
    moved_back = sum(new < old for old, new in zip(letters, swapped, strict=True))
    assert 850 < moved_back < 1150


def test_full_strength_drops_or_wraps_the_whole_text():
    assert perturb(TEXT, "drop", 1.0, Random(0)) == ""
    assert perturb(TEXT, "words", 1.0, Random(0)).split() == []
    assert TEXT in (wrapped := perturb(TEXT, "wrap", 1.0, Random(0)))
    assert wrapped.startswith("You are") and wrapped.endswith("advance!")


def test_paraphrase_keeps_capitals_and_meaning():
    said = perturb("What is the table? Write a functional list.", "paraphrase", 1.0, Random(0))
    assert said.split()[0] in ("Tell", "Could") and "functional" in said
    assert "table" not in said and "Write" not in said and "list" not in said.split()


def test_paraphrased_phrases_are_lower_case():
    """The search is in lower case: a key with capitals would never match."""
    assert all(key == key.lower() for key in PHRASES)


def test_foreign_text_is_as_long_as_declared():
    before = perturb("one two three four", "prefix", 0.5, Random(0), FOREIGN)
    assert before == "Natalia sold\n\none two three four"
    assert perturb("one two three four", "suffix", 1.0, Random(0), FOREIGN).endswith("\n\nNatalia sold clips to")
    assert perturb(TEXT, "prefix", 1.0, Random(0)) == TEXT
