"""Report of `distill`: the data card of its output directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import regular_files
from specctl.distillation.card import CARD
from specctl.reporting.collect import RunRecord, flat
from specctl.reporting.contents import Contents, Picture, ReportTable, fallback_contents
from specctl.reporting.style import Looks, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = {"prompt_tokens": "prompt", "response_tokens": "response"}


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    """Show the data card of each run with a card in its directory, and only the results of the other runs."""
    made = fallback_contents(runs)
    for run in runs:
        if "output" not in run.result:
            continue
        path = Path(str(run.result["output"])) / CARD
        if not path.is_file():
            run.notes.append(f"there is no {path}: jobs of the array are missing, or the data was moved")
            continue
        try:
            card = regular_files.read_json(path)
        except (OSError, ValueError) as error:
            run.notes.append(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")
            continue
        if len(runs) == 1:
            made.headline = _headline(card)
        made.tables.insert(0, _left_out(run, card["prompts"], card["responses"]))
        made.tables += [_ids(run, card["prompts"]["ids"]), _facts(run, card)]
        caption = f"Lengths of prompts and responses in tokens, {run.named('distill')}."
        figure = _histograms({name: card["responses"][key] for key, name in LENGTHS.items()}, looks)
        made.pictures.append(Picture(run.stem("lengths"), caption, figure))
    return made


def _headline(card: Mapping[str, Any]) -> dict[str, Any]:
    prompts, responses = card["prompts"], card["responses"]
    return {
        "responses": responses["count"],
        "response tokens": responses["response_tokens"]["sum"],
        "prompt tokens": responses["prompt_tokens"]["sum"],
        "truncated": f"{responses['truncated_share']:.1%}",
        "loops": responses["loops"],
        "prompts left out": sum(prompts["left_out"].values()),
    }


def _left_out(run: RunRecord, prompts: Mapping[str, Any], responses: Mapping[str, Any]) -> ReportTable:
    rows: list[list[Any]] = [["prompts", "read", prompts["read"]], ["prompts", "rejected", prompts["rejected"]]]
    rows += [["prompts", reason, count] for reason, count in prompts["left_out"].items()]
    rows += [["responses", f"{reason}, dropped", count] for reason, count in responses["dropped"].items()]
    rows += [["responses", "loop, cut", responses["loops_cut"]], ["responses", "kept", responses["count"]]]
    return ReportTable("left-out", run.named("Prompts and responses left out"), ["of", "reason", "count"], rows)


def _ids(run: RunRecord, ids: Mapping[str, list[str]]) -> ReportTable:
    rows = [[reason, id] for reason, listed in ids.items() for id in listed]
    return ReportTable("ids", run.named("Prompts left out, by id"), ["reason", "prompt"], rows)


def _facts(run: RunRecord, card: Mapping[str, Any]) -> ReportTable:
    shown = {key: value for key, value in card.items() if key not in ("prompts", "responses")}
    labels = {key: card["prompts"][key] for key in ("licenses", "languages") if key in card["prompts"]}
    counts = {key: value for key, value in card["responses"].items() if key.startswith("by_")}
    rows = [[key, value] for key, value in flat({**shown, **labels, **counts}) if value not in (None, {}, [])]
    return ReportTable("card", run.named("Data card"), ["", ""], rows)


def _histograms(lengths: Mapping[str, Mapping[str, Any]], looks: Looks) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 2.4), layout="constrained")
    for axes, (name, found) in zip(figure.subplots(1, len(lengths)), lengths.items(), strict=True):
        style_axes(axes)
        axes.stairs(found["counts"], found["edges"], fill=True, color=looks[name].color)
        axes.set_xlabel(f"{name} tokens")
    figure.axes[0].set_ylabel("count")
    return figure
