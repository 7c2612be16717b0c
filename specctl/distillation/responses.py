"""Responses that teach a drafter the wrong things: loops, truncated texts, near-duplicates.

A loop is an n-gram that is repeated to the end of a text which was cut at its length. Any drafter has it right after
its first rounds, and hundreds of such tokens outweigh the others: it is cut, and its beginning kept. A truncated text
is the target's own as far as it goes, and its tokens say nothing about an end, so nothing false is learned: it is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from specctl import regular
from specctl.decoding.target_text import TargetText
from specctl.distillation.near import NearIndex
from specctl.distillation.shards import Record, Writer, files, records, writer_of
from specctl.distillation.store import drop_torn_line
from specctl.recipe import DistillRecipe, FilterRecipe

LOOP, TRUNCATED, NEAR = "loop", "truncated", "near-duplicate"
LONGEST_PERIOD = 64  # tokens
REPEATS, SHORTEST = 4, 32  # a loop has so many repeats, and so many tokens
KEPT_REPEATS = 2  # of a loop that is cut


def loop(ids: list[int]) -> tuple[int, int] | None:
    """(start, period) of the n-gram that is repeated to the end, of the shortest period; None where there is none."""
    for period in range(1, min(LONGEST_PERIOD, len(ids) // REPEATS) + 1):
        start = len(ids) - period
        while start and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        if len(ids) - start >= max(REPEATS * period, SHORTEST):
            return start, period
    return None


def decisions(path: Path) -> dict[str, dict[str, str]]:
    """The decisions in a file by response: {"id", "prompt_id", "reason", "action"}; a torn last line is left out."""
    found = {}
    for line in regular.content(path).splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            row = regular.parsed(line)
            found[row["id"]] = row
    return found


class ResponseFilter:
    """Decides about responses in the order in which they are stored, and keeps the decisions beside them.

    `dropped` are ids of what is not kept, with their zero tokens. What earlier runs of the same filters have dropped is
    among them, and not generated again.
    """

    def __init__(
        self,
        filters: FilterRecipe,
        path: Path,
        stored: Iterable[Record],
        decode: Callable[[list[int]], str],
    ):
        self.filters, self.path, self.decode = filters, path, decode
        action = {LOOP: filters.loops, TRUNCATED: filters.truncated, NEAR: "drop" if filters.near_responses else "keep"}
        known = decisions(path)
        self.dropped = {id: 0 for id, row in known.items() if row["action"] == "drop" == action[row["reason"]]}
        if path.exists():
            drop_torn_line(path)
        self._near = None if filters.near_responses is None else NearIndex(filters.near_responses)
        if self._near is not None:
            for record in stored:
                self._near.add(record["text"])

    @classmethod
    def of(cls, recipe: DistillRecipe, directory: Path, writer: Writer, target: TargetText) -> ResponseFilter:
        """The filter of one writer of a directory, which knows what that has written already."""
        own = [path for path in files(directory, "shard") if writer_of(path) == writer]
        stored = (record for path in own for record in records(path))
        path = directory / f"filtered-{writer[0]}of{writer[1]}.jsonl"
        return cls(recipe.filters, path, stored, partial(target.tokenizer.decode, skip_special_tokens=True))

    def keep(self, rows: list[Record]) -> list[Record]:
        """The rows that are kept, loops cut."""
        kept, decided = [], []
        for row in rows:
            row, reason, action = self._decide(row)
            if reason:
                decided.append({"id": row["id"], "prompt_id": row["prompt_id"], "reason": reason, "action": action})
            if action == "drop":
                self.dropped[row["id"]] = 0
            else:
                kept.append(row)
        if decided:
            with regular.opened(self.path, "a", encoding="utf-8", follow=False) as file:
                file.writelines(json.dumps(decision) + "\n" for decision in decided)
        return kept

    def _decide(self, row: Record) -> tuple[Record, str, str]:
        """The row as it is kept, and the reason for what is done with it."""
        reason, action = "", "keep"
        if row["stop"] == "length":
            found = loop(row["response_ids"])
            if found is not None:
                reason, action = LOOP, self.filters.loops
                row = row if action != "cut" else row | self._cut(row["response_ids"], *found)
            if action != "drop" and self.filters.truncated == "drop":
                reason, action = TRUNCATED, "drop"
        if action != "drop" and self._near is not None and self._near.add(row["text"]) is not None:
            reason, action = NEAR, "drop"
        return row, reason, action

    def _cut(self, ids: list[int], start: int, period: int) -> dict[str, Any]:
        kept = ids[: start + KEPT_REPEATS * period]
        return {"response_ids": kept, "text": self.decode(kept)}
