"""`specctl eval-server`: its flags, checks, plan and tables."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from specctl.cli import checks
from specctl.cli.command import recipe_command, run_or_plan
from specctl.cli.eval import describe_prompts, later_turns
from specctl.cli.options import SAMPLING, TARGET
from specctl.cli.output import cell, records, table
from specctl.reporting.tables import headings, text

if TYPE_CHECKING:
    from specctl.recipe import EvalServerRecipe

FLAGS = (
    *("server", "baseline_server", "concurrency", "mats", "domain", "prompts", "limit", "seeds", *TARGET),
    *(flag for flag in SAMPLING if flag != "exact"),
    *("output_dir", "overwrite"),
)
COLUMNS = headings(
    *("server", "domain", "concurrency", "tokens_per_s", "request_tokens_per_s", "first_token_s", "token_s", "mat"),
    *("cached_prompt", "speedup", "same_texts"),
    speedup="× baseline",
    requests="of",
)
LENGTHS = headings(
    *("server", "concurrency", "over", "up_to", "request_tokens_per_s", "first_token_s", "token_s", "mat"),
    speedup="× baseline",
    requests="of",
)


@recipe_command(
    "eval-server",
    FLAGS,
    "specctl eval-server --server http://host:8001 --baseline-server http://host:8000 --concurrency 1,8,64",
)
def evaluate_server(recipe: EvalServerRecipe, dry_run: bool) -> None:
    """Measure the drafter of a running engine by load: mat, tokens/s, times of tokens, and speed-up.

    The speed-up is over a second server without a drafter."""
    recipe.check_server()
    checks.check_data(recipe.data)
    checks.check_run_dir("eval-server", recipe)
    rendered = partial(show, measured=describe_prompts(recipe))
    run_or_plan("eval-server", recipe, dry_run, lambda: steps(recipe), rendered, "run_dir")


def steps(recipe: EvalServerRecipe) -> list[str]:
    """Return the plan in words. No server is asked. Raises CheckpointError if no engine runs the target."""
    checks.target_config(recipe.target)
    addresses = [*recipe.server.urls, *recipe.baseline_server.urls]
    return [
        f"request responses of {recipe.target.name} from {', '.join(addresses)}; the servers are not checked",
        f"send {describe_prompts(recipe)}, with {', '.join(map(str, recipe.concurrency))} requests in flight",
        "count the accepted draft tokens, and time the first token and the following tokens",
    ]


def show(document: dict[str, Any], measured: str) -> Any:
    """Render one row per server, domain and concurrency, then the acceptance at each draft position."""
    from rich.console import Group

    places = [
        f"accepted at each draft position, {row['server']}, {row['domain']}, {row['concurrency']} in flight: "
        + ", ".join(map(text, row["acceptance_by_position"]))
        for row in document["servers"]
        if row["acceptance_by_position"]
    ]
    failures = sum(row["failures"] for row in document["servers"])
    return Group(
        records(document["servers"], COLUMNS),
        *([records(document["lengths"], LENGTHS)] if document["lengths"] else []),
        *predicted_speedups(document["worth"], document["servers"][0]["engine"]),
        *map(cell, places),
        *([f"{failures} requests failed and were retried"] if failures else []),
        *later_turns(document, "the server's own answers"),
        f"measured on: {cell(measured)}",
        f"run: {cell(document['run_dir'])}",
    )


def predicted_speedups(loads: list[dict[str, Any]], engine: str) -> list[Any]:
    """Render the predicted speed of other drafters at every load, and how to check it in vLLM if it is the engine;
    empty without a prediction."""
    if not loads:
        return []
    mats = loads[0]["mats"]
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": max(mats, default=1.0)}
    rows = [[load["concurrency"], load["mat"], load["break_even"], *load["speedups"]] for load in loads]
    rendered = table("in flight", "mat", "even at mat", *(f"× at mat {mat:g}" for mat in mats), rows=rows)
    predicted = "predicted for drafters with the cost of this one"
    if not engine.startswith("vllm"):
        return [rendered, predicted]
    return [
        rendered,
        f"{predicted}; to measure a mat without a drafter, run vLLM on a GPU with",
        f"--speculative-config {json.dumps(synthetic)}",
    ]
