"""The router of `specctl select`: loaded from a directory, or trained on prompts of the pool's domains."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from specctl.decoding.target import Target
from specctl.distillation.prompts import Rejections, read_domains
from specctl.drafters import pool
from specctl.errors import UsageError
from specctl.recipe import DataRecipe, SelectRecipe
from specctl.runs import Run
from specctl.selection.recorded.table_file import read_table
from specctl.selection.routing.labels import (
    RouterExample,
    RouterReport,
    label_by_domain,
    label_by_hindsight,
    prompt_text,
    train_router,
)
from specctl.selection.routing.router import Router, check_free

DIRECTORY = "router"


def router_of(
    recipe: SelectRecipe, run: Run, target: Target, paths: dict[str, str], rejections: Rejections
) -> tuple[Router | None, RouterReport | None]:
    """The router that the recipe asks for, and its report if it was trained just now. `paths`: name → path of each arm.

    Raises CheckpointError (a router for another pool, or a table without one of the arms), UsageError (no table is
    named for the labels, or the router's directory is taken), DataError.
    """
    if recipe.train_router:
        check_free(_place(recipe, run), recipe.overwrite)
        return train_router(recipe.router, examples(recipe, paths, rejections), list(paths), target)
    if recipe.router_dir is None:
        return None, None
    return Router.load(recipe.router_dir, list(paths), target), None


def save_router(recipe: SelectRecipe, run: Run, target: Target, router: Router, report: RouterReport) -> None:
    """Write a trained router to the directory of the recipe, or into the run directory."""
    router.save(_place(recipe, run), target, report=asdict(report), overwrite=recipe.overwrite)


def _place(recipe: SelectRecipe, run: Run) -> Path:
    return (recipe.router_dir or run.dir / DIRECTORY).expanduser().absolute()


def examples(recipe: SelectRecipe, paths: dict[str, str], rejections: Rejections) -> list[RouterExample]:
    """Training prompts, each labelled with the arm that is right for it. `paths`: name → path of each arm.

    Raises CheckpointError (the table lacks an arm), UsageError (no table is named), DataError.
    """
    options = recipe.router
    data = DataRecipe(
        domain=recipe.data.domain, prompts=options.prompts, limit=options.limit, seed=options.seed, source="auto"
    )
    prompts = read_domains(data, rejections, split="train", sample=True)
    if options.labels == "hindsight":
        best = label_by_hindsight(read_table(_table(recipe)), list(paths))
        return [RouterExample(prompt_text(p.messages), p.domain, best[p.id]) for p in prompts if p.id in best]
    labels = label_by_domain([p.domain for p in prompts], [pool.domains_of(path) for path in paths.values()])
    return [RouterExample(prompt_text(p.messages), p.domain, labels[p.domain]) for p in prompts if p.domain in labels]


def _table(recipe: SelectRecipe) -> Path:
    if recipe.replay is None:
        raise UsageError("router.labels=hindsight needs a recorded table", hint="replay=TABLE, or router.labels=domain")
    return recipe.replay
