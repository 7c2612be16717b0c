"""`generate`: the text, the origin of each piece, and the costs."""

import dataclasses

import pytest

from specctl.commands.generate import Piece, generate, pieces
from specctl.decoding.device import rounds
from specctl.decoding.sampling import GREEDY
from specctl.errors import UsageError
from specctl.recipe import GenerateRecipe, SamplingRecipe, TargetRecipe
from specctl.runs import Run
from tests.decoding.test_device_round import SHAPES, eagle3
from tests.toys.decoding import decode

PROMPT = "What is 3 + 4?"


def recipe(**fields):
    return GenerateRecipe(
        prompt=PROMPT, sampling=SamplingRecipe(max_new_tokens=15), target=TargetRecipe(dtype="fp32"), **fields
    )


@pytest.fixture(scope="module")
def plain(target):
    ids = target.render([{"role": "user", "content": PROMPT}])
    return decode(target, [ids], sampling=GREEDY, max_new_tokens=15, seeds=[0])[0]


def test_a_perfect_drafter_gives_an_equal_text_and_full_acceptance(tmp_path, target, plain, scripted):
    drafter = scripted({tuple(plain.prompt_ids): plain.output_ids}, depth=3)
    made = recipe(save_outputs=True)
    run = Run.create("generate", made, tmp_path / "run")
    result = generate(made, run, target=target, drafter=drafter)
    assert result.identical and result.agreement == "equal" and result.drafter == "script"
    assert result.tokens == len(plain.output_ids)
    assert result.mat is not None and result.mat > 2 and result.accept_rate == 1.0
    assert result.speedup == pytest.approx(result.tokens_per_s / result.vanilla_tokens_per_s)
    assert "".join(piece.text for piece in result.pieces) == result.text
    assert {piece.accepted for piece in result.pieces} == {True, False}
    assert len((run.dir / "outputs.jsonl").read_text().splitlines()) == 2
    run.result(dataclasses.asdict(result))


def test_without_a_drafter_there_is_no_comparison(target, plain):
    result = generate(recipe(), target=target)
    assert result.drafter is result.identical is result.speedup is result.accept_rate is None
    assert result.mat == 1.0 and result.tokens_per_s == result.vanilla_tokens_per_s
    assert not any(piece.accepted for piece in result.pieces)


def test_pieces_mark_the_accepted_tokens(target, plain, scripted):
    """A perfect drafter of depth 3: after the token of the prefill every fourth token is the target's, and the end cuts
    the last round."""
    drafter = scripted({tuple(plain.prompt_ids): plain.output_ids}, depth=3)
    result = generate(recipe(), target=target, drafter=drafter)
    ids = plain.output_ids
    flags = ([False] + [True, True, True, False] * len(ids))[: len(ids)]
    assert result.pieces == pieces(target.tokenizer, ids, flags)


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "eagle3"])
def test_device_rounds_give_the_result_of_host_rounds(target, plain, monkeypatch, drafts):
    """A GPU runs device rounds."""
    drafter = eagle3(target, SHAPES["tree"], words=sorted({*plain.output_ids})) if drafts else None
    launched, launch = [], rounds.DeviceRounds._launch
    monkeypatch.setattr(
        rounds.DeviceRounds, "_launch", lambda self: (launched.append(self.active_drafter), launch(self))[1]
    )
    results = []
    for mode in ("0", "eager"):
        monkeypatch.setenv("SPECCTL_GRAPHS", mode)
        result = generate(recipe(), target=target, drafter=drafter)
        results.append({name: getattr(result, name) for name in ("text", "mat", "accept_rate", "identical", "pieces")})
        assert (len(launched) > 0) == (mode == "eager")
    assert results[0] == results[1] and any(piece.accepted for piece in result.pieces) == drafts
    assert launched and (drafter in launched) == drafts


def test_a_prompt_is_required(target):
    with pytest.raises(UsageError, match="needs a prompt"):
        generate(GenerateRecipe(), target=target)


class Bytes:
    """A tokenizer with one token per byte."""

    @staticmethod
    def decode(ids, skip_special_tokens):
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "accepted", "expected"),
    [
        ("ab", [False, True], [("a", False), ("b", True)]),
        ("abc", [True, True, False], [("ab", True), ("c", False)]),
        ("né", [False, False, True], [("n", False), ("é", True)]),
        ("", [], []),
    ],
)
def test_pieces_cut_between_characters(text, accepted, expected):
    """Half a character must neither vanish nor become a replacement character."""
    assert pieces(Bytes, list(text.encode()), accepted) == [Piece(*piece) for piece in expected]


def test_an_incomplete_last_character_becomes_a_replacement_character():
    ids = list("é".encode())[:1]
    assert pieces(Bytes, ids, [True]) == [Piece("\ufffd", True)]
