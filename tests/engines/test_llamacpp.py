"""llama-server's protocol. `tests/engines/test_client.py` tests the behavior shared with the other engines."""

import math

import pytest

from specctl.engines import llamacpp
from specctl.engines.client import Client
from specctl.engines.records import (
    DraftCounters,
    EngineError,
    GenerationRequest,
    GenerationResult,
    HiddenStatesSpec,
    MalformedResponse,
    Refusal,
)
from specctl.errors import UsageError
from specctl.recipe import ServerRecipe
from tests.toys.engine import FakeEngine

ASK = GenerationRequest([5, 6, 7], 8)
PAGE = """
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 75
llamacpp:spec_decode_num_accepted_tokens_total 7
llamacpp:spec_decode_num_drafts_total 25
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 6
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 1
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 0
"""
"""Recorded from a server with a drafter, after one text."""


def document(**more):
    """A real server's answer, shortened."""
    timings = {"cache_n": 0, "prompt_n": 12, "predicted_n": 33, "draft_n": 75, "draft_n_accepted": 7}
    plain = {"content": "ab", "tokens": [8, 9], "stop_type": "eos", "truncated": False, "tokens_evaluated": 3}
    return plain | {"timings": timings} | more


@pytest.fixture
def engine(text):
    with FakeEngine(text.tokenizer, "llama.cpp") as server:
        yield server


def recipe(engine, **options):
    return ServerRecipe(urls=[engine.url], retries=0, **options)


def test_counters_of_an_answer_and_of_the_metrics_page_agree():
    """33 tokens are one from the prefill, 25 from rounds and 7 accepted ones."""
    said = llamacpp.own_drafting(document())
    assert said == DraftCounters(25, 75, 7) and said.mat == 1 + 7 / 25
    page = llamacpp.parse_draft_counters(PAGE)
    assert page == DraftCounters(25, 75, 7, [6, 1, 0])
    assert llamacpp.parse_draft_counters(PAGE.replace(" 25", " 0")) is None, "without rounds there is no drafter"


@pytest.mark.parametrize("drafted", [None, 0, -1, math.nan, 10**400, "75", True])
def test_invalid_counters_are_ignored(drafted):
    timings = document()["timings"] | {"draft_n": drafted}
    assert llamacpp.own_drafting(document(timings=timings)) is None
    assert llamacpp.own_drafting(document(timings=drafted)) is None


def test_requests_turn_off_extra_samplers_and_the_prompt_cache():
    body = llamacpp.request_body(GenerationRequest([5], 9, 0.7, 40, 0.9, seed=2**32 - 1), "m")
    assert body["samplers"] == ["temperature", "top_k", "top_p"] and body["cache_prompt"] is False
    assert (body["n_predict"], body["temperature"], body["top_k"], body["top_p"]) == (9, 0.7, 40, 0.9)
    assert body["seed"] == 0, "llama.cpp's largest seed means a random one"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens_evaluated": 2}, "2 prompt tokens, but 3"),
        ({"stop_type": "word"}, "'word'"),
        ({"stop_type": "none"}, "'none'"),
    ],
)
def test_malformed_answers_are_refused(change, says):
    with pytest.raises(MalformedResponse, match=says):
        llamacpp.parse_answer(document(**change), ASK)
    with pytest.raises(MalformedResponse, match="no tokens"):
        llamacpp.parse_answer({"content": "text of an older server"}, ASK)


def test_a_text_cut_by_a_full_slot_is_a_refusal():
    cut = llamacpp.parse_answer(document(stop_type="limit", truncated=True), ASK)
    assert isinstance(cut, Refusal) and "after 2 of 8" in cut.reason and "--ctx-size" in cut.reason
    ended = llamacpp.parse_answer(document(truncated=True), ASK)
    assert isinstance(ended, GenerationResult) and ended.stop == "eos", "the end of the text came first"


def test_a_text_beyond_the_context_is_not_retried(engine, text):
    engine.context = 5
    with Client(recipe(engine)) as client:
        answers = dict(client.answers([GenerationRequest([1, 2, 3, 4], 300)]))
    assert isinstance(answers[0], Refusal) and sum(engine.asked.values()) == 1


def test_concurrency_is_limited_by_the_slots(engine, text, capsys):
    engine.slots, engine.seconds = 2, 0.02
    asks = [GenerationRequest([n + 5], 4) for n in range(12)]
    with Client(recipe(engine, concurrency=8)) as client:
        client.check(text)
        assert len(dict(client.answers(asks))) == 12 and engine.most == 2
        assert len(dict(client.answers(asks, limit=6))) == 12 and engine.most > 2, "an explicit limit"
    assert "--parallel" in capsys.readouterr().err


@pytest.mark.parametrize(
    "page",
    [{}, {"total_slots": 1}, {"total_slots": "1", "default_generation_settings": {"n_ctx": 4}}, [], "<html>"],
    ids=str,
)
def test_a_server_without_its_properties_is_refused(engine, page):
    engine.pages = {"/props": page}
    with pytest.raises(EngineError, match="/props does not tell") as error, Client(recipe(engine)):
        pass
    assert "SPECCTL_API_KEY" in error.value.hint


def test_hidden_states_and_new_drafters_are_refused(engine, text, tmp_path):
    spec = HiddenStatesSpec("m", None, (3,), 8)
    with Client(recipe(engine)) as client:
        with pytest.raises(EngineError, match=r"llama\.cpp, which cannot return hidden states") as error:
            client.check_states(spec)
        assert "vLLM" in error.value.hint
        with pytest.raises(UsageError, match="cannot replace its drafter"):
            client.loaded()
        with pytest.raises(UsageError, match="does not accept corpora"):
            client.publish_corpus("c", None)


def test_without_servers_the_concurrency_is_not_limited_by_slots():
    """`learn-from-server` without a baseline server printed "texts at a time: 0"."""
    with Client(ServerRecipe(concurrency=7)) as client:
        assert client.in_flight == 7
