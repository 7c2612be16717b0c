"""Data card of a distilled directory, card.json: the origin of its data, the prompts left out, and statistics.

It names prompts and responses by their ids and contains none of their text. `specctl report RUN` shows it as a page.
"""

import json
import shlex
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specctl.distillation import shards, store
from specctl.distillation.rejections import Rejections
from specctl.distillation.responses import LOOP, decisions
from specctl.distillation.select_prompts import LeftOut
from specctl.errors import DataError, redacted
from specctl.recipe import DistillRecipe
from specctl.runs import atomic_write

CARD = "card.json"
BINS = 24


def write(
    directory: Path, recipe: DistillRecipe, left_out: LeftOut, rejections: Rejections, prompts: dict[str, Any]
) -> None:
    """Write the card of the whole directory, once its last writer has finished.

    `prompts`: how many prompts this run has read, and how many it has kept. DataError if every response was dropped.
    """
    if not store.exists(directory):
        raise DataError(
            f"all responses in {directory} were filtered out",
            hint="its filtered-*.jsonl gives the reasons: adjust filters.*",
        )
    there = store.summary(directory)
    if not there.complete:
        return
    data, settings = recipe.data, there.meta
    sources = [recipe.log] if recipe.log else [data.prompts_of(domain) or data.source for domain in data.domain]
    card = {
        "version": 1,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(["specctl", *map(str, redacted(sys.argv[1:]))]),
        **{key: value for key, value in settings.items() if key != "version"},
        "sources": sources,
        "excluded": str(recipe.exclude) if recipe.exclude else None,
        "filters": recipe.filters.model_dump(mode="json"),
        "prompts": {
            **prompts,
            "rejected": rejections.count,
            "too_long": rejections.too_long,
            "left_out": dict(left_out.counts),
            "ids": left_out.ids,
        },
        "responses": _responses(directory),
    }
    atomic_write(directory / CARD, json.dumps(card, indent=2, ensure_ascii=False) + "\n")


def _responses(directory: Path) -> dict[str, Any]:
    """Counts and lengths of all responses of a directory, and counts of dropped responses."""
    counted: dict[str, Counter[str]] = {"domain": Counter(), "stop": Counter(eos=0, length=0), "temperature": Counter()}
    prompt_tokens, response_tokens = array("I"), array("I")
    found = [row for path in shards.files(directory, "filtered") for row in decisions(path).values()]
    dropped = {row["id"]: row["reason"] for row in found if row["action"] == "drop"}
    for record in store.read(directory):
        dropped.pop(record["id"], None)  # dropped by earlier filters, but stored since
        for key, counts in counted.items():
            counts[str(record[key])] += 1
        prompt_tokens.append(len(record["prompt_ids"]))
        response_tokens.append(len(record["response_ids"]))
    count = len(response_tokens)
    return {
        "count": count,
        "truncated_share": counted["stop"]["length"] / count,
        "loops": sum(row["reason"] == LOOP for row in found),
        "loops_cut": sum(row["action"] == "cut" for row in found),
        "dropped": dict(Counter(dropped.values())),
        **{f"by_{key}": dict(sorted(counts.items())) for key, counts in counted.items()},
        "prompt_tokens": _lengths(prompt_tokens),
        "response_tokens": _lengths(response_tokens),
    }


def _lengths(values: Sequence[int]) -> dict[str, Any]:
    """Sum, mean, quantiles and histogram: `counts[i]` lengths from `edges[i]` to below `edges[i + 1]`."""
    lengths = np.asarray(values)
    width = max(1, -(-int(lengths.max() + 1) // BINS))
    counts = np.bincount(lengths // width)
    half, most = np.quantile(lengths, [0.5, 0.9], method="nearest").tolist()
    return {
        "sum": int(lengths.sum()),
        "mean": round(float(lengths.mean()), 2),
        "p50": half,
        "p90": most,
        "max": int(lengths.max()),
        "edges": [width * place for place in range(len(counts) + 1)],
        "counts": counts.tolist(),
    }
