"""The matrix of drafters and domains and its diagonal, on numbers small enough to check by hand."""

from dataclasses import fields

import pytest

from specctl.decoding.records import Decoded
from specctl.measuring.drafter_rows import Row
from specctl.measuring.matrix import best, mean, tabulate
from specctl.measuring.records import Record

POOL = {"chat-head": ["chat"], "mixed": ["sql", "chat"], "sql-head": ["sql"]}
MAT = {
    "sql-head": {"sql": 3.0, "chat": 1.5},
    "chat-head": {"sql": 1.0, "chat": 2.0},
    "mixed": {"sql": 2.5, "chat": 2.5},
    "vanilla": {"sql": 1.0, "chat": 1.0},
}


def row(drafter, domain, **values):
    given = {"drafter": drafter, "domain": domain, **values}
    return Row(**{field.name: given.get(field.name) for field in fields(Row)})


def record(drafter, domain, prompt, tokens, passes, seconds=1.0):
    decoded = Decoded([1], [2] * (tokens + 1), "length", passes, 0, 0, 0, [], [], 0.0, seconds)
    return Record(prompt, domain, drafter, 0, 0.0, decoded)


def measured(mat=MAT):
    """Return rows in the order of `evaluate` (by domain), and two prompts per row with the same mat."""
    rows = [row(name, domain, mat=mat[name][domain]) for domain in ("sql", "chat") for name in mat]
    records = [record(r.drafter, r.domain, prompt, int(10 * r.mat), 10) for r in rows for prompt in "ab"]
    return rows, records


def test_the_matrix_by_hand():
    matrix = tabulate("mat", *measured(), POOL)
    assert matrix.domains == ["sql", "chat"]
    assert matrix.drafters == ["sql-head", "chat-head", "mixed"], "specialists in the order of the domains: a diagonal"
    assert matrix.baselines == ["vanilla"]
    assert matrix.values == [[3.0, 1.5], [1.0, 2.0], [2.5, 2.5], [1.0, 1.0]]
    assert matrix.macro == [2.25, 1.5, 2.5, 1.0]
    assert (matrix.best, matrix.best_macro) == (["sql-head", "mixed"], "mixed")


def test_the_diagonal_by_hand():
    """The rival is the runner-up of the domain, and generalists do not count as specialists."""
    sql, chat = tabulate("mat", *measured(), POOL).diagonal
    assert (sql.drafter, sql.best, sql.rival, sql.lead) == ("sql-head", True, "mixed", 0.5)
    assert sql.interval == pytest.approx((0.5, 0.5)), "both prompts say the same"
    assert (chat.drafter, chat.best, chat.rival, chat.lead) == ("chat-head", False, "mixed", -0.5)
    verdict = tabulate("mat", *measured(), POOL).verdict
    assert verdict.startswith("diagonal: 1 of 2 specialists are the best in their own domain, 1 of them")


def test_an_insignificant_lead_is_not_counted_as_clear():
    rows, records = measured()
    records = [r for r in records if (r.drafter, r.domain) != ("sql-head", "sql")]
    records += [record("sql-head", "sql", "a", 60, 10), record("sql-head", "sql", "b", 15, 15)]  # 3.0 in total
    matrix = tabulate("mat", rows, records, POOL)
    assert matrix.diagonal[0].best
    assert matrix.diagonal[0].interval[0] < 0
    assert "0 of them" in matrix.verdict


def test_answers_are_paired_by_prompt():
    """Another order, and an extra prompt on one side, change nothing."""
    rows, records = measured()
    plain = tabulate("mat", rows, records, POOL).diagonal
    more = [*reversed(records), record("sql-head", "sql", "c", 900, 10)]
    assert tabulate("mat", rows, more, POOL).diagonal == plain


def test_speedup_cells_are_relative_to_plain_decoding():
    rows = [row(name, "sql", speedup=value) for name, value in (("sql-head", 2.0), ("mixed", 1.5), ("vanilla", 1.0))]
    seconds = {"sql-head": 1.0, "mixed": 4 / 3, "vanilla": 2.0}
    records = [record(name, "sql", prompt, 10, 10, seconds[name]) for name in seconds for prompt in "ab"]
    (found,) = tabulate("speedup", rows, records, {"sql-head": ["sql"], "mixed": []}).diagonal
    assert found.lead == 0.5
    assert found.interval == pytest.approx((0.5, 0.5))


def test_a_pool_of_one_has_no_diagonal():
    """A verdict such as "1 of 1 is the best" would be meaningless."""
    rows, records = measured({name: MAT[name] for name in ("sql-head", "vanilla")})
    matrix = tabulate("mat", rows, records, {"sql-head": ["sql"]})
    assert matrix.diagonal == []
    assert "no specialist can be compared" in matrix.verdict
    assert matrix.best == ["sql-head", "sql-head"]


def test_a_specialist_for_an_unmeasured_domain_is_not_on_the_diagonal():
    rows, records = measured()
    matrix = tabulate("mat", rows, records, {**POOL, "sql-head": ["law"]})
    assert [found.drafter for found in matrix.diagonal] == ["chat-head"]


def test_missing_measurements_are_none_and_never_the_best():
    """A mean over fewer domains must not win against means over all."""
    rows, records = measured()
    rows = [r for r in rows if (r.drafter, r.domain) != ("sql-head", "chat")]
    matrix = tabulate("mat", rows, records, POOL)
    assert matrix.values[0] == [3.0, None]
    assert matrix.macro[0] is mean([]) is best({"a": None}) is None
    assert matrix.best_macro == "mixed"
