"""Drafter of family `dflash`: block-parallel heads (DFlash, DSpark and DFlash 2).

One pass of the head drafts a whole block. An optional Markov head or candidate selector then rescores the block token
by token.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl import kernels
from specctl.decoding.cache import KVCache
from specctl.decoding.device.device_batch import CommittedSlots, DeviceBatch
from specctl.decoding.models.layers import attend
from specctl.decoding.plan import Plan, plan_at, plan_rows
from specctl.decoding.records import ChainRows
from specctl.decoding.rope import Rope
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.dflash.config import GROUP, BlockConfig, Sight, layer_attention
from specctl.drafters.dflash.head import BlockHead, BlockLayer
from specctl.drafters.dflash.layer import BlockPass
from specctl.drafters.family import HeadFamily
from specctl.drafters.feature.head import head_config, mask_token, taps_of
from specctl.drafters.feature.layer import FeatureMemory, last_slots, select_taps
from specctl.drafters.feature.parallel import ParallelDrafter, Transitions
from specctl.drafters.feature.scoring import attend_all, block_mask, hidden_context
from specctl.drafters.tree import TreeShape
from specctl.errors import UsageError
from specctl.recipe import DrafterRecipe

BLOCK = 8  # slots of a block
CANDIDATES = 32  # tokens per slot from which a Markov head chooses
RANK = 32  # rank of the Markov head or the selector; the papers use 256 for vocabularies of 150,000 tokens


@dataclass(frozen=True)
class BlockRows(ChainRows):
    """Draft logits of a block, corrected for the previous token of each chain.

    Attributes:
        tokens: for each sequence, the anchor and its chain.
        states: [B, K, H] states from which the logits are computed.
        following: function (logits [d, Vd], states [d, H], tokens [d]) → the logits after these tokens.
    """

    tokens: Sequence[list[int]] = ()
    states: Sequence[Tensor] = ()
    following: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda logits, states, tokens: logits

    def of(self, b: int, depth: int) -> Tensor:
        rows = super().of(b, depth)
        return self.following(rows, self.states[b][:depth], torch.tensor(self.tokens[b][:depth], device=rows.device))


def over_rows(linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a layer to x [..., H] as two-dimensional rows, which layers with 8-bit weights require."""
    return linear(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


class BlockDrafter(ParallelDrafter):
    """Runs a `BlockHead` for drafting.

    Keys and values of the context are computed once for every committed position.
    """

    def __init__(self, head: BlockHead, target: Target, shape: TreeShape):
        layers = cast(list[BlockLayer], list(head.layers))
        super().__init__(head, head.config, layers[0].inv_freq, target)
        self.size = 0
        self.config, self.shape, self.depths = head.config, shape, head.config.depth
        self.layers, self.sights = len(layers), head.config.sights
        self.embedding = target.model.embedding
        self.mask = head.mask(self.embedding).detach().to(self.device, torch.float32)
        self.fc, self.hidden_norm = self.linear(head.fc), self.rms_norm(head.hidden_norm)
        pairs = [proj for layer in layers for proj in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        self.pairs = self.linear(*pairs)
        self.passes = [BlockPass(head, layer, target) for layer in layers]
        self.norm = self.rms_norm(head.norm)
        own = head.lm_head
        self.head, self.scale = self.vocabulary_head(target) if own is None else (self.linear(own), 1.0)
        pruned = head.config.draft_vocab_size < head.config.vocab_size
        self.ids = head.draft_ids.to(self.device) if pruned else None
        self._to_target = head.draft_ids.tolist() if pruned else range(head.config.vocab_size)
        markov, selector = head.markov_head, head.candidate_selector
        self.before = self.after = self.steer = None
        self.candidates = CANDIDATES
        if markov is not None:
            self.before = markov.markov_w1.weight.detach().to(self.device, self.dtype)
        if selector is not None:
            self.before = selector.predecessor_codebook.detach().to(self.device, self.dtype)
            self.steer, self.candidates = self.linear(selector.hidden_projection), head.config.selector_top_k
        if head.token_dependency is not None:
            self.after = head.token_dependency.successors.detach().to(self.device, self.dtype)

    @property
    def reach(self) -> int:
        return self.config.block_size

    def feature(self, tapped: Tensor) -> Tensor:
        return self.fc(tapped).float()

    def _fill(self, state: DecodeState, memory: FeatureMemory, b: int, slots: range) -> None:
        assert state.features is not None
        plan = plan_rows([slots.start], len(slots), device=state.device, dtype=state.dtype)
        tapped = select_taps(state.features[b, slots.start : slots.stop], state.taps, self.taps)
        self._read(tapped, memory.cache.sequence(b), plan)

    def _fill_last(self, state: DecodeState, memory: FeatureMemory, width: int) -> None:
        tapped, starts = last_slots(state, width, self.taps)
        memory.cache.mark_written(starts)
        self._read(tapped, memory.cache, plan_rows(starts, width, device=state.device, dtype=state.dtype))

    def read_at(self, new: CommittedSlots, cache: KVCache, span: int) -> Tensor:
        tapped = select_taps(new.tapped.flatten(0, 1), new.taps, self.taps)
        self._read(tapped, cache, new.plan(span, cache.store.dtype))
        return torch.empty(len(new.base), self.size, device=self.device)

    def _read(self, tapped: Tensor, cache: KVCache, plan: Plan) -> None:
        """Write the keys and values of features [N, F] to the cache."""
        rope = cache.rope or self._rope_for(cache.capacity)
        table = rope.at(plan, self.kv_heads, self.kv_heads)
        pairs = self.pairs(self.hidden_norm(self.feature(tapped))).view(len(tapped), self.layers, -1, self.dim)
        for place, layer in enumerate(self.passes):
            assert layer.k_norm is not None
            keys, values = pairs[:, place].chunk(2, 1)
            cache.write(place, Rope.rotate(torch.cat((layer.k_norm(keys.float()), values), 1), table), plan)

    def transitions(self, anchors: Tensor, states: Tensor, logits: Tensor, children: int) -> Transitions:
        """Likeliest tokens of each level, rescored after every previous candidate by the Markov head or selector."""
        if self.before is None or self.after is None:
            return super().transitions(anchors, states, logits, children)
        batch, depth, vocabulary = logits.shape
        children = min(children, vocabulary)
        many = min(max(self.candidates, children), vocabulary)
        logprob, index = (x.unflatten(0, (batch, depth)) for x in kernels.expand_topk(logits.flatten(0, 1), many))
        tokens = index if self.ids is None else self.ids[index]
        before = torch.cat((anchors.view(-1, 1, 1).expand(-1, 1, many), tokens[:, :-1]), 1)
        change = self._edges(states.unsqueeze(2), before) @ self.after[index].mT  # [B, depth, C before, C]
        # Tokens beyond the candidates are assumed to keep their probability.
        left = torch.log1p(-logprob.exp().sum(-1).clamp_max(1 - 1e-6))[..., None, None]
        changed = logprob.unsqueeze(2) + change
        changed = changed - torch.logaddexp(changed.logsumexp(-1, keepdim=True), left)
        gains, places = changed.topk(children, -1)
        return Transitions(index, gains, places)

    def _edges(self, states: Tensor, before: Tensor) -> Tensor:
        """Factors [..., r] to multiply with the rows of `after`, for the preceding tokens `before` [...]."""
        assert self.before is not None
        edges = F.embedding(before, self.before)
        return edges if self.steer is None else edges * over_rows(self.steer, states)

    def rows(self, state: DecodeState, chains: list[list[int]], states: Tensor, logits: Tensor) -> ChainRows:
        """Draft logits from which the chains were chosen; corrections for previous tokens are computed on demand."""
        if self.before is None:
            return super().rows(state, chains, states, logits)
        anchors = [row.ids[-1:] for row in state.rows]
        tokens = [[*anchor, *chain] for anchor, chain in zip(anchors, chains, strict=True)]
        return BlockRows(
            logits.unbind(1), self.ids, tokens=tokens, states=states.unbind(), following=self.condition_on_previous
        )

    def block(self, state: DecodeState, depth: int) -> Tensor:
        cache, base = self.current(state).cache, state.cached
        size, device = self.config.block_size, state.device

        def plan_of(sight: Sight) -> Plan:
            if len(set(base)) == 1 and not sight.causal:  # every row attends to all slots
                positions = torch.tensor(base, device=device)[:, None] + torch.arange(size, device=device)
                plan = Plan(base, positions, base[0] + size, None, False, True)
            else:
                visible = self._visible(sight, device).expand(state.batch, -1, -1)
                plan = plan_rows(base, size, device=device, dtype=state.dtype, visible=visible)
            return plan.with_window(sight.window, state.dtype).without_slots(cache.skipped, state.dtype)

        anchors = torch.tensor([row.ids[-1] for row in state.rows], device=device)
        return self._block(anchors, cache, plan_of)[:, :depth]

    def block_at(self, sequences: DeviceBatch, hidden: Tensor, cache: KVCache, span: int) -> Tensor:
        place = torch.arange(self.config.block_size, device=sequences.device)

        def plan_of(sight: Sight) -> Plan:
            visible = self._visible(sight, sequences.device).expand(sequences.batch, -1, -1)
            plan = plan_at(sequences.length - 1, visible, place, span=span, dtype=sequences.dtype)
            return plan.with_window(sight.window, sequences.dtype)

        return self._block(sequences.last[:, 0], cache, plan_of)

    def _visible(self, sight: Sight, device: torch.device) -> Tensor:
        """Mask [S, S], True for the rows of a block that each of its rows attends to."""
        every = torch.ones(self.config.block_size, self.config.block_size, dtype=torch.bool, device=device)
        return every.tril() if sight.causal else every

    def _block(self, anchors: Tensor, cache: KVCache, plan_of: Callable[[Sight], Plan]) -> Tensor:
        """States [B, depths, H] of the blocks that begin with the tokens `anchors` [B].

        `plan_of` makes the plan of all layers with a sight. The plans differ only in their masks.
        """
        rope, size = cache.rope or self._rope_for(cache.capacity), self.config.block_size
        plans = {sight: plan_of(sight) for sight in dict.fromkeys(self.sights)}
        table = rope.at(plans[self.sights[0]], self.heads + self.kv_heads, self.kv_heads)
        x = self._entered(anchors)
        for place, layer in enumerate(self.passes):
            plan = plans[self.sights[place]]
            qkv, kernel = layer.project(x, table)
            cache.write(place, qkv[:, self.heads :], plan)
            query = qkv[:, : self.heads].unflatten(0, (-1, size))
            x = layer.layer_output(x, attend(query, cache, place, plan, self.dim**-0.5), kernel)
        return self.norm(x).unflatten(0, (-1, size))[:, self.config.first :]

    def _entered(self, anchors: Tensor) -> Tensor:
        """Input [n·S, H] of the layers for blocks that begin with the tokens `anchors` [n]."""
        x = self.mask.expand(len(anchors), self.config.block_size, -1).clone()
        x[:, 0] = F.embedding(anchors, self.embedding)
        return x.flatten(0, 1)

    def logits(self, states: Tensor) -> Tensor:
        return over_rows(self.head, states if self.scale == 1 else states * self.scale)

    def condition_on_previous(self, logits: Tensor, states: Tensor, before: Tensor) -> Tensor:
        if self.after is None:
            return logits
        return logits + F.linear(self._edges(states, before), self.after)

    def blocks_at(self, state: DecodeState, live: list[int], slots: list[list[int]], depths: int) -> Tensor:
        cache, size = self.current(state).cache, self.config.block_size
        at, index = torch.tensor(slots, device=state.device), torch.tensor(live, device=state.device)
        many, width = at.shape
        end = int(at.max()) + 1
        positions = (at[..., None] + 1 + torch.arange(size, device=state.device)).clamp_max(cache.capacity - 1)
        table = self._rope_for(cache.capacity).rows(positions.flatten(), self.heads + self.kv_heads, self.kv_heads)
        context = hidden_context(at, end, [cache.skipped[b] for b in live], own=True)
        context = context.unsqueeze(2).expand(-1, -1, size, -1)

        def mask_of(sight: Sight) -> Tensor:
            far = torch.arange(end, device=state.device) <= positions[..., None] - (sight.window or cache.capacity)
            return block_mask(context | far, self._visible(sight, state.device), state.dtype)

        masks = {sight: mask_of(sight) for sight in dict.fromkeys(self.sights)}
        x = self._entered(
            torch.tensor(
                [[state.rows[b].ids[s + 1] for s in p] for b, p in zip(live, slots, strict=True)], device=state.device
            ).flatten()
        )
        for place, layer in enumerate(self.passes):
            qkv, kernel = layer.project(x, table)
            key, value = qkv[:, self.heads :].unflatten(0, (many, -1)).transpose(1, 2).chunk(2, 1)
            keys = torch.cat((cache.keys[place][index, :, :end], key), 2)
            values = torch.cat((cache.values[place][index, :, :end], value), 2)
            out = attend_all(qkv[:, : self.heads], keys, values, masks[self.sights[place]])
            x = layer.layer_output(x, out, kernel)
        first = self.config.first
        return self.norm(x).view(many, width, size, -1)[:, :, first : first + depths]


class BlockFamily(HeadFamily):
    """Block-parallel heads."""

    head, config, drafter = BlockHead, BlockConfig, BlockDrafter

    def architecture(self, recipe: DrafterRecipe, target: Target) -> BlockConfig:
        """Shape of a head as the recipe sets it; options left out follow the target's own layers.

        Raises UsageError if the convolutions or the window do not fit a block or the target's states.
        """
        layer, block, convolved = head_config(recipe, target), recipe.block_size or BLOCK, recipe.conv_kernel_size or 0
        if convolved > block:
            hint = f"use at most {block}, or raise drafter.block_size"
            raise UsageError(f"drafter.conv_kernel_size={convolved} exceeds the {block} slots of a block", hint)
        if convolved and layer.hidden_size % GROUP:
            what = f"the states of target {target.name} have {layer.hidden_size} channels, not a multiple of {GROUP}"
            raise UsageError(f"drafter.conv_kernel_size={convolved}: {what}", "leave out drafter.conv_kernel_size")
        taps = taps_of(recipe, target, default_taps(target.num_layers))
        rank = recipe.markov_rank if recipe.markov_rank is not None else 0 if recipe.selector_rank else RANK
        return BlockConfig(
            **asdict(
                replace(
                    layer, taps=taps, draft_vocab_size=min(recipe.vocab_size or target.vocab_size, target.vocab_size)
                )
            ),
            **layer_attention(recipe, block),
            block_size=block,
            sample_from_anchor=rank > 0,
            mask_token_id=mask_token(target),
            own_mask=True,
            markov_rank=rank,
            confidence=recipe.confidence,
            conv_kernel_size=convolved,
            selector_rank=recipe.selector_rank or 0,
        )


FAMILY = BlockFamily("dflash")


def default_taps(layers: int) -> tuple[int, ...]:
    """Evenly spaced taps. The last one is the input of the last layer, because engines cannot tap any later state."""
    last = max(layers - 1, 1)
    return tuple(sorted({max(1, round(last * part / 3)) for part in (1, 2, 3)}))
