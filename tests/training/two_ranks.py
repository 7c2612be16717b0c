"""Run under torchrun with two processes: compare the gradient of one step with one process on the same texts."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from specctl.recipe import FeatureRecipe
from specctl.runs import Run
from specctl.training import engine, loop
from tests.training.small import recipe

distilled, place = map(Path, sys.argv[1:])


def trainer(rank: int) -> loop.Trainer:
    run = place / f"run{rank}"
    run.mkdir()
    return loop.make_trainer(recipe(distilled, place, features=FeatureRecipe(mode="online")), Run(run))


def gradient(trainer: loop.Trainer) -> dict[str, torch.Tensor]:
    """Return the gradients after the backward pass of a step, as the optimizer sees them."""
    seen: dict[str, torch.Tensor] = {}

    class Seen(Exception):
        pass

    def look() -> None:
        parameters = trainer.trainable.module.named_parameters()
        seen.update({name: p.grad.clone() for name, p in parameters if p.grad is not None})
        raise Seen

    trainer.engine.step = look
    try:
        trainer.step(None)  # type: ignore[arg-type]
    except Seen:
        return seen
    raise AssertionError("no gradient")


rank = int(os.environ["RANK"])
one = trainer(rank)
assert dist.get_world_size() == one.world == 2
patience = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
assert patience == engine.PATIENCE, patience
assert one.max_over_ranks(rank) == 1
texts = one.corpus.train[:4]
assert one.trainable.store is not None
one.trainable.store.is_sharded = True  # otherwise a batch this uneven would be distributed again
one.batches = lambda epoch: [[texts[:3], texts[3:]]]  # type: ignore[method-assign]
ours = gradient(one)
one.trainable.module.zero_grad()
total, weight, _ = one.trainable.loss(one.trainable.module, one.trainable.batch(texts, 0))
(total / weight).backward()
expected = {name: p.grad for name, p in one.trainable.module.named_parameters() if p.grad is not None}
assert ours.keys() == expected.keys()
for name, value in expected.items():
    torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)
print("checked")
