"""The fields that a proxy adds to requests, and their removal from the answers to its clients."""

import asyncio
import json
import math

import pytest

from specctl.engines import proxy_messages, sglang, vllm


def test_ids_and_counters_are_requested_and_removed_from_answers():
    body = {"messages": [], "stream": True, "stream_options": {"continuous_usage_stats": False}}
    sent, added = proxy_messages.with_counters("vllm", body)
    assert sent["return_token_ids"] and sent["stream_options"] == {
        "continuous_usage_stats": False,
        "include_usage": True,
    }
    assert "return_token_ids" not in body and body["stream_options"] == {"continuous_usage_stats": False}
    piece = {"prompt_token_ids": [1], "choices": [{"token_ids": [2], "delta": {"content": "a"}, "index": 0}]}
    assert proxy_messages.without_added_fields(piece, added) == {"choices": [{"delta": {"content": "a"}, "index": 0}]}
    assert proxy_messages.without_added_fields({"choices": [], "usage": {}}, added) is None


def test_fields_that_the_client_requested_are_kept():
    body = {"prompt": "a", "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    sent, added = proxy_messages.with_counters("vllm", body)
    assert sent == body and not added
    piece = {"choices": [], "usage": {}}
    assert proxy_messages.without_added_fields(piece, added) == piece


def test_requests_to_sglang_and_llamacpp_are_unchanged():
    body = {"text": "a", "stream": True}
    assert proxy_messages.with_counters("sglang", body) == (body, frozenset())
    assert proxy_messages.with_counters("llama.cpp", body) == (body, frozenset())


@pytest.mark.parametrize(
    ("engine", "path", "body", "kept"),
    [
        ("vllm", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, True),
        ("vllm", "/v1/completions", {"prompt": [1, 2]}, True),
        ("vllm", "/v1/completions", {"prompt": "a", "n": 1}, True),
        ("vllm", "/v1/completions", {"prompt": "a", "n": 2}, False),
        ("vllm", "/v1/completions", {"prompt": ["a", "b"]}, False),
        ("vllm", "/v1/completions", {"prompt": [[1], [2]]}, False),
        ("vllm", "/v1/completions", {"prompt": "a", "echo": True}, False),
        ("vllm", "/v1/embeddings", {"input": "a"}, False),
        ("vllm", "/generate", {"text": "a"}, False),
        ("sglang", "/generate", {"text": "a"}, True),
        ("sglang", "/generate", {"text": ["a", "b"]}, False),
        ("sglang", "/v1/chat/completions", {"messages": []}, True),
        ("vllm", "/v1/chat/completions", ["no object"], False),
        ("vllm", "/completion", {"prompt": "a"}, False),
        ("llama.cpp", "/completion", {"prompt": "a"}, True),
        ("llama.cpp", "/completion", {"prompt": ["a", "b"]}, False),
        ("llama.cpp", "/v1/completions", {"prompt": "a", "n_cmpl": 2}, False),
        ("llama.cpp", "/generate", {"text": "a"}, False),
    ],
)
def test_only_requests_for_a_single_text_are_recordable(engine, path, body, kept):
    assert proxy_messages.is_recordable(engine, path, body) is kept


def test_events_end_only_at_empty_lines():
    """JSON may contain U+2028 and U+0085 unescaped, which Unicode treats as line ends."""
    wanted = [b'data: {"text": "a\xe2\x80\xa8b\xc2\x85c"}\n\n', b": ping\n\n", b"data: [DONE]\n\n", b"rest"]
    whole = b"".join(wanted)

    async def parts(size):
        for at in range(0, len(whole), size):
            yield whole[at : at + size]

    async def read(size):
        return [event async for event in proxy_messages.events(parts(size))]

    for size in (1, 3, 7, len(whole)):
        assert asyncio.run(read(size)) == wanted
    assert proxy_messages.piece_of(wanted[0]) == {"text": "a\u2028b\x85c"}
    assert [proxy_messages.piece_of(event) for event in wanted[1:]] == [None] * 3


def test_pieces_of_a_stream_are_joined_to_a_response():
    pieces = [
        {"prompt_token_ids": [1, 2], "choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "SEL"}, "token_ids": [3], "finish_reason": None}]},
        {"choices": [{"delta": {"content": "ECT"}, "token_ids": [4, 5], "finish_reason": "stop"}]},
        {"choices": [], "usage": {}, "metrics": {"speculative_decoding": {}}},
    ]
    whole = proxy_messages.joined(pieces)
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": "SELECT"} and choice["token_ids"] == [3, 4, 5]
    assert whole["prompt_token_ids"] == [1, 2] and whole["metrics"] and choice["finish_reason"] == "stop"
    with pytest.raises(ValueError, match="ended early"):
        proxy_messages.joined(pieces[:2])


def test_sglang_pieces_may_be_cumulative_or_incremental():
    growing = [{"output_ids": [1], "meta_info": {}}, {"output_ids": [1, 2], "meta_info": {"completion_tokens": 2}}]
    fresh = [{"output_ids": [1], "meta_info": {}}, {"output_ids": [2, 3], "meta_info": {"completion_tokens": 4}}]
    assert proxy_messages.joined(growing)["output_ids"] == [1, 2]
    assert proxy_messages.joined(fresh)["output_ids"] == [1, 2, 3]


def test_a_restored_event_is_valid_json():
    event = b'data: {"choices": [{"text": "\xc3\xa9", "token_ids": [1]}]}\n\n'
    shown = proxy_messages.restored_event(event, proxy_messages.piece_of(event), frozenset({"token_ids"}))
    assert json.loads(shown.removeprefix(b"data: ")) == {"choices": [{"text": "é"}]} and shown.endswith(b"\n\n")


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_every_valid_form_of_an_event_is_read(end, size):
    """Three faults: lines with CRLF were delayed until the end of the stream, "data:" without a blank was ignored, and
    an event with a name before its data exposed the added fields to the client."""
    piece = {"choices": [{"text": "a", "token_ids": [1]}]}
    forms = [
        [b"data:" + json.dumps(piece).encode()],
        [b"event: message", b"id: 3", b"data: " + json.dumps(piece).encode(), b"retry: 10"],
        [b"data: " + line for line in json.dumps(piece, indent=1).encode().split(b"\n")],
    ]
    sent = [end.join(form) + 2 * end for form in (*forms, [b"data:[DONE]"], [b": ping"])]
    whole, seen = b"".join(sent), []

    async def parts():
        for at in range(0, len(whole), size):
            yield whole[at : at + size]
            due = sum(len(b"".join(sent[: n + 1])) <= at + size for n in range(len(sent)))
            assert len(seen) >= due - (end == b"\r")  # a final \r may be half of a CRLF

    async def read():
        async for event in proxy_messages.events(parts()):
            seen.append(event)

    asyncio.run(read())
    assert b"".join(seen) == whole and len(seen) == len(sent)
    assert [proxy_messages.piece_of(event) for event in seen] == [piece] * 3 + [None] * 2
    assert proxy_messages.data_of(seen[3]) == b"[DONE]" and proxy_messages.data_of(seen[4]) == b""
    for event in seen[:3]:
        shown = proxy_messages.restored_event(event, proxy_messages.piece_of(event), frozenset({"token_ids"}))
        assert proxy_messages.piece_of(shown) == {"choices": [{"text": "a"}]} and shown.endswith(b"\n\n")
        assert (b"event: message\n" in shown) == (event is seen[1])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 10**400, -1, 1.5, "3", True, None])
def test_invalid_counters_are_ignored(wrong):
    """Python's JSON reads NaN and numbers of any length."""
    for histogram, drafted in (([1, wrong], 3), ([1, 2], wrong)):
        said = {"metrics": {"speculative_decoding": {"acceptance_histogram": histogram, "num_draft_tokens": drafted}}}
        assert vllm.own_drafting(said) is None
        about = {"spec_verify_ct": 3, "spec_correct_drafts_histogram": histogram, "spec_num_proposed_drafts": drafted}
        assert wrong is drafted is None or sglang.own_drafting(about) is None


def test_counters_are_read_from_answers_and_streams():
    drafts = {"speculative_decoding": {"acceptance_histogram": [2, 1], "num_draft_tokens": 3}}
    whole = {"choices": [], "usage": {"completion_tokens": 4}, "metrics": drafts}
    counts = proxy_messages.text_counts("vllm", "/v1/completions", whole)
    assert (counts.tokens, counts.drafting.rounds, counts.drafting.accepted) == (4, 3, 1)
    kept = {}
    for piece in ({"choices": [1]}, {"choices": [2], "usage": None}, whole, None):
        kept |= proxy_messages.counters(piece)
    assert proxy_messages.text_counts("vllm", "/v1/chat/completions", kept) == counts
    assert proxy_messages.text_counts("vllm", "/v1/completions", {"usage": {"completion_tokens": 4}}).drafting is None
    about = {"completion_tokens": 4, "spec_verify_ct": 3, "spec_correct_drafts_histogram": [2, 1]}
    assert proxy_messages.text_counts("sglang", "/generate", {"meta_info": about}).drafting.accepted == 1


@pytest.mark.parametrize(
    ("engine", "path", "said"),
    [
        ("vllm", "/v1/completions", {}),  # a stream that broke off
        ("vllm", "/v1/completions", {"usage": {"completion_tokens": 0}}),
        ("vllm", "/v1/completions", {"usage": "many"}),
        ("sglang", "/v1/completions", {"usage": {"completion_tokens": 4}}),  # SGLang's OpenAI API reports no drafts
    ],
)
def test_incomplete_answers_have_no_counters(engine, path, said):
    assert proxy_messages.text_counts(engine, path, said) is None
