"""Our sides of the comparison with `speculators`, and the file shared by all sides.

python -m tests.benchmarks.comparison_ours PLACE DISTILLED ARCH write STEPS
python -m tests.benchmarks.comparison_ours PLACE DISTILLED ARCH like|default
"""

import json
import sys
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from specctl.decoding.models.loading import pick_dtype
from specctl.drafters.dflash.head import BlockHead
from specctl.drafters.feature.ttt_attention import ranges
from specctl.progress import Progress
from specctl.recipe import DrafterRecipe, FeatureRecipe, OptimizerRecipe, TargetRecipe, TrainRecipe
from specctl.runs import Run
from specctl.training.data import batches
from specctl.training.features import Features
from specctl.training.loop import Trainer, make_trainer
from specctl.training.trainable import TrainableHead
from tests.benchmarks.against_speculators import Side, read, serve

DOCUMENTS = 256  # of the distilled data, because every side keeps their features in memory
LIKE, DEFAULT = "like", "default"


def shared(place: Path) -> Path:
    """Return the path of the shared file."""
    return place / "shared.safetensors"


def trainer_for(
    place: Path, distilled: Path, arch: str, variant: str, dtype: Literal["auto", "fp32"] = "auto"
) -> Trainer:
    """Return a trainer on the first `DOCUMENTS` examples of `distilled`, without features; `dtype` is for target and
    products.

    `like` uses only what both sides support: AdamW, all response positions in every step or block, and a frozen
    vocabulary head. A `dflash` head has no Markov head, and its masks are the embedding of the mask token. `default` is
    the default recipe.
    """
    target = TargetRecipe(device="cpu", dtype=dtype)
    recipe = TrainRecipe(target=target, precision=dtype, distilled=distilled, arch=arch, output_dir=place / "drafter")
    if variant == LIKE:
        recipe = recipe.model_copy(update={"optimizer": OptimizerRecipe(type="adamw"), "ttt_stride": 1})
        if arch == "dflash":
            recipe = recipe.model_copy(update={"drafter": DrafterRecipe(markov_rank=0)})
    trainer = make_trainer(recipe, Run(place))
    if variant == LIKE:
        as_theirs(trainer)
    trainer.corpus = replace(trainer.corpus, train=trainer.corpus.train[:DOCUMENTS])
    return trainer


def as_theirs(trainer: Trainer) -> None:
    """Freeze the weights that `speculators` does not train."""
    head = trainer.trainable.module
    if isinstance(head, BlockHead):
        assert head.mask_embedding is not None
        with torch.no_grad():
            head.mask_embedding.copy_(trainer.target.model.embedding[head.config.mask_token_id])
        head.mask_embedding.requires_grad_(False)
    else:
        head.lm_head.requires_grad_(False)


def write(file: Path, trainer: Trainer, steps: int) -> None:
    """Compute the features and write the shared file.

    Settings: family, architecture, recipe, `batches` (documents of each step), and per document its range of `slots` in
    M, its range of `queries` (response slots) in N, and its number of `responses` tokens. Tensors: `tokens` [M] x_{i+1}
    of slot i; `taps` [M, F], `teacher` [N, H] and `best` [N] as in `Features`; `inside` [N] whether `best` is in the
    draft vocabulary; `embedding` [V, H], `target_head` [Vd, H]; our weights as `head.*`.
    """
    recipe, examples, trainable = trainer.recipe, trainer.corpus.train, trainer.trainable
    assert isinstance(trainable, TrainableHead)
    head = trainable.module
    trainable.store.prepare(examples, FeatureRecipe(mode="memory"), recipe.features_dir)
    features = trainable.store.get(examples)
    best = torch.cat([f.best for f in features])
    epochs = (batches(examples, trainer.batch_tokens, seed=recipe.data.seed, epoch=epoch) for epoch in count())
    order = islice((batch for epoch in epochs for batch in epoch), steps)  # the trainer's own order
    settings = {
        "arch": recipe.arch,
        "architecture": head.config.to_dict(),
        "ttt_steps": recipe.ttt_steps,
        "ttt_decay": recipe.ttt_decay,
        "dtype": str(pick_dtype(recipe.precision, trainer.target.device)).removeprefix("torch."),
        "lr": trainer.schedule.peak,
        "betas": recipe.optimizer.betas,
        "weight_decay": recipe.optimizer.weight_decay,
        "clip": recipe.optimizer.clip,
        "batches": [[e.index for e in batch] for batch in order],
        "slots": ranges([len(f.taps) for f in features]),
        "queries": ranges([len(f.teacher) for f in features]),
        "responses": [e.response_length for e in examples],
    }
    tensors = {
        "tokens": torch.tensor([token for e in examples for token in e.tokens[1:-1]]),
        "taps": torch.cat([f.taps for f in features]),
        "teacher": torch.cat([f.teacher for f in features]),
        "best": best,
        "inside": head.t2d[best.long()],
        "embedding": trainer.target.model.embedding,
        "target_head": trainable.target_head,
        **{f"head.{name}": value for name, value in head.state_dict().items()},
    }
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata={"settings": json.dumps(settings)})


def read_features(file: Path) -> dict[int, Features]:
    """Return the features in a file of `write` by document."""
    settings, tensors = read(str(file))
    found = {}
    for document, ((s0, s1), (q0, q1)) in enumerate(zip(settings["slots"], settings["queries"], strict=True)):
        found[document] = Features(tensors["taps"][s0:s1], tensors["teacher"][q0:q1], tensors["best"][q0:q1])
    return found


def losses(trainer: Trainer) -> list[float]:
    """Return the mean loss on the first batch by draft depth."""
    first = batches(trainer.corpus.train, trainer.batch_tokens, seed=trainer.recipe.data.seed, epoch=0)[0]
    with torch.no_grad():
        _, _, steps = trainer.forward([first])
    return [(loss / weight).item() for loss, weight in steps]


def our_side(place: Path, distilled: Path, arch: str, variant: str) -> Side:
    """Return a side that runs the trainer's own step."""
    trainer = trainer_for(place, distilled, arch, variant)
    assert isinstance(trainer.trainable, TrainableHead)
    trainer.trainable.store.kept = read_features(shared(place))

    def step() -> int:
        before = trainer.state.tokens
        with Progress("step", quiet=True) as bar:
            trainer.step(bar)
        return trainer.state.tokens - before

    return Side(lambda: losses(trainer), step)


def main() -> None:
    """Run a child process of `comparison.compare`."""
    place, distilled, arch, role = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    if role == "write":
        write(shared(place), trainer_for(place, distilled, arch, LIKE), int(sys.argv[5]))
    else:
        serve(lambda: our_side(place, distilled, arch, role))


if __name__ == "__main__":
    main()
