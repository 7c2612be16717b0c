"""Plan and result of `specctl online --server`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specctl.cli.output import cell, table

if TYPE_CHECKING:
    from specctl.recipe import OnlineRecipe


def steps(recipe: OnlineRecipe, stream: str) -> list[str]:
    """Return the plan in words, for the `stream` or for traffic. No server is asked."""
    urls, source = ", ".join(recipe.server.urls), recipe.traffic
    texts = f"send prompts to {urls} ({stream})"
    if source.listen is not None:
        texts = f"forward requests from {source.listen} to {urls}"
    elif source.log is not None:
        texts = f"read the texts of {urls} from {source.log}" + (" as it grows" if source.follow else "")
    (algo,), start = recipe.algo, recipe.initial_drafter(recipe.families[0])
    publish = "publish better versions, and roll back worse ones" if recipe.publication.enabled else "publish nothing"
    return [texts, f"learn after every {recipe.chunk} texts: {algo} from {start}", publish]


def show(document: dict[str, Any]) -> Any:
    """Render one row per chunk, then the mat over the baseline, and the counts of published versions."""
    from rich.console import Group

    titles = (
        "chunk",
        "drafted by",
        "texts",
        "mat",
        "mat of the baseline",
        "learnt",
        "published",
        "mat before",
        "after",
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
