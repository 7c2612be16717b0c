"""Streamed parts add up to the text for any split into tokens, without stop strings."""

import random

import pytest

from specctl.gateway.text_stream import TextStream, decoder

TEXTS = ["SELECT name FROM pets;", "Zwölf Bäume, é und 日本語 🙂 ende", "a  b\n\n c", ""]


@pytest.fixture(scope="module")
def decode(target):
    return decoder(target.tokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_parts_add_up_to_the_text(target, decode, text):
    """The bytes of a character may span several tokens."""
    ids = target.tokenizer.encode(text, add_special_tokens=False)
    whole = target.tokenizer.decode(ids, skip_special_tokens=True)
    draw = random.Random(0)
    for _ in range(20):
        stream, parts, at = TextStream(decode), [], 0
        while at < len(ids):
            size = draw.randint(1, 4)
            parts.append(stream.add(ids[at : at + size]))
            at += size
        parts.append(stream.finish())
        assert "".join(parts) == whole == stream.text and not any("\ufffd" in part for part in parts)


def test_an_incomplete_character_is_shown_at_the_end(target, decode):
    ids = target.tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1, "the toy's tokenizer has it in bytes"
    stream = TextStream(decode)
    assert stream.add(ids[:1]) == "" and stream.finish() == target.tokenizer.decode(ids[:1])


@pytest.mark.parametrize(
    "stops", [["name"], ["ELECT na"], ["FROM", "name"], ["xyz", "pets;"], ["; "], ["M p", "FROM pe"]]
)
def test_a_stop_string_ends_the_text_and_is_not_shown(target, decode, stops):
    text = "SELECT name FROM pets;"
    ids = target.tokenizer.encode(text, add_special_tokens=False)
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    end, first = min(found, default=(len(text), ""))  # the first stop string to be complete
    expected = text[: end - len(first)]
    for size in (1, 2, 3, len(ids)):
        stream, parts = TextStream(decode, stops), []
        for at in range(0, len(ids), size):
            parts.append(stream.add(ids[at : at + size]))
            if stream.stopped:
                break
        parts.append(stream.finish())
        assert "".join(parts) == expected == stream.text
        assert (stream.stopped in stops) == bool(found) and stream.used <= len(ids)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_stop_string_may_end_the_text_late_and_be_shown(target, decode, size):
    """A stop string that is complete within the least number of tokens does not count, even if a longer one does."""
    ids = target.tokenizer.encode("one two three four two five", add_special_tokens=False)
    pieces = [target.tokenizer.decode([id]) for id in ids]
    least = pieces.index(" two") + 1
    for shows, expected in ((False, "one two three four "), (True, "one two three four two")):
        stream, parts = TextStream(decode, ["two", "four two five six"], least, shows), []
        for at in range(0, len(ids), size):
            parts.append(stream.add(ids[at : at + size]))
            if stream.stopped:
                break
        assert "".join([*parts, stream.finish()]) == expected == stream.text and stream.used == len(ids) - 1


def test_tokens_after_a_stop_string_are_not_counted(target, decode):
    ids = target.tokenizer.encode("one two three four", add_special_tokens=False)
    stream = TextStream(decode, ["two"])
    stream.add(ids)
    assert stream.used < len(ids) and stream.text == "one "


def test_the_held_part_is_the_longest_prefix_of_a_stop_string():
    """Compared with the definition on random texts of two letters."""
    draw = random.Random(1)
    for _ in range(2000):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(draw.randint(1, 3))]
        stream = TextStream(str, stops)
        stream.text = text = "".join(draw.choices("ab", k=draw.randint(0, 9)))
        ends = [size for size in range(1, len(text) + 1) for stop in stops if len(stop) > size]
        held = [size for size in ends if any(stop.startswith(text[-size:]) and len(stop) > size for stop in stops)]
        assert stream._held() == max(held, default=0)
