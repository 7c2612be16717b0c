"""`specctl eval`: measure drafters × domains."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from specctl.cli import checks
from specctl.cli.command import recipe_command, run_or_plan
from specctl.cli.options import SAMPLING, TARGET
from specctl.cli.output import cell, records, table
from specctl.reporting.tables import headings, machine, unusable_notes
from specctl.threads import counted

if TYPE_CHECKING:
    from specctl.recipe import EvalRecipe, EvalServerRecipe

FLAGS = (
    *("drafters", "pool", "domain", "prompts", "limit", "seeds", *TARGET, *SAMPLING),
    *("matrix", "metric", "baselines", "save_outputs", "output_dir", "resume", "overwrite"),
)
EARLIER = ("server", "baseline_server", "concurrency", "mats")
"""Flags of commands that were modes of this one."""
COLUMNS = headings(
    *("drafter", "domain", "mat", "accept_rate", "tokens_per_s", "speedup", "speedup_transformers", "tokens")
)
LENGTHS = headings("drafter", "over", "up_to", "mat", "accept_rate", "speedup", "tokens", prompts="of")


@recipe_command(
    "eval", FLAGS, "specctl eval --drafter drafters/sql-eagle3 --drafter lookup --domain sql", earlier=EARLIER
)
def evaluate(recipe: EvalRecipe, dry_run: bool) -> None:
    """Measure drafters × domains: mat (tokens per pass of the target), acceptance, speed, and losslessness."""
    checks.check_drafters(recipe.drafters, recipe.drafting)
    members = checks.pool_members(recipe.pool) if recipe.pool else []
    if recipe.matrix:
        from specctl.commands.eval import with_domains_of_drafters

        recipe = with_domains_of_drafters(recipe)
    checks.check_data(recipe.data)
    checks.check_run_dir("eval", recipe)
    if recipe.output_dir and recipe.resume:
        from specctl.measuring.records import check_stamp, recipe_stamp

        check_stamp(recipe.output_dir, recipe_stamp(recipe))
    run_or_plan(
        "eval",
        recipe,
        dry_run,
        lambda: steps(recipe, [*recipe.drafters, *members]),
        partial(show, measured=describe_prompts(recipe)),
        "run_dir",
    )


def describe_prompts(recipe: EvalRecipe | EvalServerRecipe) -> str:
    sampling = "greedy" if recipe.sampling.temperature == 0 else f"at temperature {recipe.sampling.temperature:g}"
    prompts = checks.up_to(recipe.limit, f"{recipe.split} prompt")
    return (
        f"{prompts} per domain ({', '.join(recipe.data.domain)}), {sampling}, "
        f"up to {counted(recipe.sampling.max_new_tokens, 'new token')}"
    )


def steps(recipe: EvalRecipe, drafters: list[str]) -> list[str]:
    drafters = list(dict.fromkeys(drafters))  # a drafter that is named twice runs once
    return [
        checks.check_target(recipe.target, drafters),
        *(checks.copy_step(recipe.target) if "transformers" in recipe.baselines else []),
        f"decode {describe_prompts(recipe)}, {counted(len(recipe.seeds), 'time')}",
        f"with {', '.join(drafters) or 'no drafter'}; baselines {', '.join(recipe.baselines) or 'none'}",
        "compare every text with the text of plain decoding",
    ]


def show(document: dict[str, Any], measured: str) -> Any:
    """Render the matrix, if any, or one row per drafter and domain; then the verdict on losslessness."""
    from rich.console import Group

    return Group(
        *(matrix_parts(document["matrix"]) if document["matrix"] else [records(document["rows"], COLUMNS)]),
        *([records(document["lengths"], LENGTHS)] if document["lengths"] else []),
        *map(cell, unusable_notes(document)),
        "drafters against plain decoding: " + verdict(document["lossless"]),
        "plain decoding against transformers: " + verdict(document["lossless_transformers"]),
        *later_turns(document, "plain decoding's answers"),
        f"measured on: {cell(measured)}",
        f"machine: {machine(document['machine'])}",
        f"run: {cell(document['run_dir'])}",
    )


def later_turns(document: dict[str, Any], answers: str) -> list[str]:
    """Say how many prompts are later turns of conversations, and which answers precede them (`answers`)."""
    number = document["later_turns"]
    return [f"{number} prompts are later turns of conversations and follow {answers}"] if number else []


def verdict(lossless: dict[str, int]) -> str:
    if not lossless["sequences"]:
        return "not compared"
    return "{mismatches} mismatches, {ties} ties in {sequences} sequences".format(**lossless)


def matrix_parts(matrix: dict[str, Any]) -> list[Any]:
    """Render drafters above baselines, by domain and macro average, then the test of the diagonal and the verdict.

    The best drafter of a column is bold and has a star.
    """
    diagonal = [_diagonal(matrix["diagonal"])] if matrix["diagonal"] else []
    return [_cells(matrix), *diagonal, cell(matrix["verdict"]), *_baseline_wins(matrix)]


def _cells(matrix: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column(matrix["metric"])
    for column in (*matrix["domains"], "macro"):
        made.add_column(column, justify="right")
    best = [*matrix["best"], matrix["best_macro"]]
    names = [*matrix["drafters"], *matrix["baselines"]]
    for name, values, macro in zip(names, matrix["values"], matrix["macro"], strict=True):
        # Values without a star get a space, so that digits stay aligned.
        line = [
            Text(f"{cell(value)}*", style="bold") if name == first else f"{cell(value)} "
            for value, first in zip([*values, macro], best, strict=True)
        ]
        made.add_row(cell(name), *line, end_section=name == matrix["drafters"][-1])
    return made


def _baseline_wins(matrix: dict[str, Any]) -> list[str]:
    """Return a line with the domains in which a baseline beats every trained drafter, which the stars do not show."""
    count = len(matrix["drafters"])
    outdone = []
    for domain, column in zip(matrix["domains"], zip(*matrix["values"], strict=True), strict=True):
        known = [(value, name) for value, name in zip(column[count:], matrix["baselines"], strict=True) if value]
        top = max((value for value in column[:count] if value), default=None)
        if known and top is not None and max(known)[0] > top:
            outdone.append(f"{max(known)[1]} in {domain}")
    return [cell(f"better than every trained drafter: {', '.join(outdone)}")] if outdone else []


def _diagonal(diagonal: list[dict[str, Any]]) -> Any:
    rows = [
        [
            *(specialist[key] for key in ("drafter", "domain", "best", "rival")),
            f"{specialist['lead']:+.2f}",
            "{:+.2f} … {:+.2f}".format(*specialist["interval"]) if specialist["interval"] else None,
        ]
        for specialist in diagonal
    ]
    return table("specialist", "its domain", "best there", "best of the others", "lead", "95 %", rows=rows)
