"""Report of `train-drafter`: loss and mat over steps, acceptance by position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.reporting import curves
from specctl.reporting.collect import RunRecord
from specctl.reporting.commands.acceptance import by_position, picture
from specctl.reporting.contents import Contents, ReportTable, headline, numbers, records
from specctl.reporting.curves import Curve, Panel
from specctl.reporting.style import Looks
from specctl.reporting.tables import headings

COLUMNS = headings(
    *("drafter", "arch", "domain", "mat", "choosing_mat", "final_loss", "steps", "train_tokens", "tokens_per_s"),
    choosing_mat="mat, prompts that chose it",
    train_tokens="trained tokens",
    params="parameters",
    elapsed_s="seconds",
)
HEADLINE = ("mat", "final_loss", "steps", "train_tokens", "tokens_per_s", "params")


@dataclass(frozen=True)
class Curves:
    """Curves of one training run: losses, acceptance checks, and its result (partial if unfinished)."""

    name: str
    losses: list[dict[str, Any]]
    checks: list[dict[str, Any]]
    result: Mapping[str, Any]

    @property
    def acceptance(self) -> list[Any]:
        last = self.checks[-1] if self.checks else {}
        return self.result.get("acceptance_by_position") or last.get("acceptance_by_position") or []


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    trainings = [_curves(run) for run in runs]
    made = Contents(headline=headline([one.result for one in trainings], {key: COLUMNS[key] for key in HEADLINE}))
    losses = [_line(one.name, one.losses, "loss", looks, noisy=True) for one in trainings if one.losses]
    mats = [_line(one.name, one.checks, "mat", looks) for one in trainings if len(one.checks) > 1]
    panels = [Panel("training loss", losses), Panel("mat on held-out prompts\n(tokens per pass of the target)", mats)]
    caption = "Loss of the training batches (running mean) and acceptance checks during training."
    made.pictures += curves.picture("training", caption, panels, "optimizer step")
    positions = {one.name: one.acceptance for one in trainings if one.acceptance}
    if positions:
        made.pictures.append(picture(positions, looks, "the kept drafter on held-out prompts"))
    rows = [{**training.result, "drafter": training.name} for training in trainings]
    made.tables.append(records("trained", "Trained drafters", rows, COLUMNS))
    if positions:
        made.tables.append(by_position(positions))
    checks = [[training.name, check.get("step"), check["mat"]] for training in trainings for check in training.checks]
    if checks:
        made.tables.append(ReportTable("checks", "Acceptance checks", ["drafter", "step", "mat"], checks))
    return made


def _curves(run: RunRecord) -> Curves:
    metrics = list(run.lines("metrics.jsonl"))
    losses = [line for line in metrics if "loss" in line]
    checks = [line for line in metrics if line.get("mat") is not None]
    result = run.result or _so_far(run.keys(), losses, checks)
    made = result.get("drafter")
    return Curves(run.named(Path(made).name if made else run.dir.name), losses, checks, result)


def _so_far(recipe: Mapping[str, Any], losses: list[dict[str, Any]], checks: list[dict[str, Any]]) -> dict[str, Any]:
    """Build a partial result of an unfinished run; its drafter gets the name planned by the recipe."""
    last = losses[-1] if losses else {}
    domain, arch = "+".join(map(str, recipe.get("data.domain") or [])), recipe.get("arch")
    return {
        "drafter": recipe.get("output_dir") or (f"{domain}-{arch}" if domain else None),
        "arch": arch,
        "domain": domain or None,
        "choosing_mat": max((check["mat"] for check in checks), default=None),
        "final_loss": last.get("loss"),
        "steps": last.get("step"),
        "train_tokens": last.get("tokens"),
        "tokens_per_s": last.get("tokens_per_s"),
        "elapsed_s": last.get("elapsed_s"),
    }


def _line(name: str, lines: list[dict[str, Any]], key: str, looks: Looks, noisy: bool = False) -> Curve:
    return Curve(
        name, numbers(line.get("step") for line in lines), numbers(line[key] for line in lines), looks[name], noisy
    )
