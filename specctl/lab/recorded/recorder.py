"""Recording a table: the drafts that every drafter of a pool would make at every position of the target's answers.

An answer is decoded plainly, one token per step, and before every step each drafter proposes from the present state. So
every draft is made from the same features, caches and room as in a live round that begins there. The answer itself
tells how much of a draft is accepted. Only the target can tell how close a draft is to the target's distributions after
its first rejected token. So at every token one more target step reads the chains of all drafts.

Only rounding differs from live decoding: a live drafter reads the tokens of a round in one product, here they are read
one at a time. In fp32 both accept the same. In bf16, on the built-in target, 0 to 1 % of the rounds accept another
number of tokens (EAGLE-3 5 of 1,125, suffix 0 of 608). If the two likeliest tokens are nearly equal, the live text may
differ.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specctl import progress
from specctl.decoding.controllers import Fixed, NoDraft
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.offline import decode
from specctl.decoding.prompt_features import features_of
from specctl.decoding.protocols import Proposer
from specctl.decoding.records import DraftTree, Request, empty_draft, topology
from specctl.decoding.sampling import Sampling
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.feature.layer import select_taps
from specctl.errors import UsageError
from specctl.lab.recorded.overhead_timing import overheads
from specctl.lab.recorded.recording import Recording
from specctl.lab.recorded.table_file import Header, Recorded, read_table
from specctl.lab.recorded.trace import Table, Trace
from specctl.recipe import SamplingRecipe
from specctl.selection import feedback
from specctl.selection.arms import Arm, TimedDraft, longest_draft, prompt_taps, taps_of
from specctl.selection.assembly import step_seconds
from specctl.selection.feedback import overlaps
from specctl.selection.policies.policy import Array


@dataclass(frozen=True)
class Query:
    """A prompt to be answered with at most `room` new tokens, and the number of its session in the stream."""

    id: str
    domain: str
    ids: list[int]
    room: int
    seed: int
    session: int = 0


@dataclass(frozen=True)
class Drafted:
    """One draft: its nodes, its depth (−1: its drafter raised), its seconds, and `divergence.overlap`."""

    tokens: list[int]
    parents: list[int]
    depth: int
    seconds: float
    overlap: Array = field(default_factory=lambda: np.zeros(0))

    def accepted(self, text: Sequence[int]) -> int:
        """Number of tokens that the match rule accepts if the target goes on with `text`.

        Among siblings with equal tokens the first one is taken, as in verification.
        """
        node = -1
        for count, token in enumerate(text):
            children = (i for i, parent in enumerate(self.parents) if parent == node and self.tokens[i] == token)
            following = next(children, None)
            if following is None:
                return count
            node = following
        return len(text)


class RecordingDrafter(Proposer):
    """A drafter that drafts nothing, and keeps the draft that each of `arms` would have made: `drafts[i][t]`."""

    def __init__(self, target: Target, arms: Sequence[Arm], depth: int):
        self.target, self.arms, self.depth = target, arms, depth
        self.prompt_taps = prompt_taps(arms, target)
        self.taps = tuple(sorted({*taps_of(arms), *self.prompt_taps}))
        self.drafts: list[list[Drafted]] = [[] for _ in arms]
        self.context: Array | None = None  # features of the prompt

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        if not self.drafts[0]:
            for arm in self.arms:
                arm.advance(state)  # the prompt is read here, outside the time of a proposal
            assert state.features is not None
            states = state.features[0, : state.rows[0].prompt_length]
            self.context = features_of(select_taps(states, state.taps, self.prompt_taps))
        drafts = [self._draft(arm, state, budget) for arm in self.arms]
        along = overlaps(self.target, state, [made.draft for made in drafts])
        for kept, made, overlap in zip(self.drafts, drafts, along, strict=True):
            tokens, parents = made.draft.tokens[0].tolist(), made.draft.parents[0].tolist()
            depth = -1 if made.failed else max(topology(parents)[0], default=0)
            kept.append(Drafted(tokens, parents, depth, made.seconds, overlap))
        return empty_draft(state.batch, state.device)

    def invalidate(self, state: DecodeState) -> None:
        for arm in self.arms:
            arm.invalidate(state)

    def _draft(self, arm: Arm, state: DecodeState, budget: int) -> TimedDraft:
        draft = arm.propose(state, budget)
        if draft.rows is not None:
            raise UsageError(
                f"{arm.name} samples its drafts, so the text depends on its draws: its rounds cannot be replayed",
                hint="set drafting.proposal=deterministic",
            )
        deep = max(topology(draft.parents[0].tolist())[0], default=0)
        if deep > self.depth:
            raise UsageError(
                f"{arm.name} drafts to depth {deep}, but the table has depth {self.depth}",
                hint=f"set drafting.depth={self.depth} for all drafters, or record a deeper table",
            )
        assert arm.made is not None
        return arm.made


@dataclass(frozen=True)
class TableFile:
    """The file that keeps a table.

    Attributes:
        path: the file (None = the table is not kept). A recording that was cut short leaves pieces next to it, which
            `resume` takes up.
        made_of: other things that the table depends on, such as drafters' digests and the origin of the prompts. A
            recording with another `made_of` is not resumed.
    """

    path: Path | None = None
    made_of: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    overwrite: bool = False


NOT_KEPT = TableFile()


def record(
    target: Target,
    arms: Sequence[Arm],
    queries: Sequence[Query],
    recipe: SamplingRecipe,
    depth: int,
    file: TableFile = NOT_KEPT,
) -> Table:
    """Record the table of some drafters on a stream of queries.

    An answer that ends with the token of its prefill has nothing to draft for and is left out. If a drafter raises, the
    table holds the same as live decoding: a round without a draft, or a text without scores. Either is counted in the
    `failures` of its arm.

    Args:
        depth: K, at least the depth of every draft; the reach of an arm is cut to K.

    Raises:
        UsageError: sampled or too deep drafts, or a file that must be kept or was recorded with other settings.
        CheckpointError: the pieces to resume from cannot be read.
        Interrupted: by SIGTERM; recorded rows are kept.
    """
    asked = repr([vars(query) for query in queries])
    stamp = {
        "target": target.identity,
        "dtype": str(target.dtype),
        # No recipe sets min-p, and tables of earlier versions do not have it.
        "sampling": {key: value for key, value in asdict(Sampling.of(recipe)).items() if key != "min_p"},
        "exact": recipe.exact,
        "stream": hashlib.sha256(asked.encode()).hexdigest(),
        **file.made_of,
    }
    if file.path is not None and file.resume and file.path.exists():
        return read_table(file.path, {**stamp, "arms": [arm.name for arm in arms], "depth": depth})
    header = Header([arm.name for arm in arms], depth, stamp, trained_on=[arm.trained_on.pairs for arm in arms])
    scorer = feedback.Scorer(target, [arm.drafter for arm in arms], depth)
    with (
        Recording(file.path, header, resume=file.resume, overwrite=file.overwrite) as recording,
        progress.Progress("record", total=len(queries) - recording.next, unit="queries") as bar,
    ):
        for place in range(recording.next, len(queries)):
            progress.interrupts.check()
            row = _recorded(scorer, arms, queries[place], recipe, place)
            if row is not None:
                recording.add(row)
            bar.update()
        for arm, failures in zip(arms, scorer.failures, strict=True):
            arm.failures += failures
        return recording.finish(_costs(target, arms, queries, recording.rows, Sampling.of(recipe), depth))


def _recorded(
    scorer: feedback.Scorer, arms: Sequence[Arm], query: Query, recipe: SamplingRecipe, place: int
) -> Recorded | None:
    """The trace of one answer, or None if nothing was decoded."""
    witness, sampling = RecordingDrafter(scorer.target, arms, scorer.depth), Sampling.of(recipe)
    engine = Engine(scorer.target, Fixed(witness, witness.taps), EngineOptions(exact=recipe.exact))
    (answer,) = decode(engine, [Request(query.ids, sampling, query.room, query.seed)])
    if not answer.decoded_tokens:
        return None
    text = answer.output_ids[1:]
    accepted = [[draft.accepted(text[t:]) for t, draft in enumerate(drafts)] for drafts in witness.drafts]
    known = feedback.table(scorer, query.ids, answer.output_ids, sampling, seed=query.seed)
    overlap = np.zeros(known.gamma.shape, np.float32)
    for arm, drafts in enumerate(witness.drafts):
        for t, draft in enumerate(drafts):
            overlap[arm, t, : len(draft.overlap)] = draft.overlap
    trace = Trace(
        query=query.id,
        domain=query.domain,
        accepted=np.array(accepted, np.int16),
        drafted=np.array([[draft.depth for draft in drafts] for drafts in witness.drafts], np.int16),
        gamma=known.gamma,
        overlap=overlap,
        hit=known.hit,
        ended=answer.stop == "eos",
        session=query.session,
        prompt=len(query.ids),
        context=witness.context,
    )
    seconds = np.array([sum(draft.seconds for draft in drafts) for drafts in witness.drafts])
    nodes = np.array([sum(len(draft.tokens) for draft in drafts) for drafts in witness.drafts])
    return Recorded(place, trace, seconds, nodes)


def _costs(
    target: Target,
    arms: Sequence[Arm],
    queries: Sequence[Query],
    rows: Sequence[Recorded],
    sampling: Sampling,
    depth: int,
) -> dict[str, list[Any]]:
    """The `costs` of a whole table's header."""
    proposals = max(sum(row.trace.tokens for row in rows), 1)
    nodes = sum((row.nodes for row in rows), np.zeros(len(arms))) / proposals
    seconds = sum((row.seconds for row in rows), np.zeros(len(arms))) / proposals
    step_s = step_seconds(target, [1, *(1 + round(n) for n in nodes.tolist())])
    reached = [max(1, min(longest_draft(arm.drafter), depth)) for arm in arms]
    costs = {"draft_s": seconds.tolist(), "step_s": step_s, "reach": reached}
    able = [Arm(arm.name, NoDraft() if arm.failures else arm.drafter) for arm in arms]
    prompts = ((query.ids, query.room, query.seed) for query in queries)
    timed = overheads(target, able, reached, prompts, sampling)
    return costs if timed is None else {**costs, "read": timed.read.tolist(), "score": timed.score.tolist()}
