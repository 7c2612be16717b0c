"""Result rows of answers from servers: by domain, and by prompt length."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specctl.decoding import metrics
from specctl.engines.records import DraftCounters, GenerationResult
from specctl.measuring.measured import Measured, Parts, bucket, bucket_start, columns, relative


@dataclass(frozen=True)
class Reply:
    """An answer to one turn, with the baseline's answer to the same messages of the user.

    Attributes:
        conversation: id of its first prompt; the turns of a conversation are drawn together for intervals.
        turn: number of the turn, from 0.
        baseline: the baseline's answer, or None without a baseline, and if its conversation has ended earlier.
    """

    conversation: str
    turn: int
    prompt_ids: list[int]
    answer: GenerationResult
    baseline: GenerationResult | None = None


@dataclass(frozen=True)
class Figures:
    """Numbers of a set of replies. Intervals are over conversations, at 95 %.

    Attributes:
        request_tokens_per_s: tokens ÷ seconds over all requests: the average speed that a client sees.
        first_token_s, token_s: medians of the time to the first token, and of the time between later tokens.
        mat: tokens per round of verification, bonus token included, or None if the engine does not draft or does not
            report it. The interval needs counters per request.
        acceptance_by_position: share of rounds in which the draft token at each position was accepted.
        speedup: `request_tokens_per_s` ÷ the baseline's on the same prompts.
        same_texts: number of answers that equal the baseline's, token for token.
    """

    requests: int
    tokens: int
    request_tokens_per_s: float
    first_token_s: float | None
    first_token_p95_s: float | None
    token_s: float | None
    mat: float | None
    mat_interval: metrics.Interval | None
    acceptance_by_position: list[float]
    speedup: float | None
    speedup_interval: metrics.Interval | None
    same_texts: int | None


@dataclass(frozen=True)
class ServedRow(Figures):
    """Results of one server at one concurrency in one domain.

    Attributes:
        server: "server", or "baseline".
        tokens_per_s: throughput of all requests together.
        failures: requests that failed and were sent again.
        cached_prompt: share of the prompts' tokens that the engine took from its prefix cache, or None if it does not
            tell. Some engines find less with a drafter.
    """

    server: str
    engine: str
    domain: str
    concurrency: int
    seconds: float
    tokens_per_s: float
    failures: int
    cached_prompt: float | None = None


@dataclass(frozen=True)
class ServedLength(Figures):
    """Results for prompts of `over` < tokens ≤ `up_to`, all domains together."""

    server: str
    concurrency: int
    over: int
    up_to: int


def figures(replies: Sequence[Reply], baseline: bool, engine_counters: DraftCounters | None = None) -> dict[str, Any]:
    """Compute the fields of `Figures`. `engine_counters`: the engine's overall counters, for answers without
    counters."""
    tokens = [len(reply.answer.output_ids) for reply in replies]
    first = sorted(reply.answer.first_s for reply in replies if reply.answer.first_s is not None)
    between = [
        (reply.answer.seconds - reply.answer.first_s) / (len(reply.answer.output_ids) - 1)
        for reply in replies
        if reply.answer.first_s is not None and len(reply.answer.output_ids) > 1
    ]
    own = [reply.answer.drafting for reply in replies if reply.answer.drafting is not None]
    drafting, interval = engine_counters, None
    if len(own) == len(replies):
        if not (drafting and drafting.accepted_at) or any(one.accepted_at for one in own):
            drafting = DraftCounters.total(own)
        written = [one.rounds + one.accepted for one in own]
        names = [reply.conversation for reply in replies]
        interval = metrics.bootstrap(
            metrics.ratio_of_sums(names, written, [one.rounds for one in own]), len(set(names))
        )
    return asdict(
        Figures(
            requests=len(tokens),
            tokens=sum(tokens),
            request_tokens_per_s=sum(tokens) / sum(reply.answer.seconds for reply in replies),
            first_token_s=statistics.median(first) if first else None,
            first_token_p95_s=first[round(0.95 * (len(first) - 1))] if first else None,
            token_s=statistics.median(between) if between else None,
            mat=drafting.mat if drafting else None,
            mat_interval=interval,
            acceptance_by_position=drafting.acceptance_by_position if drafting else [],
            **columns(speedup=speedup(replies)),
            same_texts=sum(
                reply.baseline is not None and reply.answer.output_ids == reply.baseline.output_ids for reply in replies
            )
            if baseline
            else None,
        )
    )


def speedup(replies: Sequence[Reply]) -> Measured:
    """Tokens per second of a request, relative to the baseline; paired by conversation and turn."""
    pairs = [(reply.conversation, reply.answer, reply.baseline) for reply in replies if reply.baseline is not None]
    if not pairs:
        return Measured()
    names, ours, theirs = zip(*pairs, strict=True)

    def parts(answers: Sequence[GenerationResult]) -> Parts:
        return [len(answer.output_ids) for answer in answers], [answer.seconds for answer in answers]

    return relative(names, parts(ours), parts(theirs))


def by_length(replies: Sequence[Reply], server: str, concurrency: int, baseline: bool) -> list[ServedLength]:
    """One row per bucket of prompt lengths that is not empty, the shortest first."""
    buckets: dict[int, list[Reply]] = {}
    for reply in replies:
        buckets.setdefault(bucket(len(reply.prompt_ids)), []).append(reply)
    return [
        ServedLength(
            **figures(some, baseline), server=server, concurrency=concurrency, over=bucket_start(up_to), up_to=up_to
        )
        for up_to, some in sorted(buckets.items())
    ]
