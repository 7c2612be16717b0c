"""Speed and memory of training, and a profile of a training step.

    python -m tests.benchmarks.training --distilled distilled/sql [--arch eagle3] [--steps 60]
    python -m tests.benchmarks.training --distilled distilled/sql --against-speculators PYTHON

It times `steps` optimizer steps of the default recipe, and then profiles as many again; shares are of the time of all
operations.

With PYTHON, an interpreter with `speculators` 0.9, the step of `eagle3` or `dflash` is compared with its class instead:
see `tests.benchmarks.comparison`. `speculators` needs an older `transformers`, so it gets a separate environment:

    python -m venv V && V/bin/pip install torch==2.13.0 'speculators==0.9.*'
    V/bin/pip uninstall torchvision torchaudio    # if torch is a CPU build, because pip installs CUDA builds of both
"""

import argparse
import tempfile
import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from specctl.errors import SpecctlError
from specctl.families import trainable_families
from specctl.progress import Progress
from specctl.recipe import Arch, TrainRecipe
from specctl.runs import Run
from specctl.training.loop import Trainer, make_trainer
from tests.benchmarks.against_speculators import peak_memory
from tests.benchmarks.comparison import compare, report

COMPARED = ("eagle3", "dflash")

# Rows of the profile; each counts the operations it calls.
PARTS = {
    "attention, forward": ("_Merged",),
    "attention, backward": ("_MergedBackward",),
    "vocabulary head and loss": ("_LinearDistill", "_LinearDistillBackward"),
    "optimizer": ("Optimizer.step#Muon.step", "Optimizer.step#AdamW.step"),
    "other matrix products": ("aten::linear", "MmBackward0", "AddmmBackward0"),
}


def steps(trainer: Trainer, count: int) -> float:
    """Return the seconds of `count` optimizer steps."""
    with Progress("benchmark", total=count, unit="steps") as bar:
        started = time.perf_counter()
        for _ in range(count):
            trainer.step(bar)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distilled", type=Path, required=True)
    parser.add_argument("--arch", default="eagle3", choices=sorted(trainable_families()))
    parser.add_argument("--steps", type=int, default=None, help="60, or 24 against speculators")
    parser.add_argument("--against-speculators", type=Path, metavar="PYTHON", help="time the step against theirs")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    options = parser.parse_args()
    if options.against_speculators is None:
        profiled_steps(options.distilled, options.arch, options.steps or 60, options.gradient_checkpointing)
        return
    if options.arch not in COMPARED:
        parser.error(f"--against-speculators is for {' and '.join(COMPARED)}")
    try:
        measured = compare(options.distilled, options.against_speculators, options.steps or 24, options.arch)
    except SpecctlError as error:
        parser.exit(error.exit_code, f"{error.message}\n" + (f"{error.hint}\n" if error.hint else ""))
    print("\n".join(report(measured, options.arch)))


def profiled_steps(distilled: Path, arch: Arch, count: int, gradient_checkpointing: bool) -> None:
    """Time and profile the default recipe, and print both."""
    with tempfile.TemporaryDirectory() as place:
        recipe = TrainRecipe(
            distilled=distilled,
            arch=arch,
            output_dir=Path(place) / "drafter",
            gradient_checkpointing=gradient_checkpointing,
        )
        trainer = make_trainer(recipe, Run(Path(place)))
        started = time.perf_counter()
        trainer.start()
        features = time.perf_counter() - started
        steps(trainer, 10)  # warm-up
        before = trainer.state.tokens
        seconds = steps(trainer, count)
        tokens = trainer.state.tokens - before
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            steps(trainer, count)
    store = trainer.trainable.store
    if store is not None and store.kept:
        passed = store.target_tokens
        print(f"target features: {passed} tokens in {features:.1f} s ({passed / features:.0f} tokens/s)")
    print(f"training: {tokens / seconds:.0f} response tokens/s, {1000 * seconds / count:.0f} ms a step")
    print(f"peak resident memory: {peak_memory() / 2**30:.2f} GB")
    events = {event.key: event for event in profiled.key_averages()}
    total = sum(event.self_cpu_time_total for event in events.values())
    for part, names in PARTS.items():
        found = [events[name] for name in names if name in events]
        print(f"{sum(event.cpu_time_total for event in found) / total:7.1%}  {part}")


if __name__ == "__main__":
    main()
