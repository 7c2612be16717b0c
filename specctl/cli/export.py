"""`specctl export`: write a drafter in the format of vLLM, SGLang, speculators or a reference repository."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from specctl.cli import checks
from specctl.cli.command import Operand, recipe_command, run_or_plan
from specctl.cli.output import cell, fields, shell_line, table
from specctl.errors import CheckpointError, UsageError
from specctl.families import WEIGHTLESS_DRAFTERS

if TYPE_CHECKING:
    from specctl.recipe import ExportRecipe

FLAGS = ("to", "tune", "check", "push", "private", "server", "target", "output_dir", "overwrite")
SHOWN = ("family", "to", "output", "params", "max_difference", "pushed")
NAMELESS = "for vLLM, use its name (specctl guide engines); SGLang's NGRAM drafts in the same way"


@recipe_command(
    "export", FLAGS, "specctl export drafters/sql-eagle3 --to vllm --check", Operand("drafter", "Drafter directory.")
)
def export(recipe: ExportRecipe, dry_run: bool) -> None:
    """Write a drafter for vLLM, SGLang, speculators or transformers, and print the command that serves it."""
    if str(recipe.source) in WEIGHTLESS_DRAFTERS and not recipe.source.exists():
        raise UsageError(f"{recipe.source} has no weights to export: it drafts from the text of the request", NAMELESS)
    head = str(recipe.source).rpartition("+")[0]
    if os.path.isdir(head) and not os.path.lexists(recipe.source):
        raise UsageError(f"{recipe.source} is a hybrid, which no engine drafts with", f"export its head: {head}")
    checks.check_directory(str(recipe.source))
    from specctl.commands.export import check_family  # takes seconds
    from specctl.drafters import checkpoint

    check_family(recipe, checkpoint.family(recipe.source))
    if writes(recipe):
        checks.check_output("export", recipe.output, overwrite=recipe.overwrite)
    run_or_plan("export", recipe, dry_run, lambda: steps(recipe), show, "output")


def writes(recipe: ExportRecipe) -> bool:
    """Whether the export writes a directory.

    It does not if running servers take the drafter, nor for a datastore for vLLM, which reads specctl's files.
    """
    from specctl.drafters import checkpoint

    if recipe.server.urls or recipe.to != "vllm":
        return not recipe.server.urls
    with suppress(CheckpointError):  # reported later
        return checkpoint.family(recipe.source) != "retrieval"
    return True


def check_target(recipe: ExportRecipe) -> None:
    """Check that the drafter fits its target, if that is on this machine. Raises CheckpointError."""
    from specctl.commands.export import facts_of
    from specctl.drafters import checkpoint
    from specctl.formats import llamacpp

    made_for = checkpoint.read_json(recipe.source / checkpoint.CONFIG).get("target")
    if not isinstance(made_for, dict) or not isinstance(made_for.get("name"), str):
        return  # the run names the damaged file
    own = {} if "name" in recipe.target.model_fields_set else {"name": made_for["name"]}
    if checks.local_target(recipe.target.model_copy(update=own)) is not None:
        facts = facts_of(recipe.target, made_for)
        if recipe.to == "llama.cpp":
            llamacpp.check_target(facts.name)


def steps(recipe: ExportRecipe) -> list[str]:
    check_target(recipe)
    if not writes(recipe):
        servers = ", ".join(recipe.server.urls)
        end = f"publish its documents to {servers}, replacing earlier ones" if servers else "print its command"
        return [f"verify {recipe.drafter}", end]
    if recipe.tune is not None:
        from specctl.measuring.served_costs import tune

        tune(recipe.tune)
    tuned = [f"derive draft lengths by load from {recipe.tune}"] if recipe.tune else []
    checked = ["read it back and compare its weights"] if recipe.check else []
    pushed = [f"upload it to {recipe.push} on the Hugging Face hub"] if recipe.push else []
    return [f"verify {recipe.drafter}", f"write it for {recipe.to} to {recipe.output}", *tuned, *checked, *pushed]


def show(document: dict[str, Any]) -> Any:
    from rich.console import Group

    facts = {name: document[name] for name in SHOWN if document[name] is not None}
    tuning = document["tuning"]
    return Group(
        fields(facts),
        "",
        *(lengths(tuning) if tuning else []),
        *(cell(line) for line in map(publication_line, document["published"])),
        *map(cell, document["notes"]),
        *map(shell_line, document["commands"]),
    )


def publication_line(one: dict[str, Any]) -> str:
    if one["tokens"] is None:
        return f"{one['server']} already has {one['corpus']}"
    before = f", replacing {', '.join(one['replaced'])}" if one["replaced"] else ""
    return f"{one['server']} drafts from {one['corpus']}, {one['tokens']} tokens{before}"


def range_row(one: dict[str, Any]) -> list[Any]:
    """Return the cells of a range of loads: loads, draft length, mat, speed, and the measured loads."""
    return [
        f"{one['first']}–{one['last']}",
        one["tokens"] or "off",
        one["mat"],
        "{:.2f} – {:.2f}".format(*one["speedup"]),
        ", ".join(map(str, one["measured"])) or "none",
    ]


def lengths(tuning: dict[str, Any]) -> list[Any]:
    """Render the draft lengths by load, also by prompt length, and the times of the cost model next to the measured
    times."""
    columns = ("texts at once", "draft tokens", "mat", "× plain", "measured at")
    ranges = [range_row(one) for one in tuning["ranges"]]
    contexts = [
        [f"{context['over'] + 1}–{context['up_to']}", context["requests"], *range_row(one)]
        for context in tuning["contexts"]
        for one in context["ranges"]
    ]
    times = ("concurrency", "batch", "step_s", "modelled_step_s", "round_s", "modelled_round_s")
    fits = [[one["concurrency"], one["batch"], *(1000 * one[name] for name in times[2:])] for one in tuning["fits"]]
    costs = {name: 1000 * value for name, value in tuning["costs"].items()}
    return [
        table(*columns, rows=ranges),
        *([table("prompt tokens", "of", *columns, rows=contexts)] if contexts else []),
        table("in flight", "on average", "step, ms", "model", "round, ms", "model", rows=fits),
        "model: {step:.3g} + {step_per_text:.3g} b + k ({token:.3g} + {token_per_text:.3g} b) ms per round that "
        "drafts k tokens for each of b texts".format(**costs)
        + (", and {block:.3g} + {block_per_text:.3g} b for the block".format(**costs) if costs["block"] else ""),
        "acceptance of each draft position, if the earlier ones are accepted: "
        + ", ".join(f"{share:.2f}" for share in tuning["acceptance"]),
        "",
    ]
