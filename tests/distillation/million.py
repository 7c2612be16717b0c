"""Run `distill` over many synthetic prompts without decoding: read, filter, plan, shard, describe.

`python -m tests.distillation.million 1000000` prints rate and peak memory of the process as JSON.
"""

import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from specctl.distillation import generate
from specctl.recipe import DistillRecipe
from specctl.runs import Run

WORDS = [f"{'abcdefghij'[number % 10]}{number}" for number in range(20000)]
RESPONSE = 32  # tokens


class Target:
    """A target with a tokenizer of words."""

    context_length, longest_text = 4096, 409600
    device = torch.device("cpu")
    identity = {"name": "synthetic", "vocab_hash": "0"}  # noqa: RUF012
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))

    def render(self, messages, **options):
        return [hash(word) % 50000 for word in messages[-1]["content"].split()]


def write(path: Path, count: int) -> None:
    """Write prompts of 20 to 100 words; one in 20 is a near-duplicate of the previous, one in 100 a copy."""
    draw, text = random.Random(0), ""
    with open(path, "w") as file:
        for number in range(count):
            if number % 50 and number % 20:
                text = f"Prompt {number}: " + " ".join(draw.choices(WORDS, k=draw.randrange(20, 100)))
            elif number % 20 == 0:
                text += "."
            file.write(json.dumps({"prompt": text, "license": "MIT"}) + "\n")


class NoEngine:
    """An engine that decodes nothing."""

    def __init__(self, target, options):
        self.options = options


def answers(engine, requests):
    """Yield responses derived from the seed instead of decoding."""
    for index, request in enumerate(requests):
        ids = random.Random(request.seed).choices(range(50000), k=RESPONSE)
        yield SimpleNamespace(index=index, output_ids=ids, stop="eos")


def main(count: int) -> None:
    generate.Engine, generate.stream = NoEngine, answers
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        write(place / "prompts.jsonl", count)
        data = {"domain": ["many"], "prompts": str(place / "prompts.jsonl")}
        recipe = {"data": data, "output_dir": place / "out", "shard_size": 10000, "batch_size": 512}
        started = time.perf_counter()
        result = generate.distill(DistillRecipe.model_validate(recipe), Run(place), target=Target())
        seconds = time.perf_counter() - started
    document = {
        "prompts": count,
        "responses": result.responses,
        "prompts_per_s": round(count / seconds),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main(int(sys.argv[1]))
