"""Block-parallel heads as trainable modules: DFlash (Chen et al. 2026, arXiv 2602.06036) and
DSpark (Cheng et al. 2026, arXiv 2607.05147).

A block begins at an anchor, the last committed token x_p, and goes on with masks. Decoder layers run once over all of
it: their queries are those of the block, their keys and values those of the target's features before the anchor and of
the whole block, without a causal mask. The target's own vocabulary head reads all drafted tokens off the result.

The slots of a block do not know what the ones before them will say. DSpark's Markov head gives that back at the end,
where it is cheap: behind token y the logits of the next one change by W₂ W₁[y], of a low rank. DSpark's confidence head
says of every slot how likely the target is to keep what is drafted there: σ(w · [h ; W₁[y]] + b).

Slot i of a sequence holds the target's features g_i and the token x_{i+1}, as in EAGLE-3, so the block that begins at
slot i has the anchor x_{i+1}, and its step k = 0, 1, … predicts x_{i+2+k}.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specctl.decoding.target import Target
from specctl.drafters.blueprint import CONFIG, Count, misfit
from specctl.drafters.feature.head import DraftHead, HeadAttention, HeadConfig, HeadLayer, Losses, SlotBatch
from specctl.drafters.feature.ttt_attention import Layout, block_attention
from specctl.drafters.lora import Product
from specctl.kernels.distill import linear_distill


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """Shape of a block-parallel head.

    Attributes:
        block_size: slots of a block, the anchor included.
        sample_from_anchor: the anchor's slot predicts the token behind it, slot k the one k + 1 behind; otherwise it
            predicts nothing, and slot k predicts its own token.
        mask_token_id: the token that stands in the slots behind the anchor where engines ask for one.
        own_mask: their embedding is the head's own; otherwise it is that of the token in the target.
        markov_rank: rank of the Markov head; 0 = none.
        confidence: has a confidence head, which reads the Markov head's W₁.
    """

    num_layers: Count
    block_size: Annotated[int, Field(strict=True, ge=2, le=64)]
    sample_from_anchor: bool
    mask_token_id: Annotated[int, Field(strict=True, ge=0)]
    own_mask: bool
    markov_rank: Annotated[int, Field(strict=True, ge=0, le=65_536)]
    confidence: Annotated[bool, Field(strict=True)] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.confidence and not self.markov_rank:
            raise ValueError("a confidence head reads a Markov head, and markov_rank is 0")

    @property
    def depth(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - self.first

    @property
    def first(self) -> int:
        """The first slot that predicts."""
        return 0 if self.sample_from_anchor else 1

    def check(self, target: Target) -> None:
        super().check(target)
        if self.mask_token_id >= self.vocab_size:
            beyond = f"is {self.mask_token_id}, the vocabulary has {self.vocab_size} tokens"
            raise misfit(CONFIG, "architecture.mask_token_id", beyond)


class BlockAttention(HeadAttention):
    """Queries and keys are normed head by head, as in Qwen3."""

    def __init__(self, config: HeadConfig):
        super().__init__(config, config.hidden_size)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)


class BlockLayer(HeadLayer):
    """A decoder layer over blocks and their context."""

    self_attn: BlockAttention

    def __init__(self, config: HeadConfig):
        super().__init__(config, config.hidden_size)
        self.self_attn = BlockAttention(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, places: Tensor, layout: Layout) -> Tensor:
        """The layer's output [n, S, H], of x [n, S, H] at `positions` [n, S] and the context [M, H] at `places` [M]."""
        attention, inputs = self.self_attn, self.input_layernorm(x)
        key, value = self._pairs(context, places)
        own = torch.stack(self._pairs(inputs.flatten(0, 1), positions.flatten()))
        query = attention.q_proj(inputs).flatten(0, 1).unflatten(-1, (-1, self.config.head_dim))
        query = self.rope(attention.q_norm(query.float()).to(own.dtype), positions.flatten())
        blocks = x.shape[:2]
        out = block_attention(query.unflatten(0, blocks), key, value, own.unflatten(1, blocks), layout)
        return self.leave(x.flatten(0, 1), out.flatten(0, 1)).unflatten(0, blocks)

    def _pairs(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values, each [N, Hkv, D], of inputs [N, H]."""
        attention, shape = self.self_attn, (-1, self.config.num_kv_heads, self.config.head_dim)
        value = attention.v_proj(inputs).view(shape)
        key = attention.k_norm(attention.k_proj(inputs).view(shape).float()).to(value.dtype)
        return self.rope(key, positions), value


class MarkovHead(nn.Module):
    """Token y ↦ W₂ W₁[y], what is added to the logits of the token behind it. It starts as nothing."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """Hidden state h [n, H] and W₁[y] [n, r] ↦ the logit [n] of the chance that the target keeps what is drafted behind
    y. It starts undecided."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        return self.proj(torch.cat((hidden, before), -1)).squeeze(-1)


class BlockHead(DraftHead):
    """Parameters carry the names of the published checkpoints (`fc`, `hidden_norm`, `layers.0.*`, `norm`,
    `markov_head.*`, `confidence_head.*`); a draft vocabulary brings a vocabulary head of its own, `lm_head`."""

    config: BlockConfig

    def __init__(self, config: BlockConfig, draft_ids: Tensor | None = None):
        pruned = config.draft_vocab_size < config.vocab_size
        super().__init__(config, draft_ids, stored=pruned)
        self.steps = config.depth
        self.gradient_checkpointing = False
        size = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.num_layers)])
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(size)) if config.own_mask else None
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False) if pruned else None
        rank = config.markov_rank
        self.markov_head = MarkovHead(config.vocab_size, config.draft_vocab_size, rank) if rank else None
        self.confidence_head = ConfidenceHead(size + rank) if config.confidence else None

    def mask(self, embedding: Tensor) -> Tensor:
        """[H] what stands in the slots behind the anchor, given the target's token embedding [V, H]."""
        return embedding[self.config.mask_token_id] if self.mask_embedding is None else self.mask_embedding

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of the blocks that begin at the batch's `later_rows`, tokens teacher-forced.

        Args:
            embedding: [V, H] the target's (frozen) token embedding.
            target_head: [Vd, H] the rows of the target's vocabulary head that belong to the draft vocabulary.

        Returns:
            As `DraftHead.sums`.
        """
        config, rows = self.config, batch.later_rows
        features = batch.features
        if not torch.is_autocast_enabled(features.device.type):
            features = features.float()
        context = self.hidden_norm(self.fc(features).float())
        anchors = batch.query_rows[rows]
        x = self.mask(embedding).float().expand(len(rows), config.block_size, -1).clone()
        x[:, 0] = F.embedding(batch.key_tokens[anchors], embedding).float()
        ahead = torch.arange(config.block_size, device=rows.device)
        positions = batch.key_positions[anchors][:, None] + 1 + ahead
        layout = batch.later_layout.blockwise(config.block_size)
        for layer in self.layers:
            run = partial(checkpoint, layer, use_reentrant=False) if self.gradient_checkpointing else layer
            x = run(x, context, positions, batch.key_positions, layout)
        hidden = self.norm(x[:, config.first :]).transpose(0, 1).flatten(0, 1)  # step by step, as `distil` reads them
        before = (anchors + ahead[: self.steps, None]).flatten().clamp_max(len(batch.key_tokens) - 1)
        tokens = batch.key_tokens[before]
        product = self._product(hidden, tokens, target_head)
        each = [rows] * self.steps
        found = self.distil(product, each, range(self.steps), batch, self.teacher(batch, target_head))
        if self.confidence_head is not None:
            doubt = self._doubt(hidden, tokens, product, found, batch, target_head)
            found = found._replace(total=found.total + doubt)
        return self.sums(found, [len(rows)] * self.steps)

    def _doubt(
        self, hidden: Tensor, before: Tensor, product: Product, found: Losses, batch: SlotBatch, target_head: Tensor
    ) -> Tensor:
        """The confidence head's loss, weighted as `found` is: the cross-entropy with 1 − TV(p, q), the chance that a
        token of q is kept. What it reads is detached: learning to tell does not change what is drafted."""
        assert self.confidence_head is not None and self.markov_head is not None
        rows = batch.later_rows
        step = torch.arange(self.steps, device=rows.device).repeat_interleave(len(rows))
        distance = found.each
        if self.objective != "tv":
            with torch.no_grad():
                teacher = self.distributions(batch, target_head)
                _, distance = linear_distill(*product, teacher, rows.repeat(self.steps) + step, found.share, "tv")
        inputs = hidden.detach(), self.markov_head.markov_w1(before).detach().to(hidden.dtype)
        kept = (1 - distance).clamp(0, 1)
        losses = F.binary_cross_entropy_with_logits(self.confidence_head(*inputs).float(), kept, reduction="none")
        return torch.dot(found.share, losses)

    def _product(self, hidden: Tensor, before: Tensor, target_head: Tensor) -> Product:
        """The product that makes the logits of hidden states [n, H] behind the tokens `before` [n]."""
        if self.lm_head is None:
            # A cap would not change the order of tokens.
            hidden, weight, bias = hidden * self.squash.scale, target_head, self.squash.shift
        else:
            weight, bias = self.lm_head.weight, None
        if self.markov_head is None:
            return hidden, weight, bias
        # W h + W₂ W₁[y] as one product of what stands side by side.
        markov = self.markov_head
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wide = torch.cat((weight.to(dtype), markov.markov_w2.weight.to(dtype)), 1)
        return torch.cat((hidden, markov.markov_w1(before).to(hidden.dtype)), 1), wide, bias


def layers_of(head: BlockHead) -> list[BlockLayer]:
    """The decoder layers."""
    return [cast(BlockLayer, layer) for layer in head.layers]
