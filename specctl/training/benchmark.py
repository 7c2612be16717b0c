"""Speed and memory of training, and where the time of a step goes.

    python -m specctl.training.benchmark --distilled distilled/sql [--arch eagle3] [--steps 60]

Times `steps` optimizer steps of the default recipe, then profiles as many again; shares are of all operations' time.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

from torch.profiler import ProfilerActivity, profile

from specctl.progress import track
from specctl.recipe import Arch, TrainRecipe
from specctl.runs import Run
from specctl.training.loop import Trainer, make_trainer

# Rows of the profile; each counts the operations that it calls.
PARTS = {
    "attention, forward": ("_Merged",),
    "attention, backward": ("_MergedBackward",),
    "loss": ("_Distillation", "_DistillationBackward"),
    "optimizer": ("Optimizer.step#Muon.step", "Optimizer.step#AdamW.step"),
    "other matrix products": ("aten::linear", "MmBackward0", "AddmmBackward0"),
}


def steps(trainer: Trainer, count: int) -> float:
    """Seconds of `count` optimizer steps."""
    with track("benchmark", total=count, unit="steps") as bar:
        started = time.perf_counter()
        for _ in range(count):
            trainer._step(bar)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distilled", type=Path, required=True)
    parser.add_argument("--arch", default="eagle3", choices=get_args(Arch))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        recipe = TrainRecipe(distilled=options.distilled, arch=options.arch, output_dir=Path(place) / "drafter")
        trainer = make_trainer(recipe, Run(Path(place)))
        started = time.perf_counter()
        trainer.start()
        features = time.perf_counter() - started
        steps(trainer, 10)  # warm-up
        before = trainer.at.tokens
        seconds = steps(trainer, options.steps)
        tokens = trainer.at.tokens - before
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            steps(trainer, options.steps)
    store = trainer.trainee.store
    if store is not None and store.kept:
        print(f"target features: {store.passes} tokens in {features:.1f} s ({store.passes / features:.0f} tokens/s)")
    print(f"training: {tokens / seconds:.0f} response tokens/s, {1000 * seconds / options.steps:.0f} ms a step")
    unit = 2**20 if sys.platform == "linux" else 2**30  # kilobytes there, bytes elsewhere
    print(f"peak resident memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.2f} GB")
    events = {event.key: event for event in profiled.key_averages()}
    total = sum(event.self_cpu_time_total for event in events.values())
    for part, names in PARTS.items():
        found = [events[name] for name in names if name in events]
        print(f"{sum(event.cpu_time_total for event in found) / total:7.1%}  {part}")


if __name__ == "__main__":
    main()
