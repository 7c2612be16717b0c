"""Report of `eval-server`: speed and mat by requests in flight, acceptance, and the expected gain at other mats."""

from collections.abc import Sequence
from dataclasses import replace

from specctl.reporting import curves
from specctl.reporting.collect import RunRecord
from specctl.reporting.commands import acceptance
from specctl.reporting.contents import Contents, labeled_rows, records
from specctl.reporting.curves import Panel
from specctl.reporting.style import Looks
from specctl.reporting.tables import headings

SERVERS = headings(
    *("label", "engine", "domain", "concurrency", "requests", "tokens", "tokens_per_s", "request_tokens_per_s"),
    *("first_token_s", "first_token_p95_s", "token_s", "mat", "mat_interval", "cached_prompt", "speedup"),
    *("speedup_interval", "same_texts", "failures"),
    label="server",
    requests="texts",
    request_tokens_per_s="tokens/s of a request",
    first_token_p95_s="first token, s, 95 %",
    token_s="next tokens, s",
    cached_prompt="cached share of prompts",
    speedup="× baseline",
    failures="failures",
)
LENGTHS = headings("label", "concurrency", "over", "up_to", label="server") | {
    key: SERVERS[key]
    for key in ("requests", "request_tokens_per_s", "first_token_s", "token_s", "mat", "mat_interval", "speedup")
}
WORTH = headings("label", "concurrency", "mat", label="run", break_even="even at mat")


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    rows = [
        {**row, "label": run.named(f"{row['server']}, {row['domain']}")}
        for run in runs
        for row in run.result["servers"]
    ]
    made = Contents()
    over_load = {
        key: curves.labeled(rows, "concurrency", key, looks)
        for key in ("tokens_per_s", "request_tokens_per_s", "mat", "speedup")
    }
    panels = [
        Panel("tokens/s,\nall requests", over_load["tokens_per_s"], limits=(0, None)),
        Panel("tokens/s\nof a request", over_load["request_tokens_per_s"], limits=(0, None)),
        Panel("mat", over_load["mat"]),
        Panel("× baseline", over_load["speedup"], reference=(1.0, "the baseline server")),
    ]
    caption = "Speed and mat of the servers by requests in flight, for each domain."
    made.pictures += curves.picture("load", caption, panels, "requests in flight", powers_of_two=True)
    accepted = {
        f"{row['label']}, {row['concurrency']} in flight": row["acceptance_by_position"]
        for row in rows
        if row["acceptance_by_position"]
    }
    worth = [
        {**load, "label": run.named("as measured"), **dict(zip(map(_at, load["mats"]), load["speedups"], strict=True))}
        for run in runs
        for load in run.result["worth"]
    ]
    mats = dict.fromkeys(mat for load in worth for mat in load["mats"])
    priced = "Predicted speed over the baseline for drafters with another mat and the same cost"
    made.tables = [
        records("servers", "Servers by load", rows, SERVERS),
        records("lengths", "Servers by length of prompts", labeled_rows(runs, "lengths", "server"), LENGTHS),
        records("worth", priced, worth, WORTH | {_at(mat): _at(mat) for mat in sorted(mats)}),
    ]
    if accepted:
        made.tables.append(replace(acceptance.by_position(accepted), name="served-acceptance"))
    return made


def _at(mat: float) -> str:
    return f"× at mat {mat:g}"
