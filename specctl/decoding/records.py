"""Records that travel through decoding: requests and their texts, drafts, verdicts, scores, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specctl.decoding.sampling import GREEDY, Sampling
from specctl.kernels import Rows

PADDING = -2  # parent of a slot that holds no node


@dataclass(frozen=True)
class Label:
    """A text as controllers, logs and buffers know it: the id and domain of its prompt. Texts of one `key` belong
    together (a session), others stand alone; `seed` tells repeats of a prompt apart, as in the records."""

    query: str
    domain: str = ""
    key: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """A text to be generated.

    Attributes:
        prompt: its ids.
        max_new_tokens: at most so many; fewer where the target's context ends.
        seed: with the prompt and `sampling` all that the text depends on.
        ends: ids that end it, next to the target's own; it stops with "eos" there, too.
        label: what is known of it besides; None = nothing.
    """

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    seed: int = 0
    ends: frozenset[int] = frozenset()
    label: Label | None = None


@dataclass(eq=False)
class Sequence:
    """One sequence and its counts. `ids` are the committed tokens, prompt included; the last one is not yet cached.

    `accepted`, `rejections` and the by-depth lists count draft tokens of rounds as committed (trimmed at the end of the
    sequence); `offered[d]` counts the rounds in which a draft token at depth d+1 was verified.
    """

    index: int
    request: Request
    ids: list[int]
    prompt_length: int
    limit: int  # longest total length
    eos_ids: frozenset[int]
    stop: str | None = None  # "eos", "length", "cancelled" or "failed" once finished
    error: Exception | None = None  # why it failed
    begun: bool = False  # its controller knows of it
    told: int = 0  # tokens that events have told, prompt included
    target_passes: int = 0
    accepted: int = 0
    rejections: int = 0
    drafted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    offered_by_depth: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, context_length: int, eos_ids: frozenset[int], index: int = 0) -> Sequence:
        """The sequence that a request begins with, for a target with such a context and such ends."""
        size, ends = len(request.prompt), eos_ids | request.ends
        limit = min(size + request.max_new_tokens, context_length)
        return cls(index, request, list(request.prompt), size, limit, ends, told=size)

    @classmethod
    def idle(cls, eos_ids: frozenset[int]) -> Sequence:
        """A stand-in for a row that is no text's: it has ended, behind a first token that was no round's."""
        return cls(-1, Request([0], GREEDY, 1), [0, 0], 1, 2, eos_ids, "cancelled", told=2)

    def fail(self, error: Exception) -> None:
        """End it for a reason that is not the text's."""
        self.stop, self.error = "failed", error

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def room(self) -> int:
        """Draft tokens that can still matter: the target adds one more, and a finished sequence takes none."""
        return 0 if self.stop is not None else max(0, self.limit - len(self.ids) - 1)

    def count(self, accepted: int, offered: int, rejected: bool, drafted: int) -> None:
        """Book one round: `accepted` of `offered` verified depths, in a draft `drafted` deep."""
        self.target_passes += 1
        self.accepted += accepted
        self.rejections += rejected
        self.drafted += drafted
        missing = offered - len(self.offered_by_depth)
        if missing > 0:
            self.offered_by_depth += [0] * missing
            self.accepted_by_depth += [0] * missing
        for depth in range(offered):
            self.offered_by_depth[depth] += 1
            self.accepted_by_depth[depth] += depth < accepted


@dataclass(frozen=True)
class ChainRows:
    """The rows that the first chains of a draft (`first_chain`) were chosen from: what q was along each of them.

    Attributes:
        logits: of each depth [R, Vd].
        ids: [Vd] target id of every draft token; None = the target's own vocabulary.
        places: of each sequence, which of the R rows is its own at each depth; None: row b of sequence b, R = B.
    """

    logits: Many[Tensor]
    ids: Tensor | None = None
    places: Many[Many[int]] | None = None

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


def first_chain(parents: Many[int]) -> list[int]:
    """The nodes from the root down over first children, which in every drafter's trees are the likeliest ones."""
    chain: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (chain[-1] if chain else -1):
            chain.append(node)
    return chain


@dataclass
class Verdict:
    """The target's answer to a draft.

    Attributes:
        paths: per sequence, the accepted nodes from the root.
        committed: per sequence, the accepted tokens and the bonus token.
        stops: per sequence: "rejected", "leaf" (nothing was rejected), or "eos" / "length" once committed.
        depths: how deep each draft was.
        logits, hidden, tapped: target rows [B, 1 + n, ·] of the root and all nodes, until the next step.
        chain: the draft was a chain, so accepted cache rows are already in place.
        failed: sequences that nothing can be committed for, and why.
    """

    paths: list[list[int]]
    committed: list[list[int]]
    stops: list[str]
    depths: list[int]
    logits: Tensor
    hidden: Tensor
    tapped: Tensor | None
    chain: bool
    failed: dict[int, Exception] = field(default_factory=dict)

    def counts(self, b: int, committed: int) -> Counts:
        """The round of sequence b, which has grown by `committed` tokens."""
        accepted, whole = min(len(self.paths[b]), committed), committed == len(self.committed[b])
        return Counts(committed, accepted, self.depths[b], whole)

    def predicting(self, states: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
        """Rows of `states` [B, 1 + n, ·] (logits, hidden) that the first `counts[b]` tokens of each sequence's
        `committed` were drawn from, [counts[b], ·] each."""
        pairs = zip(counts, self.paths, strict=True)
        assert all(0 <= count <= len(path) + 1 for count, path in pairs), "a round was not kept"
        width = states.shape[1]
        places = [
            b * width + node
            for b, (path, count) in enumerate(zip(self.paths, counts, strict=True))
            for node in [0, *(node + 1 for node in path)][:count]
        ]
        return states.flatten(0, 1)[torch.tensor(places, dtype=torch.long, device=states.device)].split(counts)


class Counts(NamedTuple):
    """A round of one text in numbers.

    Attributes:
        committed: tokens that the text has grown by.
        accepted: those of them that were drafted.
        depth: of its draft.
        whole: nothing was cut off at the end of the text.
    """

    committed: int
    accepted: int
    depth: int
    whole: bool


@dataclass(frozen=True)
class HeardRound:
    """A round that ran without the host, when that hears of it.

    Attributes:
        counts: by slot, of the texts that it was a round of. A text that had ended before it, which was not known when
            it began, has none.
        seconds: that the device took for it; on a GPU measured there, so that the host's waiting is not counted.
    """

    counts: dict[int, Counts]
    seconds: float


@dataclass(frozen=True)
class Score:
    """Proposals a drafter would have made for S committed tokens of one sequence, teacher-forced, at K draft depths.

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


@dataclass(frozen=True)
class Decoded:
    """One finished sequence; `index` is the number that the engine gave its request.

    `stop` is "eos", "length", "cancelled" or "failed". Counts are EOS-trimmed and leave out the token of the prefill
    pass. `prefill_s` and `decode_s` are wall-clock of all sequences until this one was given out; from `decode`, of the
    whole call. `replays` counts the rounds of all sequences until then that were replays of a CUDA graph, `ahead` those
    that ran on the device, ahead of the host, and `rounds` all.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    stop: str
    target_passes: int
    accepted: int
    rejections: int
    drafted: int
    accepted_by_depth: list[int]
    offered_by_depth: list[int]
    prefill_s: float
    decode_s: float
    index: int = 0
    replays: int = 0
    ahead: int = field(default=0, compare=False)
    rounds: int = field(default=0, compare=False)

    @property
    def decoded_tokens(self) -> int:
        """Tokens of the decode phase: mat = Σ decoded_tokens ÷ Σ target_passes."""
        return max(len(self.output_ids) - 1, 0)  # a cancelled text may have none


@dataclass(frozen=True)
class Event:
    """News of a text from a step: its new `tokens`, and, where it has `ended`, all of it; `error`: why it
    failed."""

    id: int
    tokens: list[int]
    ended: Decoded | None = None
    error: Exception | None = None
