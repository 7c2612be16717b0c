"""`specctl select`: choose a drafter of a pool in every round, while decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from specctl.cli import checks
from specctl.cli.command import recipe_command, run_or_plan
from specctl.cli.eval import verdict
from specctl.cli.options import SAMPLING, TARGET
from specctl.cli.output import by_domain, cell, table
from specctl.errors import UsageError
from specctl.reporting.tables import headings, machine, unusable_notes, with_mark

if TYPE_CHECKING:
    from specctl.recipe import GameRecipe, PoolRecipe, SelectRecipe

Pooled = TypeVar("Pooled", bound="PoolRecipe")
Played = TypeVar("Played", bound="SelectRecipe")

FLAGS = (
    *("algo", "pool", "drafters", "strict", "beside", "domain", "prompts", "limit", "reset", "session"),
    *("select_baselines", "rivals", "batch", "seeds", *TARGET, *SAMPLING, "save_outputs", "output_dir", "overwrite"),
)
EARLIER = ("record", "replay", "train_router", "router_dir", "server", "listen", "resume")
"""Flags of commands that were modes of this one."""
BOUNDS = ("speedup_at_least", "over_best_arm_at_least")
"""Fields with certified bounds, which are empty after a short run."""
COLUMNS = headings(
    *("algo", "kind", "mat", "share_of_best", "share_of_best_256", "share_after_256", "best_arm_ratio", "speedup"),
    *("over_best_arm", *BOUNDS, "decide_us_p50", "score_share", "switch_ms"),
    share_of_best="of best arm",
    share_of_best_256="in games of 256 tokens",
    share_after_256="after 256 tokens",
    best_arm_ratio="best arm played",
    over_best_arm="× fastest arm",
    decide_us_p50="µs deciding",
    score_share="scoring",
    switch_ms="ms a switch",
)
MODELLED = {"speedup": "× plain, modeled", "over_best_arm": "× fastest arm, modeled"}
"""Headings in a replay."""
REWARDS = {
    "arm": "arm",
    "reward": "reward",
    "n": "rounds",
    "mean": "mean",
    "std": "standard deviation",
    "zeros": "zeros",
}
BY_SPEED = {"share_of_best": "of fastest arm, by game", "best_arm_ratio": "fastest arm played"}
"""Headings if policies play for tokens per second."""


@recipe_command("select", FLAGS, "specctl select --algo cgp-ucb,hedgespec --pool ./drafters", earlier=EARLIER)
def select(recipe: SelectRecipe, dry_run: bool) -> None:
    """Choose among a pool of drafters while decoding: bandits, Hedge, and their baselines on one stream.

    A policy forgets after every query, unless --reset says otherwise; only cgp-ucb keeps its memory of prompts.
    `replay` plays policies without a model, and `serve --server` chooses among engines with different drafters."""
    recipe, arms = checked(recipe)
    checks.check_run_dir("select", recipe)
    run_or_plan("select", recipe, dry_run, lambda: steps(recipe, arms), show, "run_dir")


def checked(recipe: Played) -> tuple[Played, list[str]]:
    """Check policies and drafters. Return the recipe with the domains of its pool, and the paths of the pool."""
    from specctl.selection.game.rules import check_batch
    from specctl.selection.policies import registry

    registry.check(recipe.algo)
    if recipe.choice == "batch":
        check_batch(recipe.algo, recipe.game)
    recipe, pool = with_pool(recipe, recipe.rivals)
    from specctl.drafters.names import labels
    from specctl.selection.arms import chosen_names

    others = {
        *chosen_names(recipe.arms, list(labels(pool).values())),
        *([recipe.companion] if "beside" in recipe.baselines else []),
    }
    if twice := sorted(name for name in labels(recipe.rivals).values() if name in others):
        hint = "--rival takes drafters outside the pool; --baselines fixed measures each drafter of the pool alone"
        raise UsageError(f"two contenders are called {twice[0]!r}", hint)
    return recipe, pool


def with_pool(recipe: Pooled, rivals: Sequence[str] = ()) -> tuple[Pooled, list[str]]:
    """Check the drafters and prompts. Return the recipe with the domains of its pool, and the paths of the pool."""
    checks.check_drafters([*rivals, *recipe.drafters], recipe.drafting)
    # These imports take seconds, so they come after the checks for misspelled names.
    from specctl.commands.select import with_domains_of_pool
    from specctl.drafters.names import labels
    from specctl.selection.arms import chosen_names, pool_paths

    arms = pool_paths(recipe)
    chosen_names(recipe.arms, list(labels(arms).values()))
    recipe = with_domains_of_pool(recipe, arms)
    checks.check_data(recipe.data)
    return recipe, arms


def steps(recipe: SelectRecipe, pool: list[str]) -> list[str]:
    checks.check_made_for(recipe.target, recipe.rivals)
    arms = [*pool, *([recipe.companion_arm] if recipe.companion_arm and recipe.companion_arm not in pool else [])]
    plain = {None: " (and plain decoding, for policies that count seconds)", True: " and plain decoding"}.get(
        recipe.arms.plain, ""
    )
    return [
        *stream_steps(recipe, arms),
        f"choose among {', '.join(arms)}{plain} {choice(recipe)}",
        *([f"every head drafts in one tree with {recipe.companion}"] if recipe.companion else []),
        *presets(recipe.algo, recipe.game),
        f"measure for comparison: {', '.join([*recipe.baselines, *recipe.rivals]) or 'nothing'}",
    ]


def stream_steps(recipe: PoolRecipe, pool: list[str]) -> list[str]:
    """Return the steps that decode the stream with the drafters of a pool, in words."""
    return [
        checks.check_target(recipe.target, pool, strict=recipe.strict),
        f"decode {checks.up_to(recipe.limit, f'{recipe.split} prompt')} per domain ({', '.join(recipe.data.domain)}), "
        f"in sessions of {recipe.session}, order {recipe.order}",
    ]


def choice(recipe: SelectRecipe) -> str:
    chosen = f"with {', '.join(recipe.algo)}, reset after every {recipe.reset}"
    if recipe.choice == "batch":
        return f"for all texts of a batch (at most {recipe.batch}) {chosen}, with separate statistics per load"
    return chosen


def presets(algo: list[str], game: GameRecipe) -> list[str]:
    """Return a line for each policy with other rules than the recipe's `game.*`: the keys and the policy's values."""
    from specctl.selection.game.rules import preset_options
    from specctl.selection.policies.registry import learns

    lines = []
    for name in algo:
        told = [
            f"game.{key}={json.dumps(value)}"
            for key, value in preset_options(name, game).items()
            if learns(name) == ("reward" if key == "reward" else "losses")
        ]
        lines += [f"{name} sets {', '.join(told)}"] * bool(told)
    return lines


def show(document: dict[str, Any]) -> Any:
    """Render one row per contender, then the number of plays of each arm by the first policy."""
    from rich.console import Group

    rows = [row for row in document["policies"] if row["kind"] == "policy"]
    rows += [row for row in document["policies"] if row["kind"] != "policy"]
    live = document["mode"] == "live"
    by_speed = document["yardstick"] == "throughput"
    headings = COLUMNS | (MODELLED if not live else {}) | (BY_SPEED if by_speed else {})
    if not live:
        headings.pop("share_of_best_256")  # over whole games; `share_after_256` shows the learned choice
    columns = {name: title for name, title in headings.items() if any(row[name] is not None for row in rows)}
    parts = [table(*columns.values(), rows=[[_shown(name, row) for name in columns] for row in rows])]
    timed = any(row["speedup"] for row in document["per_domain"])
    parts += by_domain(*("× plain in", "speedup") if timed else ("mat in", "mat"), document["per_domain"], "drafter")
    if document["oracle_mat"]:
        best = "fastest" if by_speed else "best"
        parts.append(f"oracle, the {best} arm of every {document['reset']}: mat {cell(document['oracle_mat'])}")
    parts.append(f"intervals over {document['intervals_over']}; speeds {document['speeds']}")
    if statistics := [row for row in document["rewards"] if row["reward"] != "tokens"]:
        parts.append(table(*REWARDS.values(), rows=[[row[name] for name in REWARDS] for row in statistics]))
    if any(row[name] is not None for row in rows for name in BOUNDS):
        parts.append(document["at_least"])
    if document["mode"] == "record":
        parts.append(f"table: {cell(document['table'])}")
    else:
        pulls = sorted(document["pulls"].items(), key=lambda item: -item[1])
        parts.append(f"{document['algo']} played " + ", ".join(f"{cell(arm)} {count}" for arm, count in pulls))
    if live:
        parts.append("all texts against plain decoding: " + verdict(document["lossless"]))
    parts += [*map(cell, unusable_notes(document)), f"machine: {machine(document['machine'])}"]
    return Group(*parts, f"run: {cell(document['run_dir'])}")


def _shown(name: str, row: dict[str, Any]) -> Any:
    value, interval = row[name], row.get(f"{name}_interval")
    if value is None or not name.startswith(("share", "score_share", "best_arm_ratio")):
        return with_mark(row, name)
    around = f" ({100 * interval[0]:.1f} … {100 * interval[1]:.1f})" if interval else ""
    return f"{100 * value:.1f} %{around}"
