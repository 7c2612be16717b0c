"""`distill --from-log`: responses are found in many formats, tokenized as by the target, and stored once."""

import json
import os
import shutil
import sys

import pytest

from specctl.cli.distill import check_log
from specctl.decoding.models.loading import builtin_path
from specctl.decoding.target_text import load_target_text
from specctl.distillation import logs, store
from specctl.distillation.logs import LoggedTurn, turns
from specctl.distillation.prompts import Prompt, prompt_ids, prompts_of_row
from specctl.distillation.rejections import Rejections
from specctl.errors import DataError
from specctl.recipe import DistillRecipe
from tests.cli.conftest import specctl

__all__ = ["specctl"]

ASK, SAY = {"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "It is 5."}
MORE, LATER = {"role": "user", "content": "And 4 + 4?"}, {"role": "assistant", "content": "8."}
LOGGED = {
    "request": {"model": "m", "messages": [ASK], "temperature": 0.7},
    "response": {"choices": [{"message": SAY | {"refusal": None}, "finish_reason": "stop"}]},
}


@pytest.mark.parametrize(
    "row",
    [
        LOGGED,
        {key: json.dumps(body) for key, body in LOGGED.items()},
        {"request": {"body": LOGGED["request"]}, "response": {"status_code": 200, "body": LOGGED["response"]}},
        {"custom_id": "1", "body": LOGGED["request"], "response": {"status_code": 200, "body": LOGGED["response"]}},
        LOGGED["request"] | {"response": LOGGED["response"]},
        {"messages": [ASK], "response": SAY["content"]},
        {"request": LOGGED["request"], "response": SAY["content"]},
        {"messages": [ASK, SAY]},
        {"messages": [ASK, SAY | {"content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "5."}]}]},
        {"conversations": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": SAY["content"]}]},
        {"conversations": [ASK, SAY]},
        {"instruction": ASK["content"], "input": "", "output": SAY["content"]},
        {"prompt": ASK["content"], "response": SAY["content"]},
        {"prompt": ASK["content"], "completion": SAY["content"]},
        {"prompt": [ASK], "completion": [SAY]},
        {"conversation": [ASK, SAY], "conversation_id": "1"},
        {"messages": json.dumps([ASK]), "response": json.dumps(LOGGED["response"])},
        {"messages": {}, "proxy_server_request": LOGGED["request"], "response": LOGGED["response"]},
        {"input": [ASK], "output": SAY, "type": "GENERATION"},
        {"input": json.dumps({"messages": [ASK], "tools": []}), "output": json.dumps(SAY)},
        {"input": ASK["content"], "output": SAY["content"]},
    ],
)
def test_one_response_in_many_formats(row):
    """Exports of LiteLLM and Langfuse, and data sets of TRL, LMSYS and WildChat, used to be refused."""
    (turn,) = turns(row)
    assert turn[:3] == LoggedTurn([ASK], SAY["content"])[:3]
    assert turn.id == LoggedTurn([ASK], SAY["content"]).id
    if "proxy_server_request" not in row:  # its `messages` are empty
        assert [prompt.messages for prompt in prompts_of_row(row, "chat")] == [[ASK]]


def test_parameters_of_litellm_are_read():
    """A text that ended at a stop string was learned with an end token, and its tools were lost."""
    tool = {"type": "function", "function": {"name": "look"}}
    parameters = {"temperature": 0.7, "stop": ["\n"], "tools": [tool]}
    (turn,) = turns({"messages": [ASK], "response": LOGGED["response"], "model_parameters": parameters})
    assert (turn.cut, turn.temperature, turn.tools) == (True, 0.7, [tool])


def test_every_choice_is_a_response():
    """Only the first choice used to be read; the others were lost without a word."""
    both = {"choices": [{"message": SAY, "finish_reason": "stop"}, {"message": LATER, "finish_reason": "length"}]}
    found = turns({"request": LOGGED["request"] | {"n": 2}, "response": both})
    assert [(turn.messages, turn.answer, turn.cut) for turn in found] == [
        ([ASK], "It is 5.", False),
        ([ASK], "8.", True),
    ]
    assert len({turn.id for turn in found}) == 2


def test_every_assistant_turn_is_a_response():
    found = turns({"messages": [{"role": "system", "content": "Be short."}, ASK, SAY, MORE, LATER]})
    assert [(len(turn.messages), turn.answer) for turn in found] == [(2, "It is 5."), (4, "8.")]
    assert found[1].messages[2:] == [SAY, MORE]


def test_finish_reason_and_temperature_are_read():
    cut = {"choices": [{"message": SAY, "finish_reason": "length"}]}
    (turn,) = turns({"request": LOGGED["request"], "response": cut})
    assert (turn.cut, turn.temperature) == (True, 0.7)
    assert turns({"messages": [ASK, SAY]})[0].temperature == -1
    for wrong in (10**400, float("nan"), -0.5, "warm"):  # a number beyond floats used to end the command
        assert turns({"request": LOGGED["request"] | {"temperature": wrong}, "response": cut})[0].temperature == -1
    assert (
        turns({"instruction": "Add.", "input": "2 and 3", "output": "5"})[0].messages[0]["content"] == "Add.\n\n2 and 3"
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, "has none of"),
        ({"messages": [ASK]}, "no answer from the assistant"),
        ({"messages": []}, "non-empty list"),
        ({"messages": [SAY]}, "no answer from the assistant"),
        ({"messages": [ASK, SAY | {"content": ""}]}, "empty assistant"),
        ({"messages": [ASK, SAY | {"content": None}]}, "must be a string"),
        ({"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [{}]}]}, "no function name"),
        ({"messages": [ASK | {"content": [{"type": "image_url"}]}, SAY]}, "not text"),
        ({"conversations": [{"from": "bing", "value": "x"}]}, "speaker 'bing'"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "expected one of human"),
        ({"conversations": [{"text": "x"}]}, "needs `from` and `value`, or `role` and `content`"),
        ({"conversations": [{"from": "human"}]}, "needs `from` and `value`, or `role` and `content`"),
        ({"conversations": ["x"]}, "needs `from` and `value`, or `role` and `content`"),
        ({"messages": [ASK, SAY | {"content": None, "reasoning": "Let me"}]}, "has thinking, but no answer"),
        ({"messages": [ASK, SAY | {"reasoning_content": [1]}]}, "thinking must be a string, got list"),
        ({"messages": [ASK, SAY | {"thinking": "\ud800"}]}, "surrogate"),
        ({"request": LOGGED["request"], "response": {"error": "overloaded"}}, "no `choices`"),
        ({"request": LOGGED["request"], "response": {"choices": [{"message": {"content": None}}]}}, "must be a string"),
        ({"request": "x{", "response": LOGGED["response"]}, "not JSON"),
        ({"request": "[" * 100_000, "response": LOGGED["response"]}, "not JSON"),
        ({"response": LOGGED["response"]}, "no `request`, `body` or `messages`"),
        ({"request": LOGGED["request"], "response": [{"choices": [{"delta": {}}]}]}, "stream in pieces: log the whole"),
        ({"request": LOGGED["request"], "response": "data: {}"}, "stream in pieces: log the whole"),
        ({"request": {"prompt": "x"}, "response": {"choices": [{"text": "y"}]}}, "only token ids"),
        ({"prompt": "x"}, "no answer from the assistant"),
    ],
)
def test_lines_without_a_response_are_refused(row, says):
    with pytest.raises(ValueError, match=says):
        turns(row)


def test_ids_are_those_the_target_would_have_written(text):
    """From the generation prompt to the end-of-turn token; a cut response has no such token."""
    row = logs.record(LoggedTurn([ASK], "It is 5."), "math", text, {})
    assert row["prompt_ids"] == text.render([ASK])
    assert row["response_ids"][-1] in text.eos_ids and not set(row["response_ids"][:-1]) & text.eos_ids
    assert text.tokenizer.decode(row["response_ids"], skip_special_tokens=True) == "It is 5."
    cut = logs.record(LoggedTurn([ASK], "It is 5.", cut=True), "math", text, {})
    assert cut["response_ids"] == row["response_ids"][:-1] and cut["stop"] == "length"
    whole = text.render([ASK, SAY], add_generation_prompt=False)
    assert whole[: len(row["prompt_ids"]) + len(row["response_ids"])] == row["prompt_ids"] + row["response_ids"]


HEAD = "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}\n{% else %}<|assistant|>\n"
TAIL = "{{ m.content.split('</think>')[-1].strip() }}<|end|>{% endif %}{% endfor %}"
TAIL += "{% if add_generation_prompt %}<|assistant|>\n"
BLOCK = "{% if loop.last %}<think>\n{{ m.NAME or m.content.split('</think>')[0].split('<think>')[-1].strip() "
BLOCK += "if '</think>' in m.content else m.NAME or '' }}\n</think>\n\n{% endif %}"
TEMPLATES = {
    "first": "{{ messages[0].content }}",
    "users": "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}",
    "last": "{{ messages[-1].content }}",
    "no end": "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    "late end": "{% for m in messages %}{{ m.content }}<|end|>\n{% endfor %}",
    "block": HEAD + BLOCK.replace("NAME", "reasoning_content") + TAIL + "{% endif %}",
    "opened": HEAD + BLOCK.replace("NAME", "reasoning") + TAIL + "<think>\n{% endif %}",
    "thinking": HEAD + BLOCK.replace("NAME", "thinking") + TAIL + "{% endif %}",
    "stripped": HEAD + TAIL + "{% endif %}",
    "stripped, opened": HEAD + TAIL + "<think>\n{% endif %}",
}
PLAIN, SECOND, SHORT = (
    LoggedTurn([ASK], "It is 5."),
    LoggedTurn([ASK, SAY, MORE], "8."),
    LoggedTurn([ASK], "It is", cut=True),
)
APART, INLINE = (
    LoggedTurn([ASK], "It is 5.", thinking="2 plus 3"),
    LoggedTurn([ASK], "<think>\n2 plus 3\n</think>\n\nIt is 5."),
)
PONDERED, CLOSED = LoggedTurn([ASK], "<think>\n2 plus", cut=True), LoggedTurn([ASK], "2 plus 3\n</think>\n\nIt is 5.")
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "turn", "prompt", "response"),
    [
        # without an assistant turn in the template, the answer's own ids are used
        ("first", PLAIN, "What is 2 + 3?", "It is 5.<|end|>"),
        ("first", SHORT, "What is 2 + 3?", "It is"),
        ("first", INLINE, "What is 2 + 3?", INLINE.answer + "<|end|>"),
        ("users", PLAIN, "What is 2 + 3?\n", "It is 5.<|end|>"),
        ("users", SECOND, "And 4 + 4?\n", "8.<|end|>"),
        ("last", SECOND, "And 4 + 4?", "8.<|end|>"),
        ("no end", SECOND, "And 4 + 4?\n", "8.<|end|>"),
        ("no end", SHORT, "What is 2 + 3?\n", "It is"),
        ("late end", PLAIN, "What is 2 + 3?<|end|>\n", "It is 5.<|end|>"),
        # separate thinking is passed to the template; a think block that the target did not write is not learned
        ("block", APART, "<|assistant|>\n", INLINE.answer + "<|end|>"),
        ("block", APART._replace(cut=True), "<|assistant|>\n", INLINE.answer),
        ("block", INLINE, "<|assistant|>\n", INLINE.answer + "<|end|>"),
        ("block", PLAIN, "<|assistant|>\n" + EMPTY, "It is 5.<|end|>"),
        ("block", SHORT, "<|assistant|>\n" + EMPTY, "It is"),
        ("block", SECOND, "<|assistant|>\n" + EMPTY, "8.<|end|>"),
        ("block", PONDERED, "<|assistant|>\n", "<think>\n2 plus"),
        ("thinking", APART, "<|assistant|>\n", INLINE.answer + "<|end|>"),
        ("opened", APART, "<|assistant|>\n<think>\n", CLOSED.answer + "<|end|>"),
        ("opened", INLINE, "<|assistant|>\n<think>\n", CLOSED.answer + "<|end|>"),
        ("opened", CLOSED, "<|assistant|>\n<think>\n", CLOSED.answer + "<|end|>"),
        ("opened", PONDERED, "<|assistant|>\n<think>\n", "2 plus"),
        ("opened", SHORT, "<|assistant|>\n<think>\n", "It is"),
        ("stripped", INLINE, "<|assistant|>\n", INLINE.answer + "<|end|>"),
        ("stripped, opened", INLINE, "<|assistant|>\n<think>\n", CLOSED.answer + "<|end|>"),
    ],
)
def test_the_response_is_the_text_that_the_target_wrote(text, monkeypatch, template, turn, prompt, response):
    """Answers used to vanish ([<|end|>] alone was learned), and empty think blocks replaced the thinking."""
    monkeypatch.setattr(text.tokenizer, "chat_template", TEMPLATES[template])
    row = logs.record(turn, "math", text, {})
    assert text.tokenizer.decode(row["prompt_ids"]).endswith(prompt)
    assert text.tokenizer.decode(row["response_ids"]) == response
    assert row["stop"] == ("length" if turn.cut else "eos")


@pytest.mark.parametrize(
    ("template", "turn", "says"),
    [
        ("first", SECOND, "leaves out the last of 3 messages"),
        ("first", APART, "has thinking outside its content"),
        ("users", APART, "has thinking outside its content"),
        ("stripped", APART, "has thinking outside its content"),
        ("stripped, opened", APART, "has thinking outside its content"),
        ("opened", PLAIN, "has no thinking, but the prompt of target builtin ends with an opening"),
        ("opened", SECOND, "has no thinking, but the prompt of target builtin ends with an opening"),
    ],
)
def test_ambiguous_responses_are_refused(text, monkeypatch, template, turn, says):
    monkeypatch.setattr(text.tokenizer, "chat_template", TEMPLATES[template])
    with pytest.raises(ValueError, match=says):
        logs.record(turn, "math", text, {})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_is_kept_under_each_of_its_names(name):
    said = SAY | {name: "2 plus 3"}
    (logged,) = turns({"request": LOGGED["request"], "response": {"choices": [{"message": said}]}})
    first, second = turns({"messages": [ASK, said, MORE, LATER]})
    assert logged.thinking == first.thinking == "2 plus 3" and second.thinking == ""
    assert second.messages[1] == SAY | {"reasoning_content": "2 plus 3"}
    assert first.id == turns({"conversations": [ASK, said]})[0].id != LoggedTurn([ASK], SAY["content"]).id


STOP = {"stop": ["###"]}


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize(
    ("choice", "request_", "ended"),
    [
        ({"finish_reason": "stop"}, {}, "eos"),
        ({"finish_reason": "eos_token"}, {}, "eos"),
        ({"finish_reason": "stop", "stop_reason": None}, STOP, "eos"),
        ({"finish_reason": "stop", "stop_reason": 3}, {}, "eos"),
        ({"finish_reason": "stop", "matched_stop": 3}, STOP, "eos"),
        ({"finish_reason": "length"}, {}, "length"),
        ({"finish_reason": None}, {}, "length"),
        ({}, {}, "length"),
        ({"finish_reason": "stop"}, STOP, "length"),
        ({"finish_reason": "stop", "stop_reason": "###"}, STOP, "length"),
        ({"finish_reason": "stop", "stop_reason": "###"}, {}, "length"),
        ({"finish_reason": "stop", "matched_stop": "###"}, {}, "length"),
        ({"finish_reason": "stop", "stop_reason": 11}, {"stop_token_ids": [11]}, "length"),
        ({"finish_reason": "abort"}, {}, "has the unknown finish reason 'abort'"),
        ({"finish_reason": "content_filter"}, {}, "has the unknown finish reason 'content_filter'"),
        ({"finish_reason": "error"}, {}, "has the unknown finish reason 'error'"),
        ({"finish_reason": {"type": "stop"}}, {}, "has the unknown finish reason {'type': 'stop'}"),
    ],
)
def test_only_a_clean_stop_gets_an_end_token(text, ids, choice, request_, ended):
    """Interrupted texts, and texts ended by a stop string, used to be learned with a false end."""
    response = {"choices": [{"message": SAY} | choice | ({"token_ids": [7, 8, 9]} if ids else {})]}
    response |= {"prompt_token_ids": [5, 6]} if ids else {}
    row = {"request": LOGGED["request"] | request_, "response": response}
    if ended not in ("eos", "length"):
        with pytest.raises(ValueError, match=ended):
            turns(row)
        return
    (turn,) = turns(row)
    kept = logs.record(turn, "chat", text, {})
    assert kept["stop"] == ended
    assert kept["response_ids"] == [7, 8, 9] if ids else (kept["response_ids"][-1] in text.eos_ids) == (ended == "eos")


def test_ids_that_end_with_an_end_token_are_not_truncated(text):
    (turn,) = turns(served(token_ids=[7, 8, 3], finish_reason=None))
    assert logs.record(turn, "chat", text, {})["stop"] == "eos"


@pytest.mark.parametrize(
    ("finish", "stop"),
    [
        ({"type": "stop", "matched": 3}, "eos"),
        ({"type": "stop", "matched": "###"}, "length"),
        ({"type": "length", "length": 3}, "length"),
        (None, "length"),
        ({"type": "abort", "message": "gone"}, "finish reason 'abort'"),
    ],
)
def test_the_finish_reason_of_sglang_is_read(text, finish, stop):
    about = {"finish_reason": finish, "prompt_tokens": 2, "completion_tokens": 3}
    row = {"request": {"input_ids": [5, 6]}, "response": {"output_ids": [7, 8, 9], "meta_info": about}}
    if stop.startswith("finish"):
        with pytest.raises(ValueError, match=stop):
            turns(row)
    else:
        assert logs.record(turns(row)[0], "chat", text, {})["stop"] == stop


@pytest.mark.parametrize("change", [{"token_ids": 5}, {"token_ids": "abc"}, {"prompt_token_ids": {"a": 1}}])
def test_invalid_ids_are_refused(change):
    row = served(**change)
    del row["request"]["messages"]
    with pytest.raises(ValueError, match=r"not a list|must be a non-empty list"):
        [logs.record(turn, "chat", load_target_text("builtin"), {}) for turn in turns(row)]


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """Return `make(own, known)`: the built-in target with that end token in its tokenizer and those ids in its config.

    Its template has no end token.
    """

    def make(own, known):
        directory = tmp_path_factory.mktemp("endless")
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            fields = json.loads((builtin_path() / name).read_text()) | {"eos_token_id": known, "eos_token": own}
            (directory / name).write_text(json.dumps(fields))
        shutil.copy(builtin_path() / "tokenizer.json", directory)
        template = (builtin_path() / "chat_template.jinja").read_text()
        (directory / "chat_template.jinja").write_text(template.replace("<|end|>{% endgen", "{% endgen"))
        return load_target_text(str(directory))

    return make


@pytest.mark.parametrize(
    ("own", "known", "end"),
    [
        (None, 3, 3),
        (None, [3, 0], 0),
        ("<|end|>", [0, 3], 3),  # of two ids, the tokenizer's ends a turn
        ("<|pad|>", 3, 3),  # the tokenizer's end token is not one of the model's
        ("<|end|>", None, 3),
    ],
)
def test_the_end_token_is_found_without_a_template(endless, own, known, end):
    """Without an end token in the tokenizer, `null` used to be stored, and the data became unreadable."""
    target = endless(own, known)
    row = logs.record(LoggedTurn([ASK], "It is 5."), "math", target, {})
    assert row["response_ids"][-1] == end == target.end_id
    assert target.tokenizer.decode(row["response_ids"][:-1]) == "It is 5."


def test_a_target_without_any_end_token_is_refused(endless):
    target = endless(None, None)
    with pytest.raises(ValueError, match=r"has no end token: target .* does not define one"):
        logs.record(LoggedTurn([ASK], "It is 5."), "math", target, {})
    assert logs.record(LoggedTurn([ASK], "It is", cut=True), "math", target, {})["stop"] == "length"
    target.tokenizer.chat_template = None
    with pytest.raises(DataError, match="no token that begins a document"):
        target.document_start()


def test_a_template_that_rewrites_earlier_messages_is_handled(text, monkeypatch):
    template = text.tokenizer.chat_template
    monkeypatch.setattr(text.tokenizer, "chat_template", "{{ messages | length }}" + template)
    row = logs.record(LoggedTurn([ASK], "It is 5."), "math", text, {})
    own = text.tokenizer.encode("It is 5.", add_special_tokens=False)
    assert row["response_ids"] == [*own, text.tokenizer.eos_token_id]


def test_an_overlong_response_is_refused(text):
    with pytest.raises(ValueError, match="do not fit the target's context of 2048"):
        logs.record(LoggedTurn([ASK], "5 " * 3000), "math", text, {})


def test_a_text_beyond_any_context_is_refused_before_it_is_tokenized(text, monkeypatch):
    """One line of some MB took the template's time, and ended a distillation of a million prompts."""
    huge = [{"role": "user", "content": "x " * 10**6}]
    monkeypatch.setattr(type(text), "render", None)
    with pytest.raises(ValueError, match="2000000 characters do not fit the target's context of 2048"):
        prompt_ids(text, Prompt("00", huge, "math", "file:1"), {})
    with pytest.raises(ValueError, match="2000005 characters do not fit"):
        logs.record(LoggedTurn(huge, "It is"), "math", text, {})


def many(count):
    return [{"prompt": f"What is {n} + 1?", "response": f"It is {n + 1}."} for n in range(count)]


def test_a_log_becomes_a_data_set(go, tmp_path, text):
    result = go([*many(30), *many(5), {"messages": [ASK, SAY, MORE, LATER]}])
    assert (result.domain, result.prompts, result.responses, result.rejected) == ("traffic", 32, 32, 0)
    rows = list(store.read(tmp_path / "out"))
    assert len(rows) == 32 and result.response_tokens == sum(len(row["response_ids"]) for row in rows)
    assert store.summary(tmp_path / "out").complete


def test_stored_texts_of_clients_are_private(go, tmp_path):
    go([*many(8), {"prompt": "my password is hunter2"}], data={"max_rejected": 1.0})
    (tmp_path / "out").chmod(0o755)  # as if it had existed before
    places = [path for place in ("out", "run") for path in (tmp_path / place).iterdir()]
    told = [path for path in places if b"hunter2" in path.read_bytes()]
    shards = list((tmp_path / "out").glob("shard-*"))
    assert len(told) == 1 and len(shards) == 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in [*told, *shards])
    go(many(8), output="other")
    assert (tmp_path / "other").stat().st_mode & 0o077 == 0


def test_excluded_prompts_are_left_out(go, tmp_path):
    held = tmp_path / "test.jsonl"
    held.write_text(json.dumps({"prompt": "What is 3 + 1?"}) + "\n" + json.dumps({"messages": [ASK, SAY]}) + "\n")
    result = go([*many(10), {"messages": [ASK, SAY, MORE, LATER]}], exclude=held)
    assert result.responses == 10
    asked = [row["messages"][-1]["content"] for row in store.read(tmp_path / "out")]
    assert "What is 3 + 1?" not in asked and ASK["content"] not in asked and MORE["content"] in asked
    held.write_text("{}\n")
    with pytest.raises(DataError, match="1 of 1 prompts rejected"):
        go(many(3), "other", exclude=held)


def test_near_duplicates_of_excluded_prompts_are_left_out_except_later_turns(go, tmp_path):
    """Two answers to one prompt are two samples; a second turn repeats the first but is another prompt."""
    words = " ".join(f"word{n}" for n in range(60))
    asked = [{"prompt": words, "response": "One."}, {"prompt": words, "response": "Two."}]
    near = {"prompt": words + "!", "response": "Three."}
    first = [{"role": "user", "content": words + "?"}, {"role": "assistant", "content": "Yes."}]
    later = {"messages": [*first, {"role": "user", "content": words}, {"role": "assistant", "content": "No."}]}
    held = tmp_path / "test.jsonl"
    held.write_text(json.dumps({"prompt": words + "!!"}) + "\n")
    assert go([*asked, near, later]).responses == 5
    assert go([*asked, near, later], "near", exclude=held).responses == 1
    assert go([*asked, near, later], "all", exclude=held, filters={"near_excluded": None}).responses == 5


def test_a_resumed_run_continues_with_a_longer_log(go, tmp_path):
    go(many(12), data={"limit": 5})
    assert len(list(store.read(tmp_path / "out"))) == 5
    assert go(many(12), resume=True).responses == 12
    assert go(many(20), resume=True).responses == 20
    assert len({row["id"] for row in store.read(tmp_path / "out")}) == len(list(store.read(tmp_path / "out"))) == 20


def test_byte_order_marks_are_skipped(go, tmp_path):
    rows = b"\xef\xbb\xbf" + json.dumps(many(1)[0]).encode() + b"\n"
    (tmp_path / "bom.jsonl").write_bytes(rows * 2)  # two concatenated files
    rejections = Rejections(None, 0.0)
    assert len(list(logs.read(str(tmp_path / "bom.jsonl"), rejections))) == 2 and rejections.count == 0


def test_invalid_lines_are_counted_and_limited(go, tmp_path):
    with pytest.raises(DataError, match="2 of 12 responses rejected") as error:
        go([*many(10), {"messages": [ASK]}, {}])
    assert '"request"' in error.value.hint
    result = go([*many(10), {"messages": [ASK]}, {}], "more", data={"max_rejected": 0.5})
    assert (result.responses, result.rejected) == (10, 2)
    with pytest.raises(DataError, match="no responses"):
        go([], "none")


@pytest.mark.parametrize("fields", [{"server": {"urls": ["http://a"]}}, {"data": {"prompts": "x"}}, {"shard": "0/2"}])
def test_options_for_new_responses_are_refused(fields):
    with pytest.raises(ValueError, match="is for new responses"):
        DistillRecipe.model_validate({"log": "x.jsonl", **fields})


def test_the_command_reads_stdin(specctl, monkeypatch):
    read, write = os.pipe()
    os.write(write, "".join(json.dumps(row) + "\n" for row in many(9)).encode())
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        done = specctl("distill", "--from-log", "-", "--output-dir", "out", "--json")
    assert done.code == 0, done.err
    assert done.json["responses"] == 9 and done.json["domain"] == "stdin"


def test_process_substitution_is_read(tmp_path):
    """`--from-log <(zcat log.gz)` in a shell."""
    read, write = os.pipe()
    os.write(write, "".join(json.dumps(row) + "\n" for row in many(9)).encode())
    os.close(write)
    check_log(DistillRecipe(log=f"/dev/fd/{read}"), f"/dev/fd/{read}")
    turns = list(logs.read(f"/dev/fd/{read}", Rejections(None, 0.0)))
    os.close(read)
    assert len(turns) == 9
    with pytest.raises(DataError, match="log file /dev/null cannot be read: a device"):
        check_log(DistillRecipe(log="/dev/null"), "/dev/null")


def test_data_of_any_name_can_be_trained_on(tmp_path, specctl):
    """Negative control: a name without data is refused."""
    (tmp_path / "traffic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many(9)))
    assert specctl("distill", "--from-log", "traffic.jsonl").code == 0
    plan = specctl("train-drafter", "--domain", "traffic", "--dry-run")
    assert plan.code == 0 and "distilled/traffic" in plan.out, plan.err
    assert specctl("train-drafter", "--domain", "traffik", "--dry-run").code == 2


def served(**change):
    choice = {"message": {"content": "x"}, "finish_reason": "stop", "token_ids": [7, 8, 9], **change}
    response = {"choices": [choice], "prompt_token_ids": [5, 6]}
    return {"request": {"messages": [{"role": "user", "content": "q"}], "temperature": 0.5}, "response": response}


def test_ids_of_the_engine_are_used_unchanged(text):
    (turn,) = logs.turns(served())
    kept = logs.record(turn, "chat", text, {})
    assert (kept["prompt_ids"], kept["response_ids"], kept["temperature"]) == ([5, 6], [7, 8, 9], 0.5)
    assert kept["messages"] == [{"role": "user", "content": "q"}] and kept["stop"] == "eos"


def test_tool_calls_are_learned_if_there_are_ids(text):
    tools = served(message={"content": None, "tool_calls": [{"id": "1"}]}, finish_reason="tool_calls")
    (turn,) = logs.turns(tools)
    kept = logs.record(turn, "chat", text, {})
    assert kept["response_ids"] == [7, 8, 9] and kept["messages"][0]["content"] == text.tokenizer.decode([5, 6])
    other = served(message={"content": None, "tool_calls": [{"id": "1"}]}, token_ids=[7, 8, 10])
    assert logs.turns(other)[0].id != turn.id
    del tools["response"]["prompt_token_ids"]
    with pytest.raises(ValueError, match="tool call 1 has no function name"):
        logs.turns(tools)


def test_ids_outside_the_vocabulary_are_refused(text):
    (turn,) = logs.turns(served(token_ids=[7, 10**6]))
    with pytest.raises(ValueError, match="vocabulary"):
        logs.record(turn, "chat", text, {})
