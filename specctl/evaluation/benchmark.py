"""Cost of one target step: our lean step against `transformers`' own forward of the same model.

    python -m specctl.evaluation.benchmark [--target builtin] [--dtype bf16] [--context 256]

Both run in turn on the same context, so that a machine whose speed drifts slows both; medians and ratios are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from specctl.decoding.cache import plan_rows
from specctl.decoding.target import Target, load_model, load_target

ROWS = (1, 4, 8, 16)


def step_costs(target: Target, model, context: int, repeats: int) -> dict[int, tuple[float, float]]:
    """Milliseconds per forward of (our step, transformers) by number of rows, medians over `repeats` rounds."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, target.vocab_size, (1, context), generator=generator).to(target.device)
    cache = target.model.new_cache(1, context + max(ROWS))
    target.prefill(ids.tolist(), cache)
    theirs = DynamicCache(config=model.config)
    model(ids, past_key_values=theirs, use_cache=True)
    timed: dict[str, Callable[[], object]] = {}
    for rows in ROWS:
        tokens = ids[:, :rows]

        def ours(tokens: torch.Tensor = tokens) -> object:
            plan = plan_rows([context], tokens.shape[1], device=target.device, dtype=target.dtype)
            return target.step(tokens, cache, plan)

        def reference(tokens: torch.Tensor = tokens) -> object:
            output = model(tokens, past_key_values=theirs, use_cache=True)
            theirs.crop(-tokens.shape[1])
            return output

        timed[f"ours {rows}"], timed[f"theirs {rows}"] = ours, reference
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(repeats + 5):
        for name, function in timed.items():
            started = time.perf_counter()
            function()
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= 5:  # the first rounds warm up
                seconds[name].append(time.perf_counter() - started)
    median = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    return {rows: (median[f"ours {rows}"], median[f"theirs {rows}"]) for rows in ROWS}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    target = load_target(options.target, device=options.device, dtype=options.dtype)
    model = load_model(options.target, device=target.device, dtype=target.dtype)
    costs = step_costs(target, model, options.context, options.repeats)
    print(f"{options.target}, {target.dtype}, context {options.context}, {torch.get_num_threads()} threads")
    print("rows   ours ms   transformers ms   transformers/ours   ours against 1 row")
    for rows, (ours, theirs) in costs.items():
        print(f"{rows:4d} {ours:9.2f} {theirs:17.2f} {theirs / ours:19.2f} {ours / costs[1][0]:20.2f}")


if __name__ == "__main__":
    main()
