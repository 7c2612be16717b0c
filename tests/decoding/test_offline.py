"""Node budgets of drafters, the order of finished texts, threads, and signals in offline decoding."""

import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from specctl import threads
from specctl.decoding import engine, offline, verify
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import DraftTree
from specctl.decoding.sampling import GREEDY
from specctl.errors import Interrupted
from specctl.progress import interrupts
from tests.toys.decoding import decode, engine_for, requests, stream


class Room(Drafter):
    """Drafts nothing and records its budgets by batch size."""

    def __init__(self):
        self.seen = {}

    def propose(self, state, budget):
        self.seen.setdefault(state.batch, set()).add(budget)
        return DraftTree.from_chains([[] for _ in state.rows], torch.device("cpu"))


def budgets(target, prompts, **options):
    drafter = Room()
    limits = [4, 9, 14]
    decode(target, prompts, sampling=GREEDY, max_new_tokens=limits, seeds=[0] * 3, drafter=drafter, **options)
    return drafter.seen


def test_sequences_of_a_batch_share_the_row_budget(target, prompts):
    """Except in exact mode, which has fixed rows, and with `share_rows=False`, which measures acceptance."""
    whole = {verify.MAX_NODES - 1}
    seen = budgets(target, prompts)
    assert seen[3] == {verify.SHARED_ROWS["cpu"] // 3 - 1} and seen[1] == whole
    assert set.union(*budgets(target, prompts, share_rows=False).values()) == whole
    assert set.union(*budgets(target, prompts, exact=True).values()) == {engine.EXACT_ROWS - 1}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_node_budgets_keep_a_step_within_the_shared_rows(device):
    """64 sequences with a default tree of 48 nodes would have 3,136 rows: the time of six steps."""
    rows = verify.SHARED_ROWS[device]
    nodes = [verify.nodes_within(rows, batch) for batch in range(1, rows + 1)]
    assert all(batch * (1 + count) <= rows for batch, count in enumerate(nodes, 1) if count > 1)
    assert all(batch * (2 + count) > rows for batch, count in enumerate(nodes, 1) if count < verify.MAX_NODES - 1)
    assert nodes == sorted(nodes, reverse=True) and nodes[-1] == 1


@pytest.mark.parametrize(("slots", "nodes"), [(2, 62), (4, 31), (8, 15), (32, 3), (64, 1), (256, 1)])
def test_the_node_budget_of_a_gpu_is_from_128_rows(slots, nodes):
    """The front page has these numbers."""
    state = SimpleNamespace(device=torch.device("cuda"), batch=slots, exact_rows=0)
    assert verify.node_budget(state, share=True) == nodes
    assert verify.node_budget(state, share=False) == verify.MAX_NODES - 1


def test_texts_are_returned_as_they_finish(target, prompts):
    """Short texts first, each with its own time; `decode` restores the order of the prompts."""
    options = dict(sampling=GREEDY, max_new_tokens=[9, 2, 5], seeds=[0] * 3)
    found = list(stream(target, prompts, **options))
    lengths = [len(one.output_ids) for one in found]
    assert lengths == sorted(lengths) and [one.index for one in found] != [0, 1, 2]
    assert [one.decode_s for one in found] == sorted(one.decode_s for one in found)
    together = decode(target, prompts, **options)
    assert [one.index for one in together] == [0, 1, 2]
    assert len({one.decode_s for one in together}) == 1


def test_threads_are_chosen_by_the_rows_of_a_step(target, prompts, monkeypatch):
    """A prompt is a step of many rows; a request that waits for a slot is in no step."""
    asked = []
    monkeypatch.setattr(threads, "step_threads", lambda flops: asked.append(flops / target.row_flops) or nullcontext())
    options = {"sampling": GREEDY, "max_new_tokens": 2}
    decode(target, prompts[:1], seeds=[0], **options)
    assert asked == [1, len(prompts[0])]
    asked.clear()
    decode(target, [*prompts, *prompts], seeds=[0] * 6, slots=2, **options)
    assert asked[:2] == [2, len(prompts[0]) + len(prompts[1])]


@pytest.mark.parametrize("stoppable", [True, False])
def test_a_signal_stops_decoding_within_a_text(target, prompts, stoppable):
    """It once took effect only at the end of the text, after minutes."""
    rounds = []

    def signalled(state):
        rounds.append(state)
        if len(rounds) == 3:
            interrupts.handle(signal.SIGTERM)

    running = engine_for(target, on_commit=signalled)
    asked = requests(prompts[:1], sampling=GREEDY, max_new_tokens=8, seeds=[0], ends=frozenset())
    try:
        with pytest.raises(Interrupted) if stoppable else nullcontext():
            offline.decode(running, asked, stoppable=stoppable)
    finally:
        interrupts.reset()
    assert not running.busy and (len(rounds) == 3 if stoppable else len(rounds) > 3)
