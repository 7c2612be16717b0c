"""Line charts, bars and styles, checked by the objects on the figure."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.reporting import bars, curves, plots
from specctl.reporting.bars import Bar
from specctl.reporting.curves import Curve, Panel, running_mean
from specctl.reporting.style import COLORS, Looks, grouped_names, short


def drawn(figure):
    return [line for axes in figure.axes for line in axes.get_lines()]


def test_a_legend_is_drawn_only_for_several_lines():
    looks = Looks()
    one, two = (Curve(name, [1, 2], [1.0, 2.0], looks[name]) for name in ("_a", "b"))
    assert curves.lines([Panel("y", [one])], "x").legends == []
    (legend,) = curves.lines([Panel("y", [one, two]), Panel("z", [two])], "x").legends
    assert [text.get_text() for text in legend.get_texts()] == ["_a", "b"], "matplotlib drops names that begin with _"


@pytest.mark.parametrize("name", ["$a_b", "a$^{$", "", "\n", "模型", "x" * 500])
def test_any_name_can_be_drawn(name):
    looks = Looks()
    line, bar = Curve(name, [1], [1.0], looks[name]), Bar(name, 1.0, (0.5, 1.5), looks[name])
    other = Curve("other", [1], [math.nan], looks["other"])
    for figure in (
        curves.lines([Panel("y", [line, other])], "x"),
        curves.stacked([1], [[0.5], [0.5]], [name, "other"], [line.look, other.look], "x", "y"),
        bars.bars({name: [bar]}, "x", reference=1.0),
        bars.shares({name: [1, 2]}, [name, "other"], [line.look, other.look], "x"),
    ):
        assert plots.png(figure).startswith(b"\x89PNG")


def test_long_names_keep_both_ends():
    assert short("a" * 40 + "b" * 40) == "a" * 17 + "…" + "b" * 18


def test_batch_ticks_are_powers_of_two():
    look = Looks()["a"]
    axes = curves.lines([Panel("y", [Curve("a", [1, 8], [1.0, 2.0], look)])], "batch", powers_of_two=True).axes[0]
    assert list(axes.get_xticks()) == [1, 8]


def test_a_noisy_line_is_shown_behind_its_mean_only_if_alone():
    looks = Looks()
    x, y = list(range(100)), list(np.random.default_rng(0).random(100))
    noisy = [Curve(name, x, y, looks[name], noisy=True) for name in "ab"]
    assert len(drawn(curves.lines([Panel("y", noisy[:1])], "x"))) == 2
    assert len(drawn(curves.lines([Panel("y", noisy)], "x"))) == 2


def test_a_line_with_many_points_is_thinned():
    look = Looks()["a"]
    (line,) = drawn(curves.lines([Panel("y", [Curve("a", range(100_000), np.zeros(100_000), look)])], "x"))
    assert len(line.get_xdata()) <= curves.MOST_POINTS


@given(st.lists(st.one_of(st.just(math.nan), st.floats(-1e3, 1e3)), max_size=30), st.integers(1, 9))
def test_the_running_mean_skips_missing_values(values, window):
    made = running_mean(values, window)
    for index in range(len(values)):
        around = values[max(index - window // 2, 0) : index + window // 2 + 1]
        known = [value for value in around if not math.isnan(value)]
        assert made[index] == pytest.approx(np.mean(known), abs=1e-6) if known else math.isnan(made[index])


def test_a_name_keeps_its_style_and_styles_differ():
    looks = Looks()
    names = [f"drafter {n}" for n in range(4 * len(COLORS))]
    seen = [looks[name] for name in names] + [looks[f"{name} #2"] for name in names[: 2 * len(COLORS)]]
    assert len(set(seen)) == len(seen)
    assert looks["drafter 3"] == seen[3]
    assert looks["drafter 3 #2"].color == looks["drafter 3"].color


def test_baselines_are_gray_and_use_no_color():
    looks = Looks()
    assert looks["vanilla"].color == looks["vanilla #2"].color == looks["transformers"].color
    assert looks["transformers+lookup"].color == looks["vanilla"].color
    assert len({looks["vanilla"], looks["vanilla #2"], looks["transformers"]}) == 3
    assert looks["first"].color == COLORS[0]


def test_bars_of_a_name_share_a_row_in_all_panels():
    looks = Looks()
    panels = {
        "sql": [Bar("a", 1, None, looks["a"]), Bar("b", 2, (1, 3), looks["b"])],
        "math": [Bar("b", 3, None, looks["b"])],
    }
    left, right = bars.bars(panels, "mat").axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "b"]
    assert [round(patch.get_y() + patch.get_height() / 2, 9) for patch in right.patches] == [1.0]


def test_shares_fill_the_row():
    looks = Looks()
    figure = bars.shares({"sql": [1, 3], "none": [0, 0]}, ["a", "b"], [looks["a"], looks["b"]], "share")
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    assert widths == [0.25, 0.75, 0.0, 0.0]


def test_runs_of_one_drafter_are_adjacent():
    assert grouped_names(["a #1", "b #1", "a #2", "c", "b #2", "a #1"]) == ["a #1", "a #2", "b #1", "b #2", "c"]
