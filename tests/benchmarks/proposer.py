"""Time that text drafters take of an engine's step: python -m tests.benchmarks.proposer [DATASTORE …]"""

import statistics
import sys
import time
from types import SimpleNamespace

import numpy as np

from specctl.drafters import checkpoint
from specctl.engines.vllm_proposer import KEY, TextProposer

TEXTS, PROMPT, STEPS, LONGEST = 8, 8000, 50, 8192


def measure(named: list[str], vocab_size: int) -> tuple[float, float]:
    """Microseconds for a token of a prompt, and for a step of a text that gets two tokens in each."""
    proposer = TextProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=7),
            model_config=SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: vocab_size),
            additional_config={KEY: named},
        )
    )
    table = np.random.default_rng(0).integers(0, vocab_size, (TEXTS, LONGEST)).astype(np.int32)
    seconds = []
    for step in range(STEPS + 1):
        lengths, begin = np.full(TEXTS, PROMPT + 2 * step), time.perf_counter()
        proposer.propose([[0, 0]] * TEXTS, lengths, table)
        seconds.append(time.perf_counter() - begin)
    return seconds[0] / TEXTS / PROMPT * 1e6, statistics.median(seconds[1:]) / TEXTS * 1e6


def main(stores: list[str]) -> None:
    sizes = [checkpoint.load(store).config["target"]["vocab_size"] for store in stores] or [4096]
    for named in (["lookup"], ["suffix"], *([store] for store in stores), ["lookup", *stores]):
        token, step = measure(named, sizes[0])
        print(f"{' + '.join(named)}: {token:.1f} µs a token of the prompt, {step:.0f} µs a text in a step")


if __name__ == "__main__":
    main(sys.argv[1:])
