"""`distill --from-log`: what is a response in other people's files, in the target's own ids, each once."""

import json
import subprocess
import sys

import pytest

from specctl.decoding.target_text import load_target_text
from specctl.distillation import logs, store
from specctl.distillation.generate import distill
from specctl.distillation.logs import Turn, turns
from specctl.errors import DataError
from specctl.recipe import DistillRecipe
from specctl.runs import Run
from tests.cli.conftest import specctl

__all__ = ["specctl"]

ASK, SAY = {"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "It is 5."}
MORE, LATER = {"role": "user", "content": "And 4 + 4?"}, {"role": "assistant", "content": "8."}
LOGGED = {
    "request": {"model": "m", "messages": [ASK], "temperature": 0.7},
    "response": {"choices": [{"message": SAY | {"refusal": None}, "finish_reason": "stop"}]},
}


@pytest.fixture(scope="module")
def text():
    return load_target_text("builtin")


@pytest.mark.parametrize(
    "row",
    [
        LOGGED,
        {key: json.dumps(body) for key, body in LOGGED.items()},
        {"request": {"body": LOGGED["request"]}, "response": {"status_code": 200, "body": LOGGED["response"]}},
        {"messages": [ASK, SAY]},
        {"messages": [ASK, SAY | {"content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "5."}]}]},
        {"conversations": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": SAY["content"]}]},
        {"instruction": ASK["content"], "input": "", "output": SAY["content"]},
        {"prompt": ASK["content"], "response": SAY["content"]},
        {"prompt": ASK["content"], "completion": SAY["content"]},
    ],
)
def test_one_response_in_many_forms(row):
    (turn,) = turns(row)
    assert turn[:3] == Turn([ASK], SAY["content"])[:3]
    assert turn.id == Turn([ASK], SAY["content"]).id


def test_every_turn_of_the_assistant_is_a_response():
    found = turns({"messages": [{"role": "system", "content": "Be short."}, ASK, SAY, MORE, LATER]})
    assert [(len(turn.messages), turn.answer) for turn in found] == [(2, "It is 5."), (4, "8.")]
    assert found[1].messages[2:] == [SAY, MORE]


def test_what_a_log_says_of_a_response():
    cut = {"choices": [{"message": SAY, "finish_reason": "length"}]}
    (turn,) = turns({"request": LOGGED["request"], "response": cut})
    assert (turn.cut, turn.temperature) == (True, 0.7)
    assert turns({"messages": [ASK, SAY]})[0].temperature == -1
    assert (
        turns({"instruction": "Add.", "input": "2 and 3", "output": "5"})[0].messages[0]["content"] == "Add.\n\n2 and 3"
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, "has none of"),
        ({"messages": [ASK]}, "answers nothing"),
        ({"messages": []}, "non-empty list"),
        ({"messages": [SAY]}, "answers nothing"),
        ({"messages": [ASK, SAY | {"content": ""}]}, "empty assistant"),
        ({"messages": [ASK, SAY | {"content": None}]}, "must be a string"),
        ({"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [{}]}]}, "calls tools"),
        ({"messages": [ASK | {"content": [{"type": "image_url"}]}, SAY]}, "no text"),
        ({"conversations": [{"from": "bing", "value": "x"}]}, "'bing' speaks"),
        ({"request": LOGGED["request"], "response": {"error": "overloaded"}}, "no `choices`"),
        ({"request": LOGGED["request"], "response": {"choices": [{"message": {"content": None}}]}}, "must be a string"),
        ({"request": "x{", "response": LOGGED["response"]}, "no JSON"),
        ({"response": LOGGED["response"]}, "has no `request`"),
        ({"prompt": "x"}, "must be a string"),
    ],
)
def test_lines_without_a_response(row, says):
    with pytest.raises(ValueError, match=says):
        turns(row)


def test_ids_are_those_that_the_target_would_have_written(text):
    """Behind the generation prompt, up to the token that ends a turn; a response that was cut has no such token."""
    row = logs.record(Turn([ASK], "It is 5."), "math", text, {})
    assert row["prompt_ids"] == text.render([ASK])
    assert row["response_ids"][-1] in text.eos_ids and not set(row["response_ids"][:-1]) & text.eos_ids
    assert text.tokenizer.decode(row["response_ids"], skip_special_tokens=True) == "It is 5."
    cut = logs.record(Turn([ASK], "It is 5.", cut=True), "math", text, {})
    assert cut["response_ids"] == row["response_ids"][:-1] and cut["stop"] == "length"
    whole = text.render([ASK, SAY], add_generation_prompt=False)
    assert whole[: len(row["prompt_ids"]) + len(row["response_ids"])] == row["prompt_ids"] + row["response_ids"]


def test_a_template_that_changes_what_stands_before(text, monkeypatch):
    template = text.tokenizer.chat_template
    monkeypatch.setattr(text.tokenizer, "chat_template", "{{ messages | length }}" + template)
    row = logs.record(Turn([ASK], "It is 5."), "math", text, {})
    own = text.tokenizer.encode("It is 5.", add_special_tokens=False)
    assert row["response_ids"] == [*own, text.tokenizer.eos_token_id]


def test_a_response_that_is_too_long(text):
    with pytest.raises(ValueError, match="the target's context has 2048"):
        logs.record(Turn([ASK], "5 " * 3000), "math", text, {})


@pytest.fixture
def go(tmp_path, text):
    def run(rows, output="out", **fields):
        path = tmp_path / "traffic.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "run").mkdir(exist_ok=True)
        recipe = {"log": str(path), "output_dir": tmp_path / output, "shard_size": 7, "batch_size": 4, **fields}
        return distill(DistillRecipe.model_validate(recipe), Run(tmp_path / "run"), target=text)

    return run


def many(count):
    return [{"prompt": f"What is {n} + 1?", "response": f"It is {n + 1}."} for n in range(count)]


def test_a_log_becomes_data(go, tmp_path, text):
    result = go([*many(30), *many(5), {"messages": [ASK, SAY, MORE, LATER]}])
    assert (result.domain, result.prompts, result.responses, result.rejected) == ("traffic", 32, 32, 0)
    rows = list(store.read(tmp_path / "out"))
    assert len(rows) == 32 and result.response_tokens == sum(len(row["response_ids"]) for row in rows)
    assert store.summary(tmp_path / "out").complete


def test_prompts_to_be_measured_on_are_left_out(go, tmp_path):
    held = tmp_path / "test.jsonl"
    held.write_text(json.dumps({"prompt": "What is 3 + 1?"}) + "\n" + json.dumps({"messages": [ASK, SAY]}) + "\n")
    result = go([*many(10), {"messages": [ASK, SAY, MORE, LATER]}], exclude=held)
    assert result.responses == 10
    asked = [row["messages"][-1]["content"] for row in store.read(tmp_path / "out")]
    assert "What is 3 + 1?" not in asked and ASK["content"] not in asked and MORE["content"] in asked
    held.write_text("{}\n")
    with pytest.raises(DataError, match="1 of 1 prompts rejected"):
        go(many(3), "other", exclude=held)


def test_near_duplicates_are_left_out_but_samples_and_later_turns_are_not(go):
    """Two answers to one prompt are two samples; a second turn repeats all of the first, and is another prompt."""
    words = " ".join(f"word{n}" for n in range(60))
    asked = [{"prompt": words, "response": "One."}, {"prompt": words, "response": "Two."}]
    near = {"prompt": words + "!", "response": "Three."}
    first = [{"role": "user", "content": words + "?"}, {"role": "assistant", "content": "Yes."}]
    later = {"messages": [*first, {"role": "user", "content": words}, {"role": "assistant", "content": "No."}]}
    assert go([*asked, near, later]).responses == 3
    assert go([*asked, near, later], "all", filters={"near_prompts": None}).responses == 5


def test_what_stopped_goes_on_and_more_of_a_log_is_added(go, tmp_path):
    go(many(12), data={"limit": 5})
    assert len(list(store.read(tmp_path / "out"))) == 5
    assert go(many(12), resume=True).responses == 12
    assert go(many(20), resume=True).responses == 20
    assert len({row["id"] for row in store.read(tmp_path / "out")}) == len(list(store.read(tmp_path / "out"))) == 20


def test_lines_that_are_none_are_told(go, tmp_path):
    with pytest.raises(DataError, match="2 of 12 prompts rejected") as error:
        go([*many(10), {"messages": [ASK]}, {}])
    assert '"request"' in error.value.hint
    result = go([*many(10), {"messages": [ASK]}, {}], "more", data={"max_rejected": 0.5})
    assert (result.responses, result.rejected) == (10, 2)
    with pytest.raises(DataError, match="no responses"):
        go([], "none")


@pytest.mark.parametrize("fields", [{"server": {"urls": ["http://a"]}}, {"data": {"prompts": "x"}}, {"shard": "0/2"}])
def test_what_is_about_new_responses_is_refused(fields):
    with pytest.raises(ValueError, match="about new responses"):
        DistillRecipe.model_validate({"log": "x.jsonl", **fields})


def test_the_command_reads_a_pipe(tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in many(9))
    command = [sys.executable, "-m", "specctl", "distill", "--from-log", "-", "--output-dir", "out", "--json"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["responses"] == 9 and json.loads(done.stdout)["domain"] == "stdin"


def test_data_of_any_name_can_be_trained_on(tmp_path, specctl):
    """And a name without data is still none: negative control."""
    (tmp_path / "traffic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many(9)))
    assert specctl("distill", "--from-log", "traffic.jsonl").code == 0
    plan = specctl("train-drafter", "--domain", "traffic", "--dry-run")
    assert plan.code == 0 and "distilled/traffic" in plan.out, plan.err
    assert specctl("train-drafter", "--domain", "traffik", "--dry-run").code == 2


def served(**change):
    choice = {"message": {"content": "x"}, "finish_reason": "stop", "token_ids": [7, 8, 9], **change}
    response = {"choices": [choice], "prompt_token_ids": [5, 6]}
    return {"request": {"messages": [{"role": "user", "content": "q"}], "temperature": 0.5}, "response": response}


def test_ids_of_the_engine_are_taken_as_they_are(text):
    (turn,) = logs.turns(served())
    kept = logs.record(turn, "chat", text, {})
    assert (kept["prompt_ids"], kept["response_ids"], kept["temperature"]) == ([5, 6], [7, 8, 9], 0.5)
    assert kept["messages"] == [{"role": "user", "content": "q"}] and kept["stop"] == "eos"


def test_calls_of_tools_are_learnt_from_where_there_are_ids(text):
    tools = served(message={"content": None, "tool_calls": [{"id": "1"}]}, finish_reason="tool_calls")
    (turn,) = logs.turns(tools)
    kept = logs.record(turn, "chat", text, {})
    assert kept["response_ids"] == [7, 8, 9] and kept["messages"][0]["content"] == text.tokenizer.decode([5, 6])
    other = served(message={"content": None, "tool_calls": [{"id": "1"}]}, token_ids=[7, 8, 10])
    assert logs.turns(other)[0].id != turn.id
    del tools["response"]["prompt_token_ids"]
    with pytest.raises(ValueError, match="calls tools"):
        logs.turns(tools)


def test_ids_that_the_target_does_not_have_are_refused(text):
    (turn,) = logs.turns(served(token_ids=[7, 10**6]))
    with pytest.raises(ValueError, match="vocabulary"):
        logs.record(turn, "chat", text, {})
