"""Near-duplicates are found exactly, like in a comparison of all pairs."""

import random

import pytest

from specctl.distillation.select_prompts import NearDuplicateIndex, word_ngrams

WORDS = [f"w{number}" for number in range(5000)]


def text(seed: int, count: int = 200) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


def similarity(a: str, b: str) -> float:
    first, second = set(word_ngrams(a)), set(word_ngrams(b))
    return len(first & second) / len(first | second)


def index_of(threshold, texts):
    index = NearDuplicateIndex(threshold)
    for number, one in enumerate(texts):
        index.add(str(number), one)
    return index


def test_n_grams_ignore_case_punctuation_and_spaces():
    assert word_ngrams("The cat, the DOG -- and\nthe bird.") == word_ngrams("the cat the dog and the bird")
    assert len(word_ngrams("数据库里有多少学生")) == 5, "a script without spaces would be one word"
    assert word_ngrams("one two three four") == []


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9, 0.95, 1.0])
def test_exactly_the_pairs_above_the_threshold_are_found(threshold):
    """Compared with the similarity of each pair."""
    originals = [text(seed) for seed in range(200)]
    index, above = index_of(threshold, map(" ".join, originals)), 0
    for number, words in enumerate(originals):
        changed = list(words)
        for place in random.Random(number).sample(range(200), number % 40):
            changed[place] = "other"
        near = similarity(" ".join(words), " ".join(changed)) >= threshold
        assert index.find(" ".join(changed)) == (str(number) if near else None)
        above += near
    assert 0 < above < 200


@pytest.mark.parametrize("length", range(12, 40))
def test_a_pair_at_the_threshold_is_found(length):
    """For texts that differ in their last n-grams only, at every possible similarity."""
    words = text(length, length)
    index = index_of(1.0, [" ".join(words)])
    for count in range(1, length - 4):
        longer = " ".join([*words, *[f"more{n}" for n in range(count)]])
        index.threshold = similarity(" ".join(words), longer)
        assert index.find(longer) == "0"
        index.threshold += 1e-3
        assert index.find(longer) is None


def test_the_most_similar_text_is_named():
    words = text(1)
    index = index_of(0.5, [" ".join([*words[:150], *text(2, 50)]), " ".join(words[:195]), " ".join(words)])
    assert index.find(" ".join(words)) == "2"


def test_short_texts_are_not_compared():
    """Texts such as "What is 3 + 1?" and "What is 3 + 2?" have no n-grams."""
    index = index_of(0.8, ["Please tell me what is 3 and one?"])
    assert index.find("Please tell me what is 3 and one?") is None


def test_shared_boilerplate_does_not_hide_copies():
    boilerplate = " ".join(text(0, 400))
    texts = [f"{boilerplate} {' '.join(text(seed, 60))}" for seed in range(1, 200)]
    index = index_of(0.95, texts)
    assert [index.find(one.upper()) for one in texts] == [str(number) for number in range(199)]
    assert index.find(f"{boilerplate} {' '.join(text(1000, 60))}") is None
