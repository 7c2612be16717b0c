"""Ensemble of feature heads that drafts from the mean of their distributions (OnlineSpec; `learner.combine=probs`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.cache import KVCache
from specctl.decoding.plan import Plan
from specctl.decoding.records import Score
from specctl.decoding.state import DecodeState
from specctl.drafters.feature.drafter import FeatureDrafter
from specctl.drafters.feature.layer import FeatureMemory, Table


@dataclass(frozen=True)
class _Caches:
    """KV caches, one per head."""

    parts: list[KVCache]

    @property
    def capacity(self) -> int:
        return self.parts[0].capacity


class Mixture(FeatureDrafter):
    """Drafts from the mixture Σ p_i q_i: every head reads all tokens that the mixture has drafted.

    This costs N times as much as one head with averaged weights. The mixture's states are the heads' states
    concatenated [·, N·H], so it can use the chains and trees of a single head.
    """

    def __init__(self, heads: Sequence[FeatureDrafter], weights: Sequence[float]):
        """`heads` have the same architecture and draft vocabulary; `weights` has one entry per head and sums to 1."""
        vars(self).update(vars(heads[0]))
        self.members, self.key = list(heads), object()
        self._log_weights = torch.tensor(list(weights), device=self.device).log()[:, None, None]  # [N, 1, 1]

    def _ready(self, state: DecodeState, asked: list[int] | None = None) -> FeatureMemory:
        memories = [head._ready(state, asked) for head in self.members]
        caches = _Caches([memory.cache for memory in memories])
        return FeatureMemory(caches, memories[0].cached, torch.cat([memory.hidden for memory in memories], -1))  # type: ignore[arg-type]

    def _layer(
        self,
        tokens: Tensor,
        features: Tensor,
        cache: KVCache | _Caches,
        plan: Plan,
        table: Table,
        last: list[int] | None = None,
    ) -> Tensor:
        assert isinstance(cache, _Caches)
        parts = zip(self.members, features.chunk(len(self.members), -1), cache.parts, strict=True)
        return torch.cat([head._layer(tokens, part, own, plan, table, last) for head, part, own in parts], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Log probabilities log Σ p_i q_i [N, Vd] for the states [N, N·H]."""
        parts = zip(self.members, hidden.chunk(len(self.members), -1), strict=True)
        return self._mixed([head.logits(part) for head, part in parts])

    def _mixed(self, rows: Sequence[Tensor]) -> Tensor:
        logs = torch.stack([row.float().log_softmax(-1).flatten(0, -2) for row in rows])
        return torch.logsumexp(logs + self._log_weights, 0).view(rows[0].shape)

    def candidates(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(hidden)
        return logits, *kernels.expand_topk(logits, count)

    def feature(self, tapped: Tensor) -> Tensor:
        raise NotImplementedError("every head computes its own features")

    layer_input = to_head = feature  # type: ignore[assignment]

    fixed_shape = False

    def on_device(self, state: DecodeState, budget: int) -> None:
        """Return None: rounds always go through the host."""

    def advance(self, state: DecodeState) -> None:
        for head in self.members:
            head.advance(state)

    def lag(self, state: DecodeState) -> list[int]:
        return self.members[0].lag(state)

    def invalidate(self, state: DecodeState) -> None:
        for head in self.members:
            head.invalidate(state)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Score with the mixture's distributions. Raises like the `score` of its heads."""
        found = []
        for scores in zip(*(head.score(state, spans, depths) for head in self.members), strict=True):
            rows = [score.logits for score in scores if score.logits is not None]
            first = scores[0]
            logits = self._mixed(rows) if rows else None
            found.append(Score(first.positions, logits, first.ids, children=first.children))
        return found
