"""Cost of `specctl serve --server`: send the same requests to an engine and through the gateway, in turns.

    python -m tests.benchmarks.serve_engines --tokens-per-s 50 --streams 64

The engine is `tests/gateway/paced_engine.py`, a process that emits tokens at a steady pace and computes nothing. The
gateway is the installed command with two engine addresses, so it also chooses. One client in a separate process sends
to both. On a busy machine the medians of the differences are more reliable than the tails, and the gateway's CPU time
is more reliable than both: `cpu_ms` per request, and `cpu_us_per_token` per further token of a stream.
"""

import argparse
import asyncio
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import httpx
import psutil

from tests.gateway import test_killed_engines
from tests.gateway.test_killed_engines import EngineProcess, Gateway


def chat(number: int, tokens: int, stream: bool) -> dict:
    messages = [{"role": "user", "content": f"Write a story about {number} penguins. " * 20}]
    return {"model": "toy", "messages": messages, "max_tokens": tokens, "stream": stream}


async def alone(http, urls: dict[str, str], repeats: int) -> dict:
    """Return the milliseconds of one-token requests from one client, in turns."""
    times: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(-20, repeats):
        for name in list(urls)[:: 1 if number % 2 else -1]:
            began = time.perf_counter()
            (await http.post(urls[name], json=chat(number, 1, False))).raise_for_status()
            times[name].append(1000 * (time.perf_counter() - began))
    kept = {name: values[20:] for name, values in times.items()}
    extra = [b - a for a, b in zip(kept["engine"], kept["gateway"], strict=True)]
    shown = {name: percentiles(values) for name, values in (*kept.items(), ("added", extra))}
    return {"clients": 1, "requests": repeats, "ms": shown}


def percentiles(values: list[float]) -> dict[str, float]:
    return {"p50": round(median(values), 3), "p99": round(quantiles(values, n=100)[98], 3)}


async def streams(http, url: str, count: int, tokens: int) -> float:
    """Return tokens per second of `count` streams at once."""

    async def one(number: int) -> int:
        size = 0
        async with http.stream("POST", url, json=chat(number, tokens, True)) as said:
            async for part in said.aiter_raw():
                size += part.count(b'"content":')
        return size

    began = time.perf_counter()
    sizes = await asyncio.gather(*[one(number) for number in range(count)])
    assert sum(sizes) == count * tokens, sizes
    return count * tokens / (time.perf_counter() - began)


async def whole(http, url: str, count: int) -> None:
    """Request `count` answers of one token at once."""
    for answer in await asyncio.gather(*[http.post(url, json=chat(number, 1, False)) for number in range(count)]):
        answer.raise_for_status()


def computed(gateway: psutil.Process) -> float:
    """Return the CPU milliseconds of all threads of a process. `cpu_times` would round to 10 ms."""
    tasks = Path(f"/proc/{gateway.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e6


async def cpu(gateway: psutil.Process, count: int, repeats: int, work) -> float:
    """Return the gateway's CPU milliseconds per request, for `count` requests made by `work`.

    The minimum of the repeats is used, because other processes can only add time, by evicting caches.
    """
    found = []
    for _ in range(repeats):
        began = computed(gateway)
        await work()
        found.append((computed(gateway) - began) / count)
    return min(found)


async def cpu_costs(http, url: str, gateway: psutil.Process, count: int, options) -> dict:
    """Measure the gateway's CPU time with `count` simultaneous clients."""

    async def streamed(tokens: int) -> float:
        return await cpu(gateway, count, options.repeats, lambda: streams(http, url, count, tokens))

    answer_ms = await cpu(gateway, count, options.repeats, lambda: whole(http, url, count))
    first_ms, all_ms = await streamed(1), await streamed(options.tokens)
    row = {"clients": count, "cpu_ms": {"whole": round(answer_ms, 3), "streamed": round(first_ms, 3)}}
    return row | {"cpu_us_per_token": round(1000 * (all_ms - first_ms) / (options.tokens - 1), 1)}


async def measure(urls: dict[str, str], gateway: psutil.Process, options) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        began = computed(gateway)
        row = await alone(http, urls, options.requests)
        row["cpu_ms"] = round((computed(gateway) - began) / (options.requests + 20), 3)
        print(json.dumps(row), flush=True)
        for count in (1, options.streams):
            print(json.dumps(await cpu_costs(http, urls["gateway"], gateway, count, options)), flush=True)
        speeds: dict[str, list[float]] = {name: [] for name in urls}
        for repeat in range(options.repeats):
            for name in list(urls)[:: 1 if repeat % 2 else -1]:
                speeds[name].append(await streams(http, urls[name], options.streams, options.tokens))
        shown = {name: round(median(values), 1) for name, values in speeds.items()}
        ratios = [b / a for a, b in zip(speeds["engine"], speeds["gateway"], strict=True)]
        row = {"streams": options.streams, "tokens_per_s": shown, "ratio": round(median(ratios), 4)}
        print(json.dumps(row | {"ratios": [round(one, 4) for one in ratios]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-s", type=float, default=50.0, help="of a stream; 0 is as fast as it can")
    parser.add_argument("--choose", default="cgp-ucb", help="the policy, such as random, which computes nothing")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    test_killed_engines.TOKENS_PER_S = options.tokens_per_s
    print(json.dumps({"load": os.getloadavg(), "cores": os.cpu_count()}))
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory()))
        engine, other = EngineProcess(), EngineProcess()
        stack.callback(lambda: [one.kill() for one in (engine, other)])
        gateway = Gateway(place, engine.url, other.url, choose=options.choose)
        stack.callback(gateway.stop)
        paths = {"engine": engine.url, "gateway": gateway.url}
        urls = {name: f"{url}/v1/chat/completions" for name, url in paths.items()}
        asyncio.run(measure(urls, psutil.Process(gateway.process.pid), options))
    print(json.dumps({"load": os.getloadavg()}))


if __name__ == "__main__":
    main()
