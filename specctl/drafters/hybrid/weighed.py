"""Text drafters that draft as many nodes as pay off.

A text drafter (`lookup`, `suffix`, `retrieval`) drafts for free, but every node costs a row of the target's step. In
each round the tree gets the nodes that raise the round's expected tokens per cost. A text corrects the probabilities
that the drafter claims (`candidates.Calibration`). Costs are measured (`costs`).

Trees chosen by expected tokens follow Sequoia (Chen et al. 2024, arXiv 2402.12374) and OPT-Tree (Wang et al. 2025,
arXiv 2406.17276).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specctl.decoding.protocols import DeviceDraft, Drafter
from specctl.decoding.records import DraftTree, Score
from specctl.decoding.state import DecodeState, per_text
from specctl.drafters.hybrid.candidates import Candidates
from specctl.drafters.hybrid.costs import Costs
from specctl.drafters.hybrid.gate import TEXT, Gate, GateStatistics, Pending
from specctl.drafters.tree import DepthLimited, TextDrafter

OFFERED = 8, 32  # least and largest number of nodes that a text drafter proposes
WORSE = 0.9  # share of the best rate below which no larger draft is considered


class TextProposal(NamedTuple):
    """Proposals of a text drafter in one round.

    Attributes:
        gates: statistics of every text.
        drafts: candidates of every text.
        costs: costs of rounds at the present length of the texts.
        size: the nodes that pay off.
    """

    gates: list[Gate]
    drafts: list[Candidates]
    costs: Costs
    size: Size

    def kinds(self) -> list[int]:
        """Kind of the round for every text (`Gate.kind`)."""
        expected = zip(self.drafts, self.size.nodes, strict=True)
        return [Gate.kind(sum(draft.joint[node] for node in nodes)) for draft, nodes in expected]


class WeighedText(Drafter):
    """Text drafter that drafts as many nodes as pay off.

    Attributes:
        past: record of the texts of a stream, for a head (`hybrid.drafter`). None = each text has its own record, so
            that texts do not depend on the texts before them.
        quality: prior gain of the head of a hybrid (`gate.quality_of`).
    """

    weighs_rows = True
    quality = 1.0

    def __init__(self, text: TextDrafter, costs: Costs, past: GateStatistics | None = None):
        self.text, self.costs, self.past = text, costs, past
        # The text drafter proposes as many nodes as a round of one text verifies at twice the cost of a plain round.
        least, most = OFFERED
        self.offered = max(size for size in range(least, most + 1) if size == least or costs.round(1 + size) <= 2)

    @property
    def longest(self) -> int:
        """Most tokens of a draft of the text drafter, which may be a chain."""
        depth = self.text.depth if isinstance(self.text, DepthLimited) else None
        return min(depth or self.offered, self.offered)

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """Draft a tree from the last committed token; in exact mode a chain."""
        offer = self.offer(state, budget)
        return self.draft(state, offer, offer.size)

    def offer(self, state: DecodeState, budget: int) -> TextProposal:
        """Candidates of the text drafter, and the nodes of them that pay off."""
        gates = self._gates(state)
        for gate, row in zip(gates, state.rows, strict=True):
            gate.settle(row)
        live = state.live
        costs = self.costs.at(sum(len(state.rows[b].ids) for b in live) / max(len(live), 1))
        drafts = [Candidates() for _ in gates]
        proposals = self.text.propose_trees(state, min(budget, self.offered))
        for draft, proposal, gate in zip(drafts, proposals, gates, strict=True):
            draft.add(proposal, TEXT, gate.trust[TEXT])
        return TextProposal(gates, drafts, costs, best_size(state, drafts, budget, costs))

    def draft(
        self, state: DecodeState, offer: TextProposal, size: Size, levels: int = 0, kinds: Sequence[int] = ()
    ) -> DraftTree:
        """Draft the nodes of `size`, and record the round. `levels`: levels that a head has drafted, in rounds of these
        `kinds`."""
        for b in state.live:
            row, kind = state.rows[b], kinds[b] if levels else 0
            offer.gates[b].pending = Pending(len(row.ids), row.target_passes, offer.drafts[b], kind, levels)
        trees = [draft.cut(nodes) for draft, nodes in zip(offer.drafts, size.nodes, strict=True)]
        return DraftTree.from_trees(trees, state.device)

    def _gates(self, state: DecodeState) -> list[Gate]:
        kept: list[Gate | None] = per_text(state, self, lambda: None)
        gates = [
            gate or Gate(self.text.calibration, self.past, row.request.sampling.temperature, self.quality)
            for gate, row in zip(kept, state.rows, strict=True)
        ]
        kept[:] = gates
        return gates

    def advance(self, state: DecodeState) -> None:
        """Let the text drafter read the committed tokens."""
        self.text.advance(state)

    def invalidate(self, state: DecodeState) -> None:
        self.text.invalidate(state)

    @property
    def kind(self) -> str:
        return self.text.kind

    @property
    def fixed_shape(self) -> bool:
        """Whether the text drafter can draft in device rounds."""
        return self.text.fixed_shape

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft | None:
        """Device rounds of the text drafter. Their drafts have one size, so nothing is weighed."""
        return self.text.on_device(state, budget)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Children that the text drafter proposes without weighing. Its own drafts have one size, so that a weighed one
        can have fewer nodes or more levels."""
        return self.text.score(state, spans, depths)


def unweighed(drafter: Drafter) -> Drafter:
    """The text drafter itself, with drafts of one size; any other drafter comes back unchanged."""
    return drafter.text if type(drafter) is WeighedText else drafter


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
    best = Size([], 0, tokens, spent + costs.round(state.exact_rows or 1, state.batch))
    for width in range(1, min(budget, max(map(len, joint), default=0)) + 1):
        tokens += sum(values[width - 1] for values in joint if width <= len(values))
        cost = spent + costs.round(state.exact_rows or width + 1, state.batch)
        if tokens * best.cost > best.tokens * cost:
            best = Size([], width, tokens, cost)
        elif tokens * best.cost < WORSE * best.tokens * cost:
            break
    return best._replace(nodes=[nodes[: best.width] for nodes in ranked])
