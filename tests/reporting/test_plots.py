"""The heat map, checked by the objects on the figure."""

import csv
import io
import struct
import sys

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from specctl.reporting import plots
from specctl.reporting.tables import to_csv

MATRIX = {
    "metric": "mat",
    "drafters": ["sql-head", "chat-head"],
    "baselines": ["vanilla"],
    "domains": ["sql", "chat", "summarization"],
    "values": [[3.0, 1.5, 1.25], [1.0, 2.0, None], [1.0, 1.0, 1.0]],
    "macro": [1.9166, None, 1.0],
    "best": ["sql-head", "chat-head", "sql-head"],
    "best_macro": "sql-head",
}


def cells(figure):
    """Return (column, row) → text of the main axes; rows count downwards."""
    return {
        (int(text.get_position()[0]), int(text.get_position()[1])): text.get_text() for text in figure.axes[0].texts
    }


def frames(figure):
    patches = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle) and not patch.get_fill()]
    return {(int(patch.get_x()), int(patch.get_y())) for patch in patches}


def test_every_cell_shows_its_value():
    shown = cells(plots.heat_map(MATRIX))
    assert [shown[column, 0] for column in range(4)] == ["3.00", "1.50", "1.25", "1.92"]
    assert [shown[column, 1] for column in range(4)] == ["1.00", "2.00", "–", "–"]
    assert len(shown) == 3 * 4


def test_the_best_of_each_column_is_framed():
    assert frames(plots.heat_map(MATRIX)) == {(0, 0), (1, 1), (2, 0), (3, 0)}


def test_axes_and_color_bar_are_labeled():
    figure = plots.heat_map(MATRIX, "target builtin")
    axes, bar = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["sql-head", "chat-head", "vanilla"]
    assert [label.get_text() for label in axes.get_xticklabels()][:3] == MATRIX["domains"]
    assert bar.get_ylabel() == "mat"
    assert "tokens per pass of the target (target builtin)" in figure.get_suptitle()


def test_text_contrasts_with_its_cell():
    """White on pale yellow is unreadable."""
    axes = plots.heat_map(MATRIX).axes[0]
    colors = {text.get_text(): text.get_color() for text in axes.texts}
    assert colors["3.00"] == "white"
    assert colors["1.00"] != "white"


def test_the_png_has_the_size_of_its_figure(tmp_path):
    """A figure with many domains must not be shrunk to a default size."""
    figure = plots.heat_map(MATRIX | {"drafters": ["a" * 40, "b"]} | {"best": ["b"] * 3, "best_macro": None})
    written = plots.save(figure, tmp_path / "m.png").read_bytes()
    assert written[:8] == b"\x89PNG\r\n\x1a\n"
    size = struct.unpack(">II", written[16:24])
    assert size == pytest.approx([side * plots.DPI for side in figure.get_size_inches()], abs=1)
    assert size[0] > plots.heat_map(MATRIX).get_size_inches()[0] * plots.DPI


def test_a_very_tall_figure_is_scaled_down():
    """matplotlib refuses more than 65,536 pixels; the bars of a hundred runs would need more."""
    image = plots.png(Figure(figsize=(2, 600)))
    assert int.from_bytes(image[20:24]) == pytest.approx(plots.LARGEST, abs=2)


@pytest.mark.parametrize("name", ["$a_b", "a$^{$", "_^\\"])
def test_names_are_not_read_as_formulas(tmp_path, name):
    """matplotlib reads $…$ as math and fails on invalid math."""
    matrix = MATRIX | {"drafters": [name, "x"], "best": [name] * 3, "best_macro": name}
    plots.save(plots.heat_map(matrix, name), tmp_path / "m.png")


def test_a_single_or_missing_value_is_drawn(tmp_path):
    for value in (None, 2.0):
        one = {"drafters": ["a"], "baselines": [], "domains": ["sql"], "values": [[value]], "macro": [value]}
        matrix = MATRIX | one | {"best": [value and "a"], "best_macro": value and "a"}
        plots.save(plots.heat_map(matrix), tmp_path / "m.png")


def test_pyplot_is_not_used(monkeypatch):
    """pyplot picks a backend and keeps every figure alive."""
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plots.heat_map(MATRIX)
    assert "matplotlib.pyplot" not in sys.modules


def test_a_document_with_a_matrix_gets_its_files(tmp_path):
    plots.write_matrix({"target": "/models/one", "matrix": MATRIX}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"matrix.csv", "matrix.png"}
    assert (tmp_path / "matrix.csv").read_text().splitlines() == [
        "drafter,sql,chat,summarization,macro",
        "sql-head,3.0,1.5,1.25,1.9166",
        "chat-head,1.0,2.0,,",
        "vanilla,1.0,1.0,1.0,1.0",
    ]


@pytest.mark.parametrize("document", [{}, {"matrix": None}])
def test_a_document_without_a_matrix_gets_none(tmp_path, document):
    plots.write_matrix(document, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_csv_cells_are_not_formulas():
    """Drafter names are user input, and spreadsheets evaluate cells that start with = + - @."""
    cells = ["=1+1", "+a", "-a", "@a", "\t=1", "\r=1", "-1.5", "-3;4e-5", "a=b", -2.5, None, ["-x", "y"]]
    (head, row) = csv.reader(io.StringIO(to_csv(["=name"] + ["x"] * 11, [cells]), newline=""))
    assert head[0] == "'=name"
    assert row == [*(f"'{text}" for text in cells[:5]), "'\n=1", "-1.5", "-3;4e-5", "a=b", "-2.5", "", "'-x;y"]
