"""`Arm` guards one drafter; `PerSequence` and `DraftAll` combine several drafters."""

import pytest
import torch

from specctl.decoding.controllers import NoDraft, PerSequence
from specctl.decoding.protocols import Controller
from specctl.decoding.records import DraftTree
from specctl.decoding.sampling import GREEDY
from specctl.errors import Interrupted
from specctl.selection.arms import Arm, DraftAll, union
from tests.lossless.drafters import constant, perfect
from tests.toys.decoding import decode


class Failing(NoDraft):
    def __init__(self, error):
        self.error, self.calls = error, 0
        self.forgotten = 0

    def propose(self, state, budget):
        self.calls += 1
        raise self.error

    def invalidate(self, state):
        self.forgotten += 1


def test_a_failing_drafter_does_not_change_the_text(target, prompts, capsys):
    plain = decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=6, seeds=[0])
    broken = Failing(RuntimeError("no such row"))
    guarded = Arm("broken", broken)
    found = decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=6, seeds=[0], drafter=guarded)
    assert found[0].output_ids == plain[0].output_ids
    assert guarded.failures == broken.calls == broken.forgotten == found[0].target_passes == 5
    assert capsys.readouterr().err.count("no such row") == 1


def test_a_signal_is_not_caught_as_a_drafter_failure(target, prompts):
    """SIGTERM raises inside the running code; if the guard caught it, the job could not be stopped."""
    with pytest.raises(Interrupted):
        decode(
            target,
            prompts[:1],
            sampling=GREEDY,
            max_new_tokens=6,
            seeds=[0],
            drafter=Arm("stopped", Failing(Interrupted("SIGTERM"))),
        )


def test_an_arm_limits_the_nodes_of_a_draft(target, prompts):
    found = decode(
        target,
        prompts[:1],
        sampling=GREEDY,
        max_new_tokens=12,
        seeds=[0],
        drafter=Arm("two", constant([7] * 9), nodes=2),
    )
    assert set(found[0].offered_by_depth) and len(found[0].offered_by_depth) <= 2
    assert found[0].drafted <= 2 * found[0].target_passes


def test_sequences_of_a_batch_can_have_different_drafters(target, prompts):
    """If the merge mixed up rows, a sequence would get the wrong draft and need more passes than when it is decoded
    alone."""
    options = dict(sampling=GREEDY, max_new_tokens=16)
    plain = [decode(target, [p], seeds=[0], **options)[0] for p in prompts]
    texts = [one.prompt_ids + one.output_ids for one in plain]
    good, bad = perfect(texts, 4), constant([7, 7])
    alone = [
        decode(target, [prompt], seeds=[0], drafter=who, **options)[0]
        for prompt, who in zip(prompts, (perfect(texts[:1], 4), bad, perfect(texts[2:], 4)), strict=True)
    ]
    found = decode(target, prompts, seeds=[0] * 3, drafter=None, controller=Played([good, bad, good]), **options)
    for one, by_itself, text in zip(found, alone, plain, strict=True):
        assert one.output_ids == text.output_ids
        assert one.target_passes == by_itself.target_passes


class Played(Controller):
    def __init__(self, drafters):
        self.drafters = drafters

    def choose(self, state):
        return PerSequence([self.drafters[row.index] for row in state.rows])

    def observe(self, state, result):
        pass


def test_a_union_of_drafts_has_every_path_once():
    a = ([5, 6, 7], [-1, 0, 1])
    b = ([5, 8, 6], [-1, 0, 0])
    tokens, parents = union([a, b, ([], [])], 10)
    paths = set()
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path.append(tokens[at])
            at = parents[at]
        paths.add(tuple(reversed(path)))
    assert paths == {(5,), (5, 6), (5, 8), (5, 6, 7)} and len(tokens) == 4
    assert all(parent < node for node, parent in enumerate(parents))


def test_a_union_over_budget_drops_the_deepest_nodes():
    """Cutting in the order of the drafters could drop the whole draft of a later drafter."""
    chain = ([1, 2, 3, 4], [-1, 0, 1, 2])
    tokens, parents = union([chain, ([9, 8], [-1, 0])], 4)
    assert sorted(tokens) == [1, 2, 8, 9] and parents.count(-1) == 2


def test_a_union_ignores_padding():
    assert union([([4, 0], [-1, -2])], 8) == ([4], [-1])


def test_draft_all_accepts_as_much_as_its_best_drafter(target, prompts):
    options = dict(sampling=GREEDY, max_new_tokens=16, seeds=[0])
    plain = decode(target, prompts[:1], **options)[0]
    good = perfect([plain.prompt_ids + plain.output_ids], 3)
    one, both = (
        decode(target, prompts[:1], drafter=who, **options)[0]
        for who in (good, DraftAll([Arm("7", constant([7, 7, 7])), Arm("good", good)]))
    )
    assert both.output_ids == one.output_ids and both.target_passes == one.target_passes


def test_drafters_that_do_not_draft_make_an_empty_batch_draft(target):
    class State:
        batch, device = 2, torch.device("cpu")

    draft = PerSequence([NoDraft()] * 2).propose(State(), 4)
    assert isinstance(draft, DraftTree) and draft.size == 0
