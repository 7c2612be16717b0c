"""Near-duplicates: found where they are, and nothing else is."""

import random

import pytest

from specctl.distillation.near_duplicates import NearDuplicateIndex, word_ngrams

WORDS = [f"w{number}" for number in range(5000)]


def text(seed: int, count: int = 200) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


def similarity(a: str, b: str) -> float:
    first, second = set(word_ngrams(a)), set(word_ngrams(b))
    return len(first & second) / len(first | second)


def test_grams_know_no_case_punctuation_or_spaces():
    assert word_ngrams("The cat, the DOG -- and\nthe bird.") == word_ngrams("the cat the dog and the bird")
    assert len(word_ngrams("数据库里有多少学生")) == 5, "a script without spaces would be one word"
    assert word_ngrams("one two three four") == []


@pytest.mark.parametrize("threshold", [0.8, 0.9, 0.95])
def test_pairs_above_the_threshold_are_found_and_others_are_not(threshold):
    """Recall at the threshold is 0.95 by design: 300 pairs above it miss 40 with a probability below 1e-7."""
    index, missed, above = NearDuplicateIndex(threshold), 0, 0
    originals = [text(seed) for seed in range(400)]
    for number, words in enumerate(originals):
        assert index.add(" ".join(words)) is None
        assert len(index) == number + 1
    for number, words in enumerate(originals):
        changed = list(words)
        for place in random.Random(number).sample(range(200), number % 6):
            changed[place] = "other"
        near = similarity(" ".join(words), " ".join(changed)) >= threshold
        found = index.find(" ".join(changed))
        assert found in ((number, None) if near else (None,)), "an estimate has dropped a text that differs"
        above, missed = above + near, missed + (near and found is None)
    assert above > 50 and missed <= max(3, 40 * above // 300)


def test_decisions_follow_from_texts_and_order():
    """A resumed run that decided otherwise would mix two data sets."""
    texts = [" ".join(text(seed // 2)[: 200 - seed % 2]) for seed in range(100)]
    first, second = NearDuplicateIndex(0.9), NearDuplicateIndex(0.9)
    assert [first.add(one) for one in texts] == [second.add(one) for one in texts]
    assert [first.find(one) for one in texts] == [number // 2 for number in range(100)]


def test_short_texts_are_told_apart():
    """ "What is 3 + 1?" and "What is 3 + 2?" have no n-gram to differ in."""
    index = NearDuplicateIndex(0.8)
    for number in range(50):
        assert index.add(f"Please tell me what is {number} and one?") is None
    assert len(index) == 50


def test_a_crowd_under_one_band_hides_no_copy():
    """Boilerplate: thousands of texts share a bucket, and only the newest are compared."""
    boilerplate = " ".join(text(0, 400))
    texts = [f"{boilerplate} {' '.join(text(seed, 60))}" for seed in range(1, 200)]
    index = NearDuplicateIndex(0.95)
    assert all(index.add(one) is None for one in texts)
    assert [index.find(one.upper()) for one in texts] == list(range(199))
