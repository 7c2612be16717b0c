"""The gateway gives the texts of `generate`, and no request affects another."""

import asyncio
import copy
import functools
import json
import math
import operator
import random
import threading

import httpx
import pytest
import torch

from specctl.commands.generate import generate
from specctl.decoding.controllers import Fixed
from specctl.decoding.device.rounds import DeviceRounds
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.offline import decode
from specctl.decoding.prefix_cache import PrefixCache
from specctl.decoding.records import Request
from specctl.decoding.sampling import GREEDY, Adjustment, Sampling
from specctl.drafters import pool
from specctl.gateway import engine_thread
from specctl.gateway.choosing import controller_for
from specctl.gateway.engine_thread import Channel, EngineThread, Generation
from specctl.gateway.text_stream import decoder
from specctl.recipe import DraftingRecipe, GenerateRecipe, ServeRecipe
from specctl.selection.certificate import Certificate
from tests.conftest import PROMPTS
from tests.gateway.conftest import chat, served, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 7}


def text_of(response):
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["message"]["content"]


def pieces(response_text):
    """Return the events of a stream as documents."""
    events = [event for event in response_text.split("\n\n") if event]
    assert events[-1] == "data: [DONE]" and all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def joined(documents, index=0):
    choices = [choice for one in documents for choice in one["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_texts_equal_generate(target, lookup, make_gateway, drafts, options):
    """In a batch and alone, streamed and whole, with and without a drafter."""
    expected = [
        generate(GenerateRecipe(prompt=prompt, sampling={"max_new_tokens": 24, **options}), target=target).text
        for prompt in PROMPTS
    ]
    gateway = make_gateway(Fixed.of(lookup if drafts else None))
    bodies = [chat(prompt, **options) for prompt in PROMPTS]
    assert [text_of(one) for one in gateway.ask(CHAT, *bodies)] == expected
    streams = gateway.ask(CHAT, *[body | {"stream": True} for body in bodies])
    assert [joined(pieces(one.text))[0] for one in streams] == expected
    assert not gateway.thread.open


@pytest.mark.parametrize("drafts", [False, True])
def test_a_text_that_ignores_ends_goes_on_to_its_limit(target, lookup, make_gateway, drafts):
    """Load tests ask for it. Other texts of the batch end where they did."""
    gateway = make_gateway(Fixed.of(lookup if drafts else None))
    bodies = [chat(prompt, temperature=0) | {"max_tokens": 120} for prompt in PROMPTS[:2]]
    short, other = [one.json() for one in gateway.ask(CHAT, *bodies)]
    assert short["choices"][0]["finish_reason"] == "stop"
    whole, again = [one.json() for one in gateway.ask(CHAT, bodies[0] | {"ignore_eos": True}, bodies[1])]
    assert whole["usage"]["completion_tokens"] == 120 and whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["message"]["content"].startswith(short["choices"][0]["message"]["content"])
    assert again["choices"] == other["choices"]


def test_a_pool_gives_the_same_texts_and_is_counted(target, lookup, make_gateway):
    expected = [text_of(one) for one in make_gateway().ask(CHAT, *[chat(p, temperature=0) for p in PROMPTS])]
    drafters = {"lookup": lookup, "suffix": pool.load_drafter("suffix", target, DraftingRecipe())}
    controller = controller_for(target, drafters, {}, ServeRecipe())
    gateway = make_gateway(controller, None)
    gateway.meter.certificate = Certificate()
    controller.report_to(gateway.thread.note_round, lambda: None, gateway.meter.certify)
    assert [text_of(one) for one in gateway.ask(CHAT, *[chat(p, temperature=0) for p in PROMPTS])] == expected
    assert gateway.metric("specctl:speed_texts_total") == len(PROMPTS)
    counts = gateway.meter.drafters
    assert {*counts} <= {"lookup", "suffix", "no draft"} and sum(one.texts for one in counts.values()) == len(PROMPTS)
    assert sum(one.tokens for one in counts.values()) > 0 and controller.failures == 0


@pytest.mark.parametrize("method", ["begin", "choose", "observe", "end"])
def test_a_failing_policy_changes_no_text(target, lookup, make_gateway, monkeypatch, method):
    """It used to fail each request with status 500."""
    expected = [text_of(one) for one in make_gateway().ask(CHAT, *[chat(p, temperature=0) for p in PROMPTS])]
    controller = controller_for(target, {"lookup": lookup}, {}, ServeRecipe(choose="ucbspec"))
    gateway, original, calls = make_gateway(controller, None), getattr(controller.selector, method), []

    def raising(*args):
        calls.append(args)
        if len(calls) % 3 == 2:
            raise ZeroDivisionError
        return original(*args)

    monkeypatch.setattr(controller.selector, method, raising)
    assert [text_of(one) for one in gateway.ask(CHAT, *[chat(p, temperature=0) for p in PROMPTS])] == expected
    assert controller.failures > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_penalties_and_biases_are_the_decoding_loop_s(target, lookup, make_gateway, drafts):
    """They were refused, although agents send penalties. Other texts of the batch stay."""
    gateway = make_gateway(Fixed.of(lookup if drafts else None))
    prompt = target.tokenizer.encode(PROMPTS[0])
    sent = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": {"17": 4, "30": -100}}
    meant = Adjustment(1.5, -0.5, {17: 4.0, 30: -100.0})
    body = {"prompt": prompt, "max_tokens": 24, "seed": 3, "return_token_ids": True}
    answers = gateway.ask(COMPLETIONS, body | sent, body)
    for response, adjustment in zip(answers, (meant, None), strict=True):
        asked = Request(prompt, Sampling(1.0, 0, 1.0), 24, 3, adjustment=adjustment)
        (expected,) = decode(Engine(target, Fixed.of(None)), [asked])
        (choice,) = response.json()["choices"]
        assert choice["token_ids"] == expected.output_ids
    assert answers[0].json()["choices"][0]["token_ids"] != answers[1].json()["choices"][0]["token_ids"]


def test_chats_tell_their_token_ids_if_asked(target, make_gateway):
    """Roll-outs of RL need the ids that were drawn. vLLM has these names."""
    body = chat(n=2, temperature=0.8, max_tokens=24)
    gateway = make_gateway()
    plain, told, streamed = gateway.ask(
        CHAT, body, body | {"return_token_ids": True}, body | {"return_token_ids": True, "stream": True}
    )
    assert "token_ids" not in plain.text
    events, document = pieces(streamed.text), told.json()
    assert document["prompt_token_ids"] == target.render(body["messages"])
    prompts = [one["prompt_token_ids"] for one in events if "prompt_token_ids" in one]
    assert prompts == [document["prompt_token_ids"]] * 2
    for choice in document["choices"]:
        parts = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert [id for part in parts for id in part.get("token_ids", [])] == choice["token_ids"]
        text = target.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        assert choice["message"]["content"] == text
    assert document["usage"]["completion_tokens"] == sum(len(one["token_ids"]) for one in document["choices"])


def test_completions_tell_their_token_ids_if_asked(make_gateway):
    """A stop string ends the ids: `used` counts the tokens that were read."""
    body = {"prompt": [[40, 41], [50]], "max_tokens": 12, "seed": 0, "return_token_ids": True, "stop": "e"}
    told, streamed = make_gateway().ask(COMPLETIONS, body, body | {"stream": True})
    events = pieces(streamed.text)
    for choice, prompt in zip(told.json()["choices"], body["prompt"], strict=True):
        parts = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert choice["prompt_token_ids"] == prompt == parts[0]["prompt_token_ids"]
        assert [id for part in parts for id in part.get("token_ids", [])] == choice["token_ids"]
    assert told.json()["usage"]["completion_tokens"] == sum(len(one["token_ids"]) for one in told.json()["choices"])


def test_min_p_and_a_least_length_are_the_decoding_loop_s(target, lookup, make_gateway):
    """They were refused. Without the end token, a minimum length would not show: the answer stops at a stop token."""
    prompt = target.tokenizer.encode(PROMPTS[0])
    likely = Sampling(1.0, 0, 1.0, min_p=0.2)
    (free,) = decode(Engine(target), [Request(prompt, likely, 24, 3)])
    stop = free.output_ids[2]
    ends = target.eos_ids | {stop}
    asked = Request(prompt, likely, 24, 3, frozenset({stop}), adjustment=Adjustment(least=6, ends=ends))
    (expected,) = decode(Engine(target), [asked])
    body = {"prompt": prompt, "max_tokens": 24, "seed": 3, "min_p": 0.2, "return_token_ids": True}
    sent = {"stop_token_ids": [stop], "min_tokens": 6}
    answers = make_gateway(Fixed.of(lookup)).ask(COMPLETIONS, body, body | sent)
    assert [one.json()["choices"][0]["token_ids"] for one in answers] == [free.output_ids, expected.output_ids]
    assert stop not in expected.output_ids[:6]


@pytest.mark.parametrize("shown", [False, True])
def test_a_stop_token_ends_the_text(target, make_gateway, shown):
    """As in vLLM it counts as a token, and its text is only shown if that is asked for."""
    prompt = target.tokenizer.encode(PROMPTS[0])
    (free,) = decode(Engine(target), [Request(prompt, GREEDY, 24)])
    stop = free.output_ids[5]
    ids = free.output_ids[: free.output_ids.index(stop) + 1]
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stop_token_ids": [stop], "return_token_ids": True}
    (response,) = make_gateway().ask(COMPLETIONS, body | {"include_stop_str_in_output": shown})
    (choice,) = response.json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (ids, "stop")
    assert choice["text"] == target.tokenizer.decode(ids if shown else ids[:-1], skip_special_tokens=True)
    assert response.json()["usage"]["completion_tokens"] == len(ids)


def test_a_text_with_its_stop_string_and_a_least_length(make_gateway):
    gateway = make_gateway()
    body = {"prompt": "SELECT", "max_tokens": 24, "temperature": 0}
    (plain,) = gateway.ask(COMPLETIONS, body)
    text = plain.json()["choices"][0]["text"]
    stop = text[3:5]
    shown, long = gateway.ask(
        COMPLETIONS, body | {"stop": stop, "include_stop_str_in_output": True}, body | {"stop": stop, "min_tokens": 23}
    )
    assert shown.json()["choices"][0]["text"] == text[: text.index(stop) + 2]
    assert long.json()["usage"]["completion_tokens"] >= 23


def test_load_tests_pay_nothing_for_a_least_length(make_gateway, monkeypatch):
    """Clients send it with ignore_eos. On a GPU an adjustment would keep the rounds on the host."""
    gateway, asked = make_gateway(), []
    submit = gateway.thread.submit
    monkeypatch.setattr(gateway.thread, "submit", lambda one: asked.append(one) or submit(one))
    (response,) = gateway.ask(CHAT, chat(min_tokens=24, ignore_eos=True))
    assert response.json()["usage"]["completion_tokens"] == 24 and not asked[0].request.edits_logits


def prompt_scores(target, ids):
    """Log probabilities [n − 1] of all tokens of a prompt but the first, and the likeliest tokens."""
    rows = torch.stack([target.prefill([ids[:end]], target.new_cache(1, end))[0][0] for end in range(1, len(ids))])
    rows = rows.float().log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), rows.argmax(-1).tolist()


@pytest.mark.parametrize("drafts", [False, True])
def test_an_echo_has_the_log_probabilities_of_the_prompt(target, lookup, make_gateway, monkeypatch, drafts):
    """lm-evaluation-harness compares the choices of a question by the log probabilities of the prompt. The prompts are
    read in parts of 4."""
    monkeypatch.setattr(engine_thread, "PART", 4)
    prompts = [target.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "n": 2}
    gateway = make_gateway(Fixed.of(lookup if drafts else None))
    (plain,) = gateway.ask(COMPLETIONS, body)
    for _again in (False, True):  # also if the prefix cache knows the prompts
        echoed, streamed = gateway.ask(
            COMPLETIONS, body | {"echo": True}, body | {"echo": True, "stream": True, "n": 1}
        )
        choices = echoed.json()["choices"]
        for choice, answer in zip(choices, plain.json()["choices"], strict=True):
            ids = prompts[choice["index"] // 2]
            scores, best = prompt_scores(target, ids)
            found = choice["logprobs"]
            assert choice["text"] == target.tokenizer.decode(ids) + answer["text"]
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            assert found["token_logprobs"][1:-1] == pytest.approx(scores, abs=1e-3)
            assert found["token_logprobs"][-1] == pytest.approx(answer["logprobs"]["token_logprobs"][0], abs=1e-3)
            tops = zip(found["token_logprobs"][1:-1], found["top_logprobs"][1:-1], strict=True)
            greedy = [one == token for one, token in zip(best, ids[1:], strict=True)]
            assert [one == max(top.values()) for one, top in tops] == greedy
            assert found["text_offset"][:2] == [0, len(found["tokens"][0])]
        for index in range(2):
            parts = [one for event in pieces(streamed.text) for one in event["choices"] if one["index"] == index]
            assert "".join(one["text"] for one in parts) == choices[2 * index]["text"]
            told = [one for part in parts for one in part["logprobs"]["token_logprobs"]]
            assert told[1:] == pytest.approx(choices[2 * index]["logprobs"]["token_logprobs"][1:], abs=1e-3)
    assert usage_of(echoed.json()) == usage_of(plain.json())


def usage_of(document):
    """The usage without the tokens that were cached, of which later requests have more."""
    return {key: value for key, value in document["usage"].items() if key != "prompt_tokens_details"}


def cached_tokens(document):
    return document["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("part", [4, 64])
def test_usage_tells_how_much_of_the_prompt_was_cached(make_gateway, monkeypatch, part):
    """As with OpenAI and vLLM. Parts of a prompt that its own request has read do not count."""
    monkeypatch.setattr(engine_thread, "PART", part)
    gateway = make_gateway()
    (first,) = gateway.ask(CHAT, chat())
    count = first.json()["usage"]["prompt_tokens"]
    assert count > 8 and cached_tokens(first.json()) == 0
    options = {"include_usage": True, "continuous_usage_stats": True}
    again, other, streamed, several = [
        gateway.ask(CHAT, body)[0]
        for body in (chat(), chat("How?"), chat(stream=True, stream_options=options), chat(n=2))
    ]
    assert cached_tokens(again.json()) == cached_tokens(several.json()) == count - 1
    assert 0 < cached_tokens(other.json()) < other.json()["usage"]["prompt_tokens"] - 1, "the chat template's beginning"
    assert {cached_tokens(one) for one in pieces(streamed.text)[1:]} == {count - 1}
    body = {"prompt": ["SELECT name FROM", "SELECT name"], "max_tokens": 1}
    (two,) = gateway.ask(COMPLETIONS, body)
    assert cached_tokens(two.json()) == 2, "the second prompt is the beginning of the first"
    (scored,) = gateway.ask(COMPLETIONS, body | {"logprobs": 1, "echo": True})
    assert cached_tokens(scored.json()) == 0, "log probabilities of a prompt need all of it"


def test_an_echo_without_an_answer(make_gateway):
    gateway = make_gateway()
    body = {"prompt": "SELECT name", "max_tokens": 0, "echo": True}
    scored, plain, one = gateway.ask(COMPLETIONS, body | {"logprobs": 0}, body, body | {"prompt": [40], "logprobs": 0})
    for response in (scored, plain):
        (choice,) = response.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("SELECT name", "length")
        assert response.json()["usage"]["completion_tokens"] == 0
    found = scored.json()["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == 2 and found["top_logprobs"] is None
    assert one.json()["choices"][0]["logprobs"]["token_logprobs"] == [None]
    assert not gateway.thread.open


def test_every_piece_of_a_stream_has_the_same_lists_of_log_probabilities(make_gateway):
    """A client appends the lists of the pieces. The echo of a prompt of one token had no list of alternatives."""
    gateway = make_gateway()
    body = {"prompt": [40], "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0}
    whole, streamed = gateway.ask(COMPLETIONS, body, body | {"stream": True})
    found = [one["logprobs"]["top_logprobs"] for event in pieces(streamed.text) for one in event["choices"]]
    tops = [top for piece in found for top in piece]
    assert tops == whole.json()["choices"][0]["logprobs"]["top_logprobs"] and len(tops) == 3


def test_a_prompt_that_cannot_be_read_fails_alone(make_gateway, monkeypatch):
    gateway = make_gateway()
    body = {"prompt": "SELECT name", "max_tokens": 1, "echo": True, "temperature": 0}
    monkeypatch.setattr(engine_thread.PromptLogprobs, "read", lambda *rest: 1 / 0)
    bad, good = gateway.ask(COMPLETIONS, body | {"logprobs": 1}, body)
    assert (bad.status_code, good.status_code) == (500, 200) and not gateway.thread.open


def test_stop_strings_cut_the_text_and_free_the_slot(make_gateway):
    gateway = make_gateway()
    (plain,) = gateway.ask(CHAT, chat(temperature=0))
    text = text_of(plain)
    stop = text[5:8]
    (cut,) = gateway.ask(CHAT, chat(temperature=0, stop=[stop, "never there"]))
    assert text_of(cut) == text[: text.index(stop)] and cut.json()["choices"][0]["finish_reason"] == "stop"
    assert cut.json()["usage"]["completion_tokens"] < plain.json()["usage"]["completion_tokens"]
    wait_for(lambda: not gateway.thread.engine.busy)


def test_log_probabilities_equal_the_target(target, lookup, make_gateway):
    body = chat(temperature=0, logprobs=True, top_logprobs=3)
    (whole,) = make_gateway(Fixed.of(lookup)).ask(CHAT, body)
    (streamed,) = make_gateway().ask(CHAT, body | {"stream": True})
    content = whole.json()["choices"][0]["logprobs"]["content"]
    parts = [
        token
        for one in pieces(streamed.text)
        for choice in one["choices"]
        for token in ((choice.get("logprobs") or {}).get("content") or [])
    ]
    assert len(content) == len(parts) == whole.json()["usage"]["completion_tokens"]
    prompt = target.render(body["messages"])
    (decoded,) = decode(Engine(target), [Request(prompt, Sampling(0.0, 0, 1.0), 24)])
    logits = []
    for end in range(len(decoded.output_ids)):
        cache = target.new_cache(1, len(prompt) + end + 1)
        logits.append(target.prefill([prompt + decoded.output_ids[:end]], cache)[0][0])
    rows = torch.stack(logits).float().log_softmax(-1)
    for row, token, one, other in zip(rows, decoded.output_ids, content, parts, strict=True):
        assert one["token"] == target.tokenizer.decode([token]) == one["top_logprobs"][0]["token"]
        assert math.isclose(one["logprob"], row[token].item(), abs_tol=1e-3)
        assert math.isclose(one["logprob"], other["logprob"], abs_tol=1e-3)
        assert [top["logprob"] for top in one["top_logprobs"]] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


def test_log_probabilities_where_rounds_run_on_a_device(make_gateway, monkeypatch):
    """A GPU refused `logprobs`: its rounds report no logits. The host runs the rounds of a batch that asks for them."""
    asked, other = chat(temperature=0, logprobs=True, top_logprobs=2), chat(temperature=0, max_tokens=40)
    (on_host,) = make_gateway().ask(CHAT, asked)
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    gateway, rounds, play = make_gateway(), [], DeviceRounds.play
    monkeypatch.setattr(DeviceRounds, "play", lambda *one: rounds.append(play(*one)) or rounds[-1])
    (alone,) = gateway.ask(CHAT, asked)
    assert rounds and not any(rounds)
    (plain,) = gateway.ask(CHAT, chat(temperature=0))
    assert any(rounds), "nothing runs on the device"
    together, _ = gateway.ask(CHAT, asked, other)
    contents = [one.json()["choices"][0]["logprobs"]["content"] for one in (on_host, alone, together)]
    assert text_of(alone) == text_of(plain) == text_of(together) != ""
    for content in contents[1:]:
        assert [one["token"] for one in content] == [one["token"] for one in contents[0]]
        for one, reference in zip(content, contents[0], strict=True):
            assert one["logprob"] == pytest.approx(reference["logprob"], abs=1e-3)
            assert len(one["top_logprobs"]) == 2


def test_several_answers_have_different_seeds(make_gateway):
    gateway = make_gateway()
    (together,) = gateway.ask(CHAT, chat(n=3, **SAMPLED))
    alone = gateway.ask(CHAT, *[chat(**SAMPLED | {"seed": 7 + number}) for number in range(3)])
    assert [one["message"]["content"] for one in together.json()["choices"]] == [text_of(one) for one in alone]
    assert together.json()["usage"]["completion_tokens"] == sum(
        one.json()["usage"]["completion_tokens"] for one in alone
    )
    (streamed,) = gateway.ask(CHAT, chat(n=3, stream=True, stream_options={"include_usage": True}, **SAMPLED))
    documents = pieces(streamed.text)
    assert [joined(documents, index)[0] for index in range(3)] == [text_of(one) for one in alone]
    assert documents[-1]["choices"] == [] and usage_of(documents[-1]) == usage_of(together.json())


@pytest.mark.parametrize("logprobs", [False, True])
def test_events_count_tokens_if_asked(make_gateway, logprobs):
    """vLLM's option, which benchmarks of servers set. The first event, which names the role, had no numbers."""
    body = chat(temperature=0, logprobs=logprobs, stream=True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    (counted,) = make_gateway().ask(CHAT, body | {"stream_options": options})
    (plain,) = make_gateway().ask(CHAT, body)  # a cached prefix changes the last bits of log probabilities in fp32
    first, *parts, last = pieces(counted.text)
    assert first["usage"]["completion_tokens"] == 0 and last["choices"] == []
    numbers = [one["usage"]["completion_tokens"] for one in parts]
    assert numbers == sorted(numbers) and numbers[0] >= 1 and numbers[-1] == last["usage"]["completion_tokens"]
    assert [one["choices"] for one in parts] == [one["choices"] for one in pieces(plain.text)[1:]]


def test_completions_accept_texts_and_ids(target, make_gateway):
    gateway = make_gateway()
    ids = target.tokenizer.encode("SELECT name")
    body = {"max_tokens": 8, "temperature": 0}
    by_text, by_ids, both = gateway.ask(
        COMPLETIONS, body | {"prompt": "SELECT name"}, body | {"prompt": ids}, body | {"prompt": ["SELECT name", "The"]}
    )
    assert by_text.json()["choices"][0]["text"] == by_ids.json()["choices"][0]["text"]
    assert both.json()["choices"][0]["text"] == by_text.json()["choices"][0]["text"]
    assert [one["index"] for one in both.json()["choices"]] == [0, 1]


def test_a_text_that_fails_a_step_fails_alone(make_gateway, monkeypatch):
    """Other texts of the batch continue unchanged."""
    bodies = [chat(prompt, temperature=0) for prompt in PROMPTS]
    gateway = make_gateway()
    expected = [text_of(one) for one in gateway.ask(CHAT, *bodies)]
    engine = gateway.thread.engine
    poison = engine.target.render(bodies[1]["messages"])
    original = engine._round

    def failing():
        if any(row.ids[: len(poison)] == poison for row in engine.state.rows if row.stop is None):
            raise RuntimeError("a fault in one text")
        original()

    monkeypatch.setattr(engine, "_round", failing)
    one, bad, other = gateway.ask(CHAT, *bodies)
    assert [text_of(one), text_of(other)] == [expected[0], expected[2]]
    assert bad.status_code == 500 and bad.json()["error"]["type"] == "server_error"
    monkeypatch.undo()
    assert [text_of(one) for one in gateway.ask(CHAT, *bodies)] == expected
    assert gateway.metric("specctl:faults_total", part="engine step") >= 1


def test_a_batch_that_always_fails_gives_errors_and_the_engine_survives(make_gateway, monkeypatch):
    gateway = make_gateway()
    engine, original = gateway.thread.engine, gateway.thread.engine._round

    def failing():
        if len(engine.texts) > 1:
            raise MemoryError
        original()

    monkeypatch.setattr(engine, "_round", failing)
    statuses = {one.status_code for one in gateway.ask(CHAT, *[chat(temperature=0)] * 3)}
    assert statuses <= {200, 500}
    assert text_of(gateway.ask(CHAT, chat(temperature=0))[0])


def test_texts_beyond_the_queue_limit_are_refused(make_gateway, monkeypatch):
    gateway = make_gateway(slots=1, waiting=1)
    original = gateway.thread.engine._round

    def late():
        wait_for(lambda: gateway.metric("specctl:refused_total", limit="waiting texts") == 4)
        original()

    monkeypatch.setattr(gateway.thread.engine, "_round", late)  # no text ends before all have asked
    responses = gateway.ask(CHAT, *[chat(temperature=0)] * 6)
    assert sorted(one.status_code for one in responses) == [200, 200, 429, 429, 429, 429]
    refused = next(one for one in responses if one.status_code == 429)
    assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "busy"


def test_clients_that_leave_free_everything(make_gateway):
    """Before the first token, within a stream, and during a whole answer."""
    gateway = make_gateway(slots=2)
    body = chat("Tell me a long story.", temperature=1.0, max_tokens=1500, ignore_eos=True)
    draw, left = random.Random(0), []  # `left`: whether each abandoned answer was a stream

    async def leave(http, address, stream):
        try:
            async with asyncio.timeout(draw.uniform(0.01, 0.3)):
                async with http.stream("POST", address + CHAT, json=body | {"stream": stream}) as response:
                    async for _ in response.aiter_bytes():
                        pass
        except (TimeoutError, httpx.ReadTimeout):
            left.append(stream)

    async def work(address):
        async with httpx.AsyncClient(timeout=60) as http:
            await asyncio.gather(*[leave(http, address, bool(number % 2)) for number in range(24)])

    with served(gateway.app) as address:
        asyncio.run(work(address))
        wait_for(lambda: not gateway.thread.open and not gateway.app.in_flight)
        wait_for(lambda: not gateway.thread.engine.busy)
    assert left.count(True) == left.count(False) == 12
    assert not gateway.thread._active and gateway.metric("specctl:connections") == 0


def test_the_openai_client_works(make_gateway):
    openai = pytest.importorskip("openai")
    gateway = make_gateway()
    with served(gateway.app) as address:
        client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
        ask = {
            "model": "toy",
            "messages": [{"role": "user", "content": PROMPTS[0]}],
            "max_tokens": 24,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**ask)
        text = whole.choices[0].message.content
        stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        parts = list(stream)
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
        usage = parts[-1].usage
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
        assert usage.model_copy(update={"prompt_tokens_details": whole.usage.prompt_tokens_details}) == whole.usage
        scored = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2, n=2, stop=[text[4:7]])
        assert [one.message.content for one in scored.choices] == [text[: text.index(text[4:7])]] * 2
        assert scored.choices[0].logprobs.content[0].top_logprobs[0].logprob <= 0
        plain = client.completions.create(model="toy", prompt="SELECT", max_tokens=5, temperature=0)
        assert plain.choices[0].text and plain.usage.completion_tokens == 5
        assert [model.id for model in client.models.list()] == ["toy"] and client.models.retrieve("toy").id == "toy"
        with pytest.raises(openai.NotFoundError, match="the model does not exist"):
            client.chat.completions.create(**ask | {"model": "gpt"})
        with pytest.raises(openai.BadRequestError, match="does not render tools: leave 'tools' out"):
            client.chat.completions.create(**ask, tools=[{"type": "function", "function": {"name": "f"}}])

        async def at_once():
            async with openai.AsyncOpenAI(base_url=address + "/v1", api_key="none") as http:
                return await asyncio.gather(*[http.chat.completions.create(**ask) for _ in range(4)])

        assert {one.choices[0].message.content for one in asyncio.run(at_once())} == {text}


def test_prompts_do_not_wait_for_each_other(target, make_gateway, monkeypatch):
    """On a CPU, the first of several prompts waited until all had been read, and so did running texts."""
    gateway = make_gateway()
    engine, begun = Engine(target), []
    thread, step = EngineThread(engine, gateway.meter, "plain"), engine.step
    monkeypatch.setattr(engine, "step", lambda: begun.append(len(engine.waiting)) or step())

    async def work():
        channels = [Channel() for _ in range(4)]
        texts = [
            Generation(Request([5, 6, number], GREEDY, 8), channels[number]) for number in (0, *range(len(channels)))
        ]
        for text in texts:
            thread.submit(text)
        thread.cancel(texts[2])
        thread.start()
        while any(text in thread.open for text in texts):
            await asyncio.sleep(0.01)

    asyncio.run(work())
    thread.stop()
    assert begun[:5] == [2, 0, 1, 0, 1] and sum(begun) == 4, "two texts of a prompt, and one of each other but one"


async def texts_of(thread, prompts, count):
    """Submit all prompts before the thread starts. Returns the tokens of their texts."""
    texts = [Generation(Request(prompt, GREEDY, count), Channel()) for prompt in prompts]
    for text in texts:
        thread.submit(text)
    thread.start()
    while any(text in thread.open for text in texts):
        await asyncio.sleep(0.01)
    return [text.tokens for text in texts]


@pytest.mark.parametrize("reads", [True, False])
def test_running_texts_advance_while_a_long_prompt_is_read(target, make_gateway, monkeypatch, reads):
    """It is read in parts. If a part raises, the engine reads the whole prompt."""
    gateway = make_gateway()
    prefix_cache = PrefixCache(most_bytes=2**26)
    engine, order = Engine(target, options=EngineOptions(prefix_cache=prefix_cache)), []
    thread, step, read = EngineThread(engine, gateway.meter, "plain"), engine.step, prefix_cache.read_ahead

    def read_ahead(*arguments):
        if not reads:
            raise RuntimeError("no memory")
        found = read(*arguments)
        order.append("part" if found else "last part")
        return found

    monkeypatch.setattr(prefix_cache, "read_ahead", read_ahead)
    monkeypatch.setattr(engine, "step", lambda: order.append("prefill" if engine.waiting else "round") or step())
    monkeypatch.setattr(engine_thread, "PART", 8)
    prompts = [[5, 6, 7], [*range(40, 70)]]

    alone = decode(Engine(target), [Request(prompt, GREEDY, 8) for prompt in prompts])
    assert asyncio.run(texts_of(thread, prompts, 8)) == [one.output_ids for one in alone]
    thread.stop()
    if reads:
        assert order[:9] == ["last part", "prefill", *["round", "part"] * 3, "round"]
        assert order[9:11] == ["last part", "prefill"] and prefix_cache.read == 3 + 30


@pytest.mark.parametrize("room, order", [(200, [8, 60, 20, 60, 20, 60, 20, 60, 60]), (69, [8, *[60] * 8, 20, 20, 20])])
def test_short_prompts_pass_a_long_one_in_turns(target, make_gateway, monkeypatch, room, order):
    """A short prompt waited until the long prompt before it was read. Half-read prompts must fit into the cache."""
    gateway = make_gateway()
    prefix_cache, read = PrefixCache(most_bytes=room * target.new_cache(1, 1).nbytes), []
    engine = Engine(target, options=EngineOptions(prefix_cache=prefix_cache))
    thread, read_ahead = EngineThread(engine, gateway.meter, "plain"), prefix_cache.read_ahead

    def spied(target, prompt, *arguments):
        read.append(len(prompt))
        return read_ahead(target, prompt, *arguments)

    monkeypatch.setattr(prefix_cache, "read_ahead", spied)
    monkeypatch.setattr(engine_thread, "PART", 8)
    prompts = [[*range(20, 80)], [*range(90, 110)], [*range(110, 118)]]

    assert asyncio.run(texts_of(thread, prompts, 4)) == [
        decode(Engine(target), [Request(p, GREEDY, 4)])[0].output_ids for p in prompts
    ]
    thread.stop()
    assert read[: len(order)] == order


def test_turns_of_a_conversation_are_read_once(target, make_gateway):
    gateway = make_gateway()
    first = {"role": "user", "content": PROMPTS[0]}
    answer = text_of(gateway.ask(CHAT, chat(PROMPTS[0], temperature=0))[0])
    messages = [first, {"role": "assistant", "content": answer}, {"role": "user", "content": PROMPTS[1]}]
    prompt_ids = [target.render(messages[:count]) for count in (1, 3)]
    second = text_of(gateway.ask(CHAT, chat(temperature=0) | {"messages": messages})[0])
    (expected,) = decode(Engine(target), [Request(prompt_ids[1], GREEDY, 24)])
    assert second == target.tokenizer.decode(expected.output_ids, skip_special_tokens=True)
    read = gateway.metric("specctl:prompt_tokens_read_total", model_name="toy")
    assert len(prompt_ids[0]) < read <= len(prompt_ids[1]), "the first prompt was read once"


def test_the_decoder_equals_the_tokenizer(target):
    """The decoder may use the Rust tokenizer directly."""
    ids = target.tokenizer.encode("SELECT a , b . c FROM d ; it 's é\n")
    ids = [*ids, *target.eos_ids, *ids]
    assert decoder(target.tokenizer)(ids) == target.tokenizer.decode(ids, skip_special_tokens=True)


def test_marks_of_tool_calls_are_text(target):
    """Some tokenizers have them as special tokens. They were left out, so that no call was found."""
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    text = '<tool_call>{"name": "f"}</tool_call>'
    ids = [*tokenizer.encode(text), *target.eos_ids]
    assert tokenizer.decode(ids, skip_special_tokens=True) != text
    for cleans in (False, True):
        tokenizer.clean_up_tokenization_spaces = cleans
        assert decoder(tokenizer)(ids) == text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_engine_thread_is_noticed(make_gateway, monkeypatch):
    gateway, heard = make_gateway(), threading.Event()
    gateway.thread.on_death = lambda error: (gateway.backend.died(), heard.set())

    def end():
        raise SystemExit  # not an Exception, so nothing else catches it

    monkeypatch.setattr(gateway.thread, "_count_threads", end)

    async def work():
        async with gateway.client() as http:
            asking = asyncio.ensure_future(http.post(CHAT, json=chat()))
            await asyncio.to_thread(heard.wait, 20)
            probes = [(await http.get(path)).status_code for path in ("/health", "/ready")]
            return await asking, probes, await http.post(CHAT, json=chat())

    failed, probes, refused = asyncio.run(work())
    assert failed.status_code == 500 and probes == [503, 503] and refused.status_code == 503


def test_completions_have_log_probabilities(make_gateway):
    """A stream has the offsets of the whole answer, even if a stop string delays text.

    The drawn token is among the top tokens.
    """
    body = {"prompt": "SELECT name", "temperature": 1.5, "seed": 1, "max_tokens": 16, "logprobs": 1, "stop": ["e;;;;"]}
    gateway = make_gateway()
    whole, stream = gateway.ask(COMPLETIONS, body, body | {"stream": True})
    found = whole.json()["choices"][0]["logprobs"]
    parts = [one["choices"][0]["logprobs"] for one in pieces(stream.text)]
    assert functools.reduce(operator.iadd, (part["text_offset"] for part in parts if part), []) == found["text_offset"]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob or token == "\ufffd"
