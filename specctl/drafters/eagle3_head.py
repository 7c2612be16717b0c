"""The EAGLE-3 head as a trainable module, and its training-time test (Li et al. 2025, arXiv 2503.01840, §3).

Slot i of a sequence holds the target's features g_i and the token x_{i+1}; at step 0 it predicts x_{i+2}. At step k the
slot is fed the layer's own output of step k−1 and the token x_{i+1+k}, and predicts x_{i+2+k}: at inference it has
no target features beyond the last committed position and lives on its own outputs.

Only response tokens are trained on, so only response slots are queries. The prompt enters as keys and values of step 0,
which costs one projection a token; everything else (attention output, MLP, vocabulary head, loss, and all later steps)
runs on response slots alone. A slot's later steps attend step-0 keys and its own outputs, never another slot's, so a
sample of the slots can go on while the others stop after step 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.drafters.objectives import soft_cross_entropy
from specctl.drafters.ttt_attention import Layout
from specctl.drafters.ttt_attention import attention as ttt_attention


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of a head. `taps` index `transformers`' hidden_states; `vocab_size` is the target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"taps": list(self.taps)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Eagle3Config:
        return cls(**{**values, "taps": tuple(values["taps"])})


@dataclass
class SlotBatch:
    """Packed documents for the training-time test; N = response slots, M = all slots of all documents.

    Attributes:
        features: [M, taps·Ht] target features of every slot.
        key_tokens: [M] token x_{i+1} of every slot.
        key_positions: [M] position i of every slot.
        query_rows: [N] the response slots among the M.
        later_rows: [n] which of the N go on to steps 1, 2, … .
        teacher: [N + T, Ht] target hidden state h_{i+1} (after the final norm) of every response slot, back to back;
            step k reads it shifted by k.
        inside: [N + T] bool, the target's most probable token there is in the draft vocabulary.
        left: [N] how many steps a slot is valid for (step k is used iff k < left).
        layout, later_layout: which slots the N and the n rows attend.
    """

    features: Tensor
    key_tokens: Tensor
    key_positions: Tensor
    query_rows: Tensor
    later_rows: Tensor
    teacher: Tensor
    inside: Tensor
    left: Tensor
    layout: Layout
    later_layout: Layout


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        width, dim = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, config.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)


class Eagle3Head(nn.Module):
    """Parameters carry the names of the published checkpoints (`fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d`)."""

    d2t: Tensor
    t2d: Tensor
    inv_freq: Tensor

    def __init__(
        self, config: Eagle3Config, draft_ids: Tensor | None = None, ttt_steps: int = 1, ttt_decay: float = 1.0
    ):
        """`draft_ids` [Vd] sorted target ids of the draft vocabulary (None when they come with a state dict)."""
        super().__init__()
        self.config, self.ttt_steps, self.ttt_decay = config, ttt_steps, ttt_decay
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids
        member = torch.zeros(config.vocab_size, dtype=torch.bool)
        member[ids] = True
        # d2t holds offsets, as vLLM and SGLang read it: target id = i + d2t[i].
        self.register_buffer("d2t", ids - torch.arange(config.draft_vocab_size))
        self.register_buffer("t2d", member)
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("inv_freq", config.rope_theta**-half, persistent=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def steps(self) -> int:
        return self.ttt_steps

    @property
    def draft_ids(self) -> Tensor:
        """[Vd] target id of every draft token."""
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, heads, D] rotated to `positions` [N]."""
        angle = positions[:, None].float() * self.inv_freq
        cos, sin = (torch.cat((t, t), -1)[:, None].to(x.dtype) for t in (angle.cos(), angle.sin()))
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Training-time test over a batch.

        Args:
            embedding: [V, H] the target's (frozen) token embedding.
            target_head: [Vd, H] the rows of the target's vocabulary head that belong to the draft vocabulary.

        Returns:
            (Σ_k decay^k Σ loss, Σ_k decay^k · valid slots, [T, 2] sums of (loss, valid slots) per step): the mean loss
            is the first divided by the second, over however many ranks and micro-batches. Where only some rows go on
            (`later_rows`), the later steps weigh accordingly less.
        """
        config, layer = self.config, self.midlayer
        attention = layer.self_attn
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden = self.fc(batch.features).float()
        embedded = layer.input_layernorm(F.embedding(batch.key_tokens, embedding).float())
        inputs = torch.cat((embedded, layer.hidden_norm(hidden)), -1)
        key = self.rope(attention.k_proj(inputs).view(-1, kv_heads, dim), batch.key_positions)
        value = attention.v_proj(inputs).view(-1, kv_heads, dim)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        rows, slots, layout = torch.arange(len(batch.query_rows), device=hidden.device), batch.query_rows, batch.layout
        x, inputs, positions = hidden[slots], inputs[slots], batch.key_positions[slots]
        outputs, asked = [], []
        for k in range(self.ttt_steps):
            if k == 1:
                rows, layout = batch.later_rows, batch.later_layout
                x, slots, positions = x[rows], slots[rows], positions[rows]
            if k:
                # Slot s + k holds token x_{s+k+1}; past the end of a document the row is no longer valid.
                tokens = embedded[(slots + k).clamp_max(embedded.shape[0] - 1)]
                inputs = torch.cat((tokens, layer.hidden_norm(x)), -1)
                own_keys.append(self.rope(attention.k_proj(inputs).view(-1, kv_heads, dim), positions + k))
                own_values.append(attention.v_proj(inputs).view(-1, kv_heads, dim))
            query = self.rope(attention.q_proj(inputs).view(-1, heads, dim), positions + k)
            out = ttt_attention(query, key, value, own_keys, own_values, layout).reshape(-1, heads * dim)
            x = x + attention.o_proj(out)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            outputs.append(x)
            asked.append(rows + k)
        # The vocabulary head and the loss are no part of the recurrence: one product for all steps.
        sizes = [len(part) for part in asked]
        at = torch.cat(asked)
        step = torch.arange(self.ttt_steps, device=at.device).repeat_interleave(torch.tensor(sizes, device=at.device))
        valid = (batch.left[at - step] > step) & batch.inside[at]
        logits = self.lm_head(self.norm(torch.cat(outputs)))
        losses = soft_cross_entropy(logits, self._teacher(batch.teacher, target_head)[at], valid)
        by_step = [
            (part.sum(), count.sum()) for part, count in zip(losses.split(sizes), valid.split(sizes), strict=True)
        ]
        decay = [self.ttt_decay**k for k in range(self.ttt_steps)]
        total = torch.stack([share * loss for share, (loss, _) in zip(decay, by_step, strict=True)]).sum()
        weight = torch.stack([share * count for share, (_, count) in zip(decay, by_step, strict=True)]).sum()
        return (
            total,
            weight,
            torch.stack([torch.stack((loss.detach(), count.to(loss.dtype))) for loss, count in by_step]),
        )

    @torch.no_grad()
    def _teacher(self, hidden: Tensor, target_head: Tensor) -> Tensor:
        """Target probabilities [N + T, Vd], renormalised on the draft vocabulary (EAGLE-3 practice)."""
        logits = F.linear(hidden.to(target_head.dtype), target_head)
        return logits.float().softmax(-1).to(logits.dtype)
