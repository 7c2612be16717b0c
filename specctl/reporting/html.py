"""Build self-contained HTML. Text is escaped on input, so no name, prompt or path can become markup.

`tag("p", "a < b", tag("b", "c"), id="x")` is `<p id="x">a &lt; b<b>c</b></p>`: strings are text, and only the results
of `tag` are markup.
"""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specctl.reporting.tables import text

VOID = ("img", "meta")
SHOWN = 200
"""Maximal number of table rows on the page; the CSV file has all rows."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --line: #d9dde2; --paper: #ffffff; --card: #f5f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --soft: #9aa4af; --line: #39404a; --paper: #15181c; --card: #1f242a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p { margin: .4rem 0; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.headline { display: flex; flex-wrap: wrap; gap: .75rem; margin: .75rem 0; padding: 0; }
.headline div { background: var(--card); border-radius: 8px; padding: .6rem .9rem; min-width: 7rem; }
.headline dt { color: var(--soft); font-size: .8rem; }
.headline dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
figure { margin: 1.25rem 0; break-inside: avoid; }
figure img { max-width: 100%; height: auto; background: #fff; border-radius: 8px; padding: 6px;
  border: 1px solid var(--line); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; }
th { color: var(--soft); font-weight: 600; }
.number { text-align: right; }
td.number { white-space: nowrap; }
pre { background: var(--card); border-radius: 8px; padding: .75rem; font-size: .8rem; white-space: pre-wrap;
  max-height: 26rem; overflow: auto; }
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --card: #f3f3f3; }
  body { max-width: none; padding: 0; font-size: 11px; }
  h2, h3 { break-after: avoid; }
  table { font-size: 9px; }
  th, td { padding-right: .5rem; overflow-wrap: anywhere; }
  tr { break-inside: avoid; }
  figure img { max-height: 11cm; width: auto; }
  .wide, pre { overflow: visible; max-height: none; }
  pre.long { columns: 3; font-size: 7px; }
}
"""


@dataclass(frozen=True)
class Markup:
    """HTML fragment built by `tag`."""

    html: str


Child = Markup | str | None


def tag(name: str, /, *children: Child, **attributes: str) -> Markup:
    """Build an element; `class_` is the attribute class. A child of None adds nothing."""
    given = "".join(f' {key.rstrip("_")}="{html.escape(value)}"' for key, value in attributes.items())
    if name in VOID:
        return Markup(f"<{name}{given}>")
    inside = "".join(
        child.html if isinstance(child, Markup) else html.escape(child) for child in children if child is not None
    )
    return Markup(f"<{name}{given}>{inside}</{name}>")


def page(title: str, *body: Child) -> str:
    """Build a document that loads and runs nothing; the content security policy in its head also enforces this."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag(
            "meta",
            **{
                "http-equiv": "Content-Security-Policy",
                "content": "default-src 'none'; img-src data:; style-src 'unsafe-inline'",
            },
        ),
        tag("title", title),
        Markup(f"<style>{STYLE}</style>"),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, tag("body", *body), lang="en").html + "\n"


def headline(values: dict[str, Any]) -> Markup | None:
    """Build a row of a few numbers in large type."""
    if not values:
        return None
    return tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", text(value))) for name, value in values.items()),
        class_="headline",
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markup:
    """Build a table. Numeric columns are right-aligned; a long table shows only its first rows."""
    numeric = [all(isinstance(row[index], int | float | None) for row in rows) for index in range(len(columns))]
    looks = [{"class_": "number"} if number and any(columns) else {} for number in numeric]
    head = tag("tr", *(tag("th", name, **look) for name, look in zip(columns, looks, strict=True)))
    lines = [
        tag("tr", *(tag("td", text(value), **look) for value, look in zip(row, looks, strict=True)))
        for row in rows[:SHOWN]
    ]
    left = tag("p", f"… and {len(rows) - SHOWN:,} more rows; specctl report --csv writes all.", class_="soft")
    made = tag("table", tag("thead", head) if any(columns) else None, tag("tbody", *lines))
    return tag("div", made, left if len(rows) > SHOWN else None, class_="wide")


def picture(png: bytes, caption: str, pixels_per_inch: int) -> Markup:
    """Embed a PNG in the page, at the size for which its labels were designed."""
    width = int.from_bytes(png[16:20]) * 96 // pixels_per_inch
    source = "data:image/png;base64," + base64.b64encode(png).decode()
    return tag("figure", tag("img", src=source, alt=caption, width=str(width)), tag("figcaption", caption))
