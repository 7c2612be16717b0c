"""The data card counts the stored files, and contains no texts."""

import json
from types import SimpleNamespace

import pytest

from specctl.distillation import generate, store
from specctl.distillation.card import CARD
from specctl.errors import DataError
from specctl.recipe import DistillRecipe
from specctl.reporting.collect import RunRecord
from specctl.reporting.commands import contents
from specctl.reporting.style import Looks
from specctl.runs import Run
from tests.distillation.million import NoEngine, Target

TEXT = "private words of a user " + " ".join(f"word{n}" for n in range(60))


def looping(engine, requests):
    """Yield responses of which every fourth loops; half of all are truncated."""
    for index, request in enumerate(requests):
        ids = [request.seed % 1000 + place for place in range(20 + index)] + [1, 2] * 20 * (index % 4 == 0)
        yield SimpleNamespace(index=index, output_ids=ids, stop="length" if index % 4 < 2 else "eos")


@pytest.fixture
def go(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "Engine", NoEngine)
    monkeypatch.setattr(generate, "stream", looping)
    rows = [{"prompt": f"{number} " + " ".join(f"of{number}is{n}" for n in range(20))} for number in range(11)]
    rows += [{"prompt": TEXT}] * 3
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row | {"license": "MIT", "language": "en"}) + "\n" for row in rows))

    def distilled(**fields):
        recipe = {"data": {"domain": ["chat"], "prompts": str(file)}, "output_dir": tmp_path / "out", **fields}
        recipe = DistillRecipe.model_validate(recipe)
        result = generate.distill(recipe, Run(tmp_path, "distill"), target=Target())
        path = tmp_path / "out" / CARD
        return result, json.loads(path.read_text()) if path.exists() else None

    return distilled


def test_card_counts_equal_the_stored_records(go, tmp_path):
    result, card = go(exclude=None)
    rows = list(store.read(tmp_path / "out"))
    prompts, responses = card["prompts"], card["responses"]
    assert prompts["read"] == 14 == prompts["kept"] + result.left_out
    assert prompts["left_out"]["repeated"] == 2 and prompts["licenses"] == {"MIT": prompts["kept"]}
    assert (responses["count"], responses["loops_cut"]) == (len(rows), 3)
    assert responses["by_stop"] == {"eos": len(rows) // 2, "length": len(rows) - len(rows) // 2}
    for name in ("prompt", "response"):
        lengths, told = [len(row[f"{name}_ids"]) for row in rows], responses[f"{name}_tokens"]
        assert (told["sum"], told["max"], sum(told["counts"])) == (sum(lengths), max(lengths), len(rows))
        for low, high, count in zip(told["edges"], told["edges"][1:], told["counts"], strict=False):
            assert sum(low <= length < high for length in lengths) == count
    assert "private" not in (tmp_path / "out" / CARD).read_text()
    assert not any("private" in json.dumps(ids) for ids in prompts["ids"].values())


def test_dropped_responses_are_counted_once_after_resuming(go, tmp_path):
    first, card = go(filters={"loops": "drop"})
    again, same = go(filters={"loops": "drop"}, resume=True)
    assert card["responses"] == same["responses"] and card["responses"]["dropped"] == {"loop": 3}
    assert (first.dropped, again.dropped, again.tokens_per_s) == (3, 3, 0.0), "it was generated again"
    kept, card = go(filters={"loops": "keep"}, resume=True)
    assert kept.responses == first.responses + 3 and card["responses"]["dropped"] == {}


def test_the_last_job_of_an_array_writes_the_card(go):
    assert go(shard="0/2")[1] is None
    result, card = go(shard="1/2")
    assert card["responses"]["count"] == 12 > result.responses


def test_filtering_out_all_responses_is_an_error(go, monkeypatch):
    def truncated(*args, **options):
        for one in looping(*args, **options):
            one.stop = "length"
            yield one

    monkeypatch.setattr(generate, "stream", truncated)
    with pytest.raises(DataError, match=r"all responses in .* were filtered out"):
        go(filters={"truncated": "drop"})


def test_a_report_shows_the_card(go, tmp_path):
    go()
    run = RunRecord(tmp_path, "distill", {}, {"output": str(tmp_path / "out")}, "")
    made = contents("distill", [run], Looks())
    assert made.headline["responses"] == 12 and [picture.name for picture in made.pictures] == ["lengths"]
    cells = [cell for table in made.tables for row in table.rows for cell in row]
    assert "loop, cut" in cells and str(tmp_path / "prompts.jsonl") in str(cells)
    gone = RunRecord(tmp_path, "distill", {}, {"output": str(tmp_path / "gone")}, "")
    assert contents("distill", [gone], Looks()).pictures == [] and "card.json" in gone.notes[0]
