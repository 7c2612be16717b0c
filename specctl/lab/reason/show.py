"""`specctl reason`: its flags, checks, plan and table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.cli import checks
from specctl.cli.command import execute, library_output, recipe_command
from specctl.cli.options import TARGET
from specctl.cli.output import cell, output, table
from specctl.cli.training_data import missing_distillations, stream_of, warm_up, warm_up_steps, warm_ups
from specctl.errors import CheckpointError
from specctl.families import LM
from specctl.reporting.tables import headings
from specctl.threads import counted

if TYPE_CHECKING:
    from specctl.lab.reason.recipe import ReasonRecipe

FLAGS = (
    *("step_algo", "domain", "prompts", "data_limit", "schedule", "mixing", "chunk", "seeds", "allow_code_execution"),
    *(*TARGET, "temperature", "top_p", "top_k", "seed", "output_dir", "resume", "overwrite"),
)

COLUMNS = headings(
    *("mode", "step_acceptance", "accepted_per_target_step", "depth", "avg_len", "mat", "speedup"),
    accepted_per_target_step="per target step",
    depth="drafted a round",
    avg_len="steps a round",
    speedup="× target",
    speedup_with_learning="× target, net",
    tflops="TFLOP",
    agreement="answers of the target",
    accuracy="right answers",
)
"""Row fields of a mode; net: the time of learning counts."""
SHARES = {"step_acceptance", "agreement", "accuracy"}
INTERVALS = {"speedup", *SHARES}
"""Rates that are shown with their intervals."""


@recipe_command("reason", FLAGS, "specctl reason --algo online-lr,osd-lr --prompts math.jsonl reasoning.depth=auto")
def reason(recipe: ReasonRecipe, dry_run: bool) -> None:
    """Draft whole reasoning steps with a small LM along a stream of prompts, and let it learn from rejected steps.

    It is not lossless, so final answers are compared with the target's. A missing draft LM is trained first."""
    checks.check_data(recipe.data.model_copy(update={"domain": recipe.stream_domains}))
    check(recipe)
    checks.check_run_dir("reason", recipe)
    first = warm_ups(recipe)
    data = {path: distillation for training in first for path, distillation in missing_distillations(training).items()}
    if dry_run:
        return checks.show("reason", recipe, [*warm_up_steps(recipe, first, data), *steps(recipe)])
    if recipe.reasoning.draft is not None:
        from specctl.decoding.models.loading import check_within_reach

        check_within_reach(recipe.reasoning.draft)
    with library_output():
        warm_up(recipe, first, data)
        document = execute("reason", recipe)
    output.result(document, show, brief=document["run_dir"])


def check(recipe: ReasonRecipe) -> None:
    """Check that the draft LM, the token drafter and the judge exist and have the right kind.

    Raises UsageError, CheckpointError.
    """
    from specctl.decoding.models.loading import location
    from specctl.drafters import checkpoint

    reasoning = recipe.reasoning
    if reasoning.draft is not None:
        place = Path(location(reasoning.draft))
        if checkpoint.is_drafter(place) and (family := checkpoint.family(place)) != LM:
            raise CheckpointError(
                f"reasoning.draft: {reasoning.draft} is of family {family}, which cannot write steps alone",
                "train a small LM: specctl train-drafter --arch lm",
            )
        if place.is_dir() and not (place / "config.json").is_file():
            raise CheckpointError(
                f"reasoning.draft: {reasoning.draft} is not a model directory: it has no config.json",
                "give the directory that contains config.json",
            )
    if reasoning.drafter is not None:
        checks.check_drafters([reasoning.drafter], recipe.drafting)
    if reasoning.judge.name is not None and reasoning.judge.endpoint is None:
        location(reasoning.judge.name)


def steps(recipe: ReasonRecipe) -> list[str]:
    """Return the plan after the warm-up in words."""
    from specctl.lab.reasoning.modes import LEARNING

    reasoning = recipe.reasoning.resolved(recipe.target.name)
    checks.check_made_for(recipe.target, filter(None, [reasoning.drafter]))
    judge = f"the {reasoning.judge.kind} judge" if reasoning.judge.name is None else f"judge {reasoning.judge.name}"
    where = f" at {reasoning.judge.endpoint}" if reasoning.judge.endpoint else ""
    learners = [mode for mode in recipe.modes if mode in LEARNING]
    inside = f", with {reasoning.drafter} drafting tokens of the target's steps," if reasoning.drafter else ""
    ahead = "as many steps as save time" if reasoning.depth == "auto" else f"up to {reasoning.depth} steps"
    times = counted(len(recipe.seeds), "time")
    plans = [
        f"answer prompts ({stream_of(recipe)})",
        f"think in steps that end with {reasoning.delimiter!r}{inside} for up to {reasoning.budget} tokens, and "
        f"answer in up to {reasoning.answer_tokens}, {times}, in modes {', '.join(recipe.modes)}",
        f"draft {ahead} with {recipe.draft}; {judge}{where} compares them with the target's steps",
    ]
    if learners:
        plans.append(
            f"after {checks.every(recipe.chunk, 'prompt')} {' and '.join(learners)} learn from the rejected steps"
        )
    return [
        *plans,
        "compare all final answers with the answers of the target alone, and save texts, pairs and learned models",
    ]


def show(document: dict[str, Any]) -> Any:
    """Render one row per mode, the gain of learning, and the agreement with the answers of the target alone."""
    from rich.console import Group

    rows = document["modes"]
    shown = [name for name in COLUMNS if name == "agreement" or any(_known(row[name]) for row in rows)]
    cells = [[_shown(name, row[name]) for name in shown] for row in rows]
    return Group(
        table(*(COLUMNS[name] for name in shown), rows=cells),
        *(
            f"steps accepted, {gain['mode']} minus {gain['than']}: {_shown('step_acceptance', gain['step_acceptance'])}"
            for gain in document["differences"]
        ),
        *_fidelity(next((row for row in rows if row["mode"] == "target"), None)),
        *_slower(document),
        *(f"judge of {name}: {_judged(counts)}" for name, counts in document["judges"].items()),
        *(f"learned by {name}: {cell(place)}" for name, place in document["drafters"].items()),
        f"run: {cell(document['run_dir'])}",
    )


def _known(value: Any) -> bool:
    return (value["value"] if isinstance(value, dict) else value) is not None


def _shown(name: str, value: Any) -> str:
    """Format a number, with its interval if it is a rate."""
    if not isinstance(value, dict):
        return cell(value)
    scale, unit = (100, " %") if name in SHARES else (1, "")
    numbers = [cell(scale * number) for number in (value["value"], *(value["interval"] or ())) if number is not None]
    if not numbers:
        return "–"
    interval = f" [{numbers[1]}, {numbers[2]}]" if name in INTERVALS and len(numbers) == 3 else ""
    return numbers[0] + unit + interval


def _fidelity(alone: dict[str, Any] | None) -> list[str]:
    """Say that the run is not lossless, and how many answers are compared with the answers of the target `alone`. Warn
    if most of its steps reached their longest length and were cut."""
    if alone is None:
        return ["not lossless: agreement with the target alone was not measured (add target to reasoning.baselines)"]
    count, cut, rounds = alone["prompts"] - alone["unanswered"], alone["cut"], alone["rounds"]
    compared = f"the {count} of {alone['prompts']} prompts that the target alone answered"
    note = f"not lossless: answers are compared on {compared}"
    warning = f"{cut} of {rounds} steps were cut: set reasoning.delimiter, or raise reasoning.step_tokens"
    return [note, warning] if 2 * cut > rounds else [note]


def _slower(document: dict[str, Any]) -> list[str]:
    """Warn of modes that are slower than the target alone because they draft in every round."""
    losing = [row["mode"] for row in document["modes"] if row["depth"] >= 1 and (row["speedup"]["value"] or 1) < 1]
    if not losing:
        return []
    return [f"{', '.join(losing)}: slower than the target alone; reasoning.depth=auto drafts only when that saves time"]


def _judged(counts: dict[str, int]) -> str:
    asked = f"{counts['asked']} put to the judge"
    if counts["unanswered"]:
        asked += f", {counts['unanswered']} of them unanswered"
    return (
        f"{counts['aligned']} of {counts['pairs']} pairs of steps mean the same ({counts['identical']} equal, {asked})"
    )
