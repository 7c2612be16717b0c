"""Full information: the worth of every drafter of a pool at tokens that the target has committed.

One `score` prefill per drafter, and the rows that verification has computed anyway, give two values for each committed
token and drafter: the probability γ that the drafter's proposal would have been accepted there, and whether it was
(HedgeSpec, Theorem 3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl import kernels, progress
from specctl.decoding.plan import plan_rows
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import DraftTree, Request, Score, Verdict, first_chain, topology
from specctl.decoding.records import Sequence as Text
from specctl.decoding.sampling import DRAFT, Draws, Sampling
from specctl.decoding.state import DecodeState, per_text
from specctl.decoding.target import Target
from specctl.decoding.verify import MAX_NODES
from specctl.errors import SpecctlError
from specctl.selection.game.losses import INNER, LEAF
from specctl.selection.policies.policy import Array

UNFILTERED = Sampling(1.0, 0, 1.0)
SPAN = 128  # positions of a whole text that are scored at once: their draft rows of K depths are in memory together


@dataclass(frozen=True)
class Feedback:
    """Scores of N drafters at S committed tokens and draft depths 1 … K, as `Score` defines them. Depths that a drafter
    never reaches are 0. γ is NaN if the drafter's or the target's row is no distribution.

    Attributes:
        gamma: [N, S, K] probability that the proposal is accepted: Σ min(p, q) of a sampled one, otherwise p of the
            proposed tokens. p is filtered as the text is sampled. For greedy text it is the softmax at temperature 1,
            which is smooth (with the argmax, γ would be `hit`). For trees it is an upper bound: it ignores that a node
            may be missing because other branches were kept.
        hit: [N, S, K] whether the committed token is proposed: 0 = no; `LEAF` = yes, and the draft ends there; `INNER`
            = yes, and the draft may go on after it.
    """

    gamma: NDArray[np.float32]
    hit: NDArray[np.uint8]

    def _parts(self, sizes: list[int]) -> list[Feedback]:
        """Split into consecutive parts of `sizes` tokens."""
        cuts = np.cumsum(sizes)[:-1]
        parts = zip(np.split(self.gamma, cuts, 1), np.split(self.hit, cuts, 1), strict=True)
        return [Feedback(*part) for part in parts]


class _PendingRows:
    """Target rows for committed tokens of one text that are not scored yet. Each row predicted a token, the last row
    the token before `end`. If the state keeps the hidden states that rows are computed from, there are no rows, and
    `end` follows the scored tokens."""

    def __init__(self) -> None:
        self.rows: deque[Tensor] = deque()  # [V] each
        self.end: int | None = None

    def start(self, text: Text) -> int:
        """The position `end`, or at first the second response token: the prefill's token has no row here."""
        return self.end or text.prompt_length + 1


class Scorer:
    """Scores all drafters on the tokens of the texts being decoded, some rounds after the tokens were committed.

    The rows kept for a text are in `state.memory`, like a drafter's memory: they move with the text's slot and end with
    the text. A finished text stays in its slot until the controller's `observe` and `on_round` have run, so it can be
    scored to its end there. A drafter that raises is scored as if it proposed nothing; `failures` counts these events
    for each drafter.
    """

    def __init__(self, target: Target, drafters: Sequence[Drafter], depth: int):
        """`depth`: number of draft depths to score. 1 is cheap and biased: drafters that read their own output get
        worse with depth."""
        self.target, self.depth = target, depth
        self.use(drafters)

    def use(self, drafters: Sequence[Drafter]) -> None:
        """Score these drafters from now on."""
        self.drafters = drafters
        self.forget()

    def forget(self) -> None:
        """Reset the failure counts."""
        self.failures = [0] * len(self.drafters)

    def _texts(self, state: DecodeState) -> list[_PendingRows]:
        return per_text(state, self, _PendingRows)

    def keep(self, state: DecodeState, verdict: Verdict, slots: Collection[int]) -> None:
        """Retain the target's rows of the tokens that this round has committed in `slots`. To be called after every
        commit on the host, with the slots of all texts that will be scored. Does nothing if the state keeps the hidden
        states that rows are computed from (`DecodeState.hidden`)."""
        if state.hidden is not None:
            return
        counts: list[int] = []
        for b, (kept, row) in enumerate(zip(self._texts(state), state.rows, strict=True)):
            counts.append(len(row.ids) - kept.start(row) if b in slots else 0)
            kept.end = len(row.ids)
        for kept, part in zip(self._texts(state), verdict.predicting(verdict.logits, counts), strict=True):
            kept.rows.extend(part.unbind())

    def pending(self, state: DecodeState) -> list[int]:
        """Number of committed tokens of every text that are not scored yet."""
        if state.hidden is not None:
            return [len(row.ids) - kept.start(row) for kept, row in zip(self._texts(state), state.rows, strict=True)]
        return [len(kept.rows) for kept in self._texts(state)]

    def score(self, state: DecodeState, counts: list[int]) -> list[Feedback]:
        """Feedback on the oldest `counts[b]` pending tokens of every text; their rows are freed."""
        if state.hidden is not None:
            return self._score_kept(state, counts, state.hidden)
        spans, rows = [], []
        for kept, row, count in zip(self._texts(state), state.rows, counts, strict=True):
            assert not kept.rows or kept.end == len(row.ids), "the records of a round are missing"
            start = len(row.ids) - len(kept.rows)
            spans.append(range(start, start + count))
            rows += [kept.rows.popleft() for _ in range(count)]
        logits = torch.stack(rows) if rows else torch.empty(0, self.target.vocab_size, device=state.device)
        return self._score(state, spans, logits)

    def _score_kept(self, state: DecodeState, counts: list[int], hidden: Tensor) -> list[Feedback]:
        """`score` with rows computed again from the target's last hidden states [B, capacity, H]."""
        spans, states = [], []
        for b, (kept, row, count) in enumerate(zip(self._texts(state), state.rows, counts, strict=True)):
            start = kept.start(row)
            spans.append(range(start, start + count))
            states.append(hidden[b, start - 1 : start + count - 1])
            kept.end = start + count
        return self._score(state, spans, self.target.model.logits(torch.cat(states)))

    def _score(self, state: DecodeState, spans: list[range], logits: Tensor) -> list[Feedback]:
        """`score` with the target's `logits` [R, V] of all positions of `spans`."""
        sizes, depth = [len(span) for span in spans], self.depth
        if not any(sizes):
            shape = (len(self.drafters), 0, depth)
            return [Feedback(np.zeros(shape, np.float32), np.zeros(shape, np.uint8)) for _ in spans]
        scores = [self._asked(state, spans, n) for n in range(len(self.drafters))]
        draws = state.draws.select([b for b, size in enumerate(sizes) for _ in range(size)])
        committed = [row.ids[at] for row, span in zip(state.rows, spans, strict=True) for at in span]
        judge = _CommittedRows(logits, draws, spans, torch.tensor(committed, device=state.device))
        judged = [judge.proposals(score, depth) for score in scores]
        # The first token after the prefill's can only be at depth 1 of a draft, the next one at depth 1 or 2, and so
        # on.
        first = [row.prompt_length + 1 for row in state.rows]
        age = np.array([at - start + 1 for start, span in zip(first, spans, strict=True) for at in span])
        begun = np.arange(1, depth + 1) <= age[:, None]
        gamma, hit = (torch.stack(part).cpu().numpy() for part in zip(*judged, strict=True))
        return Feedback(gamma * begun, hit * begun)._parts(sizes)

    def _asked(self, state: DecodeState, spans: list[range], n: int) -> Score:
        """The scores of drafter n."""
        try:
            return _joined(self.drafters[n].score(state, spans, self.depth))
        except SpecctlError:  # an error with advice for the user, not a failure
            raise
        except Exception as error:
            if not any(self.failures):
                progress.log(
                    "a drafter cannot be scored, so it counts as one without a proposal: "
                    f"{type(error).__name__}: {error}"
                )
            self.failures[n] += 1
            self.drafters[n].invalidate(state)  # its memory may be half written
            silence = torch.full((1, sum(map(len, spans)), 1), -1, device=state.device)
            return Score(range(0), tokens=silence)


@torch.inference_mode()
def table(
    scorer: Scorer, prompt_ids: list[int], output_ids: list[int], sampling: Sampling, *, seed: int = 0
) -> Feedback:
    """Feedback on a whole finished text, for its T decoded tokens: `output_ids` without the token of the prefill pass.

    Args:
        seed: of the text. It decides which tokens a sampling drafter would have drawn (`hit`).
    """
    target, ids = scorer.target, prompt_ids + output_ids
    taps = tuple(sorted({tap for drafter in scorer.drafters for tap in drafter.taps}))
    state = DecodeState(target, taps=taps, spare=0)
    state.assign_slots([state.sequence(Request(ids[:-1], sampling, 1, seed))])
    _, hidden, tapped = target.prefill([ids[:-1]], state.cache, state.taps)
    state.begin([0], ids[-1:], tapped)
    state.rows[0].prompt_length = first = len(prompt_ids)
    parts = []
    for start in range(first + 1, len(ids), SPAN) or [first + 1]:
        span = range(start, min(start + SPAN, len(ids)))
        logits = target.model.logits(hidden[0, span.start - 1 : span.stop - 1])
        parts += scorer._score(state, [span], logits)
    fields = zip(*((part.gamma, part.hit) for part in parts), strict=True)
    return Feedback(*(np.concatenate(field, 1) for field in fields))


def _joined(scores: list[Score]) -> Score:
    """Join the scores of several texts into one of R positions; `positions` has no meaning there. Texts without
    positions are left out: the tokens of their scores may have another number of depths."""
    scores = [score for score in scores if score.positions] or scores[:1]
    first = scores[0]
    if first.tokens is None:
        logits = [score.logits for score in scores if score.logits is not None]
        return replace(first, positions=range(0), logits=torch.cat(logits, 1))
    tokens = [score.tokens for score in scores if score.tokens is not None]
    width = max(part.shape[-1] for part in tokens)
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in tokens]
    return replace(first, positions=range(0), tokens=torch.cat(padded, 1))


class _CommittedRows:
    """R rows of the target, and the token committed at each."""

    def __init__(self, logits: Tensor, draws: Draws, spans: list[range], committed: Tensor):
        self.draws, self.committed = draws, committed
        self.positions = torch.tensor([[at] for span in spans for at in span])
        self.p_bar = _rows(logits, draws, [UNFILTERED] * len(logits))
        laws = [UNFILTERED if law.temperature == 0 else law for law in draws.samplings]
        self.p = self.p_bar if all(law == UNFILTERED for law in laws) else _rows(logits, draws, laws)

    def proposals(self, score: Score, depth: int) -> tuple[Tensor, Tensor]:
        """γ and hit of one drafter, each [R, K]; zero at depths beyond its drafts."""
        gamma = self.p_bar.lse.new_zeros(len(self.committed), depth)
        hit = torch.zeros_like(gamma, dtype=torch.uint8)
        reach = min(depth, len(score.children))
        if reach:
            rule = self._score_sampled if score.sampled else self._score_proposed
            gamma[:, :reach], hit[:, :reach] = rule(score, reach)
        return gamma.masked_fill_(~self.p.valid[:, None], torch.nan), hit

    def _score_sampled(self, score: Score, reach: int) -> tuple[Tensor, Tensor]:
        """γ and hit of a drafter that samples from q, filtered as p. Every depth draws from its own random stream."""
        assert score.logits is not None
        rows = [self.draws.rows(logits.unsqueeze(1)) for logits in score.logits[:reach]]
        gamma, hit = [], []
        for k in range(reach):
            q = rows[min(k, len(rows) - 1)]
            if k < len(rows):
                kept = q.logits.masked_fill(q.logits * q.inv_temp[:, None] < q.cut[:, None], -torch.inf)
                draft = kernels.DraftRows(kept, score.ids, q.inv_temp)
                gamma.append(kernels.drafter_feedback(self.p, [draft], self.committed).accept[0])
            drawn = kernels.sample_rows(q, self.draws.uniform(self.positions, DRAFT + k).reshape(-1))
            hit.append((drawn == self.committed) * INNER)
        return torch.stack(gamma, 1), torch.stack(hit, 1)

    def _score_proposed(self, score: Score, reach: int) -> tuple[Tensor, Tensor]:
        """γ and hit of a drafter that proposes the most probable tokens of a row, or a list of tokens."""
        counts = torch.tensor(score.children[:reach], device=self.committed.device)
        if score.tokens is None:
            assert score.logits is not None
            flat = score.logits[:reach].flatten(0, 1)
            gain, index = kernels.expand_topk(flat, max(score.children[:reach]))
            tokens = (index if score.ids is None else score.ids[index]).unflatten(0, (-1, len(self.committed)))
            tokens = tokens.transpose(0, 1)  # [R, K, C]
            broken = ((kernels.nan_count(flat) > 0) | ~gain[:, 0].isfinite()).view(-1, len(tokens)).T
        else:
            tokens = score.tokens[:reach].transpose(0, 1)
            broken = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        some = (tokens >= 0) & (torch.arange(tokens.shape[-1], device=tokens.device) < counts[:, None])
        mass = (kernels.token_probability(self.p, tokens.clamp_min(0)) * some).sum(-1)
        rank = torch.arange(tokens.shape[-1], device=tokens.device)
        kind = torch.where(rank < (score.inner or tokens.shape[-1]), INNER, LEAF)
        hit = (((tokens == self.committed[:, None, None]) & some) * kind).sum(-1)  # at most one child is this token
        return mass.masked_fill(broken, torch.nan), hit * ~broken


def _rows(logits: Tensor, draws: Draws, laws: list[Sampling]) -> kernels.Rows:
    return Draws(laws, draws.seeds.tolist(), logits.device).rows(logits.unsqueeze(1))


def overlap(draft: DraftTree, b: int, logits: Tensor) -> Array:
    """[d] 1 − TV(p̄, q̄) at the d positions of sequence b's draft, at temperature 1 and unfiltered (MetaSD, Eq. 4). In a
    tree the positions are the chain of first children. Verification and drafting have computed p̄ and q̄ already.

    For a drafter without a distribution, q̄ is one-hot at the drafted token. NaN if a row is no distribution.

    Args:
        logits: [≥ 1 + n, V] the target's rows of the root and the draft's n nodes.
    """
    chain = first_chain(draft.parents[b].tolist())
    return _overlap(draft, b, chain, logits[[0, *(node + 1 for node in chain[:-1])]]) if chain else np.zeros(0)


def _overlap(draft: DraftTree, b: int, chain: list[int], logits: Tensor) -> Array:
    """`overlap`, given the rows [d, V] that predict the d nodes of `chain`."""
    p = logits.float().softmax(-1)
    if draft.q is None:
        shared = p.gather(1, draft.tokens[b, chain, None].to(p.device))[:, 0]
    else:
        q = draft.q.of(b, len(chain)).float().softmax(-1)
        shared = torch.minimum(p if draft.q.ids is None else p[:, draft.q.ids], q).sum(-1)
    return shared.cpu().numpy().astype(float)


def overlaps(target: Target, state: DecodeState, drafts: Sequence[DraftTree]) -> list[Array]:
    """`overlap` of drafts that are not verified, for a state with one sequence. It takes as few steps of the target as
    the room in its cache allows; the cache rows of these steps are overwritten by the next step."""
    read: list[Array] = []
    waiting: list[tuple[DraftTree, list[int]]] = []
    for draft in drafts:
        chain = first_chain(draft.parents[0].tolist())
        if sum(len(other) for _, other in waiting) + len(chain) >= MAX_NODES:
            read += _together(target, state, waiting)
            waiting = []
        waiting.append((draft, chain))
    return read + _together(target, state, waiting)


def _together(target: Target, state: DecodeState, drafts: list[tuple[DraftTree, list[int]]]) -> list[Array]:
    """`overlap` of several drafts, with their chains side by side in one step."""
    tokens = [state.rows[0].ids[-1]]
    parents: list[int] = []
    at: list[list[int]] = []  # rows that predict each chain's tokens
    for draft, chain in drafts:
        nodes = range(len(parents), len(parents) + len(chain))
        at.append([0, *(node + 1 for node in nodes)][: len(nodes)])
        parents += [-1, *nodes][: len(nodes)]
        tokens += draft.tokens[0, chain].tolist()
    if not parents:
        return [np.zeros(0) for _ in drafts]
    depths, seen = topology(parents)
    masks = torch.tensor([1, *(bits << 1 | 1 for bits in seen)])  # bit 0 = the root
    visible = (masks[:, None] >> torch.arange(len(tokens))) & 1 > 0
    plan = plan_rows(
        state.cached,
        len(tokens),
        visible=visible[None].to(state.device),
        depth=torch.tensor([[0, *depths]], device=state.device),
        device=state.device,
        dtype=state.dtype,
    )
    logits = target.step(torch.tensor([tokens], device=state.device), state.cache, plan)[0][0]
    return [_overlap(draft, 0, chain, logits[rows]) for (draft, chain), rows in zip(drafts, at, strict=True)]
