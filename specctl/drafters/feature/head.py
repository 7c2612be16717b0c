"""Shared code of trainable draft heads: configuration, batches, layer parts, draft vocabulary and loss per step."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specctl.decoding.models.supported import value_of_all_layers
from specctl.decoding.target import Target
from specctl.drafters.blueprint import CONFIG, Count, LayerIndex, Length, Size, config_error, read
from specctl.drafters.feature.ttt_attention import Layout, attention
from specctl.drafters.lora import Product
from specctl.errors import UsageError
from specctl.kernels.distill import Squash, Teacher, linear_distill
from specctl.kernels.objectives import CROSS_ENTROPIES
from specctl.recipe import DrafterRecipe


@dataclass(frozen=True)
class DraftConfig:
    """Shape shared by all heads. `taps` index `transformers`' hidden_states; `vocab_size` is the target's."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    hidden_size: Size
    vocab_size: Size
    draft_vocab_size: Size
    taps: Annotated[tuple[LayerIndex, ...], Field(min_length=1, max_length=64)]

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"the draft vocabulary has {self.draft_vocab_size} tokens, but the target has only {self.vocab_size}"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"taps": list(self.taps)}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Parse "architecture" in config.json. CheckpointError names the key that is wrong."""
        return read(cls, values)

    def check(self, target: Target) -> None:
        """Raise CheckpointError if a head of this shape does not fit the target's hidden states or vocabulary."""
        for key, own, its in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ):
            if own != its:
                raise config_error(CONFIG, f"architecture.{key}", f"is {own}, but target {target.name} has {its}")
        if max(self.taps) > target.num_layers:
            has = f"target {target.name} has hidden states 0 … {target.num_layers}"
            raise config_error(CONFIG, "architecture.taps", f"is {list(self.taps)}, but {has}")


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")


def taps_of(recipe: DrafterRecipe, target: Target, default: tuple[int, ...]) -> tuple[int, ...]:
    """Indices of the target's hidden states that a head reads: set by the recipe, or `default`.

    Raises UsageError if the target has no such state, or if one is listed twice.
    """
    taps = tuple(recipe.taps or default)
    last = target.num_layers
    if max(taps) > last or len({*taps}) < len(taps):
        raise UsageError(
            f"drafter.taps={[*taps]}: the taps must be distinct hidden states from 0 to {last}",
            f"leave out drafter.taps to use {[*default]}",
        )
    return taps


def head_config(recipe: DrafterRecipe, target: Target) -> HeadConfig:
    """Shape of a layer like the target's own, with the sizes set by the recipe.

    Each family sets taps and draft vocabulary itself. Raises UsageError if the numbers of heads do not fit each other
    or the target's hidden size.
    """
    text = target.config
    usual = max(1, target.hidden_size // 128)  # a target without attention names no heads
    heads = recipe.num_heads or value_of_all_layers(text, "num_attention_heads", None) or usual
    kv_heads = recipe.num_kv_heads or value_of_all_layers(text, "num_key_value_heads", None) or heads
    dim = (None if recipe.num_heads else value_of_all_layers(text, "head_dim", None)) or target.hidden_size // heads
    inner = recipe.intermediate_size or value_of_all_layers(text, "intermediate_size", None) or 4 * target.hidden_size
    if heads % kv_heads or dim < 2 or dim % 2:
        raise UsageError(
            f"drafter.num_heads={heads} with drafter.num_kv_heads={kv_heads} gives heads of size {dim}",
            f"num_kv_heads must divide num_heads, and heads have an even share of the {target.hidden_size} channels",
        )
    rope = getattr(text, "rope_parameters", None) or {}
    return HeadConfig(
        hidden_size=target.hidden_size,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        taps=(),
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        max_position_embeddings=target.context_length,
    )


def check_mask_token(config: HeadConfig, token: int) -> None:
    """Raise CheckpointError if a head's mask token is not in its vocabulary."""
    if token >= config.vocab_size:
        beyond = f"is {token}, but the vocabulary has {config.vocab_size} tokens"
        raise config_error(CONFIG, "architecture.mask_token_id", beyond)


def mask_token(target: Target) -> int:
    """Token id of the mask, for engines that look up its embedding: the padding token, or else the last token."""
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
        query_rows: [N] indices of the response slots among the M slots.
        later_rows: [n] indices of the rows among the N that go on to steps 1, 2, … .
        teacher: [N + T, Ht] target hidden state h_{i+1} (after the final norm) of every response slot, concatenated;
            step k reads it shifted by k.
        distributions: [N + T] output of the vocabulary head on `teacher`, perhaps on a sample of its tokens, if it was
            computed beforehand.
        in_draft_vocab: [N + T] bool, whether the target's most probable token is in the draft vocabulary.
        labels: [N + T] the true token.
        valid_steps: [N] number of steps a slot is valid for (step k is used if k is smaller).
        layout, later_layout: slots that the N and the n rows attend to.
        sample_draws: [n] numbers in [0, 1), evenly spread along a text, used to choose a share of the n rows (None =
            all 0).
    """

    features: Tensor
    key_tokens: Tensor
    key_positions: Tensor
    query_rows: Tensor
    later_rows: Tensor
    teacher: Tensor
    in_draft_vocab: Tensor
    labels: Tensor
    valid_steps: Tensor
    layout: Layout
    later_layout: Layout
    distributions: Teacher | None = None
    sample_draws: Tensor | None = None


class HeadAttention(nn.Module):
    """Projections of grouped-query attention over inputs of `width`.

    `bias` applies to queries, keys and values. With `normed`, queries and keys have norms over each head, as in Qwen3.
    """

    def __init__(self, config: HeadConfig, width: int, *, bias: bool = False, normed: bool = False):
        super().__init__()
        dim = config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(dim, config.rms_norm_eps) if normed else None
        self.k_norm = nn.RMSNorm(dim, config.rms_norm_eps) if normed else None


class HeadMLP(nn.Module):
    def __init__(self, config: HeadConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    """Decoder layer without the norm before its attention, because families differ there."""

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
        """Rotate x [N, heads, D] to `positions` [N]."""
        angle = positions[:, None].float() * self.inv_freq
        cos, sin = (torch.cat((t, t), -1)[:, None].to(x.dtype) for t in (angle.cos(), angle.sin()))
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def key_and_value(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each [n, Hkv, D], for inputs [n, ·] of the projections."""
        attention = self.self_attn
        value = attention.v_proj(inputs).unflatten(-1, (-1, self.config.head_dim))
        return self._rotated(attention.k_proj(inputs), attention.k_norm, positions), value

    def query(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [n, Hq, D] for inputs [n, ·] of the projections."""
        return self._rotated(self.self_attn.q_proj(inputs), self.self_attn.q_norm, positions)

    def _rotated(self, projected: Tensor, norm: nn.RMSNorm | None, positions: Tensor) -> Tensor:
        x = projected.unflatten(-1, (-1, self.config.head_dim))
        return self.rope(x if norm is None else norm(x.float()), positions).to(x.dtype)

    def layer_output(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Output [N, H] of the layer, from its residual stream and the attention output [N, Hq, D]."""
        x = residual + self.self_attn.o_proj(attended.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


class NormedLayer(HeadLayer):
    """Decoder layer of Llama, with a norm before its attention."""

    def __init__(self, config: HeadConfig, attention: HeadAttention | None = None):
        super().__init__(config, config.hidden_size, attention)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


Watch = Callable[[Product, Tensor, Tensor], None]
"""Callback that receives the product of the draft logits, and the response slots [n] and steps [n] of its rows."""


class StepRows(NamedTuple):
    """Rows of step k of the training-time test: their `slots` [n], their `positions` [n] and the slots they attend to.

    At step k a row reads the token of slot s + k, which is x_{s+k+1}.
    """

    k: int
    slots: Tensor
    positions: Tensor
    layout: Layout

    def tokens(self, embedded: Tensor) -> Tensor:
        """Embeddings [n, H] of the tokens that the rows read, out of the embeddings of all slots. A row past the end of
        a document is invalid."""
        return embedded[(self.slots + self.k).clamp_max(len(embedded) - 1)]


OwnPairs = list[tuple[Tensor, Tensor]]
"""Keys and values of the rows at steps 1, 2, … ."""
Step = Callable[[StepRows, Tensor, OwnPairs], tuple[Tensor, OwnPairs]]
"""One step: (rows, input [n, H], pairs of earlier steps) → (output [n, H], pairs including this step's)."""


def layer_pass(
    layer: HeadLayer,
    entered: tuple[Tensor, Tensor],
    positions: Tensor,
    pair: tuple[Tensor, Tensor],
    own: OwnPairs,
    layout: Layout,
) -> Tensor:
    """Output [n, H] of a layer for n rows, which attend to the step-0 `pair` of keys and values and to their `own`.

    `entered`: the rows' residual stream [n, H] and the input [n, ·] of their projections.
    """
    residual, inputs = entered
    return layer.layer_output(residual, attention(layer.query(inputs, positions), *pair, own, layout))


class Losses(NamedTuple):
    """Losses of n rows.

    `total` is Σ share · loss (differentiable). `each` holds every loss [n], 0 if it does not count. `valid` marks the
    losses that count, `weight` holds their weights [n].
    """

    total: Tensor
    each: Tensor
    valid: Tensor
    weight: Tensor


class DraftHead(nn.Module):
    """Base class of heads on target features.

    Training with `objective` covers `steps` draft depths, weighted by `decay`^depth.

    Attributes:
        supports_checkpointing: `gradient_checkpointing` may be set, to keep less memory for the backward pass.
    """

    d2t: Tensor
    t2d: Tensor
    supports_checkpointing: bool = False
    gradient_checkpointing: bool = False

    def __init__(self, config: DraftConfig, draft_ids: Tensor | None = None, *, stored: bool = True):
        """Create the head.

        Args:
            draft_ids: [Vd] target ids of the draft vocabulary. By default it holds the first ids, until a state
                dict is loaded.
            stored: the draft vocabulary is part of the checkpoint.
        """
        super().__init__()
        self.config = config
        self.steps, self.decay, self.objective = 1, 1.0, "soft_ce"
        self.sampled_softmax = 0  # tokens of a step's softmax in training; 0 = the draft vocabulary
        self.squash = Squash()  # squash of the target's logits
        self.watch: Watch | None = None  # callback on the draft logits of every batch
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids
        member = torch.zeros(config.vocab_size, dtype=torch.bool)
        member[ids] = True
        # d2t holds offsets, the format that vLLM and SGLang read: target id = i + d2t[i].
        self.register_buffer("d2t", ids - torch.arange(config.draft_vocab_size), persistent=stored)
        self.register_buffer("t2d", member, persistent=stored)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def check(self, target: Target) -> None:
        """Raise CheckpointError if the head was not made for `target`."""
        self.config.check(target)

    @property
    def sight(self) -> int | None:
        """Number of positions that a slot's loss depends on, with the slot itself; None = all up to the slot."""
        return None

    @property
    def draft_ids(self) -> Tensor:
        """Target token ids [Vd] of the draft vocabulary."""
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses over the response slots of a batch, with teacher-forced tokens.

        Args:
            embedding: [V, H] the target's (frozen) token embedding.
            target_head: [Vd, H] the rows of the target's (frozen) vocabulary head for the draft vocabulary.

        Returns:
            The results of `aggregate_losses`.
        """
        raise NotImplementedError

    def passes(self, steps: int, stride: int) -> float:
        """Rows that the layers compute per response position in training.

        All positions take the first of `steps` steps, every `stride`-th position takes the others.
        """
        return 1 + (steps - 1) / stride

    @property
    def prompt_layers(self) -> Sequence[nn.Module]:
        """Layers that training runs over all positions. For other layers, prompt positions are only keys and values."""
        return ()

    def initialise(self, target: Target) -> None:
        """Initialize a new head from the target."""
        raise NotImplementedError

    def unroll(self, batch: SlotBatch, x: Tensor, step: Step) -> tuple[list[Tensor], list[Tensor]]:
        """Run the training-time test from the input `x` [M, H] of step 0 at every slot.

        Returns for each step its output [n, H] and the response slots [n] of its rows. With `gradient_checkpointing`
        only the inputs of each step are kept for the backward pass.
        """
        run = partial(checkpoint, step, use_reentrant=False) if self.gradient_checkpointing else step
        rows, slots, layout = torch.arange(len(batch.query_rows), device=x.device), batch.query_rows, batch.layout
        x, own = x[slots], OwnPairs()
        outputs, asked = [], []
        for k in range(self.steps):
            if k == 1:
                rows, layout = batch.later_rows, batch.later_layout
                x, slots = x[rows], slots[rows]
            x, own = run(StepRows(k, slots, batch.key_positions[slots] + k, layout), x, own)
            outputs.append(x)
            asked.append(rows)
        return outputs, asked

    def teacher(self, batch: SlotBatch, target_head: Tensor) -> Teacher:
        """Training targets of a batch's rows: the target's tokens or its distributions, depending on `objective`.

        Distributions are renormalized on the draft vocabulary, as in EAGLE-3. If `sampled_softmax` is set, training
        renormalizes them on a sample of it. `target_head` [Vd, Ht] holds the rows of the target's vocabulary head.
        """
        if self.objective == "ce":
            ids = self.draft_ids  # an imported head may have them in any order
            place = torch.zeros_like(self.t2d, dtype=torch.long).index_put((ids,), torch.arange(len(ids)).to(ids))
            return Teacher(place[batch.labels])
        if batch.distributions is not None:
            return batch.distributions
        teacher = self.distributions(batch, target_head)
        by_sample = self.sampled_softmax and torch.is_grad_enabled() and self.objective in CROSS_ENTROPIES
        return teacher.sampled(self.sampled_softmax) if by_sample else teacher

    def distributions(self, batch: SlotBatch, target_head: Tensor) -> Teacher:
        """Distributions of the target at a batch's rows, renormalized on the draft vocabulary."""
        if batch.distributions is not None and batch.distributions.sample is None:
            return batch.distributions
        return Teacher(batch.teacher, target_head, self.squash)

    def distill_losses(
        self, product: Product, rows: list[Tensor], steps: range, batch: SlotBatch, teacher: Teacher
    ) -> Losses:
        """Losses of draft logits, which are given as the `product` that computes them.

        The product has Σ n_k input rows: for each k of `steps`, n_k rows at the response slots `rows[k]`.
        """
        row = torch.cat(rows)
        step = torch.cat([torch.full_like(part, k) for k, part in zip(steps, rows, strict=True)])
        if self.watch is not None:
            self.watch(product, row, step)
        at, valid = row + step, batch.valid_steps[row] > step
        valid = valid & (self.t2d[batch.labels] if self.objective == "ce" else batch.in_draft_vocab)[at]
        share = valid * self.decay ** step.float()
        if teacher.sample is not None:
            x, weight, bias = product
            product = x, *teacher.sample.of(weight, bias)
        total, losses = linear_distill(*product, teacher, at, share, self.objective)
        return Losses(total, losses, valid, share)

    def aggregate_losses(self, found: Losses, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Aggregate the losses of all steps, with `sizes[k]` rows for step k.

        Returns Σ share · loss, Σ share, and per step the sums of (loss, valid rows) [steps, 2]. The mean loss over any
        number of ranks and micro-batches is the sum of the first divided by the sum of the second.
        """
        pairs = zip(found.each.split(sizes), found.valid.split(sizes), strict=True)
        steps = torch.stack([torch.stack((loss.sum(), valid.sum().to(loss.dtype))) for loss, valid in pairs])
        return found.total, found.weight.sum(), steps


def copy_vocabulary_head(linear: nn.Linear, ids: Tensor, target: Target) -> None:
    """Initialize a vocabulary matrix over the tokens `ids` from the target's vocabulary head."""
    linear.weight.copy_(target.squash.scale * target.head_weight[ids.to(target.device)].float())
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def pass_through(linear: nn.Linear, part: slice) -> None:
    """Change the initial weights of a product so that it passes a `part` of its input through, with some noise."""
    linear.weight.mul_(0.1)
    linear.weight[:, part] += torch.eye(linear.out_features)
