"""Agent traces in prompt files and logs: tools, tool calls and text parts go through the target's chat template."""

import json
from copy import deepcopy
from random import Random

import pytest

from specctl.decoding.target_text import load_target_text
from specctl.distillation import logs, store
from specctl.distillation.messages import checked_messages, template_options, text_of, tool_list
from specctl.distillation.prompts import prompts_of_row, read_prompts, render
from specctl.distillation.rejections import Rejections
from specctl.recipe import DataRecipe
from tests.toys.agent_traces import LAYOUTS, hermes, logged, openai, parts, trace, turn_count, with_strings
from tests.toys.tool_templates import CHATML, HERMES, PARTS

WIDE = 1 << 20  # a context for comparing ids of long traces


@pytest.fixture(scope="module")
def loaded():
    return load_target_text("builtin")


@pytest.fixture
def text(loaded, monkeypatch):
    """The built-in target's text side, with a tool template and a large context."""
    monkeypatch.setattr(loaded.tokenizer, "chat_template", HERMES)
    monkeypatch.setattr(loaded, "context_length", WIDE)
    return loaded


def reference(target, messages, tools, **options):
    """Return the ids that `transformers` computes."""
    return target.tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=True, **options
    )["input_ids"]


@pytest.mark.parametrize("seed", range(6))
def test_ids_of_a_trace_equal_its_chat_template(text, seed):
    """Tools, calls and results used to be dropped, so a drafter learned prompts that no target gets."""
    messages, tools = trace(seed)
    row = {"messages": [with_strings(message) for message in messages], "tools": tools}
    prompts = prompts_of_row(row, "agent", "f:1")
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    rejections = Rejections(None, 1.0)
    rendered = [render(text, prompt, rejections, {}) for prompt in prompts]
    assert rendered == [reference(text, messages[:place], tools) for place in places] and len(places) > 1
    assert rejections.count == 0 and tools[0]["function"]["name"] in text.tokenizer.decode(rendered[0])
    logged_turns = logs.turns(row)
    for turn, place in zip(logged_turns, places, strict=True):
        record = logs.record(turn, "agent", text, {})
        whole = text.tokenizer.apply_chat_template(messages[: place + 1], tools=tools, return_dict=True)["input_ids"]
        ids = record["prompt_ids"] + record["response_ids"]
        assert ids == whole[: len(ids)] and ids[-1] in text.eos_ids and record["tools"] == tools
        assert record["prompt_ids"] == reference(text, messages[:place], tools)
        for call in messages[place].get("tool_calls", ()):
            assert f'"name": "{call["function"]["name"]}"' in record["text"]


def test_a_response_includes_the_calls_after_its_text(text):
    """The end of a response used to be searched by its text alone, which cut off the calls."""
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    said = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    (turn,) = logs.turns({"messages": [{"role": "user", "content": "q"}, said]})
    kept = text.tokenizer.decode(logs.record(turn, "a", text, {})["response_ids"])
    assert kept == 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call><|end|>'
    (alone,) = logs.turns({"messages": [{"role": "user", "content": "q"}, said | {"content": None}]})
    row = logs.record(alone, "a", text, {"thinks": True})  # the empty think block belongs to the prompt
    assert text.tokenizer.decode(row["response_ids"]) == kept.removeprefix("I look.\n")
    assert text.tokenizer.decode(row["prompt_ids"]).endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("count", [44, pytest.param(500, marks=pytest.mark.slow)])
def test_no_turn_of_public_layouts_is_lost(text, count):
    """Whole data sets used to be refused, or gave only their last turn."""
    lost = []
    for seed in range(count):
        layout = LAYOUTS[seed % len(LAYOUTS)]
        row = json.loads(json.dumps(layout(seed)))
        turns, wanted = logs.turns(row), turn_count(layout, seed)
        records = [logs.record(turn, "agent", text, {}) for turn in turns]
        lost += [(layout.__name__, seed)] * (len(records) != wanted or not all(r["response_ids"][1:] for r in records))
        if layout is not logged:
            prompts = prompts_of_row(row, "agent")
            assert [prompt.id for prompt in prompts] == [record["prompt_id"] for record in records]
            assert {prompt.first_turn_id for prompt in prompts[1:]} <= {prompts[0].id}
    assert not lost


def test_a_plain_chat_is_one_prompt():
    """Earlier turns are context, and the last turn is the reference."""
    chat = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    (prompt,) = prompts_of_row({"messages": chat}, "chat")
    assert prompt.messages == chat[:3] and prompt.reference == "a" and prompt.first_turn_id is None
    (prompt,) = prompts_of_row({"messages": chat[:3], "tools": openai(1)["tools"]}, "chat")
    assert prompt.tools


def test_tools_in_the_system_prompt_are_not_rendered_again(text):
    """Hermes rows have their tools in the system prompt and in a column."""
    row = hermes(3)
    shown = text.tokenizer.decode(text.render(prompts_of_row(row, "a")[0].messages))
    assert prompts_of_row(row, "a")[0].tools is None and shown.count("<tools>") == 1


@pytest.mark.parametrize(
    ("template", "shown"), [(HERMES, "a  b\n and more<|end|>"), (PARTS, "[a  b][and more]<|end|>")]
)
def test_text_parts_are_passed_in_the_form_the_template_takes(text, template, shown):
    """A text template would print a list as Python code, and a list template needs the single parts."""
    text.tokenizer.chat_template = template
    listed = [{"type": "text", "text": part} for part in ("a  b\n", " and more")]
    messages = checked_messages([{"role": "user", "content": listed}])
    assert shown in text.tokenizer.decode(text.render(messages))
    assert text_of(messages[0]) == "a  b\n and more"
    (single,) = checked_messages([{"role": "user", "content": listed[:1]}])
    assert single["content"] == "a  b\n"


def test_template_options_of_a_row_override_the_recipe(text):
    """For example thinking modes that vary within a data set."""
    text.tokenizer.chat_template = HERMES + "{{ mode }}{{ other }}"
    row = {"prompt": "q", "chat_template_kwargs": {"mode": "fast"}}
    (prompt,) = prompts_of_row(row, "a")
    ids = render(text, prompt, Rejections(None, 0), {"mode": "slow", "other": "kept"})
    assert text.tokenizer.decode(ids).endswith("fastkept")
    assert prompt.id != prompts_of_row({"prompt": "q"}, "a")[0].id
    (turn,) = logs.turns(row | {"response": "x"})
    assert logs.record(turn, "a", text, {"mode": "slow"})["chat_template_kwargs"] == {"mode": "fast"}


def test_content_that_a_template_drops_is_reported(text, capsys):
    """SmolLM2's template has no tools, which used to vanish silently."""
    text.tokenizer.chat_template = CHATML
    rejections = Rejections(None, 1.0)
    for number in range(3):
        for prompt in prompts_of_row(openai(number), "a", f"agents.jsonl:{number + 1}"):
            render(text, prompt, rejections, {})
    said = capsys.readouterr().err
    assert said.count("agents.jsonl: its rows have tools, which the chat template of target builtin") == 1
    assert rejections.count > 0 and all("does not render tool calls" in reason for reason in rejections.reasons)
    text.tokenizer.chat_template = HERMES.replace("message.role == 'tool'", "false")
    asked = {"role": "user", "content": "q"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    result = {"role": "tool", "content": "sunny"}
    (*_, last) = prompts_of_row({"messages": [asked, call, result]}, "a", "f:1")
    rejections = Rejections(None, 1.0)
    assert render(text, last, rejections, {}) is None and "leaves out the last of 3 messages" in rejections.reasons[0]


@pytest.mark.parametrize("escaped", ["message.content", "message.content | tojson"])
def test_tool_results_may_be_rendered_as_json(text, escaped):
    """Llama 3.1's template does this; rows with quotes in a result used to be refused."""
    text.tokenizer.chat_template = HERMES.replace("'\\n<tool_response>\\n' + message.content", f"({escaped})")
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    result = {"role": "tool", "content": 'two\nlines "é" \\ end'}
    assert text.render(checked_messages([{"role": "user", "content": "q"}, call, result]))


BAD = {
    "image": ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "has the type 'image_url'"),
    "audio": ({"role": "user", "content": [{"type": "input_audio"}]}, "has the type 'input_audio'"),
    "part": ({"role": "user", "content": ["x"]}, "part 1 of the content must be an object"),
    "no text": ({"role": "user", "content": [{"type": "text"}]}, "must be a string, got NoneType"),
    "null": ({"role": "user", "content": None}, "content must be a string, got NoneType"),
    "calls": ({"role": "assistant", "content": None, "tool_calls": {}}, "`tool_calls` must be a list"),
    "call": ({"role": "assistant", "content": None, "tool_calls": [3]}, "tool call 1 must be an object"),
    "custom": ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "tool call 1 must be an object of the type"),
    "name": ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, "tool call 1 has no function name"),
    "half": ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a'}]}, "not JSON"),
    "list": (
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
        "must be a JSON object, got list",
    ),
    "nan": ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": NaN}'}]}, "constant NaN"),
    "inf": ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": float("inf")}}]}, "inf is not JSON"),
    "half pair": ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": "\ud800"}}]}, "surrogate"),
    "id": ({"role": "assistant", "tool_calls": [{"id": 3, "name": "f"}]}, "the id of tool call 1 must be a string"),
    "tool id": ({"role": "tool", "content": "x", "tool_call_id": 3}, "`tool_call_id` must be a string"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_fault_in_a_message_is_named(name):
    message, reason = BAD[name]
    with pytest.raises(ValueError, match=reason):
        checked_messages([message])
    with pytest.raises(ValueError, match=f"message 2: .*{reason}"):
        checked_messages([{"role": "user", "content": "q"}, message])


def test_invalid_tools_and_template_options_are_refused():
    """A row must not choose the template, or pass tools that templates cannot read."""
    for value, reason in (
        ("{", "`tools`: not JSON"),
        ({"a": 1}, "must be a list"),
        ([3], "tool 1 must be an object"),
        ([{"type": "retrieval"}], "tool 1 is not a function"),
        ([{"type": "function", "function": {"name": 3}}], "tool 1 has no function name"),
        ([{"name": "f", "parameters": {"a": float("nan")}}], "nan is not JSON"),
        ([{"name": "f", "parameters": json.loads("[" * 70 + "]" * 70)}], "nested deeper than 64"),
    ):
        with pytest.raises(ValueError, match=reason):
            tool_list(value)
    assert tool_list(None) is tool_list([]) is tool_list("") is None
    for name in ("chat_template", "tokenize", "tools", "continue_final_message"):
        with pytest.raises(ValueError, match=f"'{name}' is not allowed"):
            template_options({name: 1})


STRANGE = [None, 3, -1.5, True, [], {}, "", "\ud800", "a\0b", float("nan"), float("inf"), [None], [[]], {"a": None}]
STRANGE += ['{"a": ', "NaN", [{"type": "image_url"}], "x" * 100_000, 10**30, {"role": "user"}, "tool", "{{ 7 * 7 }}"]


def places(value, path=()):
    """Yield the paths of all values inside a nested value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def mutated(seed):
    """Return a trace with one to three values replaced, removed or doubled."""
    draw = Random(seed)
    row = json.loads(json.dumps(LAYOUTS[seed % len(LAYOUTS)](seed)))
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice([*places(row)] or [("messages",)])
        holder = row
        for key in path:
            holder = holder[key]
        kind = draw.random()
        if kind < 0.2:
            del holder[last]
        elif kind < 0.3 and isinstance(holder, list):
            holder.insert(last, deepcopy(holder[last]))
        else:
            holder[last] = deepcopy(draw.choice(STRANGE))
    return row


@pytest.mark.parametrize("count", [66, pytest.param(1000, marks=pytest.mark.slow)])
def test_broken_traces_are_rejected_with_place_and_reason(text, tmp_path, count):
    """Negative control: rows that stay valid are used."""
    file, rejected = tmp_path / "traces.jsonl", tmp_path / "rejected.jsonl"
    file.write_text("".join(json.dumps(mutated(seed)) + "\n" for seed in range(count)))
    for reader in ("prompts", "log"):
        rejections = Rejections(rejected, 1.0)
        used = set()
        if reader == "prompts":
            for prompt in read_prompts(
                DataRecipe(prompts=str(file), max_rejected=1.0), "agent", rejected_to=rejections
            ):
                used |= {prompt.where} if render(text, prompt, rejections, {}) else set()
        else:
            for where, turn in logs.read(str(file), rejections):
                try:
                    assert logs.record(turn, "agent", text, {})["response_ids"]
                    used.add(where)
                except ValueError as error:
                    rejections.add(where, str(error), turn.answer)
        told = [json.loads(line) for line in rejected.read_text().splitlines()]
        assert {one["where"] for one in told} | used >= {f"{file}:{n}" for n in range(1, count + 1)}
        assert all(one["reason"].strip() and "\n" not in one["reason"] for one in told)
        assert count / 10 < len(told) and len(used) > count / 10
        rejected.unlink()


def test_stored_records_keep_tools_and_calls(go, tmp_path):
    rows = [layout(seed) for seed, layout in enumerate((openai, parts, openai))]
    thoughts = {"role": "assistant", "content": "5", "reasoning_content": "2 + 3"}
    later = {"role": "user", "content": "And?"}
    rows.append(
        {"messages": [{"role": "user", "content": "q"}, thoughts, later, {"role": "assistant", "content": "6"}]}
    )
    rows[-1]["messages"][1]["content"] = "5"
    rows[-1] |= {"chat_template_kwargs": {"mode": {"deep": [1, None]}}}
    go(rows[:3])
    kept = {row["id"]: row for row in store.read(tmp_path / "out")}
    turns = [turn for row in rows[:3] for turn in logs.turns(row)]
    assert {turn.id for turn in turns} == kept.keys()
    for turn in turns:
        assert kept[turn.id]["messages"] == turn.messages and kept[turn.id]["tools"] == turn.tools
    chat = logs.turns(rows[-1])[-1]
    go(rows[-1:], "chat", data={"max_rejected": 1.0})
    (row,) = [row for row in store.read(tmp_path / "chat") if row["id"] == chat.id]
    assert row["messages"] == chat.messages and row["messages"][1]["reasoning_content"] == "2 + 3"
    assert row["chat_template_kwargs"] == {"mode": {"deep": [1, None]}}


def test_late_turns_that_do_not_fit_are_not_rejections(go, tmp_path, text):
    """The ends of long traces exceed the context; counted as rejections they would end the command."""
    text.context_length = 2048
    rows = []
    for seed in range(3):
        messages, tools = trace(seed)
        messages[-2]["content"] = "long " * 3000
        rows.append({"messages": [with_strings(message) for message in messages], "tools": tools})
    result = go(rows)
    card = json.loads((tmp_path / "out" / "card.json").read_text())["prompts"]
    assert (result.rejected, card["rejected"], card["too_long"]) == (0, 0, 3) and result.responses >= 3
    lines = (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()
    assert all("do not fit the target's context of 2048" in line for line in lines) and len(lines) == 3


def test_templates_may_need_arguments_as_text_and_empty_content(text):
    """DeepSeek's templates concatenate arguments and content."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": "é"}}]}
    asked = checked_messages([{"role": "user", "content": "q"}, call, {"role": "tool", "content": "x"}])
    text.tokenizer.chat_template = HERMES.replace("call.arguments | tojson", "call.arguments + ''")
    assert '"arguments": {"a": "é"}}' in text.tokenizer.decode(text.render(asked))
    text.tokenizer.chat_template = HERMES.replace("if message.content %}", "if (message.content + '') %}")
    assert "<tool_call>" in text.tokenizer.decode(text.render(asked))


@pytest.mark.parametrize("mark", ["<think>\n\n</think>\n\n", "\n"])
def test_calls_are_found_after_a_prompt_that_the_turn_does_not_repeat(text, mark):
    """Qwen3.5's prompt without thinking ends with an empty think block that the rendered turn lacks.

    A token may also cross the end of the prompt.
    """
    prompt, turn = "{{- '<|im_start|>assistant\\n' }}{%- endif %}\n", "{{- '\\n' + message.content }}"
    assert HERMES.count(turn) == 1 and HERMES.endswith(prompt)
    opened = "{{- " + json.dumps("<|im_start|>assistant\n" + mark) + " }}{%- endif %}"
    text.tokenizer.chat_template = (
        HERMES.removesuffix(prompt).replace(turn, "{{- '\\n\\n' + message.content }}") + opened
    )
    call = {"role": "assistant", "content": "I look.", "tool_calls": [{"name": "f", "arguments": {}}]}
    (turn,) = logs.turns({"messages": [{"role": "user", "content": "q"}, call]})
    row = logs.record(turn, "a", text, {})
    assert row["prompt_ids"] == text.render(turn.messages)
    said = text.tokenizer.decode(row["response_ids"]).lstrip()
    assert said == 'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|end|>'
