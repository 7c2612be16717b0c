"""`specctl distill --from-log`: store responses that already exist, with the target's chat template applied."""

import time
from dataclasses import dataclass
from typing import Any

from specctl import progress
from specctl.decoding.target_text import TargetText, load_target_text
from specctl.distillation import card, logs
from specctl.distillation.messages import ContextExceeded, check_tools
from specctl.distillation.responses import ResponseFilter
from specctl.distillation.select_prompts import LeftOut, PromptFilter
from specctl.distillation.store import ShardLayout, ShardWriter, check_free
from specctl.recipe import DistillRecipe
from specctl.runs import Run
from specctl.threads import counted

ALONE = (0, 1)  # the only writer of its directory


@dataclass(frozen=True)
class DistillResult:
    """Result document of `distill`; the counts cover this writer's part (`--shard i/n`) of the directory."""

    domain: str
    prompts: int
    responses: int
    response_tokens: int
    tokens_per_s: float  # of this run; includes prefill, excludes loading and rendering
    rejected: int
    left_out: int  # prompts: repeated or excluded
    dropped: int  # responses that the filters dropped
    shards: int
    output: str


def label(domains: list[str]) -> str:
    """Name of one or several domains that are distilled together: `sql`, `sql+math`."""
    return "+".join(domains)


def collect(recipe: DistillRecipe, log: str, run: Run, target: TargetText | None = None) -> DistillResult:
    """Store the responses of a log in the directory of the recipe. A response that the log repeats is stored once. The
    target's weights are not needed.

    Raises:
        DataError: no usable responses, or a directory with other settings.
        UsageError: the directory already holds data.
        Interrupted: SIGTERM arrived.
    """
    domain = label(recipe.data.domain)
    output = recipe.output
    rejections = logs.rejections_of(run.dir / "rejected.jsonl", recipe.data.max_rejected)
    check_free(output, ALONE, resume=recipe.resume, overwrite=recipe.overwrite, private=True)
    target = target or load_target_text(**recipe.target.text)
    run.annotate(target=target.identity)
    layout = recipe.target.chat_template_kwargs
    left_out = LeftOut(run.dir / "left-out.jsonl", recipe.exclude)
    wanted = PromptFilter(recipe.filters, recipe.exclude, left_out)
    found: set[str] = set()
    repeated = 0
    with (
        ShardWriter(
            output,
            {"domain": domain, "target": target.identity, "chat_template_kwargs": layout, "log": True},
            ShardLayout(size=recipe.shard_size, private=True),
            resume=recipe.resume,
            overwrite=recipe.overwrite,
        ) as store,
        progress.Progress(f"read {domain}", unit="responses") as bar,
    ):
        before, started = sum(store.done.values()), time.perf_counter()
        rows: list[dict[str, Any]] = []
        responses = ResponseFilter.of(recipe, output, ALONE, target)
        for where, turn in logs.read(log, rejections):
            try:
                row = logs.record(turn, domain, target, layout)
            except ContextExceeded as error:
                add = rejections.leave_out if turn.in_trace else rejections.add
                add(where, str(error), turn.answer)
                continue
            except ValueError as error:
                rejections.add(where, str(error), turn.answer)
                continue
            if turn.tools and turn.engine_ids is None:
                check_tools(target, turn.messages, turn.arguments(layout), where)
            repeated += row["id"] in found
            id, messages = row["prompt_id"], row["messages"]
            if row["id"] not in found and (wanted.was_kept(id) or wanted.accept(id, messages, where)):
                found.add(row["id"])
                rows += [] if row["id"] in store.done or row["id"] in responses.dropped else [row]
                bar.update(1)
            if len(rows) >= recipe.batch_size or progress.interrupts.requested():
                store.append(responses.filter_rows(rows))
                rows = []
                progress.interrupts.check()
            if len(found) == recipe.data.limit:
                break
        store.append(responses.filter_rows(rows))
        seconds = time.perf_counter() - started
        rejections.check()
        left_out.report()
        if not found:
            raise logs.no_responses(log)
        store.complete()
    kept = {id for id in found if id in store.done}
    counts = {"read": wanted.count + left_out.counts.total(), "kept": wanted.count}
    card.write(output, recipe, left_out, rejections, counts)
    if repeated:
        progress.log(f"{counted(repeated, 'repeated response')} of {domain} left out: one copy of each is kept")
    return DistillResult(
        domain=domain,
        prompts=wanted.count,
        responses=len(kept),
        response_tokens=sum(store.done[id] for id in kept),
        tokens_per_s=(sum(store.done.values()) - before) / seconds,
        rejected=rejections.count,
        left_out=left_out.counts.total(),
        dropped=len(responses.dropped),
        shards=store.shards,
        output=str(output),
    )
