"""The figures in README and in the guides equal the measured figures in RESULTS."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "recipes/replicate/RESULTS.md").read_text()
BUILTIN = (ROOT / "recipes/replicate/BUILTIN.md").read_text()
ROWS = {
    "`retrieval`, a store of the responses": "one domain, and responses to distil or to log",
    "an `eagle3` head and `lookup` in one tree": "one domain, free text",
    "one head of all domains, with `lookup`": "several domains, free text",
    "`lookup`": "answers that repeat the prompt",
}
"""Row of the table of speeds in RESULTS → row of README's table of what to try first."""


def table(section: str) -> dict[str, list[float]]:
    """Return the numbers of every row of a section's first table, by first cell."""
    part = RESULTS.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| ([\d. |]+) \|$", part, re.MULTILINE)
    return {name: [float(cell) for cell in cells.split("|")] for name, cells in rows}


@pytest.mark.parametrize("section", ["Speed by domain", "Mat", "Against llama.cpp"])
def test_the_mean_column_is_the_mean_of_the_row(section):
    rows = table(section)
    assert len(rows) >= 6
    for name, (*cells, mean) in rows.items():
        assert sum(cells) / len(cells) == pytest.approx(mean, abs=0.011), name


@pytest.mark.parametrize(("measured", "shown"), ROWS.items())
def test_the_ranges_in_readme_match_the_results(measured, shown):
    *cells, mean = table("Speed by domain")[measured]
    row = next(line for line in README.splitlines() if line.startswith(f"| {shown} |"))
    least, most = re.findall(r"(\d\.\d) to (\d\.\d)", row)[0]
    assert (float(least), float(most)) == (round(min(cells), 1), round(max(cells), 1))
    assert float(re.findall(r"mean (?:of seven domains )?(\d\.\d+)", row)[0]) == mean


@pytest.mark.parametrize("page", ["README.md", *(f"specctl/guides/{name}.md" for name in ("drafters", "choosing"))])
def test_every_speed_on_a_page_is_in_the_results(page):
    """Checks speeds with two decimals, outside blocks of output."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    speeds = re.findall(r"(\d\.\d\d)(?: ×)", text)
    assert speeds
    assert not [speed for speed in speeds if speed not in RESULTS + BUILTIN]
