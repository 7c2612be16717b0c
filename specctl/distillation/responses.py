"""Filter of responses that teach a drafter the wrong things: loops and truncated texts.

A loop is an n-gram that repeats until the text is cut at its length limit. Any drafter predicts it after a few rounds,
and hundreds of such tokens outweigh all others. By default a loop is cut and its beginning kept. A truncated text is
genuine target output up to its cut, and its tokens say nothing about an end. It teaches nothing false, so it is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from specctl import regular_files
from specctl.decoding.target_text import TargetText
from specctl.distillation.shards import Record, Writer
from specctl.distillation.store import drop_torn_line
from specctl.recipe import DistillRecipe, FilterRecipe

LOOP, TRUNCATED = "loop", "truncated"
LONGEST_PERIOD = 64  # of a loop, in tokens
REPEATS, SHORTEST = 4, 32  # least repeats and least tokens of a loop
KEPT_REPEATS = 2  # repeats that a cut loop keeps


def find_loop(ids: list[int]) -> tuple[int, int] | None:
    """(start, period) of the n-gram that repeats until the end, with the shortest period, or None without a loop."""
    for period in range(1, min(LONGEST_PERIOD, len(ids) // REPEATS) + 1):
        start = len(ids) - period
        while start and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        if len(ids) - start >= max(REPEATS * period, SHORTEST):
            return start, period
    return None


def decisions(path: Path) -> dict[str, dict[str, str]]:
    """Decisions in a file, by response id: {"id", "prompt_id", "reason", "action"}. A torn last line is left out."""
    found = {}
    for line in regular_files.read_bytes(path).splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            row = regular_files.parse_json(line)
            found[row["id"]] = row
    return found


class ResponseFilter:
    """Decides about responses in the order in which they are stored, and writes the decisions next to the shards.

    `dropped` maps the ids of dropped responses to zero tokens. It includes the drops of earlier runs with the same
    filters, so these responses are not generated again.
    """

    def __init__(self, filters: FilterRecipe, path: Path, decode: Callable[[list[int]], str]):
        self.filters, self.path, self.decode = filters, path, decode
        action = {LOOP: filters.loops, TRUNCATED: filters.truncated}
        known = decisions(path)
        self.dropped = {id: 0 for id, row in known.items() if row["action"] == "drop" == action.get(row["reason"])}
        if path.exists():
            drop_torn_line(path)

    @classmethod
    def of(cls, recipe: DistillRecipe, directory: Path, writer: Writer, target: TargetText) -> ResponseFilter:
        path = directory / f"filtered-{writer[0]}of{writer[1]}.jsonl"
        return cls(recipe.filters, path, partial(target.tokenizer.decode, skip_special_tokens=True))

    def filter_rows(self, rows: list[Record]) -> list[Record]:
        """Filter the rows, cut loops, and append the decisions to the file. Returns the rows to store."""
        kept, new_decisions = [], []
        for row in rows:
            row, reason, action = self._decide(row)
            if reason:
                new_decisions.append(
                    {"id": row["id"], "prompt_id": row["prompt_id"], "reason": reason, "action": action}
                )
            if action == "drop":
                self.dropped[row["id"]] = 0
            else:
                kept.append(row)
        if new_decisions:
            with regular_files.open_regular(self.path, "a", encoding="utf-8", follow=False) as file:
                file.writelines(json.dumps(decision) + "\n" for decision in new_decisions)
        return kept

    def _decide(self, row: Record) -> tuple[Record, str, str]:
        """Return the row in its stored form, the reason for the decision, and the action."""
        reason, action = "", "keep"
        if row["stop"] == "length":
            found = find_loop(row["response_ids"])
            if found is not None:
                reason, action = LOOP, self.filters.loops
                row = row if action != "cut" else row | self._cut(row["response_ids"], *found)
            if action != "drop" and self.filters.truncated == "drop":
                reason, action = TRUNCATED, "drop"
        return row, reason, action

    def _cut(self, ids: list[int], start: int, period: int) -> dict[str, Any]:
        kept = ids[: start + KEPT_REPEATS * period]
        return {"response_ids": kept, "text": self.decode(kept)}
