"""Filters for loops and truncated responses; their decisions survive a restart."""

import json
import random

import pytest

from specctl.distillation.responses import ResponseFilter, decisions, find_loop
from specctl.recipe import FilterRecipe

BEGINNING = list(range(100, 150))


def row(ids, stop="length", id="a", text=""):
    return {"id": id, "prompt_id": "p", "response_ids": list(ids), "stop": stop, "text": text}


def made(path, **filters):
    return ResponseFilter(FilterRecipe(**filters), path / "filtered-0of1.jsonl", str)


@pytest.mark.parametrize("period", [1, 2, 7, 40])
def test_a_loop_is_found_with_its_start_and_shortest_period(period):
    repeated = (list(range(period)) * 200)[:190]
    assert find_loop(BEGINNING + repeated) == (len(BEGINNING), period)


def test_repetitions_that_are_not_loops():
    """Table rows, short lists and refrains in the middle must not cut a response."""
    noise = random.Random(0).choices(range(200, 250), k=400)
    assert find_loop(noise) is None and find_loop([]) is None and find_loop([7] * 31) is None
    assert find_loop(noise + [1, 2, 3] * 9) is None
    assert find_loop([1, 2, 3] * 40 + noise[:5]) is None
    assert find_loop(noise + list(range(60)) * 3) is None
    assert find_loop([7] * 32) == (0, 1)


@pytest.mark.parametrize(
    ("filters", "kept", "action"), [({}, 54, "cut"), ({"loops": "keep"}, 90, "keep"), ({"loops": "drop"}, None, "drop")]
)
def test_loops_are_cut_kept_or_dropped_and_recorded(tmp_path, filters, kept, action):
    whole = BEGINNING + [1, 2] * 20
    rows = made(tmp_path, **filters).filter_rows([row(whole), row(whole, stop="eos", id="b")])
    lengths = {kept_row["id"]: len(kept_row["response_ids"]) for kept_row in rows}
    assert lengths == {"b": 90} | ({} if kept is None else {"a": kept}), "a text that ends by itself is no loop"
    assert all(kept_row["text"] == str(kept_row["response_ids"]) for kept_row in rows if len(kept_row["text"]) > 1)
    assert [(d["reason"], d["action"]) for d in decisions(tmp_path / "filtered-0of1.jsonl").values()] == [
        ("loop", action)
    ]


def test_truncated_responses_are_kept_by_default(tmp_path):
    rows = [row(BEGINNING), row(BEGINNING, stop="eos", id="b")]
    assert len(made(tmp_path).filter_rows(rows)) == 2
    assert [kept["id"] for kept in made(tmp_path, truncated="drop").filter_rows(rows)] == ["b"]
    assert decisions(tmp_path / "filtered-0of1.jsonl")["a"]["reason"] == "truncated"


def test_the_decisions_file_survives_a_kill_and_other_settings(tmp_path):
    """An incomplete last line loses no other decision; responses that are no longer dropped are generated again."""
    looping = [1, 2] * 40
    made(tmp_path, loops="drop").filter_rows([row(looping)])
    path = tmp_path / "filtered-0of1.jsonl"
    path.write_bytes(path.read_bytes() + b'{"id": "to')
    resumed = made(tmp_path, loops="drop")
    resumed.filter_rows([row(looping, id="c")])
    assert made(tmp_path, loops="drop").dropped == {"a": 0, "c": 0} and not made(tmp_path).dropped
    assert all(json.loads(line) for line in path.read_text().splitlines() if line)
