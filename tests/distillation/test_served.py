"""`distill --server` answers every prompt once, despite failing servers, requests and processes."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter

import pytest

from specctl.distillation import store
from specctl.distillation.generate import distill
from specctl.engines.records import EngineError
from specctl.errors import DataError, Interrupted
from specctl.progress import interrupts
from specctl.recipe import DistillRecipe
from specctl.runs import Run
from tests.cli.conftest import specctl
from tests.conftest import holding
from tests.distillation.test_store import by_id
from tests.toys.engine import FAULTS, FakeEngine

__all__ = ["specctl"]

COUNT = 60


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {n} + {n * n}?"}) + "\n" for n in range(COUNT)))
    return path


def go(questions, output, engine, text, **fields):
    server = {"urls": [engine.url], "concurrency": 8, **fields.pop("server", {})}
    data = {"domain": ["math"], "prompts": str(questions), **fields.pop("data", {})}
    recipe = {"data": data, "server": server, "batch_size": 4, "shard_size": 7, "output_dir": output, **fields}
    (output.parent / "run").mkdir(exist_ok=True)
    return distill(DistillRecipe.model_validate(recipe), Run(output.parent / "run"), target=text)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_stored_texts_are_those_of_the_engine(questions, tmp_path, text, kind):
    with FakeEngine(text.tokenizer, kind) as engine:
        result = go(questions, tmp_path / "out", engine, text, server={"urls": [engine.locked]})
        assert holding(tmp_path, "HUSH") == [], "passwords of addresses are kept nowhere"
        rows = list(store.read(tmp_path / "out"))
        assert (result.responses, result.rejected, len(rows)) == (COUNT, 0, COUNT)
        for row in rows:
            seed = row["seed"] % 2**63 if kind == "vllm" else row["seed"] % 2**31
            ids, stop = engine.text(row["prompt_ids"], 128, row["temperature"], seed)
            assert (row["response_ids"], row["stop"]) == (ids, {"stop": "eos", "length": "length"}[stop])
            assert row["prompt_ids"] == text.render(row["messages"])
            assert row["text"] == text.tokenizer.decode(ids, skip_special_tokens=True)
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["engine"] == [kind]


def test_data_names_the_engines_model_that_wrote_it(questions, tmp_path, text):
    """The engine's first model is the target itself. Another one may have an adapter: its texts are not mixed in."""
    with FakeEngine(text.tokenizer) as engine:
        engine.adapters = ["law"]
        for model in (None, "toy", "law"):
            go(questions, tmp_path / str(model), engine, text, server={"model": model}, data={"limit": 4})
            meta = json.loads((tmp_path / str(model) / "meta.json").read_text())
            assert meta.get("model") == (model if model == "law" else None)
        assert json.loads((tmp_path / "law" / "card.json").read_text())["model"] == "law"
        with pytest.raises(DataError, match='model was null and is "law" now'):
            go(questions, tmp_path / "None", engine, text, server={"model": "law"}, data={"limit": 4}, resume=True)


def test_failing_requests_change_nothing(questions, tmp_path, text):
    """A fifth of the requests fail, in five ways; the number of requests is the negative control."""
    with FakeEngine(text.tokenizer) as engine:
        go(questions, tmp_path / "whole", engine, text)
    with FakeEngine(text.tokenizer, faults=lambda n: FAULTS[n // 5 % len(FAULTS)] if n % 5 == 0 else None) as engine:
        result = go(questions, tmp_path / "out", engine, text, server={"timeout_s": 0.3})
        assert engine.number >= COUNT + 12 and result.responses == COUNT
    assert list(store.read(tmp_path / "out")) == list(store.read(tmp_path / "whole"))


@pytest.mark.slow
def test_killed_runs_resume_to_the_undisturbed_result(questions, tmp_path, text):
    context, moments = multiprocessing.get_context("fork"), random.Random(3)
    with FakeEngine(text.tokenizer, seconds=0.1) as engine:
        go(questions, tmp_path / "whole", engine, text)
        deaths = 0
        for _ in range(20):
            options = {"resume": True, "server": {"concurrency": 2}}
            process = context.Process(target=go, args=(questions, tmp_path / "out", engine, text), kwargs=options)
            process.start()
            process.join(0.2 + 0.4 * moments.random())
            process.kill()
            process.join()
            deaths += process.exitcode == -signal.SIGKILL
        assert deaths >= 5
        result = go(questions, tmp_path / "out", engine, text, resume=True)
    assert result.responses == COUNT and by_id(tmp_path / "out") == by_id(tmp_path / "whole")
    assert max(Counter(row["id"] for row in store.read(tmp_path / "out")).values()) == 1


def test_a_signal_keeps_received_answers_and_resume_completes(questions, tmp_path, text):
    before = signal.getsignal(signal.SIGTERM)
    try:
        interrupts.remember_signals()
        with FakeEngine(text.tokenizer, seconds=0.02) as engine:
            engine.faults = lambda number: os.kill(os.getpid(), signal.SIGTERM) if number == 30 else None
            with pytest.raises(Interrupted) as stop:
                go(questions, tmp_path / "out", engine, text)
            assert stop.value.exit_code == 75
            interrupts.reset()
            stored = [tuple(row["prompt_ids"]) for row in store.read(tmp_path / "out")]
            assert 12 <= len(stored) < COUNT
            engine.faults = lambda number: None
            assert go(questions, tmp_path / "out", engine, text, resume=True).responses == COUNT
            # the server may count a request of the interrupted run late
            assert {engine.asked[prompt] for prompt in stored} == {1}
    finally:
        interrupts.reset()
        signal.signal(signal.SIGTERM, before)


def test_a_permanently_failing_server_loses_nothing(questions, tmp_path, text):
    with FakeEngine(text.tokenizer) as engine:
        engine.faults = lambda number: "error" if number > 25 else None
        with pytest.raises(EngineError, match="status 500"):
            go(questions, tmp_path / "out", engine, text, server={"retries": 1, "concurrency": 1})
        assert 20 <= len(list(store.read(tmp_path / "out"))) <= 25
        engine.faults = lambda number: None
        assert go(questions, tmp_path / "out", engine, text, resume=True).responses == COUNT


def test_prompts_refused_by_the_engine_are_rejected_with_its_reason(questions, tmp_path, text):
    with FakeEngine(text.tokenizer) as engine:
        engine.faults = lambda number: "refused" if number == 3 else None
        result = go(questions, tmp_path / "out", engine, text, data={"max_rejected": 0.05})
        assert (result.responses, result.rejected) == (COUNT - 1, 1)
        assert "maximum context length" in (tmp_path / "run" / "rejected.jsonl").read_text()
        engine.faults = lambda number: "refused" if number % 2 else None
        with pytest.raises(DataError, match="maximum context length"):
            go(questions, tmp_path / "more", engine, text)
        assert not store.summary(tmp_path / "more").complete


def test_a_budget_ends_at_the_same_response(questions, tmp_path, text):
    """In the order of the plan, independent of the order of answers."""
    with FakeEngine(text.tokenizer) as engine:
        engine.faults = lambda number: "slow" if number in (2, 9) else None
        go(questions, tmp_path / "one", engine, text, max_response_tokens=150)
        engine.faults = lambda number: None
        go(questions, tmp_path / "two", engine, text, max_response_tokens=150, server={"concurrency": 1})
    assert list(store.read(tmp_path / "one")) == list(store.read(tmp_path / "two"))


def test_resuming_with_another_engine_is_refused(questions, tmp_path, text):
    with FakeEngine(text.tokenizer) as engine, FakeEngine(text.tokenizer, "sglang") as other:
        go(questions, tmp_path / "out", engine, text)
        with pytest.raises(DataError, match="engine was"):
            go(questions, tmp_path / "out", other, text, resume=True)


class TestCommand:
    def test_served_data_is_reported_as_json(self, questions, tmp_path, text, specctl):
        with FakeEngine(text.tokenizer) as engine:
            where = ["--prompts", str(questions), "--output-dir", str(tmp_path / "out"), "--server", f"{engine.url}/v1"]
            started = time.monotonic()
            done = specctl("distill", *where, "--json")
            assert done.code == 0, done.err
            assert done.json["responses"] == COUNT and time.monotonic() - started < 600
            assert "torch" not in done.err

    @pytest.mark.parametrize(
        ("change", "code", "says"),
        [
            (lambda engine: engine.pages.update({"/v1/models": "<html>"}), 1, "instead of JSON"),
            (lambda engine: setattr(engine, "tokenizer", Letters()), 4, "different tokenizer"),
        ],
    )
    def test_an_unsuitable_server_is_refused(self, questions, tmp_path, text, specctl, change, code, says):
        with FakeEngine(text.tokenizer) as engine:
            change(engine)
            where = ["--prompts", str(questions), "--output-dir", str(tmp_path / "out")]
            done = specctl("distill", *where, "--server", engine.url)
        assert done.code == code and says in done.err and "Traceback" not in done.err
        assert not list((tmp_path / "out").glob("shard*"))

    def test_a_plan_sends_no_requests(self, questions, specctl):
        address = "http://user:geheim@127.0.0.1:9"
        done = specctl("distill", "--prompts", str(questions), "--server", address, "--dry-run")
        assert done.code == 0 and "from http://user:***@127.0.0.1:9" in done.out.replace("\n", " "), done.err
        assert "geheim" not in done.out + done.err


class Letters:
    def encode(self, words, add_special_tokens):
        return [ord(letter) for letter in words]
