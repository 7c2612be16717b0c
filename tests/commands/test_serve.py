"""`specctl serve` as users start it: a process that answers requests, finishes them on a signal, and reports its
result."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from specctl import progress
from specctl.commands.serve import api_key, model_name, serve
from specctl.decoding.target_text import load_target_text
from specctl.drafters import checkpoint
from specctl.errors import UsageError
from specctl.recipe import ServeRecipe
from specctl.runs import Run
from tests.cli.conftest import specctl
from tests.commands.test_serve_engines import learns_at_once
from tests.measuring.streams import write_head
from tests.toys.engine import FakeEngine

__all__ = ["learns_at_once", "specctl"]


def test_dry_run_prints_the_drafters_and_the_policy(specctl):
    done = specctl("serve", "--drafter", "lookup", "--drafter", "suffix", "--dry-run", "--listen", "127.0.0.1:0")
    assert done.code == 0 and "choose among lookup, suffix for every text, by cgp-ucb" in done.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--choose", "nothing"), "no policy 'nothing'"),
        (("--drafter", "nowhere"), "no drafter nowhere"),
        (("--listen", "8000"), "must be HOST:PORT"),
        (("slots=0",), "slots"),
        (("--drafter", "lookup", "--drafter", "suffix", "drafting.proposal=sampled"), "serve one drafter"),
        (("--learn",), "learn: name a drafter that learns"),
        (("--learn", "--pool", "drafters"), "lookup, suffix have no weights that learn"),
        (("--learn", "--drafter", "lookup", "--drafter", "suffix"), "lookup, suffix have no weights that learn"),
        (("--learn", "--pool", "drafters", "--server", "http://a:1"), "one --drafter for all servers, or one for each"),
        (("--learn", *("--drafter", "lookup") * 3, "--server", "http://a:1,http://b:1"), "or one for each server"),
        (("--learn", "--drafter", "lookup"), "lookup has no weights that learn"),
        (("--learn", "--drafter", "lookup", "learn.algo=static"), "a rule that learns"),
        (("--learn", "--drafter", "lookup", "learn.algo=ogd-eagle3"), "without a family"),
        (("--learn", "--drafter", "lookup", "learn.device=gpu"), "should be auto, cpu, cuda or cuda:N"),
        (("--server", "http://a:1", "--drafter", "lookup"), "leave out drafters and pool"),
        (("--log", "tensorboard"), "add --learn"),
    ],
)
def test_contradictory_options_are_refused_in_one_line(specctl, argv, words):
    done = specctl("serve", *argv)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err


def test_dry_run_says_what_learning_does(specctl, tmp_path):
    """The plan must say where the texts of clients are stored, and how much time learning may take."""
    (tmp_path / "head").mkdir()
    for name in ("config.json", "drafter.json"):
        (tmp_path / "head" / name).write_text('{"family": "eagle3"}')
    head = str(tmp_path / "head")
    own = specctl("serve", "--learn", "--drafter", head, "--dry-run").out
    assert "learn by ogd after every 40 texts, for at most 5% of the time" in own and "low priority" in own
    both = specctl("serve", "--learn", "--drafter", head, "--server", "http://a:1", "--dry-run").out
    assert "write the texts to a log" in both and "roll back worse ones" in both and "5%" not in both
    pool = specctl("serve", "--learn", "--drafter", head, "--drafter", "lookup", "--dry-run").out
    assert "choose among" in pool and "learn by ogd after every 40 texts, for at most 5% of the time" in pool
    (tmp_path / "other").mkdir()
    for name in ("config.json", "drafter.json"):
        (tmp_path / "other" / name).write_text('{"family": "hydra"}')
    pool = " ".join(specctl("serve", "--learn", "--pool", str(tmp_path), "--dry-run").out.split())
    assert f"{head}, {tmp_path}/other learn by ogd after every 40 or 80 texts" in pool
    assert "in turns, each from its own texts" in pool
    servers = ("--server", "http://a:1,http://b:1", "--drafter", head, "--drafter", "lookup")
    each = " ".join(specctl("serve", "--learn", *servers, "--dry-run").out.split())
    assert "each by the server that cgp-ucb chooses" in each and "learn by ogd after every 40 texts" in each


@pytest.mark.slow
def test_learned_weights_are_saved_and_can_be_served_again(tmp_path, target):
    """At the end they are on the disk, without any text of a client."""
    start, environ = write_head(tmp_path / "head", target, "eagle3"), os.environ | {"OMP_NUM_THREADS": "1"}
    body = {"messages": [{"role": "user", "content": "A quokka asks"}], "max_tokens": 24, "temperature": 1, "n": 4}
    for place, drafter in (("one", start), ("two", tmp_path / "one/drafter")):
        command = [sys.executable, "-m", "specctl", "serve", "--drafter", str(drafter), "--listen", "127.0.0.1:0"]
        settings = ["--learn", "learn.chunk=4", "learn.learner.budget=null", "learn.learner.holdout=0", "--log"]
        process = subprocess.Popen(
            [*command, *settings, "tensorboard", "--json", "--device", "cpu", "--output-dir", place],
            **{"cwd": tmp_path, "env": environ, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
        )
        said = ""
        while " at http" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        address = said.partition(" at ")[2].partition(",")[0]
        until = time.monotonic() + 120
        while "learning_version 0.0" in httpx.get(address + "/metrics", timeout=60).text:
            assert time.monotonic() < until, "no update happened in time"
            assert httpx.post(address + "/v1/chat/completions", json=body, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        learning = json.loads(out)["learning"]
        assert learning["version"] >= 1 and learning["lessons"] >= 1 and not learning["failed"]
        assert checkpoint.load(tmp_path / place / "drafter").config["family"] == "eagle3"
        assert list((tmp_path / place / "tensorboard").iterdir())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"quokka" in path.read_bytes()]


def test_the_api_key_is_read_from_the_environment(monkeypatch, capfd):
    monkeypatch.setenv("SPECCTL_SERVE_KEY", "hush")
    assert api_key(ServeRecipe()) == "hush"
    monkeypatch.setenv("SPECCTL_SERVE_KEY", " ")
    with pytest.raises(UsageError, match="is empty"):
        api_key(ServeRecipe())
    for key in ("hush\n", "a b", "schlüssel"):
        monkeypatch.setenv("SPECCTL_SERVE_KEY", key)
        with pytest.raises(UsageError, match="has spaces, line ends or letters beyond ASCII"):
            api_key(ServeRecipe())
    monkeypatch.delenv("SPECCTL_SERVE_KEY")
    assert api_key(ServeRecipe()) is None and "anybody" not in capfd.readouterr().err
    assert api_key(ServeRecipe(listen="0.0.0.0:8000")) is None and "anybody" in capfd.readouterr().err


def test_the_served_model_name_has_no_directory(tmp_path):
    (tmp_path / "m.gguf").write_text("")
    assert model_name(str(tmp_path / "m.gguf")) == "m.gguf" and model_name("org/model") == "org/model"


def test_serve_forwards_requests_to_running_engines(tmp_path, capsys, learns_at_once):
    tokenizer = load_target_text("builtin").tokenizer
    found = []
    with FakeEngine(tokenizer) as one, FakeEngine(tokenizer) as other:
        made = ServeRecipe(server={"urls": [one.url, other.url]}, listen="127.0.0.1:0", output_dir=tmp_path)
        thread = threading.Thread(target=lambda: found.append(serve(made, Run.create("serve", made, tmp_path))))
        thread.start()
        said = ""
        try:
            while " at http" not in said:
                assert thread.is_alive(), said
                time.sleep(0.02)
                said += capsys.readouterr().err
            address = said.partition(" at ")[2].partition(" ")[0]
            body = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 30}
            with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as http:
                assert [http.post(address + "/v1/completions", json=body).status_code for _ in range(6)] == [200] * 6
                assert http.post(address + "/pause", json={}).status_code == 404
                assert "text/html" in http.get(address).headers["content-type"]
        finally:
            progress.interrupts.handle(signal.SIGTERM)
            thread.join(60)
            progress.interrupts.reset()
    assert found[0].model == "toy" and found[0].choose == "cgp-ucb" and one.asked and other.asked


def test_a_signal_finishes_running_requests_and_exits_with_0(tmp_path):
    """Both a stream that has begun and a response that has not are complete when the process ends."""
    command = [sys.executable, "-m", "specctl", "serve", "--drafter", "lookup", "--listen", "127.0.0.1:0", "--json"]
    environ = os.environ | {"SPECCTL_SERVE_KEY": "hush", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--output-dir", "run"],
        **{"cwd": tmp_path, "env": environ, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
    )
    said, got = "", {}
    while " at http" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    address = said.partition(" at ")[2].partition(",")[0]
    headers = {"authorization": "Bearer hush"}
    body = {"messages": [{"role": "user", "content": "Tell a story"}], "max_tokens": 300, "temperature": 2, "n": 2}
    body |= {"seed": 0, "ignore_eos": True}

    def ask(name, **fields):
        got[name] = httpx.post(address + "/v1/chat/completions", json=body | fields, headers=headers, timeout=60).text

    threads = [threading.Thread(target=ask, args=("stream",), kwargs={"stream": True})]
    threads += [threading.Thread(target=ask, args=("whole",))]
    for thread in threads:
        thread.start()
    # The two requests, and the request for the metrics.
    with httpx.Client(headers=headers) as http:
        while b"in_flight 3.0" not in http.get(address + "/metrics").content:
            time.sleep(0.01)
            assert len(got) < 2, "both ended before the signal"
    process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(60)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert got["stream"].endswith("data: [DONE]\n\n") and json.loads(got["whole"])["choices"][0]["finish_reason"]
    document = json.loads(out)
    assert document["command"] == "serve" and document["drafters"][0]["texts"] == 4
    assert "story" not in err + out and "hush" not in err + out
