"""Visual style of pictures: one color, dash and marker per name, and axes without decoration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito 2008, distinguishable by color-blind readers, without the yellow that is invisible on white paper.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
MARKERS = "osD^vPX"
HATCHES = ("", "//", "..", "xx")
GREY = "#8a8a8a"
BASELINES = ("vanilla", "transformers")
LONGEST = 36  # maximal characters of a name in a picture


@dataclass(frozen=True)
class Look:
    """Style of one name, as a line (dash, marker) and as an area (hatch)."""

    color: str
    dash: str | tuple
    marker: str
    hatch: str


class Looks(dict[str, Look]):
    """Assigns a style to every name, the same in all pictures of a report.

    After seven names the colors repeat with other dashes, markers and hatches. `name #2` has the color of `name` with
    a different dash and hatch. Baselines are grey.
    """

    def __missing__(self, name: str) -> Look:
        plain = plain_name(name)
        alike = [other for other in map(plain_name, [*self, name]) if is_baseline(other) == is_baseline(plain)]
        order, variant = list(dict.fromkeys(alike)).index(plain), alike.count(plain) - 1
        self[name] = grey(order + variant, variant) if is_baseline(plain) else colorful(order, variant)
        return self[name]


def colorful(number: int, variant: int) -> Look:
    turn = number // len(COLORS)
    return Look(
        COLORS[number % len(COLORS)],
        DASHES[(turn + variant) % len(DASHES)],
        MARKERS[(number + turn) % len(MARKERS)],
        HATCHES[(turn + variant) % len(HATCHES)],
    )


def grey(number: int, variant: int = 0) -> Look:
    return Look(GREY, DASHES[(number + 2) % len(DASHES)], ".", HATCHES[variant % len(HATCHES)])


def plain_name(name: str) -> str:
    return name.split(" #")[0]


def is_baseline(name: str) -> bool:
    """Whether a name is a baseline: plain decoding, or `transformers` without our drafters (`transformers+lookup`)."""
    return name in BASELINES or name.startswith("transformers+")


def grouped_names(names: Iterable[str]) -> list[str]:
    """List each name once, in order of appearance, with `a #2` directly after `a #1` for comparison."""
    unique = list(dict.fromkeys(names))
    plain = list(map(plain_name, unique))
    return sorted(unique, key=lambda name: plain.index(plain_name(name)))


def short(name: str) -> str:
    """Shorten a name for a picture by cutting its middle."""
    one_line = " ".join(name.split()) or "–"
    half = LONGEST // 2
    return one_line if len(one_line) <= LONGEST else f"{one_line[: half - 1]}…{one_line[-half:]}"


def style_axes(axes: Axes) -> None:
    """Style axes with two spines, a light grid under the data, and small labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b0b0b0")
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, color="#b0b0b0")
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)


def legend(figure: Figure, handles: dict[str, Artist]) -> None:
    """Add a legend at the right of the figure, in order; a single name needs no legend."""
    if len(handles) < 2:
        return
    made = figure.legend(
        list(handles.values()),
        ["x"] * len(handles),
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        handlelength=2.6,
    )
    for text, name in zip(made.get_texts(), handles, strict=True):
        text.set_parse_math(False)  # a drafter may be named $a_b; a leading underscore would also drop the label
        text.set_text(short(name))
