"""Drafter of family `peagle`: a P-EAGLE head (Hui et al. 2026, arXiv 2602.01469).

The pass that reads the committed tokens also drafts: its last rows cover all draft depths.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.cache import KVCache
from specctl.decoding.device.device_batch import CommittedSlots, DeviceBatch
from specctl.decoding.plan import Plan, plan_rows
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.family import HeadFamily
from specctl.drafters.feature.fusion import FusedInput, fusion_shape
from specctl.drafters.feature.head import DraftHead, mask_token
from specctl.drafters.feature.layer import FeatureMemory, last_slots, select_taps
from specctl.drafters.feature.parallel import ParallelDrafter
from specctl.drafters.feature.scoring import attend_all, block_mask, hidden_context
from specctl.drafters.peagle.head import PEagleConfig, PEagleHead
from specctl.drafters.tree import TreeShape
from specctl.recipe import DrafterRecipe, TrainRecipe

LAYERS = 1


class PEagleDrafter(ParallelDrafter, FusedInput):
    """Runs a `PEagleHead` for drafting. It carries the output at all depths of a draft from round to round."""

    def __init__(self, head: PEagleHead, target: Target, shape: TreeShape):
        FusedInput.__init__(self, head, head.midlayer, target)
        self.shape, self.depths, self.mask_token = shape, head.config.depths, head.config.mask_token_id
        self.width = head.config.hidden_size
        self.size = self.depths * self.width
        self.fuse(head, head.embedding(target.model.embedding).detach().to(self.device), target)
        self.mask_hidden = head.mask_hidden.detach().to(self.device, self.dtype).flatten()
        self.ids = head.draft_ids.to(self.device)
        self._to_target = self.ids.tolist()

    @property
    def reach(self) -> int:
        return self.depths

    def logits(self, states: Tensor) -> Tensor:
        return self.head(states.flatten(0, -2)).unflatten(0, states.shape[:-1])

    def block(self, state: DecodeState, depth: int) -> Tensor:
        return self._normed(self.current(state).hidden.view(state.batch, self.depths, -1)[:, :depth])

    def block_at(self, sequences: DeviceBatch, hidden: Tensor, cache: KVCache, span: int) -> Tensor:
        return self._normed(hidden.view(len(hidden), self.depths, -1))

    def _normed(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])

    def _fill(self, state: DecodeState, memory: FeatureMemory, b: int, slots: range) -> None:
        assert state.features is not None
        tokens = [state.rows[b].ids[slots.start + 1 : slots.stop + 1]]
        features = select_taps(state.features[b, slots.start : slots.stop], state.taps, self.taps)
        memory.hidden[b] = self._draft(tokens, features, memory.cache.sequence(b), [slots.start])[0]

    def _fill_last(self, state: DecodeState, memory: FeatureMemory, width: int) -> None:
        features, starts = last_slots(state, width, self.taps)
        memory.cache.mark_written(starts)
        tokens = [
            row.ids[start + 1 : end + 1] for row, start, end in zip(state.rows, starts, state.cached, strict=True)
        ]
        memory.hidden = self._draft(tokens, features, memory.cache, starts)

    def _draft(self, tokens: list[list[int]], tapped: Tensor, cache: KVCache, starts: list[int]) -> Tensor:
        """Compute the output [B, K·H] at all K depths after the last of `tokens` [B][≤ T].

        The first token of each sequence stands at slot `starts`. `tapped` [B·T, F] holds the tokens' states; rows of
        sequences with fewer than T tokens are filled with arbitrary states.
        """
        batch, masks = len(tokens), self.depths - 1
        counts = [len(row) for row in tokens]
        width = len(tapped) // batch + masks
        padded = torch.tensor([row + [self.mask_token] * (width - len(row)) for row in tokens], device=self.device)
        known = F.pad(tapped.unflatten(0, (batch, -1)), (0, 0, 0, masks))
        unknown = torch.arange(width, device=self.device) >= torch.tensor(counts, device=self.device)[:, None]
        features = self.feature(torch.where(unknown[..., None], self.mask_hidden, known).flatten(0, 1))
        plan = plan_rows(starts, width, device=self.device, dtype=cache.store.dtype)
        return self._pass(padded, features, cache, plan, [max(count - 1, 0) for count in counts]).view(batch, -1)

    def read_at(self, new: CommittedSlots, cache: KVCache, span: int) -> Tensor:
        masks, width = self.depths - 1, new.tokens.shape[1] + self.depths - 1
        place = torch.arange(width, device=self.device)
        unknown = place >= new.count.unsqueeze(1)
        tokens = torch.where(unknown, self.mask_token, F.pad(new.tokens, (0, masks)))
        known = select_taps(new.tapped.flatten(0, 1), new.taps, self.taps).unflatten(0, new.tokens.shape)
        features = self.feature(
            torch.where(unknown.unsqueeze(-1), self.mask_hidden, F.pad(known, (0, 0, 0, masks))).flatten(0, 1)
        )
        x = self._pass(tokens, features, cache, new.plan(span, cache.store.dtype, masks)).unflatten(0, tokens.shape)
        rows = new.last.unsqueeze(1) + place[: self.depths]
        return x.gather(1, rows.unsqueeze(-1).expand(-1, -1, self.width)).flatten(1)

    def _pass(
        self, tokens: Tensor, features: Tensor, cache: KVCache, plan: Plan, last: list[int] | None = None
    ) -> Tensor:
        """Run the head over rows of `tokens` [B, T] and features [B·T, H]. Returns the output [N, H].

        With `last`, only the K rows of each sequence from that row on are returned.
        """
        rope = cache.rope or self._rope_for(cache.capacity)
        table = rope.at(plan, self.heads + self.kv_heads, self.kv_heads)
        only = None if last is None else self._rows_from(cache, plan, last, self.depths)
        entered = self._project(tokens.flatten(), features, table)
        return self._run_layers(entered, table, self._cached_attention(cache, plan, only))

    def blocks_at(self, state: DecodeState, live: list[int], slots: list[list[int]], depths: int) -> Tensor:
        assert state.features is not None
        cache, device = self.current(state).cache, state.device
        at, index = torch.tensor(slots, device=device), torch.tensor(live, device=device)
        many, width = at.shape
        end = int(at.max()) + 1
        positions = (at[..., None] + torch.arange(depths, device=device)).clamp_max(cache.capacity - 1)
        table = self._rope_for(cache.capacity).rows(positions.flatten(), self.heads + self.kv_heads, self.kv_heads)
        context = hidden_context(at, end, [cache.skipped[b] for b in live], own=False).unsqueeze(2)
        if self.window is not None:
            context = context | (torch.arange(end, device=device) <= positions[..., None] - self.window)
        inside = torch.ones(depths, depths, dtype=torch.bool, device=device).tril()
        mask = block_mask(context.expand(-1, -1, depths, -1), inside, state.dtype)
        tokens = torch.full((many, width, depths), self.mask_token, device=device)
        tokens[..., 0] = torch.tensor(
            [[state.rows[b].ids[s + 1] for s in part] for b, part in zip(live, slots, strict=True)], device=device
        )
        features = self.mask_hidden.repeat(many, width, depths, 1)
        features[:, :, 0] = select_taps(state.features[index[:, None], at].flatten(0, 1), state.taps, self.taps).view(
            many, width, -1
        )

        def attended(place: int, residual: Tensor, pairs: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
            own = pairs.unflatten(0, (many, -1)).transpose(1, 2)
            keys = torch.cat((cache.keys[place][index, :, :end], own[:, : self.kv_heads]), 2)
            values = torch.cat((cache.values[place][index, :, :end], own[:, self.kv_heads :]), 2)
            return residual, attend_all(query, keys, values, mask)

        entered = self._project(tokens.flatten(), self.feature(features.flatten(0, 2)), table)
        return self.norm(self._run_layers(entered, table, attended)).view(many, width, depths, -1)


class PEagleFamily(HeadFamily):
    """P-EAGLE heads."""

    head, config, drafter = PEagleHead, PEagleConfig, PEagleDrafter

    def build(self, recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> DraftHead:
        return self.new_head(self.architecture(recipe.drafter, target, recipe.ttt_steps), target, frequent)

    def architecture(self, recipe: DrafterRecipe, target: Target, depths: int = 2) -> PEagleConfig:
        """Shape of a new head as the recipe sets it, which drafts `depths` tokens in one pass, but at least two."""
        return PEagleConfig(
            **fusion_shape(recipe, target),
            num_layers=recipe.num_layers or LAYERS,
            depths=max(depths, 2),
            mask_token_id=mask_token(target),
        )


FAMILY = PEagleFamily("peagle")
