"""Reading texts from a growing log: whole lines, in order, each once, across rotations, with the engine's token ids."""

import json
import threading
import time

import pytest

from specctl import progress
from specctl.adaptation.traffic import (
    MAX_BACKLOG_CHUNKS,
    LogPosition,
    LogTraffic,
    Tail,
    TrafficByServer,
    parse_served_text,
)
from specctl.distillation.rejections import Rejections
from specctl.engines import proxy_messages
from specctl.errors import DataError, Interrupted


def row(number, **fields):
    choice = {"token_ids": [7, 8, number], "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}}
    response = {"choices": [choice], "prompt_token_ids": [5, number]}
    response["metrics"] = {"speculative_decoding": {"acceptance_histogram": [1, 2], "num_draft_tokens": 3}}
    request = {"messages": [{"role": "user", "content": f"question {number}"}]}
    return {"began": 12.5, "request": request, "response": response} | fields


def write(path, numbers, end="\n"):
    with open(path, "a") as file:
        file.write("".join(json.dumps(row(number)) + end for number in numbers))


def traffic(path, text, size=3, **options):
    return LogTraffic(path, text, {}, Rejections(None, 0.5), size, **options)


def numbers(chunks):
    return [[served.prompt_ids[1] for served in chunk] for chunk in chunks]


def flat(chunks):
    return [number for chunk in chunks for number in chunk]


def test_vllm_ids_and_counters_are_used(text):
    served = parse_served_text(row(9), text, {})
    assert (served.prompt_ids, served.output_ids, served.began) == ([5, 9], [7, 8, 9], 12.5)
    assert (served.drafting.rounds, served.drafting.accepted, served.drafting.accepted_at) == (3, 2, [2])


def test_sglang_ids_are_used(text):
    about = {"finish_reason": {"type": "length"}, "prompt_tokens": 2, "completion_tokens": 2}
    served = parse_served_text(
        {"request": {"input_ids": [5, 6]}, "response": {"output_ids": [7, 8], "meta_info": about}}, text, {}
    )
    assert (served.prompt_ids, served.output_ids, served.drafting) == ([5, 6], [7, 8], None)


def test_without_ids_the_template_renders_them(text):
    given = row(9)
    given["response"] = {"choices": [{"message": {"content": "SELECT 1"}, "finish_reason": "stop"}]}
    served = parse_served_text(given, text, {})
    assert served.prompt_ids == text.render([{"role": "user", "content": "question 9"}])
    assert text.tokenizer.decode(served.output_ids, skip_special_tokens=True).strip() == "SELECT 1"
    assert served.output_ids[-1] in text.eos_ids and served.drafting is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": [7]}, "too short"),
        ({"token_ids": [7, 10**6]}, "vocabulary"),
        ({"token_ids": [7, -1]}, "vocabulary"),
        ({"token_ids": [7] * 10**6}, "context"),
        ({"finish_reason": "abort"}, "abort"),
        ({"finish_reason": "content_filter", "token_ids": None}, "content_filter"),
        ({"token_ids": None, "message": {"content": "a", "reasoning": "b"}}, "thinking outside its content"),
        ({"token_ids": None, "message": {"content": "", "tool_calls": [{}]}}, "no function name"),
    ],
)
def test_unusable_texts_are_refused_with_a_reason(text, change, reason):
    given = row(9)
    given["response"]["choices"][0] |= change
    with pytest.raises(ValueError, match=reason):
        parse_served_text(given, text, {})


@pytest.mark.parametrize("key", ["stop_reason", "matched_stop"])
def test_streamed_answers_keep_reasoning_and_stop_reason(text, key):
    """The proxy used to drop both when it joined a stream, and an empty thought and a false end were learned."""
    deltas = [{"reasoning_content": "hm"}, {"reasoning_content": ", so"}, {"content": "SELECT"}, {"content": " 1"}]
    pieces = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    pieces[-1]["choices"][0] |= {"finish_reason": "stop", key: "###"}
    response = proxy_messages.joined(pieces)
    assert response["choices"][0]["message"]["reasoning_content"] == "hm, so"
    with pytest.raises(ValueError, match="thinking outside its content"):
        parse_served_text(row(9, response=response), text, {})
    served = parse_served_text(row(9, response=proxy_messages.joined(pieces[2:])), text, {})
    assert text.tokenizer.decode(served.output_ids) == "SELECT 1"


@pytest.mark.parametrize("ids", [[7, 8, 9], None])
@pytest.mark.parametrize("reason", ["stop", "length", None])
def test_an_interrupted_text_gets_no_end_token(text, ids, reason):
    given = row(9, began=["no time"])
    message = {"content": "SELECT 1"}
    given["response"]["choices"][0] |= {"token_ids": ids, "finish_reason": reason, "message": message}
    served = parse_served_text(given, text, {})
    assert served.began == 0.0
    assert served.output_ids == ids if ids else (served.output_ids[-1] in text.eos_ids) == (reason == "stop")


def test_a_byte_order_mark_is_skipped(text, tmp_path):
    (tmp_path / "log").write_bytes(b"\xef\xbb\xbf" + json.dumps(row(1)).encode() + b"\n")
    reading = traffic(tmp_path / "log", text, follow=False)
    assert numbers(reading.chunks()) == [[1]] and reading.rejections.count == 0


def test_a_complete_log_is_read_in_chunks(text, tmp_path):
    write(tmp_path / "log", range(1, 21))
    with open(tmp_path / "log", "a") as file:
        file.write("\nno json\n")
    write(tmp_path / "log", [30])
    reading = traffic(tmp_path / "log", text, follow=False)
    found = numbers(reading.chunks())
    assert flat(found) == [*range(1, 21), 30] and {len(chunk) for chunk in found} == {3}
    assert reading.rejections.count == 1 and reading.passed_over == 0


def test_a_complete_log_may_end_without_a_line_end(text, tmp_path):
    """The last text used to be left out without a word."""
    write(tmp_path / "log", [1])
    write(tmp_path / "log", [2], end="")
    assert numbers(traffic(tmp_path / "log", text, follow=False).chunks()) == [[1, 2]]


@pytest.mark.parametrize("began", [10**400, float("nan"), -1, "now"])
def test_an_impossible_time_of_a_request_counts_as_unknown(text, began):
    """A number beyond floats used to end the run."""
    assert parse_served_text(row(1, began=began), text, {}).began == 0


def test_a_limit_ends_the_stream(text, tmp_path):
    write(tmp_path / "log", range(1, 11))
    assert numbers(traffic(tmp_path / "log", text, total=7).chunks()) == [[1, 2, 3], [4, 5, 6], [7]]


def test_resuming_continues_after_a_chunk_without_repeats(text, tmp_path):
    write(tmp_path / "log", range(1, 12))
    first = traffic(tmp_path / "log", text, follow=False)
    chunks = first.chunks()
    taken = numbers([next(chunks), next(chunks)])
    second = traffic(tmp_path / "log", text, follow=False)
    second.resume(json.loads(json.dumps(first.position())))
    assert flat(taken + numbers(second.chunks())) == [*range(1, 12)]
    assert second.position()["prompts"] == 11


def test_an_incomplete_line_waits_for_its_end(tmp_path):
    path, tail = tmp_path / "log", Tail(tmp_path / "log")
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == [b"one\n"]
    assert tail.place.offset == 4
    with open(path, "ab") as file:
        file.write(b"o\n")
    assert list(tail.lines()) == [b"two\n"]


@pytest.mark.parametrize("grows", [True, False])
def test_a_huge_line_is_not_held_in_memory(tmp_path, monkeypatch, grows):
    """A log without line ends was read whole into memory."""
    monkeypatch.setattr("specctl.adaptation.traffic.MAX_LINE_BYTES", 64)
    path, tail = tmp_path / "log", Tail(tmp_path / "log", grows)
    path.write_bytes(b"one\n" + b"x" * 64 + b"\n" + b"y" * 63 + b"\n" + b"z" * 500)
    found = [(line, tail.start) for line in tail.lines()]
    assert found == [(b"one\n", 0), (None, 4), (b"y" * 63 + b"\n", 69)] + [(None, 133)] * (not grows)
    assert len(tail._rest) <= 64 and tail.place.offset == (133 if grows else 633)
    if grows:
        with path.open("ab") as file:
            file.write(b"\ntwo\n")
        assert [*tail.lines()] == [None, b"two\n"]


def test_a_huge_line_of_a_log_is_named(text, tmp_path, monkeypatch):
    monkeypatch.setattr("specctl.adaptation.traffic.MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "log").write_bytes(b"x" * (3 << 20))
    reading = LogTraffic(tmp_path / "log", text, {}, Rejections(None, 0.0), 2, follow=False)
    with pytest.raises(DataError, match="log, byte 0: line longer than"):
        next(reading.chunks())


def test_a_rotation_loses_no_lines(tmp_path):
    path, tail = tmp_path / "log", Tail(tmp_path / "log")
    path.write_bytes(b"one\n")
    assert list(tail.lines()) == [b"one\n"]
    with open(path, "ab") as file:
        file.write(b"two\n")
    path.rename(tmp_path / "log.1")
    path.write_bytes(b"three\n")
    assert list(tail.lines()) == [b"two\n", b"three\n"]
    path.write_bytes(b"4\n")  # truncated and rewritten in place
    assert list(tail.lines()) == [b"4\n"]


def test_a_position_is_found_in_a_rotated_log(tmp_path):
    path, tail = tmp_path / "log", Tail(tmp_path / "log")
    path.write_bytes(b"one\ntwo\n")
    next(tail.lines())
    place = tail.place
    path.rename(tmp_path / "log.1")
    path.write_bytes(b"three\n")
    again = Tail(path)
    again.seek(place)
    assert list(again.lines()) == [b"two\n", b"three\n"]
    lost = Tail(path)
    lost.seek(LogPosition(inode=1, offset=10**9))
    assert list(lost.lines()) == [b"three\n"]


def test_new_texts_are_read_as_they_arrive(text, tmp_path):
    def writer():
        for number in range(1, 7):
            time.sleep(0.05)
            write(tmp_path / "log", [number])

    thread = threading.Thread(target=writer)
    thread.start()
    assert numbers(traffic(tmp_path / "log", text, total=6).chunks()) == [[1, 2, 3], [4, 5, 6]]
    thread.join()


def test_the_oldest_texts_are_skipped_if_learning_is_slower(text, tmp_path):
    write(tmp_path / "log", range(1, 101))
    reading = traffic(tmp_path / "log", text, total=100)
    found = flat(numbers(reading.chunks()))
    assert found == [*range(101 - MAX_BACKLOG_CHUNKS * 3, 101)] and reading.passed_over == 100 - MAX_BACKLOG_CHUNKS * 3


def test_a_signal_ends_the_wait(text, tmp_path, monkeypatch):
    def stop():
        raise Interrupted("SIGTERM")

    monkeypatch.setattr(progress.interrupts, "check", stop)
    with pytest.raises(Interrupted):
        next(traffic(tmp_path / "log", text).chunks())


def test_a_log_without_texts_is_refused(text, tmp_path):
    (tmp_path / "log").write_text("")
    with pytest.raises(DataError, match="no texts in"):
        list(traffic(tmp_path / "log", text, follow=False).chunks())
    (tmp_path / "log").write_text("no json\n" * 3)
    with pytest.raises(DataError, match="3 of 3 prompts rejected"):
        list(traffic(tmp_path / "log", text, follow=False).chunks())


def test_a_busy_server_does_not_displace_the_texts_of_another(text, tmp_path):
    """The texts of all servers used to share one queue during learning, and losses were not counted."""
    path = tmp_path / "log"
    with open(path, "w") as file:
        for number in range(103):
            server = "quiet" if number < 3 else "busy"
            file.write(json.dumps(row(number, server=server)) + "\n")
    made = TrafficByServer(path, text, {}, Rejections(None, 0.5), {"quiet": 3, "busy": 3})
    chunks = made.chunks()
    found = [next(chunks) for _ in range(MAX_BACKLOG_CHUNKS + 1)]
    assert [0, 1, 2] in numbers(found)
    assert made.passed_over_of == {"busy": 100 - 3 * MAX_BACKLOG_CHUNKS}
