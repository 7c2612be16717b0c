"""`specctl serve`: its flags, checks, plan and table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specctl.cli import checks
from specctl.cli.command import recipe_command, run_or_plan
from specctl.cli.options import TARGET
from specctl.cli.output import cell, table
from specctl.families import online_families
from specctl.reporting.tables import headings
from specctl.threads import counted

if TYPE_CHECKING:
    from specctl.recipe import ServeRecipe

FLAGS = ("drafters", "pool", "strict", "choose", "server", "learn", "listen", "log", *TARGET, "output_dir", "overwrite")
FLAGS_OF_ROUTE = ("server", "listen", "algo", "seeds", "target", "output_dir", "overwrite")
"""Flags of the former command `route`."""
EXAMPLE = "specctl serve --target MODEL --drafter drafters/sql-eagle3+lookup --listen 127.0.0.1:8000"
COLUMNS = headings(
    *("drafter", "texts", "rounds", "tokens", "accepted", "mat", "share", "failures"), broken="broken off"
)
"""Fields without a value are left out."""
LEARNING_COLUMNS = headings(
    *("mat_first", "mat_last", "mat", "lessons"),
    mat_first="first mat",
    mat_last="last mat",
    mat="present mat",
    rollbacks="taken back",
)
"""Fields of the learning of a row's drafter, where drafters learn side by side."""


@recipe_command("serve", FLAGS, EXAMPLE)
@recipe_command("route", FLAGS_OF_ROUTE, EXAMPLE)
def serve(recipe: ServeRecipe, dry_run: bool) -> None:
    """Serve a target in OpenAI's protocol, with a drafter, or with a pool from which a policy chooses for each text.

    With --server, running engines answer. The policy chooses one for each text, and learns from their counters.
    With --learn, drafters learn from the texts that are served: in a pool, each from the texts that it drafted.

    / shows what it does, /metrics is for Prometheus. A signal ends it."""
    from specctl.selection import dispatch
    from specctl.selection.policies import registry

    if recipe.server.urls:
        dispatch.check(recipe.choose)
    registry.check([recipe.choose])
    checks.check_drafters(recipe.drafters, recipe.drafting)
    if recipe.learn.enabled:
        from specctl.selection.arms import learners_of

        learners_of(recipe)
    checks.check_run_dir("serve", recipe)
    run_or_plan("serve", recipe, dry_run, lambda: steps(recipe), show, "run_dir")


def steps(recipe: ServeRecipe) -> list[str]:
    if recipe.server.urls and recipe.learn.enabled:
        urls = ", ".join(recipe.server.urls)
        log = "write the texts to a log in the run directory, which only its owner can read"
        how = f", each by the server that {recipe.choose} chooses" if recipe.chooses else ""
        return [
            f"check that {urls} serve the same model",
            f"answer requests at {recipe.listen}{how}, and {log}",
            *learning_steps(recipe),
            "publish better versions to the servers, and roll back worse ones",
        ]
    if recipe.server.urls:
        if "target" in recipe.model_fields_set:
            checks.target_config(recipe.target)
        urls = ", ".join(recipe.server.urls)
        how = f", each by the server that {recipe.choose} chooses" if len(recipe.server.urls) > 1 else ""
        return [f"check that {urls} serve the same model", f"answer requests at {recipe.listen}{how}"]
    drafts, drafters = "decode without a drafter", recipe.drafters
    if recipe.chooses:
        from specctl.selection.arms import pool_paths

        drafters = pool_paths(recipe)
        drafts = f"choose among {', '.join(drafters)} for every text, by {recipe.choose}"
    elif drafters:
        drafts = f"draft with {drafters[0]}"
    plan = [
        checks.check_target(recipe.target, drafters, strict=recipe.strict or not recipe.chooses),
        f"answer requests at {recipe.listen}, up to {recipe.slots} texts at a time, and {recipe.waiting} may wait",
        drafts,
    ]
    return [*plan, *learning_steps(recipe)]


def learning_steps(recipe: ServeRecipe) -> list[str]:
    """Return what learning adds to the plan: nothing without --learn."""
    if not recipe.learn.enabled:
        return []
    from specctl.drafters import checkpoint
    from specctl.selection.arms import learners_of

    starts = list(learners_of(recipe))
    families = {checkpoint.family(start): None for start in starts}
    budget = recipe.learn.learner.budget
    time = "without a limit of the time" if budget is None else f"for at most {budget:.0%} of the time of decoding"
    time = "" if recipe.server.urls else f", {time}, in a process of low priority"
    chunks = [recipe.learn.chunk] if recipe.learn.chunk else [online_families()[family].chunk for family in families]
    how = f"learn by {recipe.learn.algo} after every {' or '.join(map(str, dict.fromkeys(chunks)))} texts"
    saved = "save the drafter in the run directory"
    if len(starts) > 1:
        how = f"{', '.join(map(str, starts))} {how}, in turns, each from its own texts"
        saved = "save each drafter in a directory of its own in the run directory"
    return [f"{how}{time}; {saved}"]


def show(document: dict[str, Any]) -> Any:
    """Render one row per drafter, and the totals."""
    from rich.console import Group

    titles = COLUMNS | ({"drafter": "server"} if any(row["engine"] for row in document["drafters"]) else {})
    columns = [name for name in titles if any(row[name] is not None for row in document["drafters"])]
    learning = document["learning_by_drafter"]
    learned = LEARNING_COLUMNS if any(row["drafter"] in learning for row in document["drafters"]) else {}
    rows = [
        [
            *(_shown(name, row[name]) for name in columns),
            *(learning.get(row["drafter"], {}).get(name) for name in learned),
        ]
        for row in document["drafters"]
    ]
    decided = document["decide_us_p50"]
    return Group(
        table(*[titles[name] for name in columns], *learned.values(), rows=rows),
        f"{counted(document['requests'], 'text')}, {counted(document['tokens'], 'token')} "
        f"in {document['seconds']:.0f} s, mat {cell(document['mat'])}"
        + (f", {decided / 1000:.2f} ms per choice" if decided is not None else ""),
        *certain(document),
        *learnt("", document["learning"]),
        *(line for name, one in document["learning_by_drafter"].items() for line in learnt(name, one)),
        f"run: {cell(document['run_dir'])}",
    )


def _shown(name: str, value: Any) -> Any:
    return f"{100 * value:.0f} %" if name == "share" and value is not None else value


def certain(document: dict[str, Any]) -> list[str]:
    """Render the lower bound of the speed: nothing where no policy chose."""
    if document["at_least"] is None:
        return []
    least = document["speed_at_least"]
    return ["× plain: no bound yet"] if least is None else [f"× plain: at least {least:.2f}", document["at_least"]]


def learnt(name: str, learning: dict[str, Any] | None) -> list[str]:
    """Render the learning of a drafter: nothing if it did not learn. The name of the only drafter is empty."""
    if learning is None:
        return []
    counts = f"{learning['lessons']} lessons changed the weights, {learning['rollbacks']} were taken back"
    spent = f"{learning['learn_s']:.0f} s of learning"
    mats = f"mat {cell(learning['mat_first'])} at first, {cell(learning['mat'])} at the end"
    of = f"{name}: " if name else ""
    return [f"{of}{counts}; {spent}; {mats}", f"{of}learned: {cell(learning['drafter'])}"]
