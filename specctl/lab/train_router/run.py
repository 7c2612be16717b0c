"""`specctl train-router`: a router, trained on prompts of the pool's domains or loaded, beside the policies."""

from dataclasses import asdict, replace
from pathlib import Path

from specctl.commands.select import load_stream, play
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target
from specctl.distillation.prompts import read_domains
from specctl.distillation.rejections import Rejections
from specctl.drafters import checkpoint, pool
from specctl.errors import UsageError
from specctl.lab.recorded.table_file import read_table
from specctl.lab.routing.router import Router
from specctl.lab.routing.training import RouterExample, RouterReport, label_by_domain, label_by_hindsight, train_router
from specctl.lab.train_router.recipe import TrainRouterRecipe
from specctl.measuring.select_contenders import SelectContenders, prompt_text
from specctl.measuring.select_result import SelectResult
from specctl.recipe import DataRecipe
from specctl.replaced_directories import check_free
from specctl.runs import Run
from specctl.selection.game.rules import log_overridden_options

DIRECTORY = "router"


def train_and_play(
    recipe: TrainRouterRecipe, run: Run, *, target: Target | None = None, drafters: dict[str, Drafter] | None = None
) -> SelectResult:
    """Train or load a router for the pool, and play it on the stream like `select`.

    `target` and `drafters`: see `load_stream`. Raises as `load_stream` and `router_of`.
    """
    log_overridden_options(recipe.algo, recipe.game)
    unlabelled = Rejections(run.dir / "router-rejected.jsonl", recipe.data.max_rejected, hold=run.replaces_earlier)
    pooled = load_stream(recipe, run, target, drafters)
    router, report = router_of(recipe, run, pooled.target, pooled.places, unlabelled)
    stage = SelectContenders(recipe, pooled.target, pooled.stream, pooled.pool, router)
    pooled.begin(run)
    unlabelled.release()
    if report is not None:
        router.save(_place(recipe, run), pooled.target, report=asdict(report), overwrite=recipe.overwrite)
    return replace(play(stage, run, pooled.rejections.count), router=report)


def router_of(
    recipe: TrainRouterRecipe, run: Run, target: Target, paths: dict[str, str], rejections: Rejections
) -> tuple[Router, RouterReport | None]:
    """The router that the recipe asks for, and its report if it was trained just now. `paths`: name → path of each arm.

    Raises:
        CheckpointError: a router for another pool, or a table without one of the arms.
        UsageError: no table is named for the labels, or the router's directory is taken.
        DataError: the prompts cannot be used.
    """
    if recipe.train_router:
        check_free(_place(recipe, run), recipe.overwrite, "router")
        return train_router(recipe.router, examples(recipe, paths, rejections), list(paths), target)
    assert recipe.router_dir is not None
    return Router.load(recipe.router_dir, list(paths), target), None


def _place(recipe: TrainRouterRecipe, run: Run) -> Path:
    return (recipe.router_dir or run.dir / DIRECTORY).absolute()


def examples(recipe: TrainRouterRecipe, paths: dict[str, str], rejections: Rejections) -> list[RouterExample]:
    """Training prompts, each labeled with the arm that is right for it. `paths`: name → path of each arm.

    Raises CheckpointError (the table lacks an arm), UsageError (no table is named), DataError.
    """
    prompts = read_domains(training_data(recipe), rejections, split="train")
    if recipe.router.labels == "hindsight":
        best = label_by_hindsight(read_table(_table(recipe)), list(paths))
        return [RouterExample(prompt_text(p.messages), p.domain, best[p.id]) for p in prompts if p.id in best]
    labels = label_by_domain([p.domain for p in prompts], [pool.domains_of(path) for path in paths.values()])
    return [RouterExample(prompt_text(p.messages), p.domain, labels[p.domain]) for p in prompts if p.domain in labels]


def training_data(recipe: TrainRouterRecipe) -> DataRecipe:
    """Source of the prompts on which the router is trained."""
    options = recipe.router
    return DataRecipe(
        domain=recipe.data.domain, prompts=options.prompts, limit=options.limit, seed=options.seed, source="auto"
    )


def check(recipe: TrainRouterRecipe) -> None:
    """Check the router's directory, or the data on which it is trained, before anything is loaded.

    Raises CheckpointError, UsageError, DataError.
    """
    if recipe.train_router and recipe.router.labels == "hindsight":
        read_table(_table(recipe))
    if recipe.router_dir is None:
        return
    place = recipe.router_dir.absolute()
    if recipe.train_router:
        check_free(place, recipe.overwrite, "router")
    else:
        checkpoint.existing_directory(place, "router", "train-router")


def _table(recipe: TrainRouterRecipe) -> Path:
    if recipe.replay is None:
        raise UsageError("router.labels=hindsight needs a recorded table", hint="replay=TABLE, or router.labels=domain")
    return recipe.replay
