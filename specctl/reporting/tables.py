"""Format tables of result documents as CSV, and values for human readers."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

MARK = " !"
HEADINGS = {
    "accept_rate": "accepted",
    "algo": "contender",
    "cached_prompt": "cached",
    "concurrency": "in flight",
    "failures": "failed",
    "first_token_s": "first token, s",
    "learn_share": "learning",
    "mat_first": "first chunk",
    "mat_last": "last chunk",
    "mat_over_static": "× static",
    "of_batch_1": "× batch 1",
    "of_one_row": "× one row",
    "ours_ms": "ms",
    "over": "prompts over",
    "over_best_arm_at_least": "× best arm, at least",
    "over_lookup_with_training": "× lookup, net",
    "over_static_with_training": "tokens/s × static, net",
    "request_tokens_per_s": "a request",
    "share_of_floor": "of floor",
    "speedup": "× plain",
    "speedup_at_least": "× plain, at least",
    "speedup_transformers": "× transformers",
    "speedup_with_training": "× plain, net",
    "step_acceptance": "steps accepted",
    "token_s": "next, s",
    "tokens_per_s": "tokens/s",
    "unusable": "speeds not usable",
    "up_to": "up to, tokens",
}
"""Usual headings of fields, if not their names; net: the time of learning counts."""
ABOVE_MAT = "above its mat"
"""Reason of `metrics.why_unusable`."""
SPEEDS = {"speedup", "speedup_transformers", "speedup_with_training"}
"""Fields to which a row's `unusable` applies."""


class Unusable(float):
    """Number that is shown with a mark because it cannot be used."""


def headings(*fields: str, **own: str) -> dict[str, str]:
    """Return the headings of the columns of a table by field: `own` ones, or the usual ones."""

    def heading(field: str) -> str:
        if field.endswith("_interval") and field not in own:
            return f"{heading(field.removesuffix('_interval'))}, 95 %"
        return own.get(field, HEADINGS.get(field, field.replace("_", " ")))

    return {field: heading(field) for field in dict.fromkeys((*fields, *own))}


def with_mark(row: Mapping[str, Any], name: str) -> Any:
    """Value of a row's field for a table, marked if it cannot be used, or None if the field is missing."""
    value = row.get(name)
    return Unusable(value) if name in SPEEDS and value is not None and row.get("unusable") else value


def usable_value(row: Mapping[str, Any], name: str) -> Any:
    """Value of a row's field for a picture or a headline, which cannot show marks. Unusable values are None."""
    return None if name in SPEEDS and row.get("unusable") else row.get(name)


def unusable_notes(document: Mapping[str, Any]) -> list[str]:
    """Return one line about the marked numbers of a result document, or an empty list."""
    rows = [row for value in document.values() if isinstance(value, list) for row in value]
    unusable = [row for row in rows if isinstance(row, Mapping) and row.get("unusable")]
    rows_by_reason: dict[str, dict[str, None]] = {}
    for row in unusable or [document]:
        if row.get("unusable"):
            rows_by_reason.setdefault(row["unusable"], {})[_row_name(row)] = None
    if not rows_by_reason:
        return []
    told = "; ".join(f"{', '.join(filter(None, names))}: {reason}" for reason, names in rows_by_reason.items())
    free = " (a draft that costs nothing is at most mat times as fast)" if ABOVE_MAT in rows_by_reason else ""
    about = document.get("machine")
    busy = f" ({machine(about)})" if isinstance(about, Mapping) else ""
    return [
        f"{MARK.strip()} speeds that cannot be used: {told.removeprefix(': ')}{free}. "
        f"Other work disturbed the clock{busy}, or there were too few tokens: measure again on an idle machine"
    ]


def machine(about: Mapping[str, Any]) -> str:
    busy = about.get("others_busy")  # read from a file, so it may have any type
    words = [f"{text(about.get(many))} {many[:-1] if about.get(many) == 1 else many}" for many in ("cores", "threads")]
    return ", ".join([*words, *([f"other processes kept {text(busy)} cores busy"] if busy is not None else [])])


def _row_name(row: Mapping[str, Any]) -> str:
    """Name of a row, such as `sql-eagle3 in sql`, or an empty text."""
    name = row.get("drafter") or row.get("algo")
    where = [f"in {row['domain']}"] if row.get("domain") else [f"batch {row['batch']}"] if row.get("batch") else []
    return " ".join([str(name), *where]) if name else ""


def text(value: Any) -> str:
    """Format a value in a few characters: rounded floats, thousands separators, and a dash for None and NaN."""
    if value is None or value != value:
        return "–"
    if isinstance(value, Unusable):
        return text(float(value)) + MARK
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) < 0.01 else f"{value:.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(text, value)) or "–"
    return str(value)


def blank(value: Any) -> bool:
    """Whether a table shows a dash for a value. A column of dashes is left out."""
    return text(value) == text(None)


def to_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write unrounded CSV. Empty cells stand for None; the items of a list are separated by `;`.

    Text that a spreadsheet would evaluate gets a leading apostrophe. A carriage return, which would end the row
    unquoted, becomes a line feed.
    """
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    for row in (columns, *rows):
        plain = [";".join(map(str, value)) if isinstance(value, list) else value for value in row]
        writer.writerow([_escape_formula(value) if isinstance(value, str) else value for value in plain])
    return made.getvalue()


def _escape_formula(text: str) -> str:
    """Escape text that a spreadsheet would take for a formula; numbers such as `-3;-4` and `-1.5` stay."""
    text = text.replace("\r", "\n")
    formula = text.startswith(("=", "+", "-", "@", "\t", "\n")) and not re.fullmatch(r"[-+\d.;e]+", text)
    return f"'{text}" if formula else text


def matrix_csv(matrix: dict[str, Any]) -> str:
    """Format the matrix of `eval` as unrounded CSV.

    It has a row per drafter and baseline, a column per domain, and the macro average last. Cells without a measurement
    are empty.
    """
    names = [*matrix["drafters"], *matrix["baselines"]]
    rows = [[name, *line, macro] for name, line, macro in zip(names, matrix["values"], matrix["macro"], strict=True)]
    return to_csv(["drafter", *matrix["domains"], "macro"], rows)
