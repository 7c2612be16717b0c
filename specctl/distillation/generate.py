"""`specctl distill`: generate the target's own responses to a domain's prompts.

The work is planned before anything is decoded, and the seed of a response follows from its id. So the responses depend
neither on how prompts are batched nor on how often the run was interrupted.
"""

from __future__ import annotations

import copy
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from specctl import processes, progress
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.offline import stream
from specctl.decoding.prefix_cache import cpu_prefix_cache
from specctl.decoding.records import Request
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import Target, load_target
from specctl.decoding.target_text import TargetText, load_target_text
from specctl.distillation import card
from specctl.distillation.collect import DistillResult, collect, label
from specctl.distillation.messages import stored_fields, text_of
from specctl.distillation.plan import Job, ResponsePlan, plan
from specctl.distillation.rejections import Rejections
from specctl.distillation.responses import ResponseFilter
from specctl.distillation.select_prompts import LeftOut, prepare
from specctl.distillation.store import ShardLayout, ShardWriter, check_free
from specctl.engines.records import GenerationRequest, Refusal
from specctl.errors import Interrupted
from specctl.recipe import DistillRecipe
from specctl.runs import Run
from specctl.threads import counted

if TYPE_CHECKING:
    from specctl.engines.client import Client

WINDOW = 8  # batches that are decoded in one stream, through the same slots
HELD_JOBS, HELD_TOKENS = 8192, 2 << 20  # most jobs and prompt tokens in memory at once; two such lists take 150 MB
BYTES_PER_TOKEN = 9  # in a shard: its id and its text in JSON, measured
FLUSH_S = 5.0  # longest time that a finished text waits before it is written


class Response(NamedTuple):
    """A continuation of a prompt, and the reason why it ended."""

    ids: list[int]
    stop: str


Answered = Callable[[list[Job]], Iterator[tuple[int, Response | None]]]
"""Function that answers jobs: yields (position in the list, response) in any order; the response is None if refused."""


def distill(recipe: DistillRecipe, run: Run, *, target: Target | None = None) -> DistillResult:
    """Generate the responses of a recipe into its directory.

    Callers that have already loaded a target pass it in.

    Raises:
        DataError: no usable prompts, a directory with other settings, or a corrupted shard.
        UsageError: the directory already holds data.
        EngineError: a server keeps failing.
        Interrupted: SIGTERM arrived; everything decoded before is kept, and `resume` continues.
    """
    if recipe.log is not None:
        return collect(recipe, recipe.log, run, target)
    domain = label(recipe.data.domain)
    output = recipe.output
    rejections = Rejections(run.dir / "rejected.jsonl", recipe.data.max_rejected)
    writer = recipe.writer
    check_free(output, writer, resume=recipe.resume, overwrite=recipe.overwrite)
    with _client(recipe) as client:
        left_out = LeftOut(run.dir / "left-out.jsonl", recipe.exclude)
        prompts = prepare(recipe, rejections, left_out)
        if client is None:
            decoding = target or load_target(**recipe.target.loading)
            answered = partial(_decoded, recipe, decoding)
            text: TargetText = decoding
        else:
            text = copy.copy(target) if target is not None else load_target_text(**recipe.target.text)
            client.check(text)
            answered = partial(_served, recipe, client, rejections)
        run.annotate(target=text.identity)
        planned = plan(recipe, text, prompts, rejections)
        with ShardWriter(
            output,
            settings(recipe, domain, text, client),
            ShardLayout(writer, recipe.shard_size),
            resume=recipe.resume,
            overwrite=recipe.overwrite,
        ) as store:
            before = len(store.done)
            started = time.perf_counter()
            responses = ResponseFilter.of(recipe, output, writer, text)
            tokens = _generate(recipe, text, planned, store, responses, answered)
            seconds = time.perf_counter() - started
            rejections.check()
            store.complete()
        counts = {key: dict(getattr(prompts, key)) for key in ("licenses", "languages")}
        card.write(output, recipe, left_out, rejections, {"read": prompts.read, "kept": len(prompts), **counts})
        if before:
            progress.log(f"{counted(before, 'response')} existed already, {len(store.done) - before:,} new")
        if client is not None and client.failures:
            progress.log(f"{counted(client.failures, 'failed request')} sent again")
        there = Counter(owed.prompt for owed in planned.planned() if owed.id in store.done)
        return DistillResult(
            domain=domain,
            prompts=len(there),
            responses=there.total(),
            response_tokens=sum(store.done.get(owed.id, 0) for owed in planned.planned()),
            tokens_per_s=tokens / seconds if tokens else 0.0,
            rejected=rejections.count,
            left_out=left_out.counts.total(),
            dropped=len(responses.dropped),
            shards=store.shards,
            output=str(output),
        )


def _client(recipe: DistillRecipe) -> AbstractContextManager[Client | None]:
    """Client of a recipe's servers. If the recipe names none, the context yields None and the client is not
    imported."""
    if not recipe.server.urls:
        return nullcontext()
    from specctl.engines.client import Client

    return Client(recipe.server)


def settings(recipe: DistillRecipe, domain: str, target: TargetText, client: Client | None = None) -> dict[str, Any]:
    """Settings that all responses of a directory share; resuming with other settings is refused.

    They include the engine: another engine rounds differently, and so writes other texts. They also include the name of
    the engine's model, unless it is the first in the engine's list: the others may have adapters.
    """
    sampling, model = recipe.sampling, recipe.server.model
    default = [server.facts.models[0] for server in client.servers] if client is not None else [model]
    return {
        "domain": domain,
        "target": target.identity,
        "chat_template_kwargs": recipe.target.chat_template_kwargs,
        "sampling": {
            "temperatures": recipe.temperatures,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.max_new_tokens,
            "seed": sampling.seed,
        },
        **({} if client is None else {"engine": sorted({server.facts.engine for server in client.servers})}),
        **({} if model is None or model in default else {"model": model}),
    }


def _generate(
    recipe: DistillRecipe,
    target: TargetText,
    planned: ResponsePlan,
    store: ShardWriter,
    responses: ResponseFilter,
    answered: Answered,
) -> int:
    """Answer the jobs that are not done, up to the token budget, and store the responses in order. Returns the number
    of tokens generated."""
    budget = recipe.max_response_tokens  # counted in the order of the plan, also after a resume
    ordered = budget is not None or not recipe.server.urls
    done = ChainMap(store.done, responses.dropped)
    there = [done.get(owed.id) for owed in planned.planned()]
    total, pending = sum(length or 0 for length in there), there.count(None)
    if budget is not None and total >= budget:
        return 0
    generated, started = 0, time.perf_counter()
    progress.log(estimate(recipe, planned, pending))
    with progress.Progress(f"distil {label(recipe.data.domain)}", total=pending, unit="responses") as bar:
        for jobs in _bounded_lists(planned.jobs(done)):
            for rows in _records(recipe.batch_size, target, jobs, answered(jobs), ordered):
                answered_now = len(rows)
                rows = up_to_budget(responses.filter_rows(rows), None if budget is None else budget - total)
                store.append(rows)
                new = sum(len(row["response_ids"]) for row in rows)
                total, generated = total + new, generated + new
                bar.update(answered_now, tokens=total, tokens_per_s=generated / (time.perf_counter() - started))
                if budget is not None and total >= budget:
                    return generated
                if bar.done < pending:
                    progress.interrupts.check()
            if bar.done < pending:  # after a signal, the client stops asking the servers
                progress.interrupts.check()
    return generated


def estimate(recipe: DistillRecipe, planned: ResponsePlan, pending: int) -> str:
    """A line about the work ahead: number of responses, and the most tokens and disk space they take."""
    tokens = pending * recipe.sampling.max_new_tokens
    if recipe.max_response_tokens is not None:
        tokens = min(tokens, recipe.max_response_tokens)
    size = BYTES_PER_TOKEN * (tokens + pending * planned.prompt_tokens / len(planned))
    prompts = f"{counted(len(planned), 'prompt')} ({planned.prompt_tokens:,} tokens in all)"
    return (
        f"{counted(pending, 'response')} to {prompts}: "
        f"up to {tokens:,} new tokens, {size / 1e6:,.1f} MB in {recipe.output}"
    )


def _bounded_lists(jobs: Iterator[Job]) -> Iterator[list[Job]]:
    """Split jobs into lists that fit in memory. A list is answered completely before the next one starts, so lists are
    long."""
    held: list[Job] = []
    tokens = 0
    for job in jobs:
        held.append(job)
        tokens += len(job.prompt_ids)
        if len(held) == HELD_JOBS or tokens >= HELD_TOKENS:
            yield held
            held, tokens = [], 0
    if held:
        yield held


def _records(
    size: int, target: TargetText, jobs: list[Job], answers: Iterator[tuple[int, Response | None]], ordered: bool
) -> Iterator[list[dict[str, Any]]]:
    """Yield records to store, in the order of `jobs`: lists of `size`, or shorter ones if `FLUSH_S` has passed.

    After a signal, answers that wait for earlier jobs are stored as well, unless the output has to be `ordered`.
    """
    early: dict[int, Response | None] = {}
    rows: list[dict[str, Any]] = []
    following, written = 0, time.monotonic()
    for index, answer in answers:
        early[index] = answer
        while following in early:
            response = early.pop(following)
            if response is not None:
                rows.append(record(jobs[following], response, target))
            following += 1
        stopping = progress.interrupts.requested()
        late = processes.broadcast_value(time.monotonic() - written > FLUSH_S)
        if stopping and not ordered:
            rows += _waiting_records(early, jobs, target)
        if len(rows) >= size or (rows and (late or stopping)):
            yield rows
            rows, written = [], time.monotonic()
    if not ordered:
        rows += _waiting_records(early, jobs, target)
    if rows:
        yield rows


def _waiting_records(early: dict[int, Response | None], jobs: list[Job], target: TargetText) -> list[dict[str, Any]]:
    """Records of the answers that wait for earlier jobs; empties `early`."""
    there = [(jobs[place], response) for place, response in sorted(early.items()) if response is not None]
    early.clear()
    return [record(job, response, target) for job, response in there]


def up_to_budget(rows: list[dict[str, Any]], budget: int | None) -> list[dict[str, Any]]:
    """The first rows, until `budget` response tokens are reached. So the end of a run does not depend on batches."""
    if budget is None:
        return rows
    kept: list[dict[str, Any]] = []
    for row in rows:
        if budget <= 0:
            break
        kept.append(row)
        budget -= len(row["response_ids"])
    return kept


def _decoded(recipe: DistillRecipe, target: Target, jobs: list[Job]) -> Iterator[tuple[int, Response | None]]:
    """Decode the target's own responses; yield (position in `jobs`, response) as they end.

    A finished text makes room for the next one at once. Its KV cache has the size of the longest text among `WINDOW`
    batches.
    """
    top_k, top_p = recipe.sampling.top_k, recipe.sampling.top_p
    prefix_cache = None if recipe.sampling.exact else cpu_prefix_cache(target)  # prompts may have long instructions
    options = EngineOptions(slots=recipe.batch_size, exact=recipe.sampling.exact, prefix_cache=prefix_cache)
    engine = Engine(target, options=options)
    for start in range(0, len(jobs), WINDOW * recipe.batch_size):
        window = jobs[start : start + WINDOW * recipe.batch_size]
        requests = [
            Request(job.prompt_ids, Sampling(job.temperature, top_k, top_p), job.max_new_tokens, job.seed)
            for job in window
        ]
        try:
            for decoded in stream(engine, requests):
                yield start + decoded.index, Response(decoded.output_ids, decoded.stop)
        except Interrupted:  # `_generate` stores the finished texts and stops
            return


def _served(
    recipe: DistillRecipe, client: Client, rejections: Rejections, jobs: list[Job]
) -> Iterator[tuple[int, Response | None]]:
    """Get the responses from servers; yield (position in `jobs`, response). A refused prompt gives None and a
    rejection."""
    top_k, top_p = recipe.sampling.top_k, recipe.sampling.top_p
    asks = [
        GenerationRequest(job.prompt_ids, job.max_new_tokens, job.temperature, top_k, top_p, job.seed) for job in jobs
    ]
    for index, answer in client.answers(asks):
        if isinstance(answer, Refusal):
            prompt = jobs[index].prompt
            rejections.add(prompt.where, answer.reason, text_of(prompt.messages[-1]) if prompt.messages else "")
            yield index, None
        else:
            yield index, Response(answer.output_ids, answer.stop)


def record(job: Job, response: Response, target: TargetText) -> dict[str, Any]:
    """A response as a stored record; `response_ids` keep the end-of-sequence token, `text` omits it."""
    ids = [int(token) for token in response.ids]
    return {
        "id": job.id,
        "prompt_id": job.prompt.id,
        "domain": job.prompt.domain,
        "messages": job.prompt.messages,
        **stored_fields(job.prompt.tools, job.prompt.options),
        "prompt_ids": job.prompt_ids,
        "response_ids": ids,
        "text": target.tokenizer.decode(ids, skip_special_tokens=True),
        "temperature": job.temperature,
        "seed": job.seed,
        "stop": response.stop,
        "target": target.identity["vocab_hash"],
    }
