"""Expected accepted length, from held-out responses: replaces mat when the target's layers are not loaded for decoding.

A head drafts after every token of a response that the target has written. Depth j is a hit if the head's most probable
token is also the target's. The target's most probable token is known, since its state after the same text is among the
features. Let α_j be the share of hits at depth j among the drafts with hits at all shallower depths. A round then
yields

    E[tokens] = 1 + Σ_k Π_{j≤k} α_j.

This is not mat. The drafts are chains with the trained depths, they start after every token instead of after a round,
and they follow responses that may have been sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from specctl.drafters.feature.head import DraftHead
from specctl.drafters.lora import Product
from specctl.recipe import TrainRecipe
from specctl.training.data import Corpus
from specctl.training.example import Example
from specctl.training.features import HEAD_ROWS, FeatureStore, slot_batch
from specctl.training.trainable import TrainableDrafter


@dataclass(frozen=True)
class ExpectedLength:
    """Tokens per round, the target's own included, and α by depth; NaN and [] without held-out responses."""

    mat: float = math.nan
    acceptance: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, counts: Tensor) -> ExpectedLength:
        """Compute the length from counts [depths, 2] of hits and drafts."""
        shares = [hits / drafts for hits, drafts in counts.tolist() if drafts]
        if not shares:
            return cls()
        return cls(1 + sum(math.prod(shares[:depth]) for depth in range(1, len(shares) + 1)), shares)


class HeldOut:
    """Held-out responses and their features, in two halves: one chooses a checkpoint, the other reports on it."""

    def __init__(self, trainable: TrainableDrafter, corpus: Corpus):
        self.trainable = trainable
        self.store = FeatureStore(trainable.target, trainable.module.taps)
        numbered = [(number, example) for number, responses in enumerate(corpus.responses) for example in responses]
        self.examples = [replace(example, index=index) for index, (_, example) in enumerate(numbered)]
        self.half = [number % 2 for number, _ in numbered]  # 0: `Corpus.selection_prompts`, 1: `Corpus.report_prompts`

    def prepare(self, recipe: TrainRecipe, rank: int, world: int) -> None:
        """Compute and keep the features; all ranks call this. Raises the errors of `FeatureStore.prepare`."""
        if self.examples:
            homes = [self.examples] * world
            self.store.prepare(self.examples, recipe.features, recipe.features_dir, homes, rank)

    @torch.no_grad()
    def measure(self, engine: Any, rank: int, world: int) -> tuple[ExpectedLength, ExpectedLength]:
        """Expected lengths with the engine's weights, on the choosing and on the reporting half. All ranks call this,
        and they share the texts."""
        module = self.trainable.module
        counts = torch.zeros(2, module.steps, 2, device=self.trainable.target.device)
        engine.eval()
        for first in range(0, len(self.examples), world):
            # ZeRO 3 gathers weights in every forward: a rank without a text of its own runs one that is not counted.
            own = min(first + rank, len(self.examples) - 1)
            hits = hits_of(self.trainable, engine, self.store, self.examples[own])
            if own == first + rank:
                counts[self.half[own]] += hits
        engine.train()
        if world > 1:
            dist.all_reduce(counts)
        choosing, reporting = (ExpectedLength.of(half) for half in counts)
        return choosing, reporting


def hits_of(trainable: TrainableDrafter, engine: Any, store: FeatureStore, example: Example) -> Tensor:
    """Counts [depths, 2] of hits, and of drafts that got to the depth, over the tokens of a response."""
    module = trainable.module
    (features,) = store.get([example])
    batch = slot_batch([example], [features], module.steps, module.t2d)
    hits = HitRecorder(module, features.best.long())
    module.watch = hits
    try:
        trainable.loss(engine, batch)
    finally:
        module.watch = None
    return hits.counts(batch.valid_steps)


class HitRecorder:
    """Record of the response slots and steps at which a head drafts `best` [N], the target's most probable tokens."""

    def __init__(self, module: DraftHead, best: Tensor):
        self.module, self.best = module, best
        shape = module.steps, len(best)
        self.asked = torch.zeros(shape, dtype=torch.bool, device=best.device)
        self.hit = torch.zeros(shape, dtype=torch.bool, device=best.device)

    def __call__(self, product: Product, row: Tensor, step: Tensor) -> None:
        hidden, weight, bias = product
        place = hidden.device.type
        dtype = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else weight.dtype
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        drafted = torch.cat([F.linear(part.to(dtype), weight, bias).argmax(-1) for part in hidden.split(HEAD_ROWS)])
        at = (row + step).clamp_max(len(self.best) - 1)  # `counts` ignores places past the end
        self.asked[step, row] = True
        self.hit[step, row] = self.module.draft_ids[drafted] == self.best[at]

    def counts(self, left: Tensor) -> Tensor:
        """[depths, 2] hits and drafts at every depth, among drafts with hits at all shallower depths. `left`
        [N]: number of depths that the rest of the response is long enough for."""
        depth = torch.arange(len(self.asked), device=left.device)[:, None]
        asked = self.asked & (depth < left)
        reached = asked & torch.cat((torch.ones_like(asked[:1]), (asked & self.hit).cumprod(0)[:-1].bool()))
        return torch.stack(((reached & self.hit).sum(1), reached.sum(1)), 1).to(torch.float32)
