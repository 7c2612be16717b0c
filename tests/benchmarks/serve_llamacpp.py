"""Compare `specctl serve` with llama.cpp's server: the same GGUF file, prompts, threads and numbers of streams.

    python -m tests.benchmarks.serve_llamacpp --python ENV/bin/python --target FILE.gguf --prompts FILE.jsonl \\
        --drafter lookup --drafter DIR --streams 1 --streams 4

ENV has the package `xllamacpp`. Each server is a process. All servers answer the same blocks of prompts, in turns and
in alternating order, because the speed of a machine drifts. Both sides keep their caches of prompts. The rates count
all seconds, prompts included; `first_s` is the median until the first token.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import httpx
import typer

from specctl.distillation.prompts import read_prompts
from specctl.recipe import DataRecipe

CONTEXT = 4096
THEIRS = f"""
import sys, time, xllamacpp
model, threads, slots, port = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel, params.n_ctx = model, port, slots, slots * {CONTEXT}
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.cpuparams.poll = params.cpuparams_batch.poll = 0  # waiting threads must not slow the other side
server = xllamacpp.Server(params)
time.sleep(1e9)
"""


@dataclass
class Side:
    """A server, its tokens and seconds, and the seconds until each first token."""

    url: str
    tokens: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)


@contextmanager
def running(command: list[str], port: int) -> Iterator[str]:
    """Run a server until the block ends, and yield its address."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 300
        while not healthy(url):
            assert process.poll() is None and time.monotonic() < until, f"{command[0]} did not start"
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


async def ask(http: httpx.AsyncClient, side: Side, messages: list[dict], tokens: int) -> None:
    """Stream an answer, and count its tokens and the seconds to its first one."""
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began, first = time.perf_counter(), None
    async with http.stream("POST", f"{side.url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line[6:])
            if first is None and part["choices"] and part["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - began
            if part.get("usage"):
                side.tokens += part["usage"]["completion_tokens"]
    side.first_s.append(first or time.perf_counter() - began)


async def answer(side: Side, block: list[list[dict]], streams: int, tokens: int) -> None:
    """Answer a block of prompts with this many streams at a time."""
    turn = asyncio.Semaphore(streams)
    async with httpx.AsyncClient(timeout=None) as http:

        async def one(messages: list[dict]) -> None:
            async with turn:
                await ask(http, side, messages, tokens)

        began = time.perf_counter()
        await asyncio.gather(*map(one, block))
        side.seconds += time.perf_counter() - began


def main(
    python: Annotated[Path, typer.Option()],
    target: Annotated[Path, typer.Option()],
    prompts: Annotated[Path, typer.Option()],
    drafter: Annotated[list[str], typer.Option()] = [],  # noqa: B006
    streams: Annotated[list[int], typer.Option()] = [1, 4],  # noqa: B006
    limit: int = 24,
    tokens: int = 96,
) -> None:
    threads = len(os.sched_getaffinity(0))
    data = DataRecipe(domain=["prompts"], prompts=str(prompts), limit=limit)
    asked = [prompt.messages for prompt in read_prompts(data, "prompts", sample=True)]
    for count in streams:
        with ExitStack() as stack:
            port = free_port()
            theirs = [str(python), "-I", "-c", THEIRS, str(target.resolve()), str(threads), str(count), str(port)]
            sides = {"llama.cpp": Side(stack.enter_context(running(theirs, port)))}
            for name in ("", *drafter):
                port = free_port()
                ours = [
                    sys.executable,
                    "-m",
                    "specctl",
                    "serve",
                    "--target",
                    str(target),
                    "--listen",
                    f"127.0.0.1:{port}",
                ]
                ours += ["--drafter", name] if name else []
                sides[name or "plain"] = Side(stack.enter_context(running(ours, port)))
            for side in sides.values():  # the first answer warms up
                asyncio.run(answer(Side(side.url), asked[:1], 1, 8))
            blocks = [asked[place : place + 2 * count] for place in range(0, len(asked), 2 * count)]
            for place, block in enumerate(blocks):
                for name in [*sides][:: 1 if place % 2 else -1]:
                    asyncio.run(answer(sides[name], block, count, tokens))
        base = sides["llama.cpp"]
        for name, side in sides.items():
            rate = side.tokens / side.seconds
            ratio = rate * base.seconds / base.tokens
            row = {"streams": count, "server": name, "tokens": side.tokens, "tokens_per_s": round(rate, 1)}
            print(
                json.dumps(row | {"of_llamacpp": round(ratio, 2), "first_s": round(median(side.first_s), 2)}),
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
