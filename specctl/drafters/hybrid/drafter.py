"""Hybrid drafter: a trained drafter (the head) and a text drafter draft one tree together.

A text drafter (`lookup`, `suffix`, `retrieval`) drafts for free and is reliable in repetitive text. A head costs one
pass per level and knows more elsewhere. In each round the text drafter proposes first. The head is asked if its
expected gain is worth its passes (`gate`), and drafts another level as long as that pays off. The round verifies the
proposed nodes that are probable enough to be worth a row. A node, a level or the head pays if it raises the round's
expected tokens per cost. Costs are measured (`costs`).

Trees chosen by expected tokens follow Sequoia (Chen et al. 2024, arXiv 2402.12374) and OPT-Tree (Wang et al. 2025,
arXiv 2406.17276). The gate between two kinds of drafters is ours.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from specctl.decoding.protocols import BaseDrafter, DeviceDraft, OnDevice
from specctl.decoding.records import DraftTree, Score
from specctl.decoding.row_budget import node_budget
from specctl.decoding.state import DecodeState, PerText
from specctl.drafters.hybrid.candidates import Candidates
from specctl.drafters.hybrid.costs import Costs
from specctl.drafters.hybrid.device_rounds import HybridRounds
from specctl.drafters.hybrid.gate import HEAD, TEXT, Gate, GateStatistics, Pending
from specctl.drafters.tree import CandidateDrafter, TextDrafter

OFFERED = 8, 32  # least and largest number of nodes that a text drafter proposes
GOES_ON = 0.75  # assumed probability that a level's token is accepted if the previous level's was
NEXT = 0.9  # claim assumed for a level that is not drafted yet
WORSE = 0.9  # share of the best rate below which no larger draft is considered
DEVICE_TEXT_NODES = 14  # nodes of a device round that the text drafter gets: its head then keeps its default tree


class Hybrid(BaseDrafter):
    """Trained drafter (the head) and text drafter that draft as one.

    Attributes:
        past: record of the texts of a stream. None = each text has its own record, so that texts do not depend on the
            texts before them.
    """

    weighs_rows = True

    def __init__(self, head: CandidateDrafter, text: TextDrafter, costs: Costs, past: GateStatistics | None = None):
        self.head, self.text, self.costs, self.past = head, text, costs, past
        self.taps = head.taps
        # The text drafter proposes as many nodes as a round of one text verifies at twice the cost of a plain round.
        least, most = OFFERED
        self.offered = max(size for size in range(least, most + 1) if size == least or costs.round(1 + size) <= 2)

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """Draft a tree from the last committed token; in exact mode a chain."""
        gates = self._gates(state)
        for gate, row in zip(gates, state.rows, strict=True):
            gate.settle(row)
        live = state.live
        costs = self.costs.at(sum(len(state.rows[b].ids) for b in live) / max(len(live), 1))
        drafts = [Candidates() for _ in gates]
        offers = self.text.propose_trees(state, min(budget, self.offered))
        for draft, offer, gate in zip(drafts, offers, gates, strict=True):
            draft.add(offer, TEXT, gate.trust[TEXT])
        alone = best_size(state, drafts, budget, costs)
        kinds = [
            Gate.kind(sum(draft.joint[node] for node in nodes))
            for draft, nodes in zip(drafts, alone.nodes, strict=True)
        ]
        chosen, levels = alone, 0
        if self._asks(state, gates, kinds, alone, costs):
            levels = self._ask(state, budget, gates, drafts, alone, costs)
            chosen = best_size(state, drafts, budget, costs, costs.drafting(levels, state.batch))
        for b in live:
            row = state.rows[b]
            gates[b].pending = Pending(len(row.ids), row.target_passes, drafts[b], kinds[b], levels)
        return DraftTree.from_trees(
            [draft.cut(nodes) for draft, nodes in zip(drafts, chosen.nodes, strict=True)], state.device
        )

    def _asks(self, state: DecodeState, gates: list[Gate], kinds: list[int], alone: Size, costs: Costs) -> bool:
        """Whether the head's gain is worth its passes; one forward serves all texts."""
        asking = [b for b in state.live if state.rows[b].draft_room > 0]
        if not asking:
            return False
        records = [(gates[b].past, kinds[b]) for b in asking]
        overdue = {(past, kind) for past, kind in dict.fromkeys(records) if past.overdue(kind)}
        # One forward tries the head on all texts, so a minority of overdue texts does not justify its passes.
        if 2 * sum(record in overdue for record in records) >= len(asking):
            for past, kind in overdue:
                past.tried(kind, pays=False)
            return True
        gain = sum(gates[b].gain(kinds[b]) for b in asking)
        levels = round(sum(gates[b].levels for b in asking) / len(asking))
        rows = alone.width + 1
        pays = any(
            gain * share(level, levels)
            > alone.rate * (costs.drafting(level, state.batch) + costs.further_rows(rows, level, state.batch))
            for level in range(1, levels + 1)
        )
        for past, kind in records if pays else ():
            past.tried(kind, pays=True)
        return pays

    def _ask(
        self, state: DecodeState, budget: int, gates: list[Gate], drafts: list[Candidates], alone: Size, costs: Costs
    ) -> int:
        """Add the head's candidates to the drafts. Returns the number of levels it has drafted."""
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
        for draft, proposal, gate in zip(drafts, grown, gates, strict=True):
            draft.add(proposal, HEAD, gate.trust[HEAD])
        return levels

    def _gates(self, state: DecodeState) -> list[Gate]:
        memory: PerText[Gate | None] | None = state.memory.get(self)
        if memory is None:
            memory = state.memory[self] = PerText(lambda: None, state.batch)
        gates = [
            gate or Gate(self.text.calibration, self.past, row.request.sampling.temperature)
            for gate, row in zip(memory.rows, state.rows, strict=True)
        ]
        memory.rows = [*gates]
        return gates

    def advance(self, state: DecodeState) -> None:
        """Let both drafters read the committed tokens."""
        self.head.advance(state)
        self.text.advance(state)

    def lag(self, state: DecodeState) -> list[int]:
        """Number of tokens that the head has to read; the text drafter's reading is free."""
        return self.head.lag(state)

    def invalidate(self, state: DecodeState) -> None:
        """Forget the head's cache after a weight update."""
        self.head.invalidate(state)
        self.text.invalidate(state)

    @property
    def kind(self) -> str:
        head = self.head.kind if isinstance(self.head, OnDevice) else type(self.head).__name__
        return f"{head} with a text drafter"

    @property
    def fixed_shape(self) -> bool:
        """Whether both drafters can draft in device rounds."""
        return all(isinstance(part, OnDevice) and part.fixed_shape for part in (self.head, self.text))

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft | None:
        """Device rounds in which both drafters always draft: with one shape for all rounds, there is no gate."""
        budget = min(budget, node_budget(state, share=True))
        nodes = max(min(DEVICE_TEXT_NODES, budget // 4), 1)
        if not (self.fixed_shape and isinstance(self.head, OnDevice) and isinstance(self.text, OnDevice)):
            return None
        head, text = self.head.on_device(state, budget - nodes), self.text.on_device(state, nodes)
        return None if head is None or text is None else HybridRounds(head, text)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Children that both drafters would have proposed: an upper bound, as the gate may leave some out."""
        scores = []
        parts = zip(self.head.score(state, spans, depths), self.text.score(state, spans, depths), strict=True)
        for head, text in parts:
            trained, read = proposed(head), proposed(text)
            deep = max(len(trained), len(read))
            tokens = torch.cat([part.expand(deep, -1, -1) for part in (trained, read)], -1)
            depth = max(len(head.children), len(text.children))
            scores.append(Score(head.positions, tokens=tokens, children=(tokens.shape[-1],) * depth))
        return scores


class Size(NamedTuple):
    """Nodes of a round's draft, with the expected tokens and the cost of the round.

    Attributes:
        nodes: nodes of every text of the batch, at most `width` each.
        tokens: expected number of committed tokens of all texts.
    """

    nodes: list[list[int]]
    width: int
    tokens: float
    cost: float

    @property
    def rate(self) -> float:
        return self.tokens / self.cost


def best_size(state: DecodeState, drafts: list[Candidates], budget: int, costs: Costs, spent: float = 0.0) -> Size:
    """Choose as many nodes per text as yield the most tokens per cost in this round. `spent`: cost of drafting.

    The rate of this round decides, and not the text's mean rate: where a text is easy to predict, tokens that this
    round leaves out come cheaply in the next one.
    """
    ranked = [draft.longest() if state.exact_rows else draft.ranked() for draft in drafts]
    joint = [[drafts[b].joint[node] for node in ranked[b]] for b in state.live]
    tokens = float(len(joint))
    best = Size([], 0, tokens, spent + costs.round(1, state.batch))
    for width in range(1, min(budget, max(map(len, joint), default=0)) + 1):
        tokens += sum(values[width - 1] for values in joint if width <= len(values))
        cost = spent + costs.round(width + 1, state.batch)
        if tokens * best.cost > best.tokens * cost:
            best = Size([], width, tokens, cost)
        elif tokens * best.cost < WORSE * best.tokens * cost:
            break
    return best._replace(nodes=[nodes[: best.width] for nodes in ranked])


def share(level: int, levels: int) -> float:
    """Share of the gain of `levels` levels that comes from the first `level` levels."""
    return (1 - GOES_ON**level) / (1 - GOES_ON**levels)


def proposed(score: Score) -> torch.Tensor:
    """Tokens [K, S, C] that the drafter of a score would have proposed; −1 = no token."""
    if score.tokens is not None:
        return score.tokens
    if score.logits is None:
        return torch.empty(1, len(score.positions), 0, dtype=torch.long)
    index = score.logits.topk(max(score.children), -1).indices
    return index if score.ids is None else score.ids[index]
