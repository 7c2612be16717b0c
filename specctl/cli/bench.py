"""`specctl bench`: time target steps, rounds and batches against their baselines on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specctl.cli import checks
from specctl.cli.command import recipe_command, run_or_plan
from specctl.cli.options import SAMPLING, TARGET
from specctl.cli.output import cell, records
from specctl.reporting.tables import headings, machine, unusable_notes
from specctl.threads import counted

if TYPE_CHECKING:
    from specctl.recipe import BenchRecipe

FLAGS = (
    *("parts", "shape", "drafters", "batches", "domain", "prompts", "limit", *TARGET, *SAMPLING),
    *("output_dir", "overwrite"),
)
STEPS = headings(
    *("rows", "ours_ms", "transformers_ms", "ratio", "of_one_row"),
    ours_ms="step ms",
    ratio="transformers / ours",
    weights_ms="reading weights ms",
)
ROUNDS = headings(
    *("drafter", "rows", "graphs", "round_ms", "target_ms", "overhead"),
    target_ms="of it target ms",
    of_weights="× reading weights",
)
DECODING = headings(
    *("drafter", "batch", "draft_length", "mat", "tokens_per_s", "with_prefill", "speedup", "of_batch_1"),
    *("speedup_transformers", "graphs"),
    draft_length="draft",
)


@recipe_command("bench", FLAGS, "specctl bench --parts steps,decoding --drafter drafters/sql-eagle3")
def bench(recipe: BenchRecipe, dry_run: bool) -> None:
    """Time target steps, rounds and batched decoding against their baselines, on this machine."""
    checks.check_drafters(recipe.drafters, recipe.drafting)
    checks.check_data(recipe.data)
    checks.check_run_dir("bench", recipe)
    run_or_plan("bench", recipe, dry_run, lambda: steps(recipe), show, "run_dir")


def steps(recipe: BenchRecipe) -> list[str]:
    from specctl.measuring.bench import shapes

    shapes.check_memory(recipe)
    drafters = recipe.drafters if {"rounds", "decoding"} & {*recipe.parts} else []
    plans = [f"random weights: {recipe.shape}" if recipe.shape else checks.check_target(recipe.target, drafters)]
    if recipe.shape is None and {"steps", "decoding"} & {*recipe.parts}:
        plans += checks.copy_step(recipe.target)
    if "steps" in recipe.parts:
        plans.append(f"time target steps of specctl and of transformers after {recipe.context} tokens of context")
    if "rounds" in recipe.parts:
        plans.append(
            "on a GPU: time whole rounds after the same context, plain and drafted, and the target's part of each"
        )
    if "decoding" in recipe.parts:
        names = ", ".join(recipe.drafters) or "no drafter"
        theirs = "with `transformers`, " if recipe.shape is None else ""
        sizes = ", ".join(map(str, recipe.batches))
        plans.append(f"decode {counted(recipe.limit, 'prompt')} at batch sizes {sizes}: plain, {theirs}with {names}")
    return plans


def show(document: dict[str, Any]) -> Any:
    """Render a table per part, and the machine, target and versions of the measurement."""
    from rich.console import Group

    tables = [
        records(document[part], columns)
        for part, columns in (("steps", STEPS), ("rounds", ROUNDS), ("decoding", DECODING))
        if document[part]
    ]
    hardware = document["hardware"]
    where = ", ".join(hardware["cuda"]) or f"{hardware['cpu']}, {machine(document['machine'])}"
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items() if number)
    on = cell(f"{document['target']}, {document['dtype']}, {where}; {versions}")
    return Group(*tables, *map(cell, unusable_notes(document)), on, f"run: {cell(document['run_dir'])}")
