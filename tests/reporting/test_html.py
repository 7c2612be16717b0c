"""HTML escaping, and the formatting of tables."""

import pytest

from specctl.reporting import page
from specctl.reporting.contents import Contents, ReportTable

BAD = "<script>alert(1)</script>\"'&"


def table(columns, rows, **headline):
    """Return a page with one table."""
    contents = Contents(headline=headline, tables=[ReportTable("name", "title", columns, rows)])
    return page.render([], {"part": contents}, {"part": []})


@pytest.mark.parametrize("value", [BAD, [BAD], {BAD: BAD}])
def test_no_value_of_a_table_becomes_markup(value):
    made = table([BAD, "x"], [[value, 1]], mat=value)
    assert "<script" not in made and "&lt;script&gt;" in made


def test_numbers_are_aligned_and_rounded():
    made = table(["name", "n"], [["a", 1234], ["b", None], ["c", 0.123456], ["d", float("nan")]])
    assert '<td class="number">1,234</td>' in made and made.count('<td class="number">–</td>') == 2
    assert '<td class="number">0.12</td>' in made and "<td>a</td>" in made


def test_a_long_table_is_cut_and_says_so():
    made = table(["n"], [[n] for n in range(page.SHOWN + 5)])
    assert made.count("<tr>") == page.SHOWN + 1
    assert "5 more rows" in made
