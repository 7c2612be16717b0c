"""Steps are split after a complete delimiter or at a limit, and loops are detected."""

from types import SimpleNamespace

import pytest

from specctl.lab.reasoning.writer import Step, StepSplitter, repeats_itself

EOS = 3


class Letters:
    """A tokenizer of the given token ids and texts."""

    def __init__(self, pieces):
        self.pieces = pieces

    def get_vocab(self):
        return {piece: token for token, piece in self.pieces.items()}

    def decode(self, ids, **options):
        return "".join(self.pieces[token] for token in ids if token != EOS)

    def batch_decode(self, rows):
        return [self.pieces[row[0]] for row in rows]


@pytest.fixture(scope="module")
def lines(target):
    return StepSplitter(target, "\n", 12)


def split(stepper, ids):
    """All steps of a text."""
    steps = []
    while ids:
        steps.append(stepper.first(ids))
        ids = ids[len(steps[-1].ids) :]
    return steps


def ids_of(target, text):
    return target.tokenizer.encode(text, add_special_tokens=False)


def test_steps_are_the_lines_of_a_text_and_keep_all_tokens(lines, target):
    ids = [*ids_of(target, "So 2 + 3 = 5\nThen 5 * 2 = 10\n#### 10"), EOS]
    steps = split(lines, ids)
    assert [step.text for step in steps] == ["So 2 + 3 = 5\n", "Then 5 * 2 = 10\n", "#### 10"]
    assert [step.end for step in steps] == ["delimiter", "delimiter", "final"]
    assert [token for step in steps for token in step.ids] == ids, "steps keep the original tokens"


def test_a_step_ends_at_a_token_after_a_gap_in_the_vocabulary():
    """The last ids of a vocabulary with gaps are not below its size. Such a delimiter was missed."""
    lines = StepSplitter(SimpleNamespace(tokenizer=Letters({0: "a", 2: "b", 9: "\n"}), eos_ids={EOS}), "\n", 12)
    assert lines.first([0, 2, 9, 0]) == Step([0, 2, 9], "ab\n", "delimiter")


def test_every_token_with_the_delimiter_ends_a_step(lines, target):
    r"""A vocabulary may have "\n " as one token. Waiting for the token "\n" would continue into the next line."""
    indented = ids_of(target, "a\n      b")
    assert len(split(lines, indented)) == 2
    assert all("\n" in target.tokenizer.decode([token]) for token in lines.ends)
    assert lines.ends


def test_a_delimiter_of_several_tokens_is_found():
    """Two line breaks may be two tokens, and neither of them contains the delimiter."""
    letters = Letters(dict(enumerate(["a", "\n", "b", "<end>"])))
    stepper = StepSplitter(SimpleNamespace(tokenizer=letters, eos_ids={EOS}), "\n\n", 10)
    assert not stepper.ends
    assert [step.ids for step in split(stepper, [0, 1, 2, 1, 1, 0, EOS])] == [[0, 1, 2, 1, 1], [0, EOS]]


def test_a_step_without_a_delimiter_ends_at_the_limit(lines, target):
    ids = ids_of(target, "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen")
    assert len(ids) > 12
    first = lines.first(ids)
    assert (len(first.ids), first.end) == (12, "limit")


def test_empty_steps_are_kept(lines, target):
    (newline,) = ids_of(target, "\n")
    step = lines.first([newline, 5])
    assert not step.text.strip() and step.ids == [newline] and step.end == "delimiter"
    assert not lines.first([EOS]).text and lines.first([EOS]).end == "final"


def steps_of(*texts):
    return [Step([1], text, "delimiter") for text in texts]


@pytest.mark.parametrize(
    ("texts", "round_"),
    [
        (["a\n", "b\n", "b\n", "B \n"], True),
        (["b\n", "b\n", "a\n"], False),
        (["a", "b", "a", "b", "a", "b"], True),
        (["x", "b", "a", "b", "a", "b"], False),
        (["\n", "\n", "\n"], True),
        (["a", "b"], False),
        ([], False),
    ],
)
def test_a_loop_is_one_repeated_step_or_two_alternating_steps(texts, round_):
    assert repeats_itself(steps_of(*texts), 3) is round_
