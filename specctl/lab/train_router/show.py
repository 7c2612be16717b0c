"""`specctl train-router`: its flags, checks and plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specctl.cli import checks, select
from specctl.cli.command import recipe_command, run_or_plan
from specctl.cli.options import SAMPLING, TARGET
from specctl.replaced_directories import check_outside

if TYPE_CHECKING:
    from specctl.lab.train_router.recipe import TrainRouterRecipe

FLAGS = (
    *("router_dir", "algo", "pool", "drafters", "strict", "beside", "domain", "prompts", "limit"),
    *("reset", "session", "select_baselines", "rivals", "batch", "seeds", *TARGET, *SAMPLING),
    *("save_outputs", "output_dir", "overwrite"),
)


@recipe_command("train-router", FLAGS, "specctl train-router --algo router,hedgespec --pool ./drafters")
def train_router(recipe: TrainRouterRecipe, dry_run: bool) -> None:
    """Train a classifier that picks a drafter from the prompt, and measure it beside the policies of `select`.

    It plays as the policy `router`. train_router=false uses the trained classifier in --router."""
    recipe, pool = select.checked(recipe)
    from specctl.lab.train_router import run  # takes seconds

    run.check(recipe)
    if recipe.train_router:
        checks.check_data(run.training_data(recipe))
        if recipe.router_dir is not None:
            check_outside(recipe.router_dir)
            checks.check_writable(recipe.router_dir)
    checks.check_run_dir("train-router", recipe)
    run_or_plan("train-router", recipe, dry_run, lambda: steps(recipe, pool), select.show, "run_dir")


def steps(recipe: TrainRouterRecipe, pool: list[str]) -> list[str]:
    target, *rest = select.steps(recipe, pool)
    label = {"domain": "their domains", "hindsight": f"the best drafters in {recipe.replay}"}[recipe.router.labels]
    router = f"load the router in {recipe.router_dir}"
    if recipe.train_router:
        router = f"train a router on up to {recipe.router.limit} prompts per domain, labeled by {label}"
    return [target, router, *rest]
