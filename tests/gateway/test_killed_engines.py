"""Engines are killed and restarted behind `specctl serve --server` while clients send requests."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

SCRIPT = Path(__file__).with_name("paced_engine.py")
REQUESTS, CLIENTS, BETWEEN_KILLS, TOKENS, TOKENS_PER_S = 500, 16, 50, 30, 100


class EngineProcess:
    """An engine process that can be killed and restarted at the same address."""

    def __init__(self, port=0):
        command = [sys.executable, "-I", str(SCRIPT), str(port), str(TOKENS_PER_S)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the engine has not started"

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def again(self):
        return EngineProcess(self.url.rpartition(":")[2])


class Gateway:
    """The command in a separate process; `stop` returns its result document."""

    def __init__(self, place, *urls, choose="cgp-ucb"):
        command = [sys.executable, "-m", "specctl", "serve", "--server", ",".join(urls), "--listen", "127.0.0.1:0"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, "--choose", choose, "--json"], cwd=place, env=environ, text=True, **pipes
        )
        said = ""
        while " at http" not in said:
            line = self.process.stderr.readline()
            assert line, said
            said += line
        self.url = said.partition(" at ")[2].partition(" ")[0]
        self.rest = threading.Thread(target=self.process.stderr.read)
        self.rest.start()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        out = self.process.stdout.read()
        self.rest.join()
        assert self.process.wait() == 0
        return json.loads(out)


def verdict(status, text, stream):
    """Classify an answer: whole, broken (a started stream ended with an error event), or failed."""
    if status != 200:
        return "failed"
    if not stream:
        return "whole" if json.loads(text)["choices"][0]["message"]["content"] == TOKENS * "x" else "failed"
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    if events[-1:] == ["[DONE]"]:
        return "whole" if len(events) == TOKENS + 1 else "failed"
    begun = len(events) > 1 and "choices" in json.loads(events[0])
    return "broken" if begun and "error" in json.loads(events[-1]) else "failed"


async def clients(url, after):
    """Send all requests from sequential clients and count verdicts; `after(number)` is called per finished request."""
    verdicts, numbers = Counter(), iter(range(REQUESTS))

    async def client(http):
        for number in numbers:
            stream = number % 2 == 0
            body = {"model": "toy", "messages": [{"role": "user", "content": f"prompt {number}"}]}
            said = await http.post(f"{url}/v1/chat/completions", json=body | {"stream": stream, "max_tokens": TOKENS})
            outcome = verdict(said.status_code, said.text, stream)
            verdicts[outcome, stream] += 1
            if outcome == "failed":
                print(f"request {number} failed with status {said.status_code}: {said.text[-300:]}")
            after(verdicts.total())

    async with httpx.AsyncClient(timeout=120) as http:
        await asyncio.gather(*[client(http) for _ in range(CLIENTS)])
    return verdicts


@pytest.mark.slow
def test_a_killed_engine_breaks_only_started_streams(tmp_path):
    """A request without an answer yet goes to another engine."""
    engines, due = [EngineProcess(), EngineProcess()], threading.Event()
    ended = threading.Event()
    kills = Counter()

    def killer():
        while due.wait() and not ended.is_set():
            due.clear()
            place = kills.total() % 2
            engines[place].kill()
            kills[place] += 1
            engines[place] = engines[place].again()

    with ExitStack() as stack:
        stack.callback(lambda: [one.kill() for one in engines])
        gateway = Gateway(tmp_path, *(one.url for one in engines))
        thread = threading.Thread(target=killer)
        thread.start()
        try:
            verdicts = asyncio.run(clients(gateway.url, lambda done: done % BETWEEN_KILLS or due.set()))
        finally:
            ended.set()
            due.set()
            thread.join()
            document = gateway.stop()
    assert verdicts.total() == REQUESTS and min(kills.values()) >= 2
    assert verdicts["failed", True] == verdicts["failed", False] == verdicts["broken", False] == 0
    rows = document["drafters"]
    assert sum(row["broken"] for row in rows) == verdicts["broken", True] > 0
    assert document["requests"] == verdicts["whole", True] + verdicts["whole", False]
    assert sum(row["failures"] for row in rows) >= verdicts["broken", True] + 1
    print(f"\n{dict(verdicts)} with {kills.total()} kills; {[row['failures'] for row in rows]} failures")
