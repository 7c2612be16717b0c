"""Effect of `specctl serve --learn` on concurrent streams: tokens per round early and late, and latency between parts.

    python -m tests.benchmarks.serve_learning --target models/SmolLM2-135M-Instruct.Q4_1.gguf \\
        --drafter drafters/sql-eagle3 --prompts math.test.jsonl learn.learner.budget=null

The installed command serves once with --learn and once without, with otherwise equal arguments. Clients stream the
same prompts. Each line covers the texts between two marks; `between_s` are seconds between two parts of a stream.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

SUMS = ("specctl:drafter_tokens_total", "specctl:drafter_rounds_total", "specctl:learning_learn_s_total")
SAMPLES = (*SUMS, "specctl:learning_version")


async def stream(http, url, prompts, tokens, gaps):
    """Request texts one after another while there are prompts."""
    while prompts:
        messages = [{"role": "user", "content": prompts.pop(0)}]
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
        before = None
        async with http.stream("POST", url, json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for _ in response.aiter_bytes():
                now = time.perf_counter()
                if before is not None:
                    gaps.append(now - before)
                before = now


def counts(address):
    """Return the sums of the samples of the metrics endpoint."""
    page = httpx.get(address + "/metrics", timeout=60).text
    found = dict.fromkeys(SAMPLES, 0.0)
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in found:
            found[name] += float(line.rpartition(" ")[2])
    return found


async def part(address, prompts, options):
    """Serve some prompts; return the seconds and the gaps between parts."""
    gaps, began = [], time.perf_counter()
    async with httpx.AsyncClient(timeout=None) as http:
        url, left = address + "/v1/chat/completions", list(prompts)
        await asyncio.gather(*[stream(http, url, left, options.tokens, gaps) for _ in range(options.streams)])
    return time.perf_counter() - began, sorted(gaps)


def measure(learn, prompts, options, rest):
    """Serve all prompts with a separate process, and print a line per part."""
    flags = ["--learn", *rest] if learn else []
    command = [sys.executable, "-m", "specctl", "serve", "--target", options.target, "--drafter", options.drafter]
    command += ["--listen", "127.0.0.1:0", "--json", "--output-dir", str(options.output / f"learn-{learn}"), *flags]
    process = subprocess.Popen([*command, "--overwrite"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    said = ""
    while " at http" not in said:
        said = process.stderr.readline()
        assert said, "it did not start"
    address = said.partition(" at ")[2].partition(",")[0]
    size = len(prompts) // options.parts
    before = counts(address)
    for number in range(options.parts):
        seconds, gaps = asyncio.run(part(address, prompts[number * size : (number + 1) * size], options))
        now = counts(address)
        tokens, rounds, learnt = (now[name] - before[name] for name in SUMS)
        line = {"learn": learn, "part": number, "texts": size, "mat": round(tokens / rounds, 3)}
        line |= {"tokens_per_s": round(tokens / seconds, 1), "learn_s": round(learnt, 1), "version": now[SAMPLES[-1]]}
        line |= {
            "between_s": [round(gaps[int(len(gaps) * q)], 4) for q in (0.5, 0.9, 0.99)],
            "worst": round(gaps[-1], 3),
        }
        print(json.dumps(line), flush=True)
        before = now
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    print(json.dumps({"learning": json.loads(out)["learning"], "warnings": err.strip().splitlines()[-3:]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/serve-learning"))
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--modes", default="off,on", help="off: without --learn; on: with it")
    options, rest = parser.parse_known_args()
    lines = options.prompts.read_text(encoding="utf-8").splitlines()[: options.count]
    prompts = [json.loads(line)["prompt"] for line in lines]
    for mode in options.modes.split(","):
        measure(mode == "on", prompts, options, rest)


if __name__ == "__main__":
    main()
