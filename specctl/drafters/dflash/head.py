"""Block-parallel heads as trainable modules: DFlash, DSpark and DFlash 2.

DFlash: Chen et al. 2026, arXiv 2602.06036. DSpark: Cheng et al. 2026, arXiv 2607.05147. DFlash 2: Inco and Z Lab,
August 2026.

A block begins with an anchor, the last committed token x_p, followed by masks. Decoder layers run once over the whole
block. Queries come from the block, keys and values from the target's features before the anchor and from the whole
block, without a causal mask. The target's own vocabulary head maps the result to all drafted tokens. A layer may also
have a sliding window over the context, or a causal mask inside the block (`BlockConfig.sights`).

The slots of a block do not know which tokens the previous slots will draft. DSpark's Markov head restores this
dependency cheaply at the end: after token y the logits of the next token change by the low-rank term W₂ W₁[y]. DSpark's
confidence head estimates for every slot how likely the target is to accept the drafted token: σ(w · [h ; W₁[y]] + b).

DFlash 2 has two other solutions. A short causal convolution before and after every sublayer lets a slot see the states
of the slots before it. Its candidate selector is a Markov head that is steered by the slot's own state h: after token y
the logit of c changes by ⟨A[y] ∘ W h, B[c]⟩.

Slot i of a sequence holds the target's features g_i and the token x_{i+1}, as in EAGLE-3. So the block that begins at
slot i has the anchor x_{i+1}, and its step k = 0, 1, … predicts x_{i+2+k}.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specctl.decoding.target import Target
from specctl.drafters.dflash.config import BlockConfig
from specctl.drafters.feature.head import (
    DraftHead,
    HeadAttention,
    Losses,
    NormedLayer,
    SlotBatch,
    copy_vocabulary_head,
    pass_through,
)
from specctl.drafters.feature.ttt_attention import Layout, block_attention
from specctl.drafters.lora import Product
from specctl.kernels.distill import linear_distill


class GroupedConv(nn.Module):
    """Causal convolutions along a block, before and after a sublayer: y_i = Σ_t (base_t + δ_{i,t}) ∘ x_{i−t}.

    The sublayer's input determines δ of both convolutions, one number per group of channels. They start as the
    identity.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        size, taps = config.hidden_size, config.conv_kernel_size
        self.taps, self.group = taps, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.base_kernel.data[:, 0] = 1
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // self.group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Kernels [..., 2, T, H] for a sublayer's input [..., H]."""
        return kernels(self.base_kernel, self.kernel_projection(x), self.group)


def kernels(base: Tensor, delta: Tensor, group: int) -> Tensor:
    """Kernels [..., 2, T, H] in fp32: the shared part [2, T, H] plus a slot's addition [..., 2·T·H/group]."""
    return base + delta.float().unflatten(-1, (2, base.shape[1], -1)).repeat_interleave(group, -1)


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve blocks x [..., S, H] with kernel [..., S, T, H], zero-padded at the start of a block."""
    out = kernel[..., 0, :] * x
    for tap in range(1, kernel.shape[-2]):
        out = out + kernel[..., tap, :] * F.pad(x[..., :-tap, :], (0, 0, tap, 0))
    return out


class BlockLayer(NormedLayer):
    """Decoder layer over blocks and their context."""

    def __init__(self, config: BlockConfig):
        super().__init__(config, HeadAttention(config, config.hidden_size, normed=True))
        convolved = config.conv_kernel_size > 0
        self.attention_conv = GroupedConv(config) if convolved else None
        self.mlp_conv = GroupedConv(config) if convolved else None

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, places: Tensor, layout: Layout) -> Tensor:
        """Output [n, S, H] for x [n, S, H] at `positions` [n, S], and the context [M, H] at `places` [M]."""
        inputs = self.input_layernorm(x)
        kernel = None if self.attention_conv is None else self.attention_conv(inputs)
        inputs = _convolve_input(inputs, kernel)
        key, value = self.key_and_value(context, places)
        rows, at, blocks = inputs.flatten(0, 1), positions.flatten(), x.shape[:2]
        own = torch.stack(self.key_and_value(rows, at)).unflatten(1, blocks)
        out = block_attention(self.query(rows, at).unflatten(0, blocks), key, value, own, layout)
        x = x + _convolve_output(self.self_attn.o_proj(out.flatten(2)), kernel)
        inputs = self.post_attention_layernorm(x)
        kernel = None if self.mlp_conv is None else self.mlp_conv(inputs)
        return x + _convolve_output(self.mlp(_convolve_input(inputs, kernel)), kernel)


def _convolve_input(x: Tensor, kernel: Tensor | None) -> Tensor:
    """Apply the convolution, if any, before a sublayer."""
    return x if kernel is None else convolve(x, kernel[..., 0, :, :]).to(x.dtype)


def _convolve_output(x: Tensor, kernel: Tensor | None) -> Tensor:
    """Apply the convolution, if any, after a sublayer."""
    return x if kernel is None else convolve(x, kernel[..., 1, :, :])


class MarkovHead(nn.Module):
    """Markov head: maps token y to W₂ W₁[y], an addition to the logits of the next token. It starts at zero."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    @property
    def successors(self) -> Tensor:
        """Matrix [Vd, r] that is multiplied with the output of `forward`."""
        return self.markov_w2.weight

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Map the tokens `before` [n] to factors [n, r]."""
        return self.markov_w1(before)


class CandidateSelector(nn.Module):
    """Candidate selector: maps token y and hidden state h to B (A[y] ∘ W h), an addition to the next token's logits.

    It starts at zero.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    @property
    def successors(self) -> Tensor:
        """Matrix [Vd, r] that is multiplied with the output of `forward`."""
        return self.successor_codebook

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Map states [n, H] and the tokens `before` [n] to factors [n, r]."""
        return F.embedding(before, self.predecessor_codebook) * self.hidden_projection(hidden)


class ConfidenceHead(nn.Module):
    """Confidence head: estimates whether the target accepts the token drafted after y.

    It maps the hidden state h [n, H] and W₁[y] [n, r] to the logit [n] of this probability, and starts undecided.
    """

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        return self.proj(torch.cat((hidden, before), -1)).squeeze(-1)


class BlockHead(DraftHead):
    """Block-parallel head. Parameters have the names of the published checkpoints.

    These are `fc`, `hidden_norm`, `layers.0.*`, `norm`, `markov_head.*`, `confidence_head.*` and
    `candidate_selector.*`. With a draft vocabulary the head has a separate vocabulary head, `lm_head`.
    """

    config: BlockConfig
    supports_checkpointing = True

    def __init__(self, config: BlockConfig, draft_ids: Tensor | None = None):
        pruned = config.draft_vocab_size < config.vocab_size
        super().__init__(config, draft_ids, stored=pruned)
        self.steps = config.depth
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
        selector = config.vocab_size, config.draft_vocab_size, size, config.selector_rank
        self.candidate_selector = CandidateSelector(*selector) if config.selector_rank else None

    @property
    def sight(self) -> int | None:
        windows = [sight.window for sight in self.config.sights]  # every layer reads the target's states, not a layer's
        return None if None in windows else max(window for window in windows if window is not None)

    @property
    def token_dependency(self) -> MarkovHead | CandidateSelector | None:
        """Markov head or selector, which makes a block's tokens depend on the previous ones, or None without either."""
        return self.candidate_selector if self.markov_head is None else self.markov_head

    @torch.no_grad()
    def initialise(self, target: Target) -> None:
        """Initialize from the target: its final norm, and `fc` passing the last tapped state through."""
        if target.norm_weight is not None:
            self.norm.weight.copy_(target.norm_weight.float())
        if self.lm_head is not None:
            copy_vocabulary_head(self.lm_head, self.draft_ids, target)
        pass_through(self.fc, slice(-self.config.hidden_size, None))
        if self.mask_embedding is not None:
            self.mask_embedding.copy_(target.model.embedding.float().mean(0))

    def passes(self, steps: int, stride: int) -> float:
        return self.config.block_size / stride

    def mask(self, embedding: Tensor) -> Tensor:
        """Mask embedding [H] of the slots after the anchor, given the target's token embedding [V, H]."""
        return embedding[self.config.mask_token_id] if self.mask_embedding is None else self.mask_embedding

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of the blocks that begin at the batch's `later_rows`, with teacher-forced tokens."""
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
        whole = batch.later_layout.blockwise(config.block_size)
        layouts = {sight: replace(whole.within(sight.window, 1), causal=sight.causal) for sight in set(config.sights)}
        for layer, sight in zip(self.layers, config.sights, strict=True):
            run = partial(checkpoint, layer, use_reentrant=False) if self.gradient_checkpointing else layer
            x = run(x, context, positions, batch.key_positions, layouts[sight])
        hidden = self.norm(x[:, config.first :]).transpose(0, 1).flatten(0, 1)  # by step, as in `distill_losses`
        before = (anchors + ahead[: self.steps, None]).flatten().clamp_max(len(batch.key_tokens) - 1)
        tokens = batch.key_tokens[before]
        product = self._product(hidden, tokens, target_head)
        each = [rows] * self.steps
        found = self.distill_losses(product, each, range(self.steps), batch, self.teacher(batch, target_head))
        if self.confidence_head is not None:
            doubt = self._doubt(hidden, tokens, product, found, batch, target_head)
            found = found._replace(total=found.total + doubt)
        return self.aggregate_losses(found, [len(rows)] * self.steps)

    def _doubt(
        self, hidden: Tensor, before: Tensor, product: Product, found: Losses, batch: SlotBatch, target_head: Tensor
    ) -> Tensor:
        """Loss of the confidence head, weighted like `found`.

        It is the cross-entropy with 1 − TV(p, q), the probability that a token drawn from q is accepted. The head's
        inputs are detached, so learning to estimate confidence does not change the drafts.
        """
        assert self.confidence_head is not None and self.markov_head is not None
        rows = batch.later_rows
        step = torch.arange(self.steps, device=rows.device).repeat_interleave(len(rows))
        distance = found.each
        if self.objective != "tv":
            with torch.no_grad():
                teacher = self.distributions(batch, target_head)
                _, distance = linear_distill(*product, teacher, rows.repeat(self.steps) + step, found.weight, "tv")
        inputs = hidden.detach(), self.markov_head.markov_w1(before).detach().to(hidden.dtype)
        kept = (1 - distance).clamp(0, 1)
        losses = F.binary_cross_entropy_with_logits(self.confidence_head(*inputs).float(), kept, reduction="none")
        return torch.dot(found.weight, losses)

    def _product(self, hidden: Tensor, before: Tensor, target_head: Tensor) -> Product:
        """Product that computes the logits of hidden states [n, H] after the tokens `before` [n]."""
        edges = None if self.token_dependency is None else self.token_dependency(hidden, before)
        if self.lm_head is None:
            # Leave out the logit cap of the target: it would not change the order of the tokens.
            hidden, weight, bias = hidden * self.squash.scale, target_head, self.squash.shift
        else:
            weight, bias = self.lm_head.weight, None
        if self.token_dependency is None or edges is None:
            return hidden, weight, bias
        # Compute W h + W₂ W₁[y] as one product of concatenated matrices.
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wide = torch.cat((weight.to(dtype), self.token_dependency.successors.to(dtype)), 1)
        return torch.cat((hidden, edges.to(hidden.dtype)), 1), wide, bias
