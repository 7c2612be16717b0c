"""The EAGLE-3 head as a trainable module, and its training-time test (Li et al. 2025, arXiv 2503.01840, §3).

Slot i of a sequence holds the target's features g_i and the token x_{i+1}; at step 0 it predicts x_{i+2}. At step k the
slot is fed the layer's own output of step k−1 and the token x_{i+1+k}, and predicts x_{i+2+k}: at inference it has
no target features beyond the last committed position and lives on its own outputs.

Only response tokens are trained on, so only response slots are queries. The prompt enters as keys and values of step 0,
which costs one projection a token; everything else (attention output, MLP, vocabulary head, loss, and all later steps)
runs on response slots alone. A slot's later steps attend step-0 keys and its own outputs, never another slot's, so a
sample of the slots can go on while the others stop after step 0.

With `gradient_checkpointing` only the inputs of every step's layer are kept for the backward pass, and vocabulary rows
are made, used and forgotten in parts: long samples and large vocabularies fit, for a second forward pass of both.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specctl.drafters.objectives import soft_cross_entropy
from specctl.drafters.ttt_attention import Layout
from specctl.drafters.ttt_attention import attention as ttt_attention

LOSS_ROWS = 512  # teacher rows in a part; each belongs to a row of logits of every step


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
        self.gradient_checkpointing = False
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
        layer = self.midlayer
        step = partial(checkpoint, self._step, use_reentrant=False) if self.gradient_checkpointing else self._step
        hidden = self.fc(batch.features).float()
        embedded = layer.input_layernorm(F.embedding(batch.key_tokens, embedding).float())
        inputs = torch.cat((embedded, layer.hidden_norm(hidden)), -1)
        key, value = self._key_and_value(inputs, batch.key_positions)
        own: list[tuple[Tensor, Tensor]] = []
        rows, slots, layout = torch.arange(len(batch.query_rows), device=hidden.device), batch.query_rows, batch.layout
        x, positions = hidden[slots], batch.key_positions[slots]
        outputs, asked = [], []
        for k in range(self.ttt_steps):
            if k == 1:
                rows, layout = batch.later_rows, batch.later_layout
                x, slots, positions = x[rows], slots[rows], positions[rows]
            x, own = step(k, x, slots, positions, embedded, key, value, own, layout)
            outputs.append(x)
            asked.append(rows + k)
        # The vocabulary head and the loss are no part of the recurrence: one product for all steps.
        sizes = [len(part) for part in asked]
        at = torch.cat(asked)
        steps = torch.arange(self.ttt_steps, device=at.device).repeat_interleave(torch.tensor(sizes, device=at.device))
        valid = (batch.left[at - steps] > steps) & batch.inside[at]
        losses = self._losses(torch.cat(outputs), batch.teacher, at, valid, target_head)
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

    def _key_and_value(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values, each [n, Hkv, D], of layer inputs [n, 2H]."""
        attention, shape = self.midlayer.self_attn, (-1, self.config.num_kv_heads, self.config.head_dim)
        return self.rope(attention.k_proj(inputs).view(shape), positions), attention.v_proj(inputs).view(shape)

    def _step(
        self,
        k: int,
        x: Tensor,
        slots: Tensor,
        positions: Tensor,
        embedded: Tensor,
        key: Tensor,
        value: Tensor,
        own: list[tuple[Tensor, Tensor]],
        layout: Layout,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The layer at step k, for rows x [n, H] at `slots` [n]; `own` are their keys and values of steps 1 … k−1.

        Returns (its output, `own` of steps 1 … k).
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        heads, dim = self.config.num_heads, self.config.head_dim
        # Slot s + k holds token x_{s+k+1}; past the end of a document the row is no longer valid.
        tokens = embedded[(slots + k).clamp_max(embedded.shape[0] - 1)]
        inputs = torch.cat((tokens, layer.hidden_norm(x)), -1)
        if k:
            own = [*own, self._key_and_value(inputs, positions + k)]
        query = self.rope(attention.q_proj(inputs).view(-1, heads, dim), positions + k)
        out = ttt_attention(query, key, value, [pair[0] for pair in own], [pair[1] for pair in own], layout)
        x = x + attention.o_proj(out.reshape(-1, heads * dim))
        return x + layer.mlp(layer.post_attention_layernorm(x)), own

    def _losses(self, x: Tensor, teacher: Tensor, at: Tensor, valid: Tensor, target_head: Tensor) -> Tensor:
        """[n] losses of layer outputs x [n, H] against rows `at` [n] of the teacher."""
        if not self.gradient_checkpointing:
            return self._vocabulary_losses(x, teacher, at, valid, target_head)
        # Sorted by teacher row, so that a part makes the probabilities of its teacher rows once for all steps.
        at, order = at.sort(stable=True)
        teachers = teacher.split(LOSS_ROWS)
        sizes = (at // LOSS_ROWS).bincount(minlength=len(teachers)).tolist()
        parts = zip(
            x[order].split(sizes), teachers, (at % LOSS_ROWS).split(sizes), valid[order].split(sizes), strict=True
        )
        losses = [checkpoint(self._vocabulary_losses, *part, target_head, use_reentrant=False) for part in parts]
        return torch.cat(losses)[order.argsort()]

    def _vocabulary_losses(self, x: Tensor, teacher: Tensor, at: Tensor, valid: Tensor, target_head: Tensor) -> Tensor:
        return soft_cross_entropy(self.lm_head(self.norm(x)), self._teacher(teacher, target_head)[at], valid)

    @torch.no_grad()
    def _teacher(self, hidden: Tensor, target_head: Tensor) -> Tensor:
        """Target probabilities [N + T, Vd], renormalised on the draft vocabulary (EAGLE-3 practice)."""
        logits = F.linear(hidden.to(target_head.dtype), target_head)
        return logits.float().softmax(-1).to(logits.dtype)
