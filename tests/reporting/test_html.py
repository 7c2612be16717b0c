"""HTML escaping, and the formatting of tables."""

import pytest

from specctl.reporting import html
from specctl.reporting.html import tag

BAD = "<script>alert(1)</script>\"'&"


def test_text_and_attributes_are_escaped():
    made = tag("p", BAD, tag("b", BAD), title=BAD).html
    assert "<script" not in made and "&lt;script&gt;" in made
    assert made.count('"') == 2, "a quotation mark ends the attribute"
    assert made.startswith("<p ") and "<b>" in made


@pytest.mark.parametrize("value", [BAD, [BAD], {BAD: BAD}])
def test_no_value_of_a_table_becomes_markup(value):
    made = html.table([BAD, "x"], [[value, 1]]).html + html.headline({BAD: value}).html + html.page(BAD, BAD)
    assert "<script" not in made


def test_numbers_are_aligned_and_rounded():
    made = html.table(["name", "n"], [["a", 1234], ["b", None], ["c", 0.123456], ["d", float("nan")]]).html
    assert '<td class="number">1,234</td>' in made and made.count('<td class="number">–</td>') == 2
    assert '<td class="number">0.12</td>' in made and "<td>a</td>" in made


def test_a_long_table_is_cut_and_says_so():
    made = html.table(["n"], [[n] for n in range(html.SHOWN + 5)]).html
    assert made.count("<tr>") == html.SHOWN + 1
    assert "5 more rows" in made
