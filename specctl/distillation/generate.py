"""`specctl distill`: the target's own responses to a domain's prompts.

The work is planned before anything is decoded, and the seed of a response follows from its id: what is written depends
neither on the batch a prompt fell into nor on how often the run was stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl import progress
from specctl.decoding.loop import stream
from specctl.decoding.records import Decoded
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import Target, load_target
from specctl.distillation.plan import Job, parse_shard, plan
from specctl.distillation.prompts import Rejections, read_domains
from specctl.distillation.store import ShardWriter, check_free
from specctl.recipe import DistillRecipe
from specctl.runs import Run

WINDOW = 8  # batches whose texts follow each other through one set of places


@dataclass(frozen=True)
class DistillResult:
    """The result document of `distill`; counts are those of this writer's part (`--shard i/n`) of the directory."""

    domain: str
    prompts: int
    responses: int
    response_tokens: int
    tokens_per_s: float  # of this run, prefill included, loading and rendering not
    rejected: int
    shards: int
    output: str


def distill(recipe: DistillRecipe, run: Run, *, target: Target | None = None, drafter: Any = None) -> DistillResult:
    """Generate the responses of a recipe into its directory.

    `target` and `drafter` are given by callers that hold them already; a drafter changes the speed, not the text.
    Raises DataError (no usable prompts, directory of other settings, corrupted shard), UsageError (directory exists),
    Interrupted (SIGTERM; everything decoded so far is kept, `resume` continues).
    """
    domain = label(recipe.data.domain)
    output = recipe.output_dir or default_output(recipe.data.domain)
    rejections = Rejections(run.dir / "rejected.jsonl", recipe.data.max_rejected)
    writer = parse_shard(recipe.shard)
    check_free(output, writer, resume=recipe.resume, overwrite=recipe.overwrite)
    read = read_domains(recipe.data, rejections, sample=True)
    prompts = list({prompt.id: prompt for prompt in reversed(read)}.values())[::-1]  # of two domains the first has it
    target = target or load_target(**recipe.target.loading)
    run.annotate(target=target.identity)
    jobs = plan(recipe, target, prompts, rejections)
    with ShardWriter(
        output,
        settings(recipe, domain, target),
        writer=writer,
        shard_size=recipe.shard_size,
        format=recipe.format,
        resume=recipe.resume,
        overwrite=recipe.overwrite,
    ) as store:
        before = len(store.done)
        started = time.perf_counter()
        tokens = _generate(recipe, target, jobs, store, domain, drafter)
        seconds = time.perf_counter() - started
        store.complete()
        answered = [job for job in jobs if job.id in store.done]
        if before:
            progress.log(f"{before} responses were there already, {len(store.done) - before} are new")
        return DistillResult(
            domain=domain,
            prompts=len({job.prompt.id for job in answered}),
            responses=len(answered),
            response_tokens=sum(store.done[job.id] for job in answered),
            tokens_per_s=tokens / seconds if tokens else 0.0,
            rejected=rejections.count,
            shards=store.shards,
            output=str(output),
        )


def label(domains: list[str]) -> str:
    """The name of one or several domains distilled together: `sql`, `sql+math`."""
    return "+".join(domains)


def default_output(domains: list[str]) -> Path:
    """./distilled/<domain>"""
    return Path("distilled") / label(domains)


def settings(recipe: DistillRecipe, domain: str, target: Target) -> dict[str, Any]:
    """The settings that all responses of a directory share; resuming under other settings is refused."""
    sampling = recipe.sampling
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
    }


def _generate(
    recipe: DistillRecipe, target: Target, jobs: list[Job], store: ShardWriter, domain: str, drafter: Any
) -> int:
    """Decode what is not done yet, up to the token budget, and store it in order. Returns the tokens generated."""
    pending = [job for job in jobs if job.id not in store.done]
    budget = recipe.max_response_tokens
    total = sum(store.done[job.id] for job in jobs if job.id in store.done)
    generated, started = 0, time.perf_counter()
    with progress.track(f"distil {domain}", total=len(pending), unit="responses") as bar:
        for rows in _records(recipe, target, pending, drafter):
            rows = within(rows, None if budget is None else budget - total)
            store.append(rows)
            new = sum(len(row["response_ids"]) for row in rows)
            total, generated = total + new, generated + new
            bar.update(len(rows), tokens=total, tokens_per_s=generated / (time.perf_counter() - started))
            if budget is not None and total >= budget:
                break
            if bar.done < len(pending):
                progress.interrupts.check()
    return generated


def _records(recipe: DistillRecipe, target: Target, pending: list[Job], drafter: Any) -> Iterator[list[dict[str, Any]]]:
    """Responses as they are stored, in the order of `pending`, in lists of a batch's size; shorter when a signal came.

    A text that ends makes room for the next at once. Its keys and values take the room of the longest text among
    `WINDOW` batches.
    """
    size = recipe.batch_size
    for start in range(0, len(pending), WINDOW * size):
        jobs = pending[start : start + WINDOW * size]
        early: dict[int, Decoded] = {}
        rows: list[dict[str, Any]] = []
        given = 0
        for response in _decode(recipe, target, jobs, drafter):
            early[response.index] = response
            while (following := given + len(rows)) in early:
                rows.append(record(jobs[following], early.pop(following), target))
            if len(rows) >= size or (rows and progress.interrupts.requested()):
                yield rows
                given += len(rows)
                rows = []
        if rows:
            yield rows


def within(rows: list[dict[str, Any]], budget: int | None) -> list[dict[str, Any]]:
    """The first rows until `budget` response tokens are reached: where a run ends does not depend on batches."""
    if budget is None:
        return rows
    kept: list[dict[str, Any]] = []
    for row in rows:
        if budget <= 0:
            break
        kept.append(row)
        budget -= len(row["response_ids"])
    return kept


def _decode(recipe: DistillRecipe, target: Target, jobs: list[Job], drafter: Any) -> Iterator[Decoded]:
    top_k, top_p = recipe.sampling.top_k, recipe.sampling.top_p
    return stream(
        target,
        [job.prompt_ids for job in jobs],
        sampling=[Sampling(job.temperature, top_k, top_p) for job in jobs],
        max_new_tokens=[job.max_new_tokens for job in jobs],
        seeds=[job.seed for job in jobs],
        drafter=drafter,
        slots=recipe.batch_size,
        exact=recipe.sampling.exact,
    )


def record(job: Job, decoded: Decoded, target: Target) -> dict[str, Any]:
    """A response as it is stored; `response_ids` keep the end-of-sequence token, `text` does not show it."""
    ids = [int(token) for token in decoded.output_ids]
    return {
        "id": job.id,
        "prompt_id": job.prompt.id,
        "domain": job.prompt.domain,
        "messages": job.prompt.messages,
        "prompt_ids": job.prompt_ids,
        "response_ids": ids,
        "text": target.tokenizer.decode(ids, skip_special_tokens=True),
        "temperature": job.temperature,
        "seed": job.seed,
        "stop": decoded.stop,
        "target": target.identity["vocab_hash"],
    }
