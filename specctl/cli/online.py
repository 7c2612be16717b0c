"""`specctl online`: run drafters that learn along a stream, and first warm up the missing ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from specctl.cli import checks
from specctl.cli.command import execute, library_output, recipe_command
from specctl.cli.eval import verdict
from specctl.cli.options import SAMPLING, TARGET
from specctl.cli.output import by_domain, cell, output, table
from specctl.cli.training_data import missing_distillations, stream_of, warm_up, warm_up_steps, warm_ups
from specctl.reporting.tables import headings, machine, unusable_notes, with_mark
from specctl.threads import counted

if TYPE_CHECKING:
    from specctl.recipe import DistillRecipe, DrafterStreamRecipe, OnlineRecipe, TrainRecipe

Learning = TypeVar("Learning", bound="DrafterStreamRecipe")

FLAGS = (
    *("learner", "arch", "init", "pool", "domain", "prompts", "data_limit", "schedule", "mixing", "chunk", "lr"),
    *("target_schedule", "draft_length", "beside", "asynchronous", "learner_device", "online_baselines"),
    *("batch", "seeds", "log"),
    *(*TARGET, *SAMPLING, "save_outputs", "output_dir", "resume", "overwrite"),
)
EARLIER = ("server", "baseline_server", "listen", "from_log", "allow_code_execution")
"""Flags of commands that were modes of this one."""
COLUMNS = headings(
    *("algo", "mat", "mat_first", "mat_last", "mat_over_static", "speedup", "speedup_with_training"),
    *("over_static_with_training", "over_lookup_with_training", "learn_share"),
)
SHARES = {"learn_share"}


@recipe_command("online", FLAGS, "specctl online --algo opt-hydra --schedule sql:400,math:400", earlier=EARLIER)
def online(recipe: OnlineRecipe, dry_run: bool) -> None:
    """Decode a stream of prompts with drafters that keep learning from the verification of their drafts.

    `learn-from-server` learns from running engines, and `reason` drafts whole reasoning steps.
    """
    checks.check_data(recipe.data.model_copy(update={"domain": recipe.stream_domains}))
    recipe = with_checks(recipe)
    checks.check_run_dir("online", recipe)
    first = warm_ups(recipe)
    data = {path: distillation for training in first for path, distillation in missing_distillations(training).items()}
    if dry_run:
        return checks.show("online", recipe, steps(recipe, first, data))
    checks.check_learner_device(recipe.learner_device[0])
    with library_output():
        warm_up(recipe, first, data)
        document = execute("online", recipe)
    output.result(document, show, brief=document["run_dir"])


def with_checks(recipe: OnlineRecipe) -> OnlineRecipe:
    """Check drafters, policy and pool, and return the recipe with the family of its first drafter."""
    from specctl.selection.policies import registry

    recipe = with_init_family(recipe)
    registry.check([recipe.policy.name])
    if recipe.pool is not None:
        checks.pool_members(recipe.pool)
    return recipe


def with_init_family(recipe: Learning) -> Learning:
    """Return the recipe with the family of its drafter `init`, unless it names a family itself."""
    from specctl.drafters import checkpoint
    from specctl.errors import RecipeError
    from specctl.families import online_families

    if recipe.init is None:
        return recipe
    checks.check_directory(str(recipe.init))
    family = checkpoint.family(recipe.init)
    if family not in online_families():
        raise RecipeError(f"init: {recipe.init} is of family {family}, which has no weights to train")
    if recipe.arch is None:
        recipe = recipe.model_copy(update={"arch": family})
    other = next((name for name in recipe.families if name != family), None)
    if other is not None:
        raise RecipeError(f"init: {recipe.init} is of family {family}, but the algo needs {other}", "leave --init out")
    return recipe


def steps(recipe: OnlineRecipe, first: list[TrainRecipe], data: dict[Any, DistillRecipe]) -> list[str]:
    plans = warm_up_steps(recipe, first, data)
    where = "a separate process learns" if recipe.asynchronous else "learn"
    if recipe.asynchronous and not recipe.buffer.reruns:
        where += ", without the target's layers,"
    return [
        *plans,
        f"answer prompts ({stream_of(recipe)}), {counted(len(recipe.seeds), 'time')}, "
        f"with {', '.join([*recipe.baselines, *recipe.algo])}"
        + (f"; every head drafts in one tree with {recipe.companion}" if recipe.companion else ""),
        f"{where} after {checks.every(recipe.chunk, 'prompt')}: "
        + ", ".join(
            f"{name} from {recipe.pool or recipe.initial_drafter(recipe.family_of(name))}" for name in recipe.algo
        ),
        "compare every text with the text of plain decoding, and save the learned drafters",
    ]


def show(document: dict[str, Any]) -> Any:
    """Render one row per contender, then mat by domain, and the verdict on losslessness."""
    from rich.console import Group

    rows = document["learners"]
    columns = {name: title for name, title in COLUMNS.items() if any(row[name] is not None for row in rows)}
    parts = [table(*columns.values(), rows=[[_shown(name, with_mark(row, name)) for name in columns] for row in rows])]
    parts += by_domain("mat in", "mat", document["per_domain"], "algo")
    return Group(
        *parts,
        *map(cell, unusable_notes(document)),
        *([f"every head drafts in one tree with {document['beside']}"] if document["beside"] else []),
        "all texts against plain decoding: " + verdict(document["lossless"]),
        *(f"learned by {name}: {cell(place)}" for name, place in document["drafters"].items()),
        f"machine: {machine(document['machine'])}",
        f"run: {cell(document['run_dir'])}",
    )


def _shown(name: str, value: Any) -> Any:
    return f"{100 * value:.0f} %" if name in SHARES and value is not None else value
