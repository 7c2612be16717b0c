"""Share of a server's capacity that its client uses: python -m tests.benchmarks.client [REQUESTS_IN_FLIGHT]

A process of its own answers like vLLM, however many requests are there: 256 tokens each, after a time between half and
one and a half times its mean. A server that always has so many requests in flight answers `in flight / mean` of them a
second. What is missing to that is the client's, and the server's own Python, which an engine has, too. Begin and end,
when fewer are in flight, are not counted.
"""

import asyncio
import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from specctl import api
from specctl.decoding.target_text import load_target_text
from specctl.engines.client import Client
from specctl.engines.records import GenerationRequest
from specctl.recipe import ServerRecipe

TOKENS, PROMPT, ROUNDS = 256, 200, 12
RATES = (16, 32, 64, 128, 256)  # answers a second
TOKENIZER = load_target_text("builtin").tokenizer


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds, stamps) -> None:
    """Every request of a connection, by the schemas of vLLM."""
    try:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode():
            length = re.search(r"content-length: *(\d+)", head, re.IGNORECASE)
            body = json.loads(await reader.readexactly(int(length[1]))) if length else {}
            path = head.split(" ", 2)[1]
            if path == "/v1/models":
                found = {"object": "list", "data": [{"id": "toy", "max_model_len": 4096}]}
            elif path == "/version":
                found = {"version": "0.32.0"}
            elif path == "/tokenize":
                found = {"tokens": TOKENIZER.encode(body["prompt"], add_special_tokens=False)}
            elif "prompt_logprobs" in body:
                found = {"choices": [{"prompt_logprobs": [None], "token_ids": [1], "finish_reason": "length"}]}
            else:
                await asyncio.sleep(seconds.value * random.uniform(0.5, 1.5))
                stamps.put(time.perf_counter())
                ids = [5 + (7 * place + len(body["prompt"])) % 200 for place in range(body["max_tokens"])]
                choice = {"token_ids": ids, "prompt_token_ids": body["prompt"], "finish_reason": "length", "text": "…"}
                found = {"choices": [choice]}
            data = json.dumps(found).encode()
            lines = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(lines.encode() + data)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _serve(seconds, stamps, port) -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda *pair: _answer(*pair, seconds, stamps), "127.0.0.1", 0, backlog=1024)
        port.value = server.sockets[0].getsockname()[1]
        await server.serve_forever()

    asyncio.run(run())


def asked(recipe: ServerRecipe, requests: int) -> None:
    """Ask with the client alone."""
    asks = [
        GenerationRequest([5 + (3 * place + number) % 200 for place in range(PROMPT)], TOKENS)
        for number in range(requests)
    ]
    with Client(recipe) as client:
        assert sum(1 for _ in client.answers(asks)) == requests


def distilled(recipe: ServerRecipe, requests: int) -> None:
    """Ask with `specctl distill --server`, which keeps the answers."""
    with tempfile.TemporaryDirectory() as place:
        prompts = Path(place) / "prompts.jsonl"
        prompts.write_text("".join(f'{{"prompt": "What is {one} times {one}?"}}\n' for one in range(requests)))
        api.distill(
            data__domain=["toy"],
            data__prompts=str(prompts),
            filters__near_prompts=None,
            sampling__max_new_tokens=TOKENS,
            server__urls=recipe.urls,
            server__concurrency=recipe.concurrency,
            output_dir=Path(place) / "out",
        )


def main(in_flight: int) -> None:
    context = multiprocessing.get_context("spawn")
    seconds, port, stamps = context.Value("d", 0.0), context.Value("i", 0), context.Queue()
    context.Process(target=_serve, args=(seconds, stamps, port), daemon=True).start()
    while not port.value:
        time.sleep(0.05)
    recipe = ServerRecipe(urls=[f"http://127.0.0.1:{port.value}"], concurrency=in_flight)
    print(f"{in_flight} in flight, {TOKENS} tokens each: share of the server's capacity")
    requests = ROUNDS * in_flight
    for rate in RATES:
        seconds.value, shares = in_flight / rate, []
        for command in (asked, distilled):
            command(recipe, requests)
            times = sorted(stamps.get() for _ in range(requests))[in_flight:-in_flight]
            shares.append((len(times) - 1) / (times[-1] - times[0]) / rate)
        client, whole = shares
        print(f"{rate:4d} answers/s ({rate * TOKENS} tokens/s): client {client:.3f}, distill {whole:.3f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
