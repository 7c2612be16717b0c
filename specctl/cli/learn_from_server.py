"""`specctl learn-from-server`: its flags, checks, plan and table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specctl.cli import checks
from specctl.cli.command import recipe_command, run_or_plan
from specctl.cli.online import with_init_family
from specctl.cli.options import SAMPLING, TARGET
from specctl.cli.output import cell, table
from specctl.cli.training_data import stream_of
from specctl.errors import UsageError

if TYPE_CHECKING:
    from specctl.recipe import LearnFromServerRecipe

FLAGS = (
    *("server", "baseline_server", "listen", "from_log", "learner", "arch", "init", "domain", "prompts", "data_limit"),
    *("schedule", "mixing", "chunk", "lr", "seeds", *TARGET, *(flag for flag in SAMPLING if flag != "exact")),
    *("output_dir", "resume", "overwrite"),
)


@recipe_command(
    "learn-from-server",
    FLAGS,
    "specctl learn-from-server --server http://host:8000 --listen 0.0.0.0:8100 --init drafters/sql-eagle3",
)
def learn_from_server(recipe: LearnFromServerRecipe, dry_run: bool) -> None:
    """Teach the drafter of running engines by their own texts, and publish better versions into them.

    The texts are answers to the prompts of a stream, requests through a proxy (--listen), or a log (--from-log)."""
    recipe.check_server()
    checks.check_data(recipe.data.model_copy(update={"domain": recipe.stream_domains}))
    recipe = with_init_family(recipe)
    start = recipe.initial_drafter(recipe.families[0])
    if not (start / "config.json").is_file():
        raise UsageError(f"no drafter in {start}", "name the drafter that the engines draft with: --init DIR")
    checks.check_run_dir("learn-from-server", recipe)
    run_or_plan("learn-from-server", recipe, dry_run, lambda: steps(recipe), show, "run_dir")


def steps(recipe: LearnFromServerRecipe) -> list[str]:
    """Return the plan in words. No server is asked."""
    from specctl.commands.learn_from_server import check_log, check_target

    urls, source = ", ".join(recipe.server.urls), recipe.traffic
    texts = f"send prompts to {urls} ({stream_of(recipe)})"
    if source.listen is not None:
        texts = f"forward requests from {source.listen} to {urls}"
    elif source.log is not None:
        texts = f"read the texts of {urls} from {source.log}" + (" as it grows" if source.follow else "")
    (algo,), start = recipe.algo, recipe.initial_drafter(recipe.families[0])
    publish = "publish better versions, and roll back worse ones" if recipe.publication.enabled else "publish nothing"
    check_log(source.log)
    if checks.local_target(recipe.target) is not None:
        check_target(recipe)
    target = checks.check_target(recipe.target, [str(start)])
    return [target, texts, f"learn after {checks.every(recipe.chunk, 'text')}: {algo} from {start}", publish]


def show(document: dict[str, Any]) -> Any:
    """Render one row per chunk, then the mat over the baseline, and the counts of published versions."""
    from rich.console import Group

    titles = (
        *("chunk", "drafted by", "texts", "mat", "mat of the baseline", "learned"),
        *("published", "mat before", "after"),
    )
    rows = []
    for row in document["per_chunk"]:
        sent = row["publication"] or dict.fromkeys(("version", "verdict", "mat_before", "mat_after"))
        word = sent["version"] if sent["verdict"] == "published" else sent["verdict"]
        own = [row[name] for name in ("chunk", "version", "prompts", "mat", "baseline_mat", "status")]
        rows.append([*own, word, sent["mat_before"], sent["mat_after"]])
    empty = [place for place in range(len(titles)) if all(row[place] is None for row in rows)]
    kept = [place for place in range(len(titles)) if place not in empty]
    shown = table(*(titles[place] for place in kept), rows=[[row[place] for place in kept] for row in rows])
    parts = [shown]
    if document["over_baseline"] is not None:
        low, high = document["over_baseline_interval"] or (None, None)
        between = f" ({low:.2f} to {high:.2f})" if low is not None else ""
        parts.append(
            f"mat relative to the baseline: {document['over_baseline']:.2f}{between}; "
            f"in the last chunk {document['over_baseline_last'] or float('nan'):.2f}"
        )
    if document["passed_over"]:
        parts.append(f"{document['passed_over']} texts were skipped: they came faster than the learner")
    return Group(
        *parts,
        f"{document['published']} versions published, {document['rolled_back']} rolled back, "
        f"{document['restored']} overwritten by others and restored; now served: {document['version'] or 'none'}",
        f"learned: {cell(document['drafter'])}",
        f"run: {cell(document['run_dir'])}",
    )
