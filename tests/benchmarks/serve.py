"""Compare the speed of `specctl serve` with the bare engine in one process, on the same texts and batches.

    python -m tests.benchmarks.serve --target models/SmolLM2-135M-Instruct.Q4_1.gguf --drafter drafters/sql-eagle3
    python -m tests.benchmarks.serve --target models/SmolLM2-135M-Instruct.Q4_1.gguf --turns 12 --tokens 96

Gateway and engine decode in turns, in alternating order, because the machine may be busy. The engine decodes the same
requests offline, while a client in a separate process streams from the gateway. One-token requests are timed too: their
time beyond a bare prefill is the cost of the gateway. On a busy machine, the ratio of CPU seconds of this process is
more reliable than the ratio of wall times. With `--turns`, a conversation is held with and without the prefix cache
instead, and each turn's seconds to the first token are printed.
"""

import argparse
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from statistics import median

import httpx

from specctl import data_prep, threads
from specctl.commands.serve import load_drafters, make_thread, warm_up
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.offline import decode
from specctl.decoding.records import Request
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.gateway.app import make_app
from specctl.gateway.metrics import Meter
from specctl.gateway.own_engine import OwnEngine
from specctl.recipe import ServeRecipe
from tests.gateway.conftest import served

CLIENT = """
import asyncio, json, sys, time
import httpx

async def ask(http, url, body):
    began, first, size = time.perf_counter(), None, 0
    async with http.stream("POST", url, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for part in response.aiter_bytes():
            first = first or time.perf_counter()
            size += len(part)
    return first - began, time.perf_counter() - began

async def main():
    async with httpx.AsyncClient(timeout=None) as http:
        for line in sys.stdin:
            url, bodies = json.loads(line)
            began = time.perf_counter()
            times = await asyncio.gather(*[ask(http, url, body) for body in bodies])
            print(json.dumps([time.perf_counter() - began, times]), flush=True)

asyncio.run(main())
"""


class Client:
    """A client in a separate process."""

    def __init__(self, address: str):
        self.url = f"{address}/v1/chat/completions"
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, bodies) -> tuple[float, list[list[float]]]:
        """Return the seconds for all bodies at once, and (first byte, whole) for each."""
        self.process.stdin.write(json.dumps([self.url, bodies]) + "\n")
        self.process.stdin.flush()
        return tuple(json.loads(self.process.stdout.readline()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--turns", type=int, default=0)
    options = parser.parse_args()
    target = load_target(options.target, device=options.device)
    names = [options.drafter] if options.drafter else []
    if options.turns:
        with (
            threads.command_threads(None),
            gateway(target, ServeRecipe(drafters=names)) as cached,
            gateway(target, ServeRecipe(drafters=names, prefix_cache_mb=0)) as uncached,
        ):
            converse({"cached": cached, "uncached": uncached}, options)
        return
    recipe = ServeRecipe(drafters=names, prefix_cache_mb=0)  # the same prompts are asked again and again
    drafters, _ = load_drafters(recipe, target)
    drafter = next(iter(drafters.values()), None)
    prompts = list(data_prep.get("sql").generate(max(options.streams), 0, "test"))
    with threads.command_threads(None), gateway(target, recipe) as address:
        client = Client(address)
        for streams in options.streams:
            show(compare(target, drafter, client, prompts[:streams], options))
        show(own_cost(target, client, prompts[0], options.repeats * 5))


@contextmanager
def gateway(target, recipe: ServeRecipe):
    """Serve a target, and yield the address."""
    drafters, places = load_drafters(recipe, target)
    warm_up(target, drafters)
    thread = make_thread(recipe, target, drafters, places, Meter("bench"))
    backend = OwnEngine(thread, target, "bench", recipe)
    backend.warm_up()
    thread.start()
    try:
        with served(make_app(backend, recipe.limits)) as address:
            yield address
    finally:
        thread.stop()


def converse(addresses: dict[str, str], options) -> None:
    """Hold the same conversation with every gateway, in turns, and print the seconds to the first token."""
    messages: list[dict] = []
    asked = iter(data_prep.get("sql").generate(options.turns, 0, "test"))
    for turn in range(options.turns):
        messages.append({"role": "user", "content": next(asked)})
        row, texts = {"turn": turn + 1}, set()
        for name, address in [*addresses.items()][:: 1 if turn % 2 else -1]:
            row[f"{name}_first_s"], text = first_token(address, messages, options.tokens)
            texts.add(text)
        show(row | {"texts_differ": len(texts) - 1})
        messages.append({"role": "assistant", "content": text})


def first_token(address: str, messages: list[dict], tokens: int) -> tuple[float, str]:
    """Return the seconds to the first token of an answer, and its text."""
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
    began, first, text = time.perf_counter(), None, ""
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=None) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                part = json.loads(line[6:])["choices"][0]["delta"].get("content")
                if part:
                    first, text = first or time.perf_counter() - began, text + part
    return round(first, 3), text


def compare(target, drafter, client: Client, prompts: list[str], options) -> dict:
    """Return tokens per second of the gateway relative to the bare engine, over alternating repeats."""
    ids = [target.render([{"role": "user", "content": prompt}]) for prompt in prompts]
    engine = Engine(target, Fixed.of(drafter), EngineOptions(slots=32))
    bodies = [chat(prompt, options.tokens) for prompt in prompts]
    tokens = sum(len(one.output_ids) for one in offline(engine, ids, options.tokens))
    client.ask(bodies)
    seconds = {"offline": [], "serve": []}
    computed = {"offline": 0.0, "serve": 0.0}
    for repeat in range(options.repeats):
        for name in ("offline", "serve") if repeat % 2 else ("serve", "offline"):
            began, cpu = time.perf_counter(), time.process_time()
            if name == "offline":
                offline(engine, ids, options.tokens)
                seconds[name].append(time.perf_counter() - began)
            else:
                seconds[name].append(client.ask(bodies)[0])
            computed[name] += time.process_time() - cpu
    pairs = [a / b for a, b in zip(seconds["offline"], seconds["serve"], strict=True)]
    best = min(seconds["offline"]) / min(seconds["serve"])
    speeds = {name: round(tokens / median(times), 1) for name, times in seconds.items()}
    ratio = round(median(pairs), 3)
    return {
        "streams": len(prompts),
        "tokens": tokens,
        "tokens_per_s": speeds,
        "ratio": ratio,
        "ratio_of_best": round(best, 3),
        "ratio_of_cpu": round(computed["offline"] / computed["serve"], 3),
    }


def own_cost(target, client: Client, prompt: str, repeats: int) -> dict:
    """Return the milliseconds of a one-token request beyond the bare prefill with its chat template."""
    engine, bare, served_s = Engine(target), [], []
    messages = [{"role": "user", "content": prompt}]
    for _ in range(repeats):
        began = time.perf_counter()
        decode(engine, [Request(target.render(messages), GREEDY, 1)])
        bare.append(time.perf_counter() - began)
        served_s.append(client.ask([chat(prompt, 1)])[0])
    return {"own_cost_ms": round(1000 * (median(served_s) - median(bare)), 2), "bare_ms": round(1000 * median(bare), 2)}


def show(row: dict) -> None:
    print(json.dumps(row), flush=True)


def offline(engine: Engine, ids: list[list[int]], tokens: int):
    return decode(engine, [Request(one, GREEDY, tokens) for one in ids])


def chat(prompt: str, tokens: int) -> dict:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}


if __name__ == "__main__":
    main()
