"""`specctl distill --from-log`: responses that are there already, as the target lays them out."""

from __future__ import annotations

import time
from typing import Any

from specctl import progress
from specctl.decoding.target_text import TargetText, load_target_text
from specctl.distillation import logs
from specctl.distillation.prompts import Rejections, prompt_ids, tell_left_out
from specctl.distillation.result import DistillResult, default_output, label
from specctl.distillation.store import ShardWriter, check_free
from specctl.errors import DataError
from specctl.recipe import DistillRecipe
from specctl.runs import Run

ALONE = (0, 1)  # the writer of a directory


def collect(recipe: DistillRecipe, log: str, run: Run, target: TargetText | None = None) -> DistillResult:
    """Keep the responses of a log in a recipe's directory, each once. Weights of the target are not needed.

    Raises DataError (no usable responses, a directory of other settings), UsageError (it exists), Interrupted.
    """
    domain = label(recipe.data.domain)
    output = recipe.output_dir or default_output(recipe.data.domain)
    rejections = Rejections(run.dir / "rejected.jsonl", recipe.data.max_rejected, expected=logs.EXPECTED)
    check_free(output, ALONE, resume=recipe.resume, overwrite=recipe.overwrite)
    target = target or load_target_text(**recipe.target.described)
    run.annotate(target=target.identity)
    unwanted, layout = prompt_ids(recipe.exclude), recipe.target.chat_template_kwargs
    found: set[str] = set()
    prompts: set[str] = set()
    left_out = repeated = 0
    with (
        ShardWriter(
            output,
            {"domain": domain, "target": target.identity, "chat_template_kwargs": layout, "log": True},
            shard_size=recipe.shard_size,
            format=recipe.format,
            resume=recipe.resume,
            overwrite=recipe.overwrite,
        ) as store,
        progress.track(f"read {domain}", unit="responses") as bar,
    ):
        before, started = sum(store.done.values()), time.perf_counter()
        rows: list[dict[str, Any]] = []
        for where, turn in logs.read(log, rejections):
            try:
                row = logs.record(turn, domain, target, layout)
            except ValueError as error:
                rejections.add(where, str(error), turn.answer)
                continue
            left_out += row["prompt_id"] in unwanted
            repeated += row["id"] in found
            if row["prompt_id"] not in unwanted and row["id"] not in found:
                found.add(row["id"])
                prompts.add(row["prompt_id"])
                rows += [] if row["id"] in store.done else [row]
                bar.update(1)
            if len(rows) >= recipe.batch_size or progress.interrupts.requested():
                store.append(rows)
                rows = []
                progress.interrupts.check()
            if len(found) == recipe.data.limit:
                break
        store.append(rows)
        seconds = time.perf_counter() - started
        rejections.check()
        if not found:
            raise DataError(f"no responses in {log}", hint=f"expected {logs.EXPECTED}")
        store.complete()
    tell_left_out(recipe.exclude, left_out)
    if repeated:
        progress.log(f"{repeated} repeated responses of {domain} are kept once")
    return DistillResult(
        domain=domain,
        prompts=len(prompts),
        responses=len(found),
        response_tokens=sum(store.done[id] for id in found),
        tokens_per_s=(sum(store.done.values()) - before) / seconds,
        rejected=rejections.count,
        shards=store.shards,
        output=str(output),
    )
