"""Records of the decoding loop: requests, sequences, drafts, verdicts, scores and results."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specctl.decoding.sampling import GREEDY, Adjustment, Sampling
from specctl.kernels import Rows

if TYPE_CHECKING:
    from specctl.decoding.constraint import Constraint

PADDING = -2  # parent of a padding slot in `DraftTree.parents`


@dataclass(frozen=True)
class Label:
    """Identity of a text for controllers, logs and buffers: the id and domain of its prompt.

    Texts with the same `key` belong to one session; a text without a key stands alone. `seed` tells repeats of a prompt
    apart, as in the records.
    """

    query: str
    domain: str = ""
    key: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """A text to be generated.

    Attributes:
        prompt: token ids of the prompt.
        max_new_tokens: upper limit; the target's context length may end the text earlier.
        seed: random seed. Prompt, `sampling`, `adjustment` and seed determine the text.
        ends: ids that end the text, in addition to the target's own. Here, too, `stop` is "eos".
        ignores_eos: the target's own end tokens do not end the text, which load tests ask for.
        constraint: form of the text, or None. It follows this text, so no other request may have it.
        label: identity of the text for controllers and logs, if known.
        adjustment: penalties and bias of its logits, or None.
        begun: number of tokens at the end of the prompt that belong to the answer, because the text goes on.
        reports_logits: the listener of its rounds reads their logits, which only rounds on the host report.
    """

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    seed: int = 0
    ends: frozenset[int] = frozenset()
    label: Label | None = None
    ignores_eos: bool = False
    constraint: Constraint | None = None
    adjustment: Adjustment | None = None
    begun: int = 0
    reports_logits: bool = False

    @property
    def edits_logits(self) -> bool:
        """Whether tokens are drawn from other logits than the target's: with a repetition penalty, min-p, an adjustment
        or a constraint."""
        edited = self.sampling.repetition_penalty != 1 or self.sampling.min_p > 0 or self.adjustment is not None
        return edited or self.constraint is not None


@dataclass(eq=False)
class Sequence:
    """One sequence and its counts. `ids` are the committed tokens, prompt included; the last one is not yet cached.

    `accepted`, `rejections` and the by-depth lists count the draft tokens of rounds as committed (trimmed at the end of
    the sequence). `offered_by_depth[d]` counts the rounds in which a draft token at depth d+1 was verified. `cached`
    counts the tokens of the prompt that were in a prefix cache.
    """

    index: int
    request: Request
    ids: list[int]
    prompt_length: int
    limit: int  # longest total length, prompt included
    eos_ids: frozenset[int]
    stop: str | None = None  # "eos", "length", "cancelled" or "failed" once finished
    error: Exception | None = None  # the reason, if `stop` is "failed"
    controller_begun: bool = False  # the controller's `begin` has run
    reported: int = 0  # tokens already reported in events, prompt included
    cached: int = 0
    target_passes: int = 0
    accepted: int = 0
    rejections: int = 0
    drafted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    offered_by_depth: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, context_length: int, eos_ids: frozenset[int], index: int = 0) -> Sequence:
        """The initial sequence of a request, for a target with this context length and these end-of-sequence ids."""
        size, ends = len(request.prompt), request.ends if request.ignores_eos else eos_ids | request.ends
        limit = min(size + request.max_new_tokens, context_length)
        return cls(index, request, list(request.prompt), size, limit, ends, reported=size)

    @classmethod
    def idle(cls, eos_ids: frozenset[int]) -> Sequence:
        """Placeholder for an idle row of the batch: a sequence that ended after its first token, without any round."""
        return cls(-1, Request([0], GREEDY, 1), [0, 0], 1, 2, eos_ids, "cancelled", reported=2)

    def fail(self, error: Exception) -> None:
        """End the sequence with an error."""
        self.stop, self.error = "failed", error

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def answer(self) -> list[int]:
        """The output, after the `begun` tokens at the end of the prompt."""
        return self.ids[self.prompt_length - self.request.begun :]

    @property
    def draft_room(self) -> int:
        """Number of draft tokens that can still be committed: the target adds one more, and a finished sequence takes
        0."""
        return 0 if self.stop is not None else max(0, self.limit - len(self.ids) - 1)

    def count(self, accepted: int, offered: int, rejected: bool, drafted: int) -> None:
        """Count one round: `accepted` of `offered` verified depths, from a draft of depth `drafted`."""
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

    def decoded(self, prefill_s: float, decode_s: float, replays: int, ahead: int, rounds: int) -> Decoded:
        """The finished text, with the seconds and the rounds that its batch has taken."""
        return Decoded(
            self.ids[: self.prompt_length],
            self.output,
            str(self.stop),
            self.target_passes,
            self.accepted,
            self.rejections,
            self.drafted,
            self.accepted_by_depth,
            self.offered_by_depth,
            prefill_s,
            decode_s,
            self.index,
            replays,
            ahead,
            rounds,
        )


@dataclass(frozen=True)
class ChainRows:
    """Drafter logits along the first chain (`first_chain`) of each draft: the distribution q at every step.

    Attributes:
        logits: one tensor [R, Vd] per depth.
        ids: [Vd] the target id of every draft token. Without it, the draft vocabulary is the target's.
        row_index: for each sequence, its row index (0 … R−1) at each depth. Without it, sequence b has row b and R = B.
    """

    logits: Many[Tensor]
    ids: Tensor | None = None
    row_index: Many[Many[int]] | None = None

    def of(self, b: int, depth: int) -> Tensor:
        """[depth, Vd] the rows of sequence b."""
        places = [b] * depth if self.row_index is None else self.row_index[b][:depth]
        return torch.stack([rows[place] for rows, place in zip(self.logits[:depth], places, strict=True)])


@dataclass
class DraftTree:
    """Draft tokens as trees, one per sequence. A chain is a tree with one branch; plain decoding has an empty tree.

    Attributes:
        tokens: [B, n] int64.
        parents: [B, n] int64, index of the parent node; −1 = the last committed token, −2 = padding in a ragged batch.
            Parents precede children.
        rows: for *sampled* chains, the distributions that the tokens were drawn from (B·n rows), which the ratio rule
            needs. Deterministic proposals have no rows; the match rule verifies them.
        rule: with `rows`, the rule that `kernels.accept_chain` applies: "token" or "block".
        chain: every node's parent is the node before it (padding aside).
        q: the drafter's distributions along the first chains. Without it, q is one-hot at the draft tokens.
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
        """Build chains of any length, one per sequence."""
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
        """Build trees from (tokens, parents) pairs of any length, one per sequence; if all are chains, mark them as
        such."""
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
    """Depth and ancestor bitmask of every node of a tree given by its parents (bit i = node i, the node itself
    included).

    Padding nodes get depth 0 and see only themselves.
    """
    depth: list[int] = []
    ancestors: list[int] = []
    for node, parent in enumerate(parents):
        depth.append(depth[parent] + 1 if parent >= 0 else int(parent == -1))
        ancestors.append((ancestors[parent] if parent >= 0 else 0) | (1 << node))
    return depth, ancestors


def first_chain(parents: Many[int]) -> list[int]:
    """Nodes from the root down along first children, which are the likeliest ones in every drafter's trees."""
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
        stops: per sequence, "rejected" or "leaf" (nothing was rejected); after the commit also "eos" or "length".
        depths: per sequence, the depth of its draft.
        logits, hidden, tapped: target rows [B, 1 + n, ·] of the root and all nodes, valid until the next step.
        chain: the draft was a chain, so accepted cache rows are already in place.
        failed: sequences for which nothing can be committed, each with its error.
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

    def predicting(self, states: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
        """Rows of `states` [B, 1 + n, ·] (logits or hidden) that predicted the first `counts[b]` committed tokens of
        each sequence b: one tensor [counts[b], ·] per sequence."""
        pairs = zip(counts, self.paths, strict=True)
        assert all(0 <= count <= len(path) + 1 for count, path in pairs), "the records of a round are missing"
        width = states.shape[1]
        places = [
            b * width + node
            for b, (path, count) in enumerate(zip(self.paths, counts, strict=True))
            for node in [0, *(node + 1 for node in path)][:count]
        ]
        return states.flatten(0, 1)[torch.tensor(places, dtype=torch.long, device=states.device)].split(counts)


class Counts(NamedTuple):
    """One round of one sequence in numbers.

    Attributes:
        committed: tokens by which the sequence has grown.
        accepted: number of draft tokens among them.
        depth: depth of the draft.
        untrimmed: nothing was cut off at the end of the sequence.
    """

    committed: int
    accepted: int
    depth: int
    untrimmed: bool


@dataclass(frozen=True)
class RoundResult:
    """A finished round, as the controller observes it.

    Attributes:
        counts: one entry per slot that took part. It is empty if no draft could be made. In a round that was launched
            ahead of the host, a sequence that had already ended has no entry.
        seconds: time of draft, verification and commit. Device rounds on a GPU are measured by events, so the host's
            waiting does not count; other rounds by `timing.work_clock`.
        draft, verdict: the draft and the target's answer; None for a round that ran on the device.
    """

    counts: dict[int, Counts]
    seconds: float
    draft: DraftTree | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Score:
    """Proposals that a drafter would have made for S committed tokens of one sequence, teacher-forced, at K draft
    depths.

    The row at depth k for the token at position j belongs to a draft that began after position j − k. Up to there it
    reads the real text and the target's features; its own tokens from there on are the committed ones. At a position
    below k + 1 no draft of that depth can begin, and the row is meaningless. Parametric drafters give `logits`; other
    drafters give the `tokens` they would have proposed.

    Attributes:
        positions: the S positions in the sequence.
        logits: [K, S, Vd], with K = 1 if depth makes no difference. Drafters without a distribution give `tokens`
            instead.
        ids: [Vd] the target id of every draft token. Without it, the draft vocabulary is the target's.
        tokens: [K, S, C] int64, the children it would have proposed, −1 = padding. Used if there are no `logits`.
        children: for each depth of its drafts, how many of a row's likeliest tokens it proposes (with `tokens`: at
            most). The length is the depth of its drafts. A tree prunes a node depending on its other branches, so these
            are upper limits per node.
        inner: how many of a row's likeliest children can have children themselves (None = all). The others are leaves,
            which end a draft.
        sampled: it proposes a draw from the row, filtered like the target's (ratio rule), not the likeliest token.
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
    """One finished sequence; `index` is the id that the engine gave its request.

    `stop` is "eos", "length", "cancelled" or "failed". Counts are trimmed at the end of the sequence and leave out the
    token of the prefill. `prefill_s` and `decode_s` are wall-clock time of the whole engine until this sequence was
    returned; in results of `decode` they cover the whole call. Three counts cover the rounds of all sequences until
    then: `rounds` (all), `ahead` (run on the device, ahead of the host) and `replays` (replays of a CUDA graph).
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
        """Number of tokens of the decode phase: mat = Σ decoded_tokens ÷ Σ target_passes."""
        return max(len(self.output_ids) - 1, 0)  # a cancelled sequence may have no output


@dataclass(frozen=True)
class Event:
    """New `tokens` of a sequence after a step. Once it has finished, `ended` is the whole result, and `error` says why
    it failed."""

    id: int
    tokens: list[int]
    ended: Decoded | None = None
    error: Exception | None = None
