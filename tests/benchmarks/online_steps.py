"""Gain and cost of an online update by optimizer and step size, for a head that meets another domain.

    python -m tests.benchmarks.online_steps MODEL.gguf drafters/sql-eagle3 distilled/math [CHUNKS]

It learns chunks of 40 distilled texts one after another, without held-out texts. It prints the loss of the following
chunk after 1, 2, … chunks, and the CPU seconds of an update.
"""

import sys
import time
from pathlib import Path

import torch

from specctl.adaptation.updates.objective import Objective, with_distributions
from specctl.adaptation.updates.registry import make_learner
from specctl.decoding.target import load_target
from specctl.recipe import LearnerRecipe, TargetRecipe, TrainRecipe
from specctl.training.data import Corpus, batches, load_corpus
from specctl.training.engine import autocast
from specctl.training.features import slot_batch
from specctl.training.optimizers import is_embedding_like
from specctl.training.trainable import TrainableHead, make_trainable

CHUNK, JUDGED, JUDGED_DEPTHS = 40, 12, 4  # texts per chunk; texts and draft depths of the printed loss
SETTINGS = [  # optimizer, rate (None is the default), tokens per step, draft depths, whether vocabulary matrices learn
    ("muon", None, 768, 2, False),
    ("muon", 1e-3, 384, 2, False),
    ("muon", 1e-3, 384, 4, True),
    ("adam", None, 384, 4, True),
    ("adam", 2e-4, 384, 2, True),
    ("adam", None, 16_384, 4, True),
]


def main(model: str, head: str, distilled: str, chunks: str = "5") -> None:
    torch.set_num_threads(1)
    target = load_target(model, device="cpu")
    recipe = TrainRecipe(
        target=TargetRecipe(name=model), distilled=Path(distilled), init=Path(head), objective="soft_ce"
    )
    trainable = make_trainable(recipe, target, Corpus([], [], "", []))
    assert isinstance(trainable, TrainableHead)
    module, count = trainable.module, int(chunks)
    autocast(module, recipe)
    texts = load_corpus(recipe, target).train[: CHUNK * (count + 1)]
    features = {text.index: found for text in texts for found in trainable.store.get([text])}
    parts = [texts[first : first + CHUNK] for first in range(0, len(texts), CHUNK)]

    def inputs(examples, tokens, depths):
        module.steps = depths
        return [
            slot_batch(part, [features[text.index] for text in part], depths, module.t2d, trainable.stride, phase=n)
            for n, part in enumerate(batches(list(examples), tokens, seed=0, epoch=0))
        ]

    for optimizer, rate, tokens, depths, vocabulary in SETTINGS:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(vocabulary or not is_embedding_like(name))
        objective = Objective(
            module, trainable.loss, 0, lambda batch: with_distributions(batch, trainable.target_head, module.squash)
        )
        options = LearnerRecipe(algo="ogd", optimizer=optimizer, lr=rate, epochs=1)
        learner = make_learner(objective, options.resolved("eagle3", target.hidden_size), objective.start())
        losses, seconds = [], []
        for n in range(count + 1):
            judged = inputs(parts[n][:JUDGED], 1500, JUDGED_DEPTHS)
            losses.append(float(objective.losses([learner.play()], judged)))
            if n < count:
                began = time.process_time()
                learner.learn(inputs(parts[n], tokens, depths))
                seconds.append(time.process_time() - began)
        found = " ".join(f"{loss:.3f}" for loss in losses)
        rate = rate or learner.rates[0]
        print(f"{optimizer} {rate:.1e} {tokens} tokens {depths} depths vocabulary {vocabulary}: {found}", end="; ")
        print(f"{sum(seconds) / count:.1f} s an update", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
