"""Result rows of lookahead reasoning: its gain, and its cost in fidelity, from the traces of one stream.

Every rate is a ratio of sums over prompts with a bootstrap interval. Modes that answered the same prompts are paired.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specctl.decoding.metrics import bootstrap, ratio, ratio_of_sums
from specctl.lab.reasoning.answers import equal_answers
from specctl.lab.reasoning.lookahead import ReasoningTrace
from specctl.lab.reasoning.options import ReasoningMode
from specctl.measuring.measured import Measured


@dataclass(frozen=True)
class ModeRow:
    """Results of one mode on a stream, or on a part of the stream.

    Attributes:
        step_acceptance: drafted steps kept ÷ drafted steps judged. A round judges its steps in order until one differs.
        accepted_per_target_step: drafted steps kept ÷ rounds. The target steps of a round are one batch.
        depth: drafted steps ÷ rounds.
        avg_len: kept steps, the target's own included, ÷ rounds; 1 without lookahead.
        mat: tokens ÷ forward passes of the target; a batch counts as one pass.
        cut: steps that ended at the length limit, without a delimiter.
        wasted: share of the target's steps that were discarded.
        seconds: wall-clock of answering.
        draft_s, judge_s: the parts of `seconds` spent with the draft LM and the judge.
        learning_s: wall-clock of learning.
        speedup: seconds of the target alone ÷ seconds of the mode, on the same prompts. The texts may differ.
        speedup_with_learning: speed-up with the time of learning counted.
        tflops: matrix products with the weights of target and draft LM, in 10¹² operations.
        accuracy: share of right answers, over prompts with a reference answer.
        agreement: share of final answers equal to the target's alone, over prompts that the target alone answers. It
            matters because the text is not lossless.
        unanswered: prompts without an answer that could be extracted.
    """

    mode: ReasoningMode
    prompts: int
    step_acceptance: Measured
    accepted_per_target_step: Measured
    depth: float | None
    avg_len: Measured
    mat: Measured
    wasted: float | None
    tokens: int
    rounds: int
    cut: int
    seconds: float
    draft_s: float
    judge_s: float
    learning_s: float
    speedup: Measured
    speedup_with_learning: float | None
    tflops: float
    accuracy: Measured
    agreement: Measured
    unanswered: int
    stops: dict[str, int]


def row(
    mode: ReasoningMode, traces: Sequence[ReasoningTrace], alone: Sequence[ReasoningTrace] | None, learning_s: float
) -> ModeRow:
    """Row of one mode. `alone`: the target's own answers to the same prompts, in the same order."""
    written = sum(trace.target_steps for trace in traces)
    kept = sum(trace.own_steps for trace in traces)
    seconds, alone_s = [trace.seconds for trace in traces], [trace.seconds for trace in alone or ()]
    return ModeRow(
        mode=mode,
        prompts=len(traces),
        step_acceptance=_rate(traces, [t.accepted for t in traces], [t.accepted + t.rejected for t in traces]),
        accepted_per_target_step=_rate(traces, [t.accepted for t in traces], [t.rounds for t in traces]),
        depth=ratio(sum(t.drafted for t in traces), sum(t.rounds for t in traces)),
        avg_len=_rate(traces, [t.accepted + t.own_steps for t in traces], [t.rounds for t in traces]),
        mat=_rate(traces, [len(t.ids) for t in traces], [t.target.passes for t in traces]),
        wasted=ratio(written - kept, written),
        tokens=sum(len(trace.ids) for trace in traces),
        rounds=sum(trace.rounds for trace in traces),
        cut=sum(trace.cut for trace in traces),
        seconds=sum(seconds),
        draft_s=sum(trace.draft_s for trace in traces),
        judge_s=sum(trace.judge_s for trace in traces),
        learning_s=learning_s,
        speedup=_rate(traces, alone_s, seconds) if alone_s else Measured(),
        speedup_with_learning=ratio(sum(alone_s), sum(seconds) + learning_s) if alone_s else None,
        tflops=sum(trace.flops for trace in traces) / 1e12,
        accuracy=_share(traces, [trace.right for trace in traces]),
        agreement=_share(traces, _agreeing(traces, alone)),
        unanswered=sum(trace.answer is None for trace in traces),
        stops={stop: sum(trace.stop == stop for trace in traces) for stop in ("final", "budget", "loop")},
    )


def acceptance_difference(ours: Sequence[ReasoningTrace], theirs: Sequence[ReasoningTrace]) -> Measured:
    """Step acceptance of one mode minus the acceptance of another mode on the same prompts, with a paired interval."""
    prompts = [trace.prompt_id for trace in ours]
    if prompts != [trace.prompt_id for trace in theirs]:
        raise ValueError("the two modes answered different prompts")
    counts = [([t.accepted for t in traces], [t.accepted + t.rejected for t in traces]) for traces in (ours, theirs)]
    if not all(sum(judged) for _, judged in counts):
        return Measured()
    one, other = (ratio_of_sums(prompts, accepted, judged) for accepted, judged in counts)
    mine, others = (sum(accepted) / sum(judged) for accepted, judged in counts)
    return Measured(mine - others, bootstrap(lambda drawn: one(drawn) - other(drawn), len(set(prompts))))


def _agreeing(traces: Sequence[ReasoningTrace], alone: Sequence[ReasoningTrace] | None) -> list[bool | None]:
    """Whether each answer equals the target's, or None if the target has no answer."""
    if alone is None:
        return [None] * len(traces)
    pairs = zip(traces, alone, strict=True)
    return [None if theirs.answer is None else equal_answers(mine.answer, theirs.answer) for mine, theirs in pairs]


def _share(traces: Sequence[ReasoningTrace], verdicts: Sequence[bool | None]) -> Measured:
    """Share of True among the verdicts that are not None."""
    return _rate(traces, [bool(verdict) for verdict in verdicts], [verdict is not None for verdict in verdicts])


def _rate(traces: Sequence[ReasoningTrace], tops: Sequence[float], bottoms: Sequence[float]) -> Measured:
    prompts = [trace.prompt_id for trace in traces]
    value = ratio(sum(tops), sum(bottoms))
    if value is None:
        return Measured()
    return Measured(value, bootstrap(ratio_of_sums(prompts, tops, bottoms), len(set(prompts))))
