"""`learn-from-server`: drafters learn from served texts, are published and tested, and are taken back if they do
harm."""

import dataclasses
import io
import itertools
import json
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from specctl import progress
from specctl.adaptation.served_learner import ServedLearner
from specctl.cli.serve import show
from specctl.commands.learn_from_server import learn_from_server
from specctl.commands.learn_from_servers import LearningServer
from specctl.commands.serve import serve
from specctl.decoding.target import load_target
from specctl.drafters import checkpoint
from specctl.engines import vllm_worker
from specctl.engines.records import EngineError
from specctl.errors import CheckpointError, Interrupted, RecipeError, SpecctlError, UsageError
from specctl.recipe import LearnFromServerRecipe, ServeRecipe
from specctl.runs import Run
from tests.conftest import SIZES, holding, write_tiny
from tests.gateway.conftest import wait_for
from tests.measuring.streams import recipe, write_head, write_prompts
from tests.toys.live import LiveEngine

BETTER, SAME, WORSE = [0, 1, 4], [2, 1, 1], [6, 1, 0]
TAPS = [1, 2, 3]  # engines have the states between layers


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A small target, with a small head to learn. Engines make their texts up."""
    place = write_tiny(tmp_path_factory.mktemp("target"), "LlamaConfig", SIZES | {"num_hidden_layers": 4})
    return load_target(place, device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def head(tmp_path_factory, target):
    return write_head(tmp_path_factory.mktemp("heads") / "eagle3", target, "eagle3", taps=TAPS)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, head):
    from specctl.commands.export import export
    from specctl.recipe import ExportRecipe

    place = tmp_path_factory.mktemp("exported")
    for name in ("vllm", "sglang"):
        export(ExportRecipe(drafter=head, to=name, output_dir=place / name))
    return place


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    monkeypatch.setattr(vllm_worker, "_load", lambda worker, tensors: None)


@pytest.fixture(params=["vllm"])
def engine(request, target, exported):
    with LiveEngine(target, exported / request.param, request.param) as engine:
        yield engine


@pytest.fixture
def go(tmp_path, target, head):
    def run(engine, baseline=None, place="run", **fields):
        prompts = write_prompts(tmp_path, [f"What is {n} + {n + 1}?" for n in range(fields.pop("prompts", 8))])
        fields.setdefault("algo", ["ogd"])
        fields.setdefault("learner", {"holdout": 0, "rest": 0})
        fields.setdefault("server", {"urls": [engine.url]})
        made = recipe(prompts, head, target, LearnFromServerRecipe, output_dir=tmp_path / place, **fields)
        if baseline is not None:
            made = made.model_copy(update={"baseline_server": made.server.model_copy(update={"urls": [baseline.url]})})
        run = Run.create("learn-from-server", made, tmp_path / place)
        found = learn_from_server(made, run, target=target)
        return found, run.result(dataclasses.asdict(found))

    return run


def versions(result):
    return [row["publication"] and row["publication"]["version"] for row in result.per_chunk]


def verdicts(result):
    return [row["publication"] and row["publication"]["verdict"] for row in result.per_chunk]


def test_a_better_drafter_is_published(go, engine, tmp_path, target):
    context = target.context_length
    engine.histograms = {"v000001": SAME, "v000002": BETTER, "v000003": BETTER, "v000004": BETTER, "v000005": BETTER}
    result, document = go(engine, server={"urls": [engine.locked]})
    assert holding(tmp_path / "run", "HUSH") == [], "passwords of addresses are kept nowhere"
    (kept,) = {path for path in (tmp_path / "run").iterdir() if list(path.glob("step-*"))}
    assert kept.stat().st_mode & 0o077 == 0, "token ids of texts are their owner's alone"
    assert verdicts(result) == ["published"] * 4 and result.version == engine.version == "v000005"
    assert [row["version"] for row in result.per_chunk] == ["v000001", "v000002", "v000003", "v000004"]
    assert (result.mat_first, result.mat_last, result.prompts) == (1.75, 2.8, 8)
    first = result.per_chunk[0]["publication"]
    assert (first["mat_before"], first["mat_after"]) == (1.75, 2.8)
    assert engine.posted.count("drafter_swap") == 5 and json.dumps(document)
    assert target.context_length == context != engine.context
    assert checkpoint.load(tmp_path / "run" / "learnt").config["family"] == "eagle3"
    assert len((tmp_path / "run" / "counts.jsonl").read_text().splitlines()) == 8


def test_a_worse_drafter_is_taken_back_by_the_learner_and_the_engine(go, engine, head, tmp_path):
    engine.histograms = {"v000002": WORSE, "v000003": WORSE}
    result, _ = go(engine, prompts=4)
    assert verdicts(result) == ["rolled back"] * 2 and engine.version == result.version == "v000001"
    ours, theirs = (checkpoint.load(place).tensors for place in (tmp_path / "run" / "learnt", head))
    assert all(bool((ours[name].float() == theirs[name].float()).all()) for name in theirs)


def test_five_harmful_chunks_end_a_run(go, engine):
    engine.histograms = {f"v00000{n}": WORSE for n in range(2, 9)}
    with pytest.raises(SpecctlError, match="nothing was learned from 5 chunks"):
        go(engine, prompts=12)
    assert engine.version == "v000001"


def test_results_compare_with_a_server_that_keeps_its_drafter(go, engine, target, exported):
    engine.histograms = {f"v00000{n}": BETTER for n in range(2, 9)}
    with LiveEngine(target, exported / "vllm") as baseline:
        result, _ = go(engine, baseline)
        assert not baseline.posted
    assert result.over_baseline_last == pytest.approx(2.8 / 1.75)
    assert 1 < result.over_baseline < 2.8 / 1.75 and result.over_baseline_interval[0] <= result.over_baseline
    assert [row["baseline_mat"] for row in result.per_chunk] == [1.75] * 4


def test_a_drafter_loaded_by_another_program_is_replaced(go, engine):
    texts = engine.generated

    def generated(body):
        if engine.number == 5:
            engine.tamper("somebody's")
        return texts(body)

    engine.generated = generated
    result, _ = go(engine)
    assert result.restored == 1 and engine.version == result.version


def test_a_run_with_publication_off_publishes_nothing(go, engine):
    result, _ = go(engine, publication={"enabled": False})
    assert not engine.posted and result.version == "" and verdicts(result) == [None] * 4
    assert all(row["steps"] for row in result.per_chunk)


def test_a_resumed_run_equals_a_whole_run(go, engine, tmp_path, target, head, monkeypatch):
    whole, _ = go(engine, place="whole")
    engine.restart()
    chunks = tmp_path / "run" / "chunks.jsonl"

    def stop():
        if chunks.exists() and len(chunks.read_text().splitlines()) == 2:
            raise Interrupted("SIGTERM")

    with monkeypatch.context() as patched, pytest.raises(Interrupted, match="after 2 chunks"):
        patched.setattr(progress.interrupts, "check", stop)
        go(engine)
    resumed, _ = go(engine, resume=True)
    assert engine.version == resumed.version == whole.version
    strip = lambda rows: [{k: v for k, v in row.items() if k not in ("learn_s", "publication")} for row in rows]  # noqa: E731
    assert strip(resumed.per_chunk) == strip(whole.per_chunk) and resumed.mat == whole.mat
    ours, theirs = (checkpoint.load(tmp_path / place / "learnt").tensors for place in ("run", "whole"))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)


def through_proxy(go, engine, count):
    """The result of a run that learns from the texts of its proxy's client."""
    port = []
    every = ([5, 6, 7 + n] for n in itertools.count())
    prompts = list(itertools.islice((ids for ids in every if len(engine.text(ids, 6, 0, 0)[0]) > 1), count))

    def client():
        try:
            wait_for(lambda: port)
            with httpx.Client(transport=httpx.HTTPTransport(verify=False, retries=30)) as http:
                for ids in prompts:  # texts of one token do not count, so their prompts are left out
                    body = {"model": "builtin", "prompt": ids, "max_tokens": 6, "temperature": 0, "seed": 0}
                    answer = http.post(f"{port[0]}/v1/completions", json=body)
                    assert answer.status_code == 200 and "token_ids" not in answer.json()["choices"][0]
        except BaseException:
            progress.interrupts.handle(signal.SIGTERM)  # the run would wait for texts forever
            raise

    thread = threading.Thread(target=client)
    thread.start()
    logged = progress.log

    def log(message):
        if message.startswith("requests that go to "):
            port.append(message.split()[4])
        logged(message)

    progress.log = log
    try:
        return go(engine, data={"limit": count}, traffic={"listen": "127.0.0.1:0"})[0]
    finally:
        progress.log = logged
        thread.join()
        progress.interrupts.reset()


def test_a_run_learns_from_the_texts_of_its_proxy(go, engine, tmp_path):
    for _ in range(2):  # the texts of an earlier run in the same directory, perhaps of another target, do not count
        result = through_proxy(go, engine, 6)
        assert result.prompts == 6 and result.chunks == 3 and result.mat == 1.75
        assert len((tmp_path / "run" / "traffic.jsonl").read_text().splitlines()) == 6


def test_a_run_learns_from_the_texts_of_a_log(go, engine, tmp_path, target):
    rows = []
    for n in range(4):
        ids, stop = engine.text([5, 6, 7 + n], 6, 0, 0)
        choice = {"token_ids": ids, "prompt_token_ids": [5, 6, 7 + n], "finish_reason": stop}
        rows.append({"request": {"prompt": "…"}, "response": {"choices": [choice]}})
    (tmp_path / "log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result, _ = go(engine, traffic={"log": str(tmp_path / "log"), "follow": False})
    assert result.prompts <= 4 and result.mat is None and "published" in verdicts(result)


def test_an_engine_without_acceptance_counts_is_refused_and_unchanged(go, engine):
    engine.histogram = []
    with pytest.raises(EngineError) as error:
        go(engine)
    assert "--per-request-spec-decode-metrics" in error.value.hint and engine.version == "v000001"


def test_a_head_of_another_form_than_the_running_head_is_refused(go, target, tmp_path, head, engine):
    config = json.loads((engine.started / "config.json").read_text())
    (tmp_path / "other").mkdir()
    for path in engine.started.iterdir():
        (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"hidden_size": 1}))
    other = LiveEngine(target, tmp_path / "other")
    with other, pytest.raises(EngineError, match=f"differs in form: hidden_size is {target.hidden_size}"):
        go(other)


def test_sglang_receives_tensors(go, target, exported):
    with LiveEngine(target, exported / "sglang", "sglang") as engine:
        result, _ = go(engine, prompts=4)
        assert engine.version == result.version and engine.posted.count("/update_weights_from_tensor") == 3
        assert any(name.endswith("q_proj.weight") for name in engine.admin.weights) and not engine.admin.paused


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"server": {"urls": ["http://a:1"]}, "algo": ["ogd", "optimistic"]}, "at most 1 item"),
        ({"server": {"urls": ["http://a:1"]}, "algo": ["osd"]}, "rejected positions"),
        ({"server": {"urls": ["http://a:1"]}, "sampling": {"exact": True}}, "sampling.exact is for drafting"),
        ({"server": {"urls": ["http://a:1"]}, "traffic": {"listen": "a:1", "log": "b"}}, "leave one of them out"),
        ({"server": {"urls": ["http://a:1"]}, "traffic": {"listen": "nowhere"}}, "listen"),
        (
            {"server": {"urls": ["http://a:1"]}, "traffic": {"log": "b"}, "baseline_server": {"urls": ["http://b:1"]}},
            "prompts of a stream",
        ),
    ],
)
def test_options_that_a_server_cannot_fulfill_are_refused(fields, problem):
    with pytest.raises(ValueError, match=problem):
        LearnFromServerRecipe.model_validate(fields)


def test_a_run_without_a_server_is_refused():
    with pytest.raises(UsageError, match="no server to learn from"):
        LearnFromServerRecipe().check_server()


def test_a_run_does_not_resume_with_another_recipe(go, engine):
    go(engine, prompts=4)
    with pytest.raises((CheckpointError, RecipeError, SpecctlError)):
        go(engine, prompts=4, resume=True, learner={"holdout": 0.5})


def test_only_held_out_texts_are_asked_again(go, engine):
    """Texts that an update has learned from cannot prove a gain."""
    engine.histograms = {f"v00000{n}": BETTER for n in range(2, 9)}
    result, _ = go(engine, prompts=4, stream={"chunk": 4}, learner={"holdout": 0.25, "rest": 0, "lr": 1e-3})
    (row,) = result.per_chunk
    assert row["publication"] is not None or row["status"] != "updated"
    asked = sorted(engine.asked.values())
    assert asked == ([1, 1, 1, 3] if row["publication"] else [1] * 4)


def test_a_missing_log_is_refused(go, engine, tmp_path):
    with pytest.raises(UsageError, match=r"log file .* does not exist"):
        go(engine, traffic={"log": str(tmp_path / "none")})


def test_servers_of_different_engines_are_refused(go, engine, target, exported, tmp_path):
    other = LiveEngine(target, exported / "sglang", "sglang")
    with other, pytest.raises(UsageError, match="run different engines"):
        go(engine, server={"urls": [engine.url, other.url]})


def test_a_brief_failure_of_an_engine_does_not_end_the_proxy(go, engine):
    """One exchange of drafters fails. Clients still get their answers, and a later version is published."""
    swaps = []

    def breaks(name):
        swaps.extend([name] * (name == "drafter_swap"))
        return "error" if name == "drafter_swap" and len(swaps) == 2 else None

    engine.breaks = breaks
    result = through_proxy(go, engine, 8)
    assert verdicts(result)[0] == "failed" and "published" in verdicts(result)[1:]
    assert engine.version == result.version and result.prompts == 8


def test_clients_are_served_after_learning_has_ended(go, engine, monkeypatch):
    monkeypatch.setattr("specctl.adaptation.traffic.MAX_BACKLOG_CHUNKS", 100)
    engine.histograms = {f"v00000{n}": WORSE for n in range(2, 9)}
    result = through_proxy(go, engine, 14)
    assert verdicts(result) == ["rolled back"] * 5 + [None] * 2 and engine.version == "v000001"
    assert [row["status"] for row in result.per_chunk[5:]] == ["rested"] * 2 and result.prompts == 14


def test_serve_learns_from_running_engines(tmp_path, target, head, engine, monkeypatch):
    """`serve --learn` must publish as `learn-from-server` does, demand the gateway's key, and show the lessons."""
    engine.histograms = {f"v00000{n}": BETTER for n in range(2, 9)}
    monkeypatch.setenv("SPECCTL_SERVE_KEY", "ours")
    asked, pages, address = [[5, 6, 7 + n] for n in range(40)], [], []
    prompts = [ids for ids in asked if len(engine.text(ids, 6, 0, 0)[0]) > 1][:6]
    recipe = ServeRecipe(
        target={"name": target.name, "dtype": "fp32", "device": "cpu"},
        server={"urls": [engine.url]},
        drafters=[str(head)],
        listen="127.0.0.1:0",
        learn={"enabled": True, "chunk": 2, "learner": {"holdout": 0, "rest": 0}},
        output_dir=tmp_path / "run",
    )
    logged = progress.log

    def log(message):
        if message.startswith("requests that go to "):
            address.append(message.split()[4])
        logged(message)

    def client():
        try:
            wait_for(lambda: address)
            with httpx.Client(base_url=address[0], transport=httpx.HTTPTransport(retries=30)) as http:
                body = {"model": "builtin", "max_tokens": 6, "temperature": 0, "seed": 0}
                pages.append(http.post("/v1/completions", json=body | {"prompt": prompts[0]}).status_code)
                http.headers["authorization"] = "Bearer ours"
                for ids in prompts:
                    assert http.post("/v1/completions", json=body | {"prompt": ids}).status_code == 200
                wait_for(lambda: 'learning_lessons_total{status="updated"} 3.0' in http.get("/metrics").text)
                pages.append(http.get("/metrics").text)
        finally:
            progress.interrupts.handle(signal.SIGTERM)

    monkeypatch.setattr(progress, "log", log)
    thread = threading.Thread(target=client)
    thread.start()
    run = Run.create("serve", recipe, tmp_path / "run")
    assert run.dir.stat().st_mode & 0o077 == 0, "the log of texts is its owner's alone"
    found = serve(recipe, run)
    thread.join()
    assert pages[0] == 401 and "specctl:learning 1.0" in pages[1] and "specctl:learning_version 4.0" in pages[1]
    assert found.learning.lessons == 3 and found.learning.version == 4 and engine.version == "v000004"
    assert checkpoint.load(found.learning.drafter).config["family"] == "eagle3"
    assert found.learning.mat_first == 1.75  # later texts may have been drafted by any version
    (row,) = found.drafters
    assert (row.drafter, row.texts, row.failures, row.engine) == (engine.url, len(prompts), 0, "vllm")
    assert row.mat > 1 and (found.requests, found.tokens) == (row.texts, row.tokens)


def test_a_failed_save_of_one_drafter_does_not_stop_the_others(capsys):
    """On a full disk, the first failure at the end once left all other drafters unsaved."""

    def full(start):
        raise OSError(28, "No space left on device")

    LearningServer(SimpleNamespace(save=full), Path("heads/one")).save()
    assert "learned from heads/one is not saved" in capsys.readouterr().err


def test_each_server_learns_from_the_texts_it_wrote(tmp_path, target, head, exported, monkeypatch, capsys):
    """A version must not go to the wrong engine. The failure of one learner must end neither the other learner nor the
    serving."""
    other = write_head(tmp_path / "heads" / "other", target, "eagle3", seed=1, taps=TAPS)
    address, pages, failing = [], [], []
    learn = ServedLearner.learn

    def fails(self, chunk, number, passed_over):
        if failing and self.publisher.engines.servers[0].url == failing[0]:
            raise ValueError("Name a colour.")
        return learn(self, chunk, number, passed_over)

    monkeypatch.setattr(ServedLearner, "learn", fails)
    with LiveEngine(target, exported / "vllm") as one, LiveEngine(target, exported / "vllm") as two:
        engines = {engine.url: engine for engine in (one, two)}
        for engine in engines.values():
            engine.histograms = {f"v{n:06}": BETTER for n in range(2, 99)}
        asked = [[5, 6, 7 + n] for n in range(50)]
        prompts = [ids for ids in asked if len(one.text(ids, 6, 0, 0)[0]) > 1]
        recipe = ServeRecipe(
            target={"name": target.name, "dtype": "fp32", "device": "cpu"},
            server={"urls": [*engines]},
            drafters=[str(head), str(other)],
            choose="random",
            listen="127.0.0.1:0",
            learn={"enabled": True, "chunk": 2, "learner": {"holdout": 0, "rest": 0}},
            output_dir=tmp_path / "run",
        )
        logged = progress.log

        def log(message):
            if message.startswith("requests that go to "):
                address.append(message.split()[4])
            logged(message)

        def version(url):
            page = httpx.get(address[0] + "/metrics").text
            found = [line.split()[-1] for line in page.splitlines() if f'_version{{drafter="{url}"}}' in line]
            return float(found[0]) if found else 0.0

        def client():
            try:
                wait_for(lambda: address)
                with httpx.Client(base_url=address[0], transport=httpx.HTTPTransport(retries=30)) as http:
                    body = {"model": "builtin", "max_tokens": 6, "temperature": 0, "seed": 0}

                    def ask(ids):
                        answer = http.post("/v1/completions", json=body | {"prompt": ids})
                        assert answer.status_code == 200
                        assert answer.json()["usage"]["completion_tokens"] == len(one.text(ids, 6, 0, 0)[0])

                    for ids in prompts[:8]:
                        ask(ids)
                    wait_for(lambda: all(version(url) >= 2 for url in engines))
                    failing.append(one.url)
                    for ids in prompts[8:16]:
                        ask(ids)
                    line = f'specctl:learning{{drafter="{one.url}"}} 0.0'
                    wait_for(lambda: line in http.get("/metrics").text)
                    before = version(two.url)
                    for ids in prompts[16:24]:
                        ask(ids)
                    wait_for(lambda: version(two.url) > before)
                    pages.append(http.get("/metrics").text)
            finally:
                progress.interrupts.handle(signal.SIGTERM)

        monkeypatch.setattr(progress, "log", log)
        thread = threading.Thread(target=client)
        thread.start()
        found = serve(recipe, Run.create("serve", recipe, tmp_path / "run"))
        thread.join()
    assert pages, "the client has failed"
    assert f'specctl:learning{{drafter="{two.url}"}} 1.0' in pages[0] and found.choose == "random"
    assert all(f'specctl:drafter_texts_total{{drafter="{url}"}}' in pages[0] for url in engines)
    learnt = found.learning_by_drafter
    assert found.learning is None and learnt[one.url].failed and not learnt[two.url].failed
    places = [tmp_path / "run/drafters" / name for name in ("eagle3", "other")]
    assert [Path(learnt[url].drafter) for url in engines] == places
    for url, start in ((one.url, head), (two.url, other)):
        assert engines[url].version == f"v{learnt[url].version:06}" and learnt[url].lessons >= 1
        ours, theirs = (checkpoint.load(place).tensors for place in (learnt[url].drafter, start))
        assert any(bool((ours[name].float() != theirs[name].float()).any()) for name in theirs)
        strange = checkpoint.load(places[start == head]).tensors
        near = sum(float((ours[name].float() - theirs[name].float()).square().sum()) for name in theirs)
        assert near < sum(float((ours[name].float() - strange[name].float()).square().sum()) for name in theirs)
    rows = {row.drafter: row for row in found.drafters}
    assert rows.keys() == {*engines} and sum(row.texts for row in rows.values()) == found.requests == 24
    for url, row in rows.items():
        counted = f'specctl:drafter_tokens_total{{drafter="{url}"}} {float(row.tokens)}'
        assert counted in pages[0] and row.tokens > row.texts, "the page and the result count the same"
    console = Console(width=250, file=io.StringIO())
    console.print(show(dataclasses.asdict(found) | {"run_dir": "run"}))
    page = console.file.getvalue()
    assert "first mat   last mat   present mat   lessons   taken back" in page
    for url in engines:
        line = next(line.split() for line in page.splitlines() if line.split()[:1] == [url])
        assert line[1] == str(rows[url].texts) and line[-2:] == [str(learnt[url].lessons), str(learnt[url].rollbacks)]
        assert line[-3] == f"{learnt[url].mat:.2f}" and line[-5] == "1.75"
    said = capsys.readouterr().err
    assert said.count("has failed and ends; it goes on with its present drafter") == 1 and "colour" not in said
    rows = [json.loads(line) for line in (tmp_path / "run/traffic.jsonl").read_text().splitlines()]
    assert {row["server"] for row in rows} == set(engines)
