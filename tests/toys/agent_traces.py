"""Generated traces of agents, in the layouts of public data sets."""

import json
from random import Random

WORDS = [
    *("river", "stone", "42", "café", "naïve", '"quoted"', "{brace}", "<b>tag</b>", "O'Neil", "東京"),
    *("\\path", "a\nb"),
]
NAMES = ("get_weather", "search_code", "run_tests", "open_file")


def words(draw, most=6):
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def tool(name):
    city = {"type": "string", "description": "of the call", "enum": ["a", "b"]}
    parameters = {"type": "object", "properties": {"city": city, "days": {"type": "integer"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": f"Do {name}.", "parameters": parameters}}


def trace(seed, only_text=False):
    """(messages, tools): system, user, and 2 to 5 turns of the assistant, with calls and their results in between."""
    draw = Random(seed)
    messages = [{"role": "system", "content": "You help. " + words(draw)}] * draw.randint(0, 1)
    messages += [{"role": "user", "content": words(draw)}]
    for step in range(draw.randint(1, 4)):
        if only_text:
            messages += [
                {"role": "assistant", "content": f"ls {words(draw)}"},
                {"role": "user", "content": words(draw)},
            ]
            continue
        values = [words(draw, 2), 3, None, True, [1, 2.5], {"deep": {"er": "é"}}]
        calls = [
            {
                "id": f"call_{step}_{number}",
                "type": "function",
                "function": {
                    "name": draw.choice(NAMES),
                    "arguments": {"city": words(draw, 2), "x": draw.choice(values)},
                },
            }
            for number in range(draw.choice([1, 1, 2]))
        ]
        messages.append({"role": "assistant", "content": draw.choice([None, words(draw)]), "tool_calls": calls})
        for call in calls:
            result = draw.choice([words(draw), json.dumps({"ok": words(draw, 2)}), ""])
            name = call["function"]["name"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})
    messages.append({"role": "assistant", "content": words(draw)})
    return messages, [tool(name) for name in NAMES[: draw.randint(1, 4)]]


def openai(seed):
    """OpenAI's messages: the arguments are strings of JSON."""
    messages, tools = trace(seed)
    return {"messages": [with_strings(message) for message in messages], "tools": tools}


def with_strings(message):
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})


def parts(seed):
    """OpenAI's messages, with contents as lists of text parts."""
    row = openai(seed)
    for message in row["messages"]:
        if message["role"] in ("user", "tool"):
            message["content"] = [{"type": "text", "text": text} for text in (message["content"], " and more")]
    return row


def hermes(seed):
    """Hermes function calling: calls and results are text, and the system prompt holds the tools."""
    messages, tools = trace(seed)
    told = [{"from": "system", "value": f"Call functions. <tools>{json.dumps(tools)}</tools>"}]
    for message in messages:
        text = message["content"] or ""
        for call in message.get("tool_calls", ()):
            text += f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>\n"
        if message["role"] != "system":
            speaker = {"user": "human", "assistant": "gpt", "tool": "tool"}[message["role"]]
            wrapped = f"<tool_response>\n{text}\n</tool_response>" if speaker == "tool" else text
            told.append({"from": speaker, "value": wrapped})
    return {"id": str(seed), "conversations": told, "tools": json.dumps(tools), "category": "x"}


def toolace(seed):
    """ToolACE: the functions are in `system`, calls are text."""
    messages, _ = trace(seed)
    told = []
    for message in messages:
        called = [f"{call['function']['name']}(city=1)" for call in message.get("tool_calls", ())]
        text = f"[{', '.join(called)}]" if called else message["content"] or "{}"
        if message["role"] != "system":
            told.append({"from": message["role"], "value": text})
    return {"system": "Here is a list of functions in JSON format. …", "conversations": told}


def apigen(seed):
    """APIGen-MT and LLaMA-Factory: calls are turns of a separate speaker, and the tools are a string of JSON."""
    messages, tools = trace(seed)
    told = []
    for message in messages:
        if calls := message.get("tool_calls"):
            called = [call["function"] for call in calls]
            told.append({"from": "function_call", "value": json.dumps(called[0] if len(called) == 1 else called)})
        elif message["role"] != "system":
            speaker = {"user": "human", "assistant": "gpt", "tool": "observation"}[message["role"]]
            told.append({"from": speaker, "value": message["content"]})
    return {"system": "Policy.", "conversations": told, "tools": json.dumps([one["function"] for one in tools])}


def xlam(seed):
    """xLAM: a question with its calls."""
    messages, tools = trace(seed)
    calls = next(message["tool_calls"] for message in messages if message.get("tool_calls"))
    flat = [one["function"] | {"parameters": {"city": {"type": "str", "description": "x"}}} for one in tools]
    answers = json.dumps([call["function"] for call in calls])
    return {"id": seed, "query": words(Random(seed)), "answers": answers, "tools": json.dumps(flat)}


def swe_agent(seed):
    """Trajectories of SWE-agent: roles and texts have other names."""
    messages, _ = trace(seed, only_text=True)
    steps = [{"role": "system", "system_prompt": "SETTING: …", "text": None, "mask": False, "cutoff_date": "x"}]
    for message in messages:
        role = {"assistant": "ai"}.get(message["role"], message["role"])
        steps += [{"role": role, "text": message["content"], "system_prompt": None}] * (role != "system")
    return {"instance_id": "a__b-1", "trajectory": steps, "exit_status": "submitted"}


def openhands(seed):
    """Trajectories of OpenHands: OpenAI's messages with every field, most of them null."""
    row = openai(seed)
    empty = dict.fromkeys(("tool_calls", "tool_call_id", "name", "function_call", "refusal"))
    return {"trajectory": [empty | message for message in row["messages"]], "tools": row["tools"]}


def swe_smith(seed):
    """SWE-smith: the messages are a string of JSON."""
    row = openai(seed)
    return row | {"messages": json.dumps(row["messages"])}


def traj(seed):
    """Files *.traj of SWE-agent."""
    row = openai(seed)
    steps = [{"agent": "main", "message_type": "x", "thought": "", **message} for message in row["messages"]]
    return {"history": steps, "trajectory": [{"action": "ls", "observation": "x"}], "tools": row["tools"]}


def logged(seed):
    """A request to a server with its response."""
    row = openai(seed)
    *asked, said = row["messages"]
    choice = {"message": said | {"refusal": None}, "finish_reason": "stop"}
    return {
        "request": {"model": "m", "tool_choice": "auto", **row, "messages": asked},
        "response": {"choices": [choice]},
    }


LAYOUTS = (openai, parts, hermes, toolace, apigen, xlam, swe_agent, openhands, swe_smith, traj, logged)


def turn_count(layout, seed):
    """The number of assistant turns in a generated row."""
    if layout in (xlam, logged):
        return 1
    messages, _ = trace(seed, only_text=layout is swe_agent)
    return sum(message["role"] == "assistant" for message in messages)
