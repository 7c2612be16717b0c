"""`specctl eval --server`: what does a drafter give in the engine that serves it, at which load?"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from specctl import progress
from specctl.decoding import metrics
from specctl.decoding.target_text import load_target_text
from specctl.distillation.prompts import Rejections, read_domains
from specctl.engines.client import Client
from specctl.engines.records import Answer, Ask, Drafting
from specctl.errors import DataError
from specctl.measuring.contenders import Case, prepare
from specctl.measuring.measured import Measured, columns
from specctl.recipe import EvalRecipe
from specctl.runs import Run

REQUESTS = "requests.jsonl"
WARMUP = 2  # requests a server, before the clock counts


@dataclass(frozen=True)
class ServedRow:
    """One server with so many requests in flight, on one domain. Intervals are over prompts, at 95 %.

    Attributes:
        server: "server", or "baseline".
        tokens_per_s: of all requests together.
        request_tokens_per_s: mean of what a request sees.
        first_token_s, token_s: medians: until the first token, and between two from there on.
        mat: tokens of a round of verification, the target's own included; None where the engine does not draft, or does
            not tell. Its interval needs counters of each request.
        acceptance_by_position: share of rounds of which the draft's token at each place was accepted.
        speedup: `request_tokens_per_s` over that of the baseline on the same prompts.
        same_texts: as many are the baseline's, token for token.
    """

    server: str
    engine: str
    domain: str
    concurrency: int
    requests: int
    tokens: int
    seconds: float
    tokens_per_s: float
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
    failures: int  # requests that were sent again


@dataclass(frozen=True)
class ServedResult:
    """The result document of `eval --server`."""

    servers: list[ServedRow]
    rejected: int  # prompts


@dataclass(frozen=True)
class Pass:
    """All prompts of a domain once through a server."""

    answers: list[Answer]
    seconds: float
    drafting: Drafting | None
    failures: int


def evaluate_served(recipe: EvalRecipe, run: Run) -> ServedResult:
    """Send a recipe's prompts to its server and to the one beside it, at every concurrency.

    Raises DataError (no usable prompts), EngineError (a server that is not there, or goes on failing), CheckpointError
    (a server of another target), Interrupted.
    """
    target = load_target_text(**recipe.target.described)
    rejections = Rejections(run.dir / "rejected.jsonl", recipe.data.max_rejected)
    with Client(recipe.server) as client, Client(recipe.baseline_server) as other:  # which may be none
        clients = {"server": client} | ({"baseline": other} if recipe.baseline_server.urls else {})
        for one in clients.values():
            one.check(target)
        data = recipe.data.model_copy(update={"limit": recipe.limit})
        prompts = read_domains(data, rejections, split=recipe.split, sample=True)
        cases = prepare(recipe, target, prompts, rejections)
        run.annotate(target=target.identity)
        rows: list[ServedRow] = []
        with open(run.dir / REQUESTS, "w", encoding="utf-8") as file:
            for domain in dict.fromkeys(case.prompt.domain for case in cases):
                mine = [case for case in cases if case.prompt.domain == domain]
                for number, concurrency in enumerate(recipe.concurrency):
                    order = list(clients) if number % 2 == 0 else list(clients)[::-1]
                    passes = {name: answered(clients[name], recipe, mine, concurrency) for name in order}
                    for name in clients:
                        base = passes.get("baseline") if name == "server" else None
                        rows.append(row(name, clients[name], domain, concurrency, mine, passes[name], base))
                        for case, answer in zip(mine, passes[name].answers, strict=True):
                            kept = {"server": name, "concurrency": concurrency, "domain": domain, "id": case.prompt.id}
                            kept["prompt_ids"] = case.ids
                            file.write(json.dumps(kept | asdict(answer)) + "\n")
                    file.flush()
    return ServedResult(rows, rejections.count)


def answered(client: Client, recipe: EvalRecipe, cases: Sequence[Case], concurrency: int) -> Pass:
    """Every prompt once, so many at a time; a few before the clock counts. Raises Interrupted, EngineError."""
    sampling, seed = recipe.sampling, recipe.seeds[0]
    asks = [
        Ask(case.ids, case.room, sampling.temperature, sampling.top_k, sampling.top_p, case.seed(seed))
        for case in cases
    ]
    warm = [replace(ask, max_new_tokens=min(8, ask.max_new_tokens)) for ask in asks[:WARMUP]]
    _ = list(client.answers(warm, limit=concurrency, timed=True))
    failures, before = client.failures, client.drafting()
    found: dict[int, Answer] = {}
    started = time.perf_counter()
    with progress.track(f"{client.servers[0].url} × {concurrency}", total=len(asks), unit="requests") as bar:
        for place, answer in client.answers(asks, limit=concurrency, timed=True):
            if not isinstance(answer, Answer):
                raise DataError(
                    f"{client.servers[0].url} refuses {cases[place].prompt.where}: {answer.reason}",
                    "leave the prompt out, or lower sampling.max_new_tokens",
                )
            found[place] = answer
            bar.update(1)
    seconds = time.perf_counter() - started
    progress.interrupts.check()
    answers = [found[place] for place in range(len(asks))]
    own = [answer.drafting for answer in answers if answer.drafting is not None]
    after = client.drafting()
    if len(own) == len(answers):
        drafting: Drafting | None = Drafting.total(own)
    else:
        drafting = None if before is None or after is None else after.since(before)
    return Pass(answers, seconds, drafting, client.failures - failures)


def row(
    name: str, client: Client, domain: str, concurrency: int, cases: Sequence[Case], done: Pass, base: Pass | None
) -> ServedRow:
    """The numbers of a pass, and of what it gains over that of a baseline."""
    prompts = [case.prompt.id for case in cases]
    tokens = [len(answer.output_ids) for answer in done.answers]
    first = sorted(answer.first_s for answer in done.answers if answer.first_s is not None)
    between = [
        (answer.seconds - answer.first_s) / (len(answer.output_ids) - 1)
        for answer in done.answers
        if answer.first_s is not None and len(answer.output_ids) > 1
    ]
    drafting = done.drafting
    rounds = [answer.drafting for answer in done.answers if answer.drafting is not None]
    interval = None
    if len(rounds) == len(prompts):
        written = [one.rounds + one.accepted for one in rounds]
        interval = metrics.bootstrap(
            metrics.ratio_of_sums(prompts, written, [one.rounds for one in rounds]), len(set(prompts))
        )
    return ServedRow(
        server=name,
        engine=" ".join((client.servers[0].facts.engine, client.servers[0].facts.version)),
        domain=domain,
        concurrency=concurrency,
        requests=len(tokens),
        tokens=sum(tokens),
        seconds=done.seconds,
        tokens_per_s=sum(tokens) / done.seconds,
        request_tokens_per_s=sum(tokens) / sum(answer.seconds for answer in done.answers),
        first_token_s=statistics.median(first) if first else None,
        first_token_p95_s=first[round(0.95 * (len(first) - 1))] if first else None,
        token_s=statistics.median(between) if between else None,
        mat=drafting.mat if drafting else None,
        mat_interval=interval,
        acceptance_by_position=drafting.shares if drafting else [],
        **columns(speedup=speedup(prompts, done.answers, base.answers) if base else Measured()),
        same_texts=None
        if base is None
        else sum(a.output_ids == b.output_ids for a, b in zip(done.answers, base.answers, strict=True)),
        failures=done.failures,
    )


def speedup(prompts: Sequence[str], ours: Sequence[Answer], theirs: Sequence[Answer]) -> Measured:
    """Tokens a second that a request sees over those of a baseline, paired by prompt."""

    def rate(answers: Sequence[Answer]) -> metrics.Statistic:
        return metrics.ratio_of_sums(prompts, [len(a.output_ids) for a in answers], [a.seconds for a in answers])

    def value(answers: Sequence[Answer]) -> float:
        return sum(len(answer.output_ids) for answer in answers) / sum(answer.seconds for answer in answers)

    one, other = rate(ours), rate(theirs)
    interval = metrics.bootstrap(lambda counts: one(counts) / other(counts), len(set(prompts)))
    return Measured(value(ours) / value(theirs), interval)
