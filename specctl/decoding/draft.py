"""What a drafter proposes, and the protocols through which the loop knows drafters and controllers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specctl.kernels import Rows

if TYPE_CHECKING:
    from specctl.decoding.resident import Resident
    from specctl.decoding.state import DecodeState
    from specctl.decoding.verify import Verdict

PADDING = -2  # parent of a slot that holds no node


@dataclass(frozen=True)
class ChainRows:
    """The rows that the first chains of a draft (`first_chain`) were chosen from: what q was along each of them.

    Attributes:
        logits: of each depth [R, Vd].
        ids: [Vd] target id of every draft token; None = the target's own vocabulary.
        places: of each sequence, which of the R rows is its own at each depth; None: row b of sequence b, R = B.
    """

    logits: Sequence[Tensor]
    ids: Tensor | None = None
    places: Sequence[Sequence[int]] | None = None

    def of(self, b: int, depth: int) -> Tensor:
        """[depth, Vd] the rows of sequence b."""
        places = [b] * depth if self.places is None else self.places[b][:depth]
        return torch.stack([rows[place] for rows, place in zip(self.logits[:depth], places, strict=True)])


@dataclass
class DraftTree:
    """Draft tokens as trees, one per sequence; a chain is a tree with one branch, plain decoding an empty one.

    Attributes:
        tokens: [B, n] int64.
        parents: [B, n] int64, index of the parent node, −1 = the last committed token; parents precede children;
            −2 marks padding in a ragged batch.
        rows: for *sampled* chains, the distributions the tokens were drawn from (B·n rows, verified by the ratio
            rule); None for deterministic proposals (verified by the match rule).
        rule: with `rows`, what `kernels.accept_chain` decides by: "token" or "block".
        chain: every node's parent is the node before it (padding aside).
        q: of drafters that have distributions, those of the first chains; None = one-hot at the draft tokens.
    """

    tokens: Tensor
    parents: Tensor
    rows: Rows | None = None
    chain: bool = True
    rule: str = "token"
    q: ChainRows | None = None

    @classmethod
    def from_chains(
        cls,
        chains: list[list[int]],
        device: torch.device,
        rows: Rows | None = None,
        rule: str = "token",
        q: ChainRows | None = None,
    ) -> DraftTree:
        """Chains of any length, one per sequence."""
        width = max(map(len, chains))
        tokens = torch.tensor([chain + [0] * (width - len(chain)) for chain in chains], dtype=torch.long, device=device)
        parents = torch.tensor(
            [list(range(-1, len(chain) - 1)) + [PADDING] * (width - len(chain)) for chain in chains],
            dtype=torch.long,
            device=device,
        )
        return cls(tokens.view(len(chains), width), parents.view(len(chains), width), rows, rule=rule, q=q)

    @classmethod
    def from_trees(cls, trees: list[tuple[list[int], list[int]]], device: torch.device) -> DraftTree:
        """(tokens, parents) of any length, one pair per sequence; what is a chain throughout is marked as one."""
        if all(parents == list(range(-1, len(parents) - 1)) for _, parents in trees):
            return cls.from_chains([tokens for tokens, _ in trees], device)
        width = max(len(tokens) for tokens, _ in trees)
        tokens = [tokens + [0] * (width - len(tokens)) for tokens, _ in trees]
        parents = [parents + [PADDING] * (width - len(parents)) for _, parents in trees]
        return cls(torch.tensor(tokens, device=device), torch.tensor(parents, device=device), chain=False)

    @property
    def size(self) -> int:
        return self.tokens.shape[1]


def empty_draft(batch: int, device: torch.device) -> DraftTree:
    return DraftTree.from_chains([[] for _ in range(batch)], device)


def topology(parents: list[int]) -> tuple[list[int], list[int]]:
    """Depth and ancestor bitmask of every node of a tree given by its parents (bit i = node i, itself included).

    Padding nodes get depth 0 and see only themselves.
    """
    depth: list[int] = []
    ancestors: list[int] = []
    for node, parent in enumerate(parents):
        depth.append(depth[parent] + 1 if parent >= 0 else int(parent == -1))
        ancestors.append((ancestors[parent] if parent >= 0 else 0) | (1 << node))
    return depth, ancestors


def first_chain(parents: Sequence[int]) -> list[int]:
    """The nodes from the root down over first children, which in every drafter's trees are the likeliest ones."""
    chain: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (chain[-1] if chain else -1):
            chain.append(node)
    return chain


@dataclass(frozen=True)
class Score:
    """What a drafter would have proposed for S committed tokens of one sequence, teacher-forced, at K draft depths.

    At depth k the row of the token at position j is the one of a draft that began behind position j − k (the text and
    the target's features up to there are real) and whose tokens so far were the committed ones; at a position below
    k + 1 no draft of that depth can begin, and the row means nothing. Parametric drafters give `logits`, the others the
    `tokens` they would have proposed.

    Attributes:
        positions: the S positions in the sequence.
        logits: [K, S, Vd], K = 1 where depth makes no difference; None without a distribution.
        ids: [Vd] target id of every draft token; None = the target's own vocabulary.
        tokens: [K, S, C] int64, the children it would have proposed, −1 = none; None where `logits` tell.
        children: how many of a row's likeliest tokens (of `tokens`, how many at most) it proposes at each depth of its
            drafts; their depth is the length. What a tree prunes depends on its other branches: these are as many as a
            node can have.
        inner: how many of a row's likeliest children can have children of their own; None = all. The others are leaves:
            with one of them a draft ends.
        sampled: it proposes a draw from the row, filtered as the target's (ratio rule), not the likeliest token.
    """

    positions: range
    logits: Tensor | None = None
    ids: Tensor | None = None
    tokens: Tensor | None = None
    children: tuple[int, ...] = ()
    sampled: bool = False
    inner: int | None = None


class Proposer(Protocol):
    """Anything that drafts for one round."""

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """At most `budget` nodes per sequence, from the last committed token."""
        ...


class Drafter(Proposer, Protocol):
    """A model or an index that proposes tokens, and can be kept while others draft.

    `taps` are the target's hidden states it reads (indices into `transformers`' hidden_states; empty for independent
    drafters). State that belongs to a sequence being decoded lives in `state.memory[self]`, never in the drafter.
    """

    taps: tuple[int, ...]

    def advance(self, state: DecodeState) -> None:
        """Consume the committed positions it has not seen yet (lazy: an idle drafter catches up in one call)."""
        ...

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Its rows at the committed positions `spans[b]` of every live sequence, at draft depths 1 .. `depths`.

        Positions are those of the tokens that are predicted; each must be at least 2 (there is text and a feature to
        draft from) and below the length of its sequence. A span may be empty.
        """
        ...

    def behind(self, state: DecodeState) -> list[int]:
        """How many tokens of every live sequence the next `advance` has to read: what it costs to switch to it."""
        ...

    def invalidate(self, state: DecodeState) -> None:
        """Forget cached keys and values (after a weight update)."""
        ...


class DeviceDraft(Protocol):
    """A drafter's part of rounds that run on the device alone (device_round.py), for the sequences of one batch.

    Attributes:
        depth: longest path that it drafts; 0 = plain decoding.
        reach: cache slots behind the committed text that its rows and those of the target's step take.
        carried: tensors that a round changes and the next one reads.
    """

    depth: int
    reach: int
    carried: list[Tensor]

    def load(self, state: DecodeState) -> None:
        """Catch up with the committed text; take over the host's memory of it."""
        ...

    def propose(self, sequences: Resident, span: int) -> DraftTree:
        """A draft of the same shape in every round, with padding where a sequence has no room for it."""
        ...

    def advance(self, sequences: Resident, before: Tensor, span: int) -> None:
        """Consume what was committed behind the first `before` [B] tokens."""
        ...

    def store(self, state: DecodeState) -> None:
        """Hand the memory of the committed text back to the host."""
        ...


@runtime_checkable
class OnDevice(Protocol):
    """A drafter that can draft on the device alone."""

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft | None:
        """Its part of rounds with at most `budget` nodes per sequence; None where its shape or its model cannot."""
        ...

    def invalidate(self, state: DecodeState) -> None:
        """As of a `Drafter`."""
        ...


class Controller(Protocol):
    """Chooses who drafts, and learns from what the target said."""

    def choose(self, state: DecodeState) -> Proposer: ...

    def observe(self, state: DecodeState, draft: DraftTree, verdict: Verdict) -> Any: ...


class NoDraft:
    """Plain decoding: the empty draft."""

    taps: tuple[int, ...] = ()

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        return empty_draft(state.batch, state.device)

    def advance(self, state: DecodeState) -> None:
        """Nothing to consume."""

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """It proposes nothing, anywhere."""
        return [Score(span, tokens=torch.empty(1, len(span), 0, dtype=torch.long)) for span in spans]

    def behind(self, state: DecodeState) -> list[int]:
        return [0] * state.batch

    def invalidate(self, state: DecodeState) -> None:
        """Nothing is cached."""

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft:
        return PlainRounds()


class PlainRounds:
    """Plain decoding on the device."""

    depth, reach = 0, 1

    def __init__(self) -> None:
        self.carried: list[Tensor] = []

    def load(self, state: DecodeState) -> None:
        """Nothing is remembered."""

    def propose(self, sequences: Resident, span: int) -> DraftTree:
        nothing = sequences.ids[:, :0]
        return DraftTree(nothing, nothing)

    def advance(self, sequences: Resident, before: Tensor, span: int) -> None:
        """Nothing to consume."""

    def store(self, state: DecodeState) -> None:
        """Nothing is remembered."""


class Fixed:
    """The controller that always plays one drafter."""

    def __init__(self, drafter: Proposer):
        self.drafter = drafter

    def choose(self, state: DecodeState) -> Proposer:
        return self.drafter

    def observe(self, state: DecodeState, draft: DraftTree, verdict: Verdict) -> None:
        """Nothing to learn."""
