"""How pictures look: one colour, dash and marker per name, axes with nothing superfluous."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito 2008, told apart by the colour-blind, without the yellow that white paper swallows.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
MARKERS = "osD^vPX"
HATCHES = ("", "//", "..", "xx")
GREY = "#8a8a8a"
BASELINES = ("vanilla", "transformers")
LONGEST = 36  # characters of a name in a picture


@dataclass(frozen=True)
class Look:
    """How one name is drawn, as a line (dash, marker) and as an area (hatch)."""

    colour: str
    dash: str | tuple
    marker: str
    hatch: str


class Looks:
    """A look per name, the same in all pictures of a report.

    Beyond seven names colours come again with other dashes, markers and hatches. `name #2` has the colour of `name`,
    and a dash and hatch of its own. Baselines are grey.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Look]] = {}  # by name, and by name with its number

    def __getitem__(self, name: str) -> Look:
        plain = name.split(" #")[0]
        variants = self._known.setdefault(plain, {})
        if name not in variants:
            variants[name] = self._look(plain, len(variants))
        return variants[name]

    def _look(self, plain: str, variant: int) -> Look:
        baseline = is_baseline(plain)
        order = [name for name in self._known if is_baseline(name) == baseline].index(plain)
        turn = order // len(COLOURS)
        if baseline:
            return grey(order + variant, variant)
        return Look(
            COLOURS[order % len(COLOURS)],
            DASHES[(turn + variant) % len(DASHES)],
            MARKERS[(order + turn) % len(MARKERS)],
            HATCHES[(turn + variant) % len(HATCHES)],
        )


def grey(number: int, variant: int = 0) -> Look:
    """The look of a baseline, which the others are compared with."""
    return Look(GREY, DASHES[(number + 2) % len(DASHES)], ".", HATCHES[variant % len(HATCHES)])


def is_baseline(name: str) -> bool:
    """Plain decoding, and what transformers does without our drafters: `transformers`, `transformers+lookup`, …"""
    return name in BASELINES or name.startswith("transformers+")


def beside(names: Iterable[str]) -> list[str]:
    """Each name once, in order of appearance, but `a #2` behind `a #1`: they are there to be compared."""
    unique = list(dict.fromkeys(names))
    plain = list(dict.fromkeys(name.split(" #")[0] for name in unique))
    return sorted(unique, key=lambda name: plain.index(name.split(" #")[0]))


def short(name: str) -> str:
    """A name that fits beside a picture: its middle is what long names can do without."""
    one_line = " ".join(name.split()) or "–"
    half = LONGEST // 2
    return one_line if len(one_line) <= LONGEST else f"{one_line[: half - 1]}…{one_line[-half:]}"


def bare(axes: Axes) -> None:
    """Two spines, a light grid behind the data, small labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b0b0b0")
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, color="#b0b0b0")
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)


def legend(figure: Figure, handles: dict[str, Artist]) -> None:
    """Names at the right of the figure, in their order; a single one needs none."""
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
        text.set_parse_math(False)  # a drafter may be called $a_b; nor may it be dropped for a leading underscore
        text.set_text(short(name))
