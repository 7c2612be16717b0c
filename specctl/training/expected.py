"""Accepted lengths that held-out responses let expect, where the target's layers are not there to decode with.

A head drafts behind every token of a response that the target has written. Depth j is a hit where its most probable
token is the target's there, whose state behind the text so far is among the features. With α_j the share of hits among
the drafts whose shallower tokens were all hits, a round yields

    E[tokens] = 1 + Σ_k Π_{j≤k} α_j.

This is no mat: drafts are chains of the depths that are trained, begin behind every token instead of behind rounds, and
follow responses that may have been sampled.
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
from specctl.training.trainees import Trainee


@dataclass(frozen=True)
class ExpectedLength:
    """Tokens of a round, the target's own included, and α by depth; NaN and none without held-out responses."""

    mat: float = math.nan
    acceptance: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, counts: Tensor) -> ExpectedLength:
        """From counts [depths, 2] of hits and drafts."""
        shares = [hits / drafts for hits, drafts in counts.tolist() if drafts]
        if not shares:
            return cls()
        return cls(1 + sum(math.prod(shares[:depth]) for depth in range(1, len(shares) + 1)), shares)


class HeldOut:
    """Held-out responses with features of their own: those that choose a checkpoint, and those that report on it."""

    def __init__(self, trainee: Trainee, corpus: Corpus):
        self.trainee = trainee
        self.store = FeatureStore(trainee.target, trainee.module.taps)
        numbered = [(number, example) for number, responses in enumerate(corpus.responses) for example in responses]
        self.examples = [replace(example, index=index) for index, (_, example) in enumerate(numbered)]
        self.half = [number % 2 for number, _ in numbered]  # as `Corpus.choosing` and `Corpus.reporting`

    def prepare(self, recipe: TrainRecipe, rank: int, world: int) -> None:
        """Have the features computed and kept; all ranks call this. Raises as `FeatureStore.prepare`."""
        if self.examples:
            homes = [self.examples] * world
            self.store.prepare(self.examples, recipe.features, recipe.features_dir, homes, rank)

    @torch.no_grad()
    def measure(self, engine: Any, rank: int, world: int) -> tuple[ExpectedLength, ExpectedLength]:
        """The lengths to expect of the engine's weights, of both halves; all ranks call this, and share the texts."""
        module = self.trainee.module
        counts = torch.zeros(2, module.steps, 2, device=self.trainee.target.device)
        engine.eval()
        for first in range(0, len(self.examples), world):
            # ZeRO 3 gathers weights in every forward: a rank without a text of its own runs one that does not count.
            own = min(first + rank, len(self.examples) - 1)
            hits = hits_of(self.trainee, engine, self.store, self.examples[own])
            if own == first + rank:
                counts[self.half[own]] += hits
        engine.train()
        if world > 1:
            dist.all_reduce(counts)
        choosing, reporting = (ExpectedLength.of(half) for half in counts)
        return choosing, reporting


def hits_of(trainee: Trainee, engine: Any, store: FeatureStore, example: Example) -> Tensor:
    """Counts [depths, 2] of hits, and of drafts that got so far, behind the tokens of a response."""
    module = trainee.module
    (features,) = store.get([example])
    batch = slot_batch([example], [features], module.steps, module.t2d)
    hits = Hits(module, features.best.long())
    module.watch = hits
    try:
        trainee.loss(engine, batch)
    finally:
        module.watch = None
    return hits.counts(batch.left)


class Hits:
    """Notes for which response slots, at which steps, a head drafts the target's token `best` [N]."""

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
        at = (row + step).clamp_max(len(self.best) - 1)  # those behind the end do not count
        self.asked[step, row] = True
        self.hit[step, row] = self.module.draft_ids[drafted] == self.best[at]

    def counts(self, left: Tensor) -> Tensor:
        """[depths, 2] hits and drafts at every depth, of drafts whose shallower tokens were hits; `left` [N]: depths
        that the response is long enough for."""
        depth = torch.arange(len(self.asked), device=left.device)[:, None]
        asked = self.asked & (depth < left)
        reached = asked & torch.cat((torch.ones_like(asked[:1]), (asked & self.hit).cumprod(0)[:-1].bool()))
        return torch.stack(((reached & self.hit).sum(1), reached.sum(1)), 1).to(torch.float32)
