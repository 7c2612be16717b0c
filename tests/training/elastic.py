"""Train with one number of processes and resume with a different number.

Run by hand or by torchrun with DATA PLACE STAGES ACTION…; `losses` explains the actions.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from specctl.progress import Progress
from specctl.recipe import FeatureRecipe
from specctl.runs import Run
from specctl.training import checkpoint, loop, portable_state
from tests.training.small import recipe


def losses(distilled: Path, place: Path, action: str, stage: int) -> list[float]:
    """Return the losses of a training of four steps at a ZeRO stage; each step sees all texts.

    "fresh:NAME" runs all four steps and saves a checkpoint after two under PLACE/NAME. "resume:NAME" restores a copy of
    that checkpoint, checks the state, and runs the last two steps.
    """
    kind, name = action.split(":")
    kept, home = place / name / str(stage) / "drafter", place / f"{kind}-{name}-{loop.start_processes(CPU)[1]}"
    output = kept if kind == "fresh" else home / str(stage) / "drafter"
    if dist.get_rank() == 0 and kind == "resume":
        shutil.copytree(checkpoint.directory(kept), checkpoint.directory(output))
    dist.barrier()
    run = home / str(stage) / f"run{dist.get_rank()}"
    run.mkdir(parents=True)
    made = recipe(
        distilled,
        output.parent,
        resume=kind == "resume",
        features=FeatureRecipe(mode="cached", dir=place / "features"),
        max_steps=4,
        batch_tokens=10**6,
        zero_stage=stage,
    )
    trainer = loop.make_trainer(made, Run(run))
    trainer.start()
    if kind == "resume":
        check_restored(trainer, checkpoint.directory(output) / "step-00000002")
    found = []
    with Progress("train") as bar:
        while trainer.state.step < 4:
            trainer.step(bar)
            found.append(trainer.state.loss)
            if trainer.state.step == 2 and kind == "fresh":
                trainer.save()
    return found


def check_restored(trainer: loop.Trainer, saved: Path) -> None:
    """Check that the restored state, gathered from all processes, equals the saved state bit for bit."""
    assert trainer.state.step == 2
    there, here = checkpoint.load_tensors(saved), portable_state.collect(trainer.engine)
    assert dist.get_rank() or there.keys() == here.keys()
    assert all(torch.equal(value, there[name]) for name, value in here.items())
    assert dist.get_rank() or all(there[name].any() for name in there if name.startswith(portable_state.MOMENTS))


CPU = torch.device("cpu")

if __name__ == "__main__":
    data, base, stages, *actions = sys.argv[1:]
    every = [int(stage) for stage in stages.split(",")]
    made = {action: {stage: losses(Path(data), Path(base), action, stage) for stage in every} for action in actions}
    if dist.get_rank() == 0:
        print(json.dumps(made))
