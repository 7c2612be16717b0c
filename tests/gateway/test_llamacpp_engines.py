"""llama-server as an engine of the gateway. The answers are shortened answers of a real server."""

import json

import pytest

from tests.gateway.test_hostile_engines import ask, gateway, hostile, reply, stream_head

CHAT, COMPLETIONS, COMPLETION = "/v1/chat/completions", "/v1/completions", "/completion"
JSON = {"content-type": "application/json"}
PLAIN = '"cache_n":0,"prompt_n":5,"prompt_per_second":4.50e2,"predicted_n":9'
DRAFTS = PLAIN + ',"draft_n":12,"draft_n_accepted":5'


def whole(path, timings):
    """Return the answer to a request without streaming."""
    text = {
        CHAT: '"choices":[{"finish_reason":"length","index":0,"message":{"role":"assistant","content":"é"}}]',
        COMPLETIONS: '"choices":[{"text":"é","index":0,"logprobs":null,"finish_reason":"length"}]',
        COMPLETION: '"index":0,"content":"é","tokens":[],"id_slot":0,"stop":true,"tokens_predicted":9',
    }[path]
    usage = "" if path == COMPLETION else ',"usage":{"completion_tokens":9,"prompt_tokens":5}'
    return ("{" + text + usage + ',"timings":{' + timings + "}}").encode()


def events(path, timings):
    """Return the answer to a streaming request, with counters in the last event."""
    first, last = {
        CHAT: (
            '{"choices":[{"finish_reason":null,"index":0,"delta":{"content":"é"}}]}',
            '{"choices":[{"finish_reason":"length","index":0,"delta":{}}]',
        ),
        COMPLETIONS: (
            '{"choices":[{"text":"é","index":0,"finish_reason":null}]}',
            '{"choices":[{"text":"","index":0,"finish_reason":"length"}]',
        ),
        COMPLETION: ('{"index":0,"content":"é","tokens":[5],"stop":false}', '{"index":0,"content":"","stop":true'),
    }[path]
    done = "" if path == COMPLETION else "data: [DONE]\n\n"
    return f'data: {first}\n\ndata: {last},"timings":{{{timings}}}}}\n\n{done}'.encode()


def answering(timings):
    """Return an engine that answers every path with these timings, streamed or not."""

    def answer(head, body, connection):
        path = head.split()[1].decode()
        if json.loads(body).get("stream"):
            return stream_head() + events(path, timings)
        return reply(whole(path, timings))

    return answer


def body_for(path, stream):
    prompt = '"messages": [{"role": "user", "content": "x"}]' if path == CHAT else '"prompt":  "x"'
    return (
        '{"model": "toy", ' + prompt + ', "temperature": 1.50' + (', "stream": true' if stream else "") + "}"
    ).encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, COMPLETION])
def test_requests_and_answers_pass_unchanged_and_are_counted(path, stream):
    """llama-server always reports its counters, so no byte needs to change."""
    with hostile(answering(DRAFTS)) as engines:
        app, backend = gateway(*engines, engine="llama.cpp")
        (said,) = ask(app, ("POST", path, {"content": body_for(path, stream), "headers": JSON}))
        assert said.content == (events if stream else whole)(path, DRAFTS)
        assert engines[0].requests[0][1] == body_for(path, stream)
    counts = backend.meter.drafters[engines[0].url]
    assert (counts.texts, counts.tokens, counts.rounds, counts.drafted, counts.accepted) == (1, 9, 4, 12, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_texts_go_to_the_server_with_accepted_drafts(stream, capfd):
    """A server without a drafter reports no draft counters, which is not worth a warning."""
    with hostile(answering(DRAFTS)) as (good,), hostile(answering(PLAIN)) as (plain,):
        app, backend = gateway(plain, good, choose="cgp-ucb", engine="llama.cpp")
        answers = ask(app, *[("POST", CHAT, {"content": body_for(CHAT, stream), "headers": JSON})] * 30)
        assert [one.status_code for one in answers] == [200] * 30
        assert len(good.requests) >= 20 > len(plain.requests) >= 1
        mats = [backend.meter.drafters[one.url].mat for one in (good, plain)]
    assert mats == [9 / 4, 1.0] and "does not report" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("path", "fields"),
    [(COMPLETION, {"prompt": ["a", "b"]}), (COMPLETIONS, {"prompt": "a", "n": 2}), (COMPLETION, {"n_cmpl": 2})],
)
def test_requests_for_several_texts_are_not_counted(path, fields):
    """The counters of such an answer cover only one of its texts."""
    with hostile(answering(DRAFTS)) as engines:
        app, backend = gateway(*engines, engine="llama.cpp")
        (said,) = ask(app, ("POST", path, {"json": fields}))
        assert said.content == whole(path, DRAFTS) and not backend.meter.drafters


def test_an_engine_specific_path_goes_to_that_kind_of_engine():
    """vLLM and SGLang have no /completion and answered with status 404."""
    missing = lambda *_: reply(b"{}", status=b"404 Not Found")  # noqa: E731
    with hostile(missing, 2) as others, hostile(answering(DRAFTS)) as (llama,):
        app, backend = gateway(*others, llama)
        backend.servers |= {llama.url: "llama.cpp", others[1].url: "sglang"}
        answers = ask(app, *[("POST", COMPLETION, {"json": {"prompt": "x"}})] * 6)
        assert [one.status_code for one in answers] == [200] * 6 and not any(one.requests for one in others)


POISON = ["1e308", "NaN", "-1", "true", "1" + "0" * 400, '"5"', "null", "9007199254740991"]


@pytest.mark.parametrize("choose", ["cgp-ucb", "metasd-ducb"])
@pytest.mark.parametrize("field", ["predicted_n", "draft_n", "draft_n_accepted"])
@pytest.mark.parametrize("value", POISON, ids=lambda one: one[:20])
def test_absurd_timings_do_not_break_later_choices(field, value, choose):
    told = {"predicted_n": "9", "draft_n": "12", "draft_n_accepted": "5"} | {field: value}
    timings = iter([",".join(f'"{name}":{number}' for name, number in told.items())])
    with hostile(lambda *_: reply(whole(CHAT, next(timings, DRAFTS))), 2) as engines:
        app, backend = gateway(*engines, choose=choose, engine="llama.cpp")
        answers = ask(app, *[("POST", CHAT, {"content": body_for(CHAT, False), "headers": JSON})] * 12)
        assert [one.status_code for one in answers] == [200] * 12
        assert sum(one.tokens for one in backend.meter.drafters.values()) <= 108
    assert not backend.meter.registry.get_sample_value("specctl:faults_total", {"part": "choosing a server"})


def test_properties_are_readable_but_not_writable():
    """`specctl eval-server` reads /props; POST /props changes the server, and /slots shows prompts of users."""
    with hostile(lambda *_: reply(b'{"total_slots": 1}')) as engines:
        app, _ = gateway(*engines, engine="llama.cpp")
        got = ask(app, ("GET", "/props", {}), ("POST", "/props", {"json": {}}), ("GET", "/slots", {}))
        assert [one.status_code for one in got] == [200, 405, 404] and len(engines[0].requests) == 1
