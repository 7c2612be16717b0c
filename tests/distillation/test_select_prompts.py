"""Selecting the prompts of a run: which are left out, why, and reproducibly."""

import json
import random

import pytest

from specctl.distillation.prompts import read_prompts
from specctl.distillation.rejections import Rejections
from specctl.distillation.select_prompts import EXCLUDED, NEAR_EXCLUDED, REPEATED, LeftOut, prepare
from specctl.errors import DataError
from specctl.recipe import DistillRecipe

WORDS = [f"w{number}" for number in range(1000)]


def question(seed: int) -> str:
    return f"Question {seed}: " + " ".join(random.Random(seed).choices(WORDS, k=80))


def write(path, texts):
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def go(tmp_path):
    def prepared(file, **fields):
        data = {"domain": ["sql"], "prompts": str(file), **fields.pop("data", {})}
        recipe = DistillRecipe.model_validate({"data": data, **fields})
        left_out = LeftOut(tmp_path / "left-out.jsonl", recipe.exclude)
        prompts = prepare(recipe, Rejections(None, 0.01), left_out)
        return [prompt.messages[0]["content"] for prompt in prompts], left_out

    return prepared


def test_each_reason_is_counted_and_listed(go, tmp_path):
    texts = [question(seed) for seed in range(20)]
    held = write(tmp_path / "test.jsonl", [texts[0], texts[1].removesuffix(texts[1].split()[-1])])
    file = write(tmp_path / "all.jsonl", [*texts, texts[2], texts[3].upper() + "!"])
    kept, left_out = go(file, exclude=held)
    assert left_out.counts == {EXCLUDED: 1, NEAR_EXCLUDED: 1, REPEATED: 1}
    assert len(kept) == 19 and not {texts[0], texts[1]} & {*kept}
    listed = [json.loads(line) for line in left_out.path.read_text().splitlines()]
    assert {row["reason"]: row["where"] for row in listed}[NEAR_EXCLUDED] == f"{file}:2"
    assert {row["prompt_id"] for row in listed} == {id for ids in left_out.ids.values() for id in ids}
    assert all(len(row["like"]) == 32 for row in listed)


def test_the_near_duplicate_filter_can_be_disabled(go, tmp_path):
    texts = [question(1), question(1) + "!", question(2)]
    held = write(tmp_path / "test.jsonl", [question(2) + "!"])
    kept, left_out = go(write(tmp_path / "all.jsonl", texts), exclude=held)
    assert len(kept) == 2 and left_out.counts == {NEAR_EXCLUDED: 1}
    kept, left_out = go(tmp_path / "all.jsonl", exclude=held, filters={"near_excluded": None})
    assert len(kept) == 3 and not left_out.counts


def test_the_limit_counts_kept_prompts(go, tmp_path):
    """With 40 of 50 prompts excluded, a limit of 8 would otherwise give one or two."""
    texts = [question(seed) for seed in range(50)]
    held, file = write(tmp_path / "test.jsonl", texts[:40]), write(tmp_path / "all.jsonl", texts)
    eight, _ = go(file, exclude=held, data={"limit": 8})
    every, _ = go(file, exclude=held)
    assert len(eight) == 8 and eight == every[:8]


def test_the_order_does_not_depend_on_the_file(go, tmp_path):
    texts = [question(seed) for seed in range(60)] + [question(seed) for seed in range(30)]
    kept, _ = go(write(tmp_path / "a.jsonl", texts))
    random.Random(0).shuffle(texts)
    file = write(tmp_path / "b.jsonl", texts)
    assert go(file)[0] == kept and len(kept) == 60
    recipe = DistillRecipe.model_validate({"data": {"domain": ["sql"], "prompts": str(file), "limit": 25}})
    drawn = [prompt.messages[0]["content"] for prompt in read_prompts(recipe.data, "sql", sample=True)]
    assert go(file, data={"limit": 25})[0] == drawn


def test_several_domains_share_their_filters(go, tmp_path):
    write(tmp_path / "sql.jsonl", [question(1), question(2)])
    write(tmp_path / "math.jsonl", [question(1), question(2), question(3)])
    kept, left_out = go(tmp_path / "{domain}.jsonl", data={"domain": ["sql", "math"]})
    assert len(kept) == 3 and left_out.counts == {REPEATED: 2}


def test_leaving_out_all_prompts_is_an_error(go, tmp_path):
    file = write(tmp_path / "all.jsonl", [question(1)])
    with pytest.raises(DataError, match="every prompt of sql is left out, 1 in all") as error:
        go(file, exclude=file)
    assert "left-out.jsonl" in error.value.hint
