"""Hybrid drafter: a trained drafter (the head) and a text drafter draft one tree together.

A text drafter drafts for free and is reliable in repetitive text. A head costs one pass per level and knows more
elsewhere. In each round the text drafter proposes first (`weighed`). The head is asked if its expected gain is worth
its passes (`gate`), and drafts another level as long as that pays off. A node, a level or the head pays if it raises
the round's expected tokens per cost. The gate between two kinds of drafters is ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.protocols import DeviceDraft
from specctl.decoding.records import DraftTree, Score
from specctl.decoding.state import DecodeState
from specctl.decoding.verify import node_budget
from specctl.drafters.hybrid.costs import Costs
from specctl.drafters.hybrid.gate import HEAD, HOPE, PARTS, REPAID, GateStatistics
from specctl.drafters.hybrid.weighed import TextProposal, WeighedText, best_size
from specctl.drafters.text.device_rounds import union
from specctl.drafters.tree import CandidateDrafter, TextDrafter

GOES_ON = 0.75  # assumed probability that a level's token is accepted if the previous level's was
NEXT = 0.9  # claim assumed for a level that is not drafted yet
DEVICE_TEXT_NODES = 14  # nodes of a device round that the text drafter gets: its head then keeps its default tree


class Hybrid(WeighedText):
    """Trained drafter (the head) and text drafter that draft as one."""

    def __init__(
        self,
        head: CandidateDrafter,
        text: TextDrafter,
        costs: Costs,
        past: GateStatistics | None = None,
        quality: float = 1.0,
    ):
        super().__init__(text, costs, past)
        self.head, self.quality = head, quality
        self.taps = head.taps

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """Draft a tree from the last committed token; in exact mode a chain."""
        offer = self.offer(state, budget)
        kinds = offer.kinds()
        if not self._asks(state, offer, kinds):
            return self.draft(state, offer, offer.size)
        levels = self._ask(state, budget, offer)
        spent = offer.costs.drafting(levels, state.batch)
        return self.draft(state, offer, best_size(state, offer.drafts, budget, offer.costs, spent), levels, kinds)

    def _asks(self, state: DecodeState, offer: TextProposal, kinds: list[int]) -> bool:
        """Whether the head's gain is worth its passes; one forward serves all texts."""
        gates, alone, costs = offer.gates, offer.size, offer.costs
        asking = [b for b in state.live if state.rows[b].draft_room > 0]
        if not asking:
            return False
        records = [(gates[b].past, kinds[b]) for b in asking]
        overdue = {(past, kind) for past, kind in dict.fromkeys(records) if past.overdue(kind)}
        gain = sum(gates[b].gain(kinds[b]) for b in asking)
        levels = round(sum(gates[b].levels for b in asking) / len(asking))
        rows, lag = alone.width + 1, self.head.lag(state)
        reading = costs.read * sum(lag[b] / reading_rounds(state.rows[b].draft_room) for b in asking)

        def pays(gain: float) -> bool:
            return any(
                gain * share(level, levels) > alone.rate * (reading + costs.asking(level, rows, state.batch))
                for level in range(1, levels + 1)
            )

        if pays(gain):
            for past, kind in records:
                past.tried(kind, pays=True)
            return True
        # One forward tries the head on all texts, so a minority of overdue texts does not justify its passes.
        tries = 2 * sum(record in overdue for record in records) >= len(asking) and pays(gain / HOPE)
        for past, kind in overdue if tries else ():
            past.tried(kind, pays=False)
        return tries

    def _ask(self, state: DecodeState, budget: int, offer: TextProposal) -> int:
        """Add the head's candidates to the drafts. Returns the number of levels it has drafted."""
        gates, alone, costs = offer.gates, offer.size, offer.costs
        levels = 1
        price = alone.rate * (costs.further(state.batch) + costs.further_rows(alone.width + 1, 2, state.batch))
        trust = [gate.trust[HEAD] for gate in gates]
        trusted, before = [1.0] * len(gates), [0.0] * len(gates)

        def pays(joint: list[float]) -> bool:
            nonlocal levels
            for b in state.live:
                trusted[b] *= trust[b](min(math.exp(joint[b] - before[b]), 1.0))
                before[b] = joint[b]
            worth = sum(trusted[b] * trust[b](NEXT) for b in state.live)
            levels += worth > price
            return worth > price

        grown = self.head.propose_candidates(state, budget, pays)
        for draft, proposal, gate in zip(offer.drafts, grown, gates, strict=True):
            draft.add(proposal, HEAD, gate.trust[HEAD])
        return levels

    def advance(self, state: DecodeState) -> None:
        """Let both drafters read the committed tokens."""
        super().advance(state)
        self.head.advance(state)

    def lag(self, state: DecodeState) -> list[int]:
        """Number of tokens that the head has to read; the text drafter's reading is free."""
        return self.head.lag(state)

    def invalidate(self, state: DecodeState) -> None:
        """Forget the head's cache after a weight update."""
        super().invalidate(state)
        self.head.invalidate(state)

    @property
    def kind(self) -> str:
        return f"{self.head.kind} with a text drafter"

    @property
    def fixed_shape(self) -> bool:
        """Whether both drafters can draft in device rounds."""
        return self.head.fixed_shape and self.text.fixed_shape

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft | None:
        """Device rounds in which both drafters always draft: with one shape for all rounds, there is no gate."""
        budget = min(budget, node_budget(state, share=True))
        nodes = max(min(DEVICE_TEXT_NODES, budget // 4), 1)
        if not self.fixed_shape:
            return None
        head, text = self.head.on_device(state, budget - nodes), self.text.on_device(state, nodes)
        return None if head is None or text is None else HybridRounds(head, text)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Children that both drafters would have proposed: an upper bound, as the gate may leave some out."""
        scores = []
        parts = zip(self.head.score(state, spans, depths), self.text.score(state, spans, depths), strict=True)
        for head, text in parts:
            trained, read = proposed(head, state.device), proposed(text, state.device)
            deep = max(len(trained), len(read))
            tokens = torch.cat([part.expand(deep, -1, -1) for part in (trained, read)], -1)
            depth = max(len(head.children), len(text.children))
            scores.append(Score(head.positions, tokens=tokens, children=(tokens.shape[-1],) * depth))
        return scores


class HybridRounds(DeviceDraft):
    """Rounds on the device with the joined trees of head and text drafter.

    The head drafts on the device, the text drafter on the host before the round starts.
    """

    reads_text = True

    def __init__(self, head: DeviceDraft, text: DeviceDraft):
        self.head, self.text = head, text
        self.depth = max(head.depth, text.depth)
        self.reach = head.reach + text.reach - 1  # one root
        self.carried = [*head.carried, *text.carried]

    def load(self, state: DecodeState) -> None:
        self.head.load(state)
        self.text.load(state)
        self.host_seconds = self.text.host_seconds

    def fits(self, state: DecodeState) -> bool:
        return self.head.fits(state) and self.text.fits(state)

    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        drafts = self.head.propose(sequences, span), self.text.propose(sequences, span)
        return union(*drafts, levels=self.head.depth)

    def advance(self, sequences: DeviceBatch, before: Tensor, span: int) -> None:
        self.head.advance(sequences, before, span)
        self.text.advance(sequences, before, span)

    def store(self, state: DecodeState) -> None:
        self.head.store(state)
        self.text.store(state)


def reading_rounds(room: int) -> float:
    """Number of rounds that share the cost of a head's reading, in a text that may get `room` more tokens."""
    return min(max(room / REPAID, 1), PARTS)


def share(level: int, levels: int) -> float:
    """Share of the gain of `levels` levels that comes from the first `level` levels."""
    return (1 - GOES_ON**level) / (1 - GOES_ON**levels)


def proposed(score: Score, device: torch.device) -> torch.Tensor:
    """Tokens [K, S, C] that the drafter of a score would have proposed; −1 = no token."""
    if score.tokens is not None:
        return score.tokens
    if score.logits is None:
        return torch.empty(1, len(score.positions), 0, dtype=torch.long, device=device)
    index = score.logits.topk(max(score.children), -1).indices
    return index if score.ids is None else score.ids[index]
