"""Drafting with `DepthHeads`: static trees whose depth-k nodes come from head k, and the heads' rows along a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from specctl.decoding.draft import DraftTree, Score, empty_draft
from specctl.decoding.layers import DraftLinear
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.depth_heads import DepthHeads
from specctl.drafters.static_tree import Shape, Trees


class DepthDrafter:
    """Inference of `DepthHeads`, with a copy of the weights in the target's dtype.

    A subclass computes `_logits`, and what its heads read of the text where that is more than the target's last state.

    Attributes:
        grounded: the heads read the drafted tokens; otherwise all nodes of a depth have the same candidates.
    """

    grounded: bool

    def __init__(self, module: DepthHeads, target: Target, shape: Shape, accuracy: Sequence[float]):
        config = module.config
        self.config, self.taps = config, config.taps
        self.dtype, self.device = target.dtype, target.device
        self.shape = replace(
            shape,
            depth=min(shape.depth, config.draft_heads),
            children=min(shape.children, config.draft_vocab_size),
        )
        self.trees = Trees(self.shape, accuracy, target.device)
        partial = config.draft_vocab_size < config.vocab_size
        self.ids = module.draft_ids.to(target.device) if partial else None

    def _linear(self, *layers: nn.Linear) -> DraftLinear:
        """Layers of one input, as one product."""
        weight = torch.cat([layer.weight.detach() for layer in layers]).to(self.device, self.dtype)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        return DraftLinear(weight, torch.cat(biases).to(self.device, self.dtype) if biases else None)

    def _logits(self, k: int, states: Tensor, tokens: Tensor) -> Tensor:
        """Head k's logits [R, Vd] from states [R, H] of slots i and the tokens [R, k + 1] x_{i+1} … x_{i+k+1}."""
        raise NotImplementedError

    def _states(self, state: DecodeState, width: int) -> tuple[Tensor, list[int]]:
        """What the heads read at every sequence's last `width` slots [B, width, H], and the first of those slots.

        A sequence that has fewer repeats its last: behind it nothing was ever written.
        """
        assert state.features is not None, "the loop retains no features for this drafter: pass its taps"
        starts = [max(end - width, 0) for end in state.cached]
        last = torch.tensor(state.cached, device=state.device).unsqueeze(1) - 1
        where = torch.tensor(starts, device=state.device).unsqueeze(1) + torch.arange(width, device=state.device)
        rows = torch.arange(state.batch, device=state.device).unsqueeze(1)
        return state.features[rows, torch.minimum(where, last)], starts

    def _last(self, state: DecodeState) -> Tensor:
        """The same at every sequence's last slot [B, H]."""
        return self._states(state, 1)[0][:, 0]

    def advance(self, state: DecodeState) -> None:
        """Nothing to consume where the target's state is all that is read."""

    def invalidate(self, state: DecodeState) -> None:
        """Forget what was computed from the text."""
        state.memory.pop(self, None)

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """A static tree from the last committed token, never deeper than there are heads, or room."""
        self.advance(state)
        tree = self.trees.of(state, budget)
        if tree is None:
            return empty_draft(state.batch, state.device)
        states = self._last(state).unsqueeze(1)

        def logits(depth: int, paths: Tensor) -> Tensor:
            behind = paths if self.grounded else paths[:, :1]
            nodes = states.expand(-1, behind.shape[1], -1)
            return self._logits(depth, nodes.flatten(0, 1), behind.flatten(0, 1)).unflatten(0, (state.batch, -1))

        roots = torch.tensor([row.ids[-1] for row in state.rows], device=state.device)
        return tree.grow(roots, logits, self.ids, self.shape.stop_below)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Head k's rows at depth k + 1, behind the tokens of the text. There are no rows deeper than the heads."""
        self.advance(state)
        heads = min(depths, self.config.draft_heads)
        # At depth k + 1 the token at position j is predicted from slot j − 2 − k.
        width = max(
            (end - span.start + 1 + heads for end, span in zip(state.cached, spans, strict=True) if span), default=0
        )
        if width == 0:
            return [Score(span, ids=self.ids) for span in spans]
        states, starts = self._states(state, width)
        scores = []
        for b, (row, span) in enumerate(zip(state.rows, spans, strict=True)):
            logits = []
            for k in range(heads):
                slots = [position - 2 - k for position in span]
                tokens = torch.tensor([row.ids[i + 1 : i + k + 2] for i in slots], device=state.device)
                at = torch.tensor([i - starts[b] for i in slots], dtype=torch.long, device=state.device)
                logits.append(self._logits(k, states[b, at], tokens.view(len(slots), k + 1)))
            scores.append(Score(span, torch.stack(logits), self.ids))
        return scores
