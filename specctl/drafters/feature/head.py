"""Common parts of trainable heads on features: configuration, batches, layer parts, vocabulary, losses by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from specctl.decoding.target import Target
from specctl.drafters.blueprint import CONFIG, WEIGHTS, Count, Length, Place, Size, filled, misfit, read
from specctl.drafters.feature.ttt_attention import Layout
from specctl.drafters.lora import Product
from specctl.errors import UsageError
from specctl.kernels.distill import Squash, Teacher, linear_distill
from specctl.recipe import DrafterRecipe


@dataclass(frozen=True)
class DraftConfig:
    """Shape of any head. `taps` index `transformers`' hidden_states; `vocab_size` is the target's."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    hidden_size: Size
    vocab_size: Size
    draft_vocab_size: Size
    taps: Annotated[tuple[Place, ...], Field(min_length=1, max_length=64)]

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"a draft vocabulary of {self.draft_vocab_size} tokens, the target has {self.vocab_size}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"taps": list(self.taps)}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """From "architecture" in config.json. CheckpointError names the key that is wrong."""
        return read(cls, values)

    def check(self, target: Target) -> None:
        """Raise CheckpointError where a head of this shape cannot read what `target` computes, or says other tokens."""
        for key, own, its in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ):
            if own != its:
                raise misfit(CONFIG, f"architecture.{key}", f"is {own}, target {target.name} has {its}")
        if max(self.taps) > target.num_layers:
            has = f"target {target.name} has hidden states 0 … {target.num_layers}"
            raise misfit(CONFIG, "architecture.taps", f"is {list(self.taps)}, {has}")


@dataclass(frozen=True)
class HeadConfig(DraftConfig):
    """Shape of a head with a decoder layer."""

    intermediate_size: Size
    num_heads: Count
    num_kv_heads: Count
    head_dim: Annotated[Count, Field(multiple_of=2)]
    rms_norm_eps: Annotated[float, Field(strict=True, gt=0, lt=1)]
    rope_theta: Annotated[float, Field(strict=True, gt=0, le=1e12)]
    max_position_embeddings: Length

    def check(self, target: Target) -> None:
        super().check(target)
        if self.num_heads % self.num_kv_heads:
            shared = f"is {self.num_kv_heads}, {self.num_heads} heads cannot share so many"
            raise misfit(CONFIG, "architecture.num_kv_heads", shared)


def taps_of(recipe: DrafterRecipe, target: Target, default: tuple[int, ...]) -> tuple[int, ...]:
    """The target's hidden states that a head reads: those of the recipe, else `default`. UsageError where the target
    has no such state, or one comes twice."""
    taps = tuple(recipe.taps or default)
    last = target.num_layers
    if max(taps) > last or len({*taps}) < len(taps):
        raise UsageError(
            f"drafter.taps={[*taps]}: the target has hidden states 0 to {last}, each to be read once",
            f"leave drafter.taps out: {[*default]}",
        )
    return taps


def head_config(recipe: DrafterRecipe, target: Target) -> HeadConfig:
    """A layer like the target's own, the recipe's sizes aside; without taps and a draft vocabulary, which the families
    choose."""
    text = target.config
    heads = recipe.num_heads or text.num_attention_heads
    dim = None if recipe.num_heads else getattr(text, "head_dim", None)
    rope = getattr(text, "rope_parameters", None) or {}
    return HeadConfig(
        hidden_size=target.hidden_size,
        intermediate_size=recipe.intermediate_size or getattr(text, "intermediate_size", 4 * target.hidden_size),
        num_heads=heads,
        num_kv_heads=recipe.num_kv_heads or getattr(text, "num_key_value_heads", None) or heads,
        head_dim=dim or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        taps=(),
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        max_position_embeddings=target.context_length,
    )


def mask_token(target: Target) -> int:
    """A token that stands for the masks where an engine looks their embedding up: the padding, or else the last one."""
    pad = getattr(target.config, "pad_token_id", None)
    if pad is not None and 0 <= pad < target.vocab_size and pad not in target.eos_ids:
        return pad
    return target.vocab_size - 1


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
        distributions: [N + T, Vd] what the vocabulary head makes of those, where it was made beforehand.
        inside: [N + T] bool, the target's most probable token there is in the draft vocabulary.
        labels: [N + T] the token that stands there.
        left: [N] how many steps a slot is valid for (step k is used iff k < left).
        layout, later_layout: which slots the N and the n rows attend.
        draws: [n] in [0, 1), evenly spread along a text, by which a share of the n rows is chosen; None = 0 for all.
    """

    features: Tensor
    key_tokens: Tensor
    key_positions: Tensor
    query_rows: Tensor
    later_rows: Tensor
    teacher: Tensor
    inside: Tensor
    labels: Tensor
    left: Tensor
    layout: Layout
    later_layout: Layout
    distributions: Tensor | None = None
    draws: Tensor | None = None


class HeadAttention(nn.Module):
    """Projections of grouped-query attention over inputs of `width`; `bias`: of queries, keys and values."""

    def __init__(self, config: HeadConfig, width: int, bias: bool = False):
        super().__init__()
        dim = config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * dim, config.hidden_size, bias=False)


class HeadMLP(nn.Module):
    def __init__(self, config: HeadConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    """A decoder layer without the norm before its attention, which is where the families differ.

    `attention`: projections that are more than `HeadAttention`'s.
    """

    inv_freq: Tensor

    def __init__(self, config: HeadConfig, width: int, attention: HeadAttention | None = None):
        super().__init__()
        self.config = config
        self.self_attn = HeadAttention(config, width) if attention is None else attention
        self.mlp = HeadMLP(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("inv_freq", config.rope_theta**-half, persistent=False)

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, heads, D] rotated to `positions` [N]."""
        angle = positions[:, None].float() * self.inv_freq
        cos, sin = (torch.cat((t, t), -1)[:, None].to(x.dtype) for t in (angle.cos(), angle.sin()))
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [N, H] from its residual stream and what its heads saw [N, Hq, D]."""
        x = residual + self.self_attn.o_proj(attended.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


Watch = Callable[[Product, Tensor, Tensor], None]
"""Function of the product that makes draft logits, the response slots [n] that its rows are at and their steps [n]."""


class Losses(NamedTuple):
    """Losses of n rows: Σ share · loss (differentiable), each loss [n], 0 where it does not count, which of them count,
    and their shares [n]."""

    total: Tensor
    each: Tensor
    valid: Tensor
    share: Tensor


class DraftHead(nn.Module):
    """A head on target features. `objective` trains `steps` draft depths, at weights `decay`^depth or `paced`."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig, draft_ids: Tensor | None = None, *, stored: bool = True):
        """`draft_ids` [Vd] sorted target ids of the draft vocabulary (None: the first, or they come with a state dict);
        `stored`: they are part of the checkpoint."""
        super().__init__()
        self.config = config
        self.steps, self.decay, self.objective = 1, 1.0, "soft_ce"
        self.paced = False  # depths are weighted by `pace`, not by `decay`
        self.squash = Squash()  # the target's
        self.watch: Watch | None = None  # told of the draft logits of every batch
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids
        member = torch.zeros(config.vocab_size, dtype=torch.bool)
        member[ids] = True
        # d2t holds offsets, as vLLM and SGLang read it: target id = i + d2t[i].
        self.register_buffer("d2t", ids - torch.arange(config.draft_vocab_size), persistent=stored)
        self.register_buffer("t2d", member, persistent=stored)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def check(self, target: Target) -> None:
        """Raise CheckpointError where it is no head for `target`."""
        self.config.check(target)

    @property
    def draft_ids(self) -> Tensor:
        """[Vd] target id of every draft token."""
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    def teacher(self, batch: SlotBatch, target_head: Tensor) -> Teacher:
        """The teacher of a batch's rows: the target's distributions, renormalised on the draft vocabulary
        (EAGLE-3 practice), or its tokens. `target_head`: [Vd, Ht] rows of the target's vocabulary head."""
        if self.objective == "ce":
            return Teacher(torch.searchsorted(self.draft_ids, batch.labels))
        return self.distributions(batch, target_head)

    def distributions(self, batch: SlotBatch, target_head: Tensor) -> Teacher:
        """The target's distributions at a batch's rows, renormalised on the draft vocabulary."""
        if batch.distributions is not None:
            return Teacher(batch.distributions)
        return Teacher(batch.teacher, target_head, self.squash)

    def distil(self, product: Product, rows: list[Tensor], steps: range, batch: SlotBatch, teacher: Teacher) -> Losses:
        """Losses of draft logits, given as the product that makes them. Its Σ n_k inputs are those of all `steps` k,
        whose n_k rows are at the response slots `rows`."""
        row = torch.cat(rows)
        step = torch.cat([torch.full_like(part, k) for k, part in zip(steps, rows, strict=True)])
        if self.watch is not None:
            self.watch(product, row, step)
        at, valid = row + step, batch.left[row] > step
        known = self.t2d[batch.labels]
        valid = valid & (known if self.objective == "ce" else batch.inside)[at]
        if self.paced:
            with torch.no_grad():
                labels = Teacher(torch.searchsorted(self.draft_ids, batch.labels))
                _, cross_entropy = linear_distill(*product, labels, at, (valid & known[at]).float(), "ce")
            right = torch.where(known[at], torch.exp(-cross_entropy), 0.0)
            share = valid * pace(right, row, step, valid)
        else:
            share = valid * self.decay ** step.float()
        total, losses = linear_distill(*product, teacher, at, share, self.objective)
        return Losses(total, losses, valid, share)

    def sums(self, found: Losses, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """(Σ share · loss, Σ share, [steps, 2] sums of (loss, valid rows) per step) of the losses of all steps,
        `sizes[k]` rows each.

        The mean loss is the first divided by the second, over however many ranks and micro-batches.
        """
        pairs = zip(found.each.split(sizes), found.valid.split(sizes), strict=True)
        steps = torch.stack([torch.stack((loss.sum(), valid.sum().to(loss.dtype))) for loss, valid in pairs])
        return found.total, found.share.sum(), steps


PACE = 0.5
"""α of D-PACE: how little a wrong token costs the weight of those behind it."""


def pace(right: Tensor, row: Tensor, step: Tensor, valid: Tensor) -> Tensor:
    """Weights of draft depths by how often a draft gets so far (D-PACE): w_k = Σ_{j ≥ k} Π_{i ≤ j} ((1 − α) q_i + α).

    Args:
        right: [n] probability q that the drafter gives to the text's token.
        row, step: [n] the draft that a loss belongs to, and its depth from 0 on.
        valid: [n] which losses count; a draft ends before the first of its losses that does not.

    Returns:
        [n] weights.
    """
    reached = torch.zeros(int(step.max()) + 1, int(row.max()) + 1, dtype=right.dtype, device=right.device)
    reached[step, row] = ((1 - PACE) * right + PACE) * valid
    return reached.cumprod(0).flip(0).cumsum(0).flip(0)[step, row]


Head = TypeVar("Head", bound=DraftHead)


def restored(
    kind: Callable[[Any], Head],
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    shape: type[DraftConfig] = HeadConfig,
) -> Head:
    """A head of `kind` and `shape` from the contents of a checkpoint. CheckpointError when they do not fit."""
    architecture = shape.from_dict(config.get("architecture"))
    head = filled(lambda: kind(architecture), tensors)
    if not bool(((head.draft_ids >= 0) & (head.draft_ids < head.config.vocab_size)).all()):
        raise misfit(WEIGHTS, "d2t", f"draft tokens stand for ids outside 0 … {head.config.vocab_size - 1}")
    return head
