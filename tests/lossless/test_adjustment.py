"""Penalties, logit bias, min-p and a minimum length: speculative decoding draws what plain decoding draws with them."""

from dataclasses import replace

import pytest
import torch

from specctl.decoding import verify
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.offline import decode
from specctl.decoding.records import Request
from specctl.decoding.sampling import GREEDY, Adjustment, Sampling
from tests.lossless.drafters import bushes, ragged
from tests.lossless.test_equality import DRAFTERS, ONE_OF_EACH, SEEDS

HOT = Sampling(1.0, 0, 1.0)
PENALISED = Sampling(0.8, 0, 1.0, repetition_penalty=1.2)
LIKELY, LIKELIEST = Sampling(1.0, 0, 1.0, min_p=0.2), Sampling(1.5, 30, 0.9, repetition_penalty=1.1, min_p=0.4)
STRONG = Adjustment(1.5, 1.0)
BIASED = Adjustment(-0.5, 0.3, {17: 6.0, 30: -100.0}, least=10, ends=frozenset({17}))  # 17 would end it sooner


def requests(prompts, samplings, adjustments=(STRONG, None, BIASED)):
    """Three requests, the middle one without an adjustment."""
    rows = zip(prompts, samplings, SEEDS, adjustments, strict=True)
    return [
        Request(prompt, sampling, 16, seed, adjustment.ends if adjustment else frozenset(), adjustment=adjustment)
        for prompt, sampling, seed, adjustment in rows
    ]


def answers(target, asked, drafter=None, slots=None):
    engine = Engine(target, Fixed.of(drafter), EngineOptions(slots=slots))
    return [(one.output_ids, one.stop) for one in decode(engine, asked)]


@pytest.mark.parametrize("samplings", [[GREEDY] * 3, [LIKELIEST, LIKELY, PENALISED]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_adjusted_texts_equal_plain_adjusted_texts(target, prompts, name, samplings):
    asked = requests(prompts, samplings)
    expected = answers(target, asked, slots=1)
    free = answers(target, requests(prompts, samplings, [None] * 3))
    assert [one == other for one, other in zip(expected, free, strict=True)] == [False, True, False]
    long = expected[2][0]
    assert 17 not in long[:10] and expected[2] == (long[: long.index(17) + 1], "eos")
    texts = [[*prompt, *ids] for prompt, (ids, _) in zip(prompts, expected, strict=True)]
    assert answers(target, asked, DRAFTERS[name](target, texts)) == expected


def test_min_p_changes_texts(target, prompts):
    """Negative control: the samplings above would be equal if it did nothing."""
    with_it, without = (
        answers(target, requests(prompts, [replace(LIKELY, min_p=min_p)] * 3, [None] * 3)) for min_p in (0.2, 0.0)
    )
    assert all(one != other for one, other in zip(with_it, without, strict=True))


@pytest.mark.parametrize("drafts", [bushes, ragged], ids=["trees", "chains"])
def test_negative_control_without_the_paths_of_nodes_texts_differ(target, prompts, monkeypatch, drafts):
    asked = requests(prompts, [GREEDY] * 3)
    expected = answers(target, asked, slots=1)
    texts = [[*prompt, *ids] for prompt, (ids, _) in zip(prompts, expected, strict=True)]

    def only_the_answer(logits, texts, parents, tokens):
        alone = verify.adjust(logits[:, :1], texts, [[] for _ in texts], tokens[:, :0])
        return logits + alone - logits[:, :1]

    monkeypatch.setattr(verify, "edit_logits", lambda draws, *rest: (only_the_answer(*rest), {}))
    assert answers(target, asked, drafts(texts, 0, target.vocab_size)) != expected


def test_a_node_counts_the_answer_and_its_path():
    """Not its siblings, not other branches, and not the prompt."""
    added = Adjustment(0.5, 0.25, {7: 3.0, 1: -1.0}).added([1, 2, 2], [-1, -1, 0, -2], [3, 2, 3, 0], 8)
    by_hand = [{1: 1, 2: 2}, {1: 1, 2: 2, 3: 1}, {1: 1, 2: 3}, {1: 1, 2: 2, 3: 2}]
    for row, counts in zip(added, by_hand, strict=False):
        expected = torch.zeros(8)
        for token, count in counts.items():
            expected[token] -= 0.5 + 0.25 * count
        expected[7] += 3
        expected[1] -= 1
        assert torch.equal(row, expected)


def test_an_end_is_excluded_until_the_path_is_long_enough():
    """The length at a node is the length of its path, without other nodes of the draft."""
    adjustment = Adjustment(least=4, ends=frozenset({5, 6}))
    added = adjustment.added([1, 2], [-1, 0, -1, 1, -2], [3, 3, 4, 3, 0], 8)
    assert [bool(row[5] == row[6] == -torch.inf) for row in added] == [True, True, False, True, False, True]
    assert (added[:, :5] == 0).all() and (added[:, 7] == 0).all() and (added[[2, 4]] == 0).all()


def test_a_bias_of_100_decides(target, prompts):
    asked = Request(prompts[0], HOT, 5, 1, adjustment=Adjustment(bias={17: 100.0}))
    assert answers(target, [asked])[0][0] == [17] * 5


def test_a_text_that_goes_on_counts_its_beginning(target, prompts):
    """A text that is tried again after a failed step has its first tokens in the prompt."""
    (whole, _), *_ = answers(target, [Request(prompts[0], HOT, 30, 3, adjustment=STRONG)])
    rest = Request(prompts[0] + whole[:12], HOT, 18, 3, adjustment=STRONG, begun=12)
    assert answers(target, [rest])[0][0] == whole[12:]
    forgotten = Request(prompts[0] + whole[:12], HOT, 18, 3, adjustment=STRONG)
    assert answers(target, [forgotten])[0][0] != whole[12:]
