"""P-EAGLE head as a trainable module: all draft depths in one pass (Hui et al. 2026, arXiv 2602.01469).

A draft consists of one row per depth. The row of depth 0 is EAGLE-3's: the target's features g_i and the token x_{i+1}.
The rows of further depths have no known input: they read a mask token and a learned replacement for the tapped states.
The row of anchor slot i and depth d has position i + d and predicts x_{i+2+d}. It attends to the rows of depth 0 up to
its anchor, and to the rows of its own draft up to itself.

Depth d is trained on a share max(0.7^d, 0.2) of the anchors. These are a subset of the anchors of depth d − 1 (COD
sampling, §3). Training all anchors at all depths would cost many rows, and the first depths matter most for the
accepted length.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specctl.decoding.target import Target
from specctl.drafters.blueprint import Count, Flag, Token
from specctl.drafters.feature.fusion import FusionConfig, FusionHead
from specctl.drafters.feature.head import HeadLayer, SlotBatch, check_mask_token
from specctl.drafters.feature.ttt_attention import Layout, attention
from specctl.drafters.lora import as_single_product

KEPT, LEAST = 0.7, 0.2
"""Share of a depth's anchors that are also trained at the next depth, and the minimal share of all anchors (COD)."""


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(FusionConfig):
    """Shape of a P-EAGLE head.

    Attributes:
        depths: number of tokens that are trained, and drafted, in one pass.
        mask_token_id: token in the rows after the first.
        own_embedding: the head has a separate token embedding instead of using the target's.
    """

    num_layers: Count = field()  # without a default, so it is always stored
    depths: Annotated[int, Field(strict=True, ge=2, le=64)]
    mask_token_id: Token
    own_embedding: Flag = False

    def check(self, target: Target) -> None:
        super().check(target)
        check_mask_token(self, self.mask_token_id)


class PEagleHead(FusionHead):
    """P-EAGLE head. Parameters have EAGLE-3's names, plus `mask_hidden`.

    `embed_tokens` is added if the head has a separate token embedding.
    """

    config: PEagleConfig

    def __init__(self, config: PEagleConfig, draft_ids: Tensor | None = None):
        super().__init__(config, draft_ids)
        self.steps = config.depths
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(config.taps) * config.hidden_size))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None

    def embedding(self, own: Tensor) -> Tensor:
        """Token embedding [V, H]: the target's, given as `own`, unless the head has a separate one."""
        return own if self.embed_tokens is None else self.embed_tokens.weight

    def shares(self) -> list[float]:
        """Share of the response's anchors that train each depth."""
        return [1.0, *(max(KEPT**depth, LEAST) for depth in range(1, self.steps))]

    def passes(self, steps: int, stride: int) -> float:
        return sum(self.shares())

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of the drafts that begin at the batch's response slots."""
        first, embedding = self.midlayer, self.embedding(embedding)
        features = self.feature(torch.cat((batch.features, self.mask_hidden.view(1, -1).to(batch.features.dtype))))
        masks = torch.full((1,), self.config.mask_token_id, device=features.device)
        tokens = F.embedding(torch.cat((batch.key_tokens, masks)), embedding).float()
        normed = first.hidden_norm(features)
        residual = normed.float() if self.config.norm_before_residual else features
        inputs = torch.cat((first.input_layernorm(tokens), normed), -1)
        layouts = [batch.layout.within(self.config.sliding_window, depth) for depth in range(self.steps)]
        rollouts = Rollouts(batch, self.shares()[1:], layouts)
        # Input row M is shared by all masked rows, as they differ only in their positions.
        place = rollouts.spread(len(batch.features))
        run = partial(checkpoint, _layer, use_reentrant=False) if self.gradient_checkpointing else _layer
        x = run(first, residual[place], inputs[place], rollouts, not self.upper)
        for layer in self.upper:
            x = run(layer, x, layer.input_layernorm(x), rollouts, layer is self.upper[-1])
        losses = self.distill_losses(
            as_single_product(self.lm_head, self.norm(x)),
            rollouts.trained_slots,
            range(self.steps),
            batch,
            self.teacher(batch, target_head),
        )
        return self.aggregate_losses(losses, [len(rows) for rows in rollouts.trained_slots])


class Rollouts:
    """Rows of a batch's drafts: M rows of depth 0, one for every slot, then the rows of each further depth.

    Attributes:
        trained_slots: for each depth, the indices [n_d] of the response slots that are trained; ascending, and a subset
            of the previous depth's.
        trained_rows: [N] indices of the trained depth-0 rows among the M.
        positions: [M + Σ n_d] positions of all rows in their documents.
        before: for each further depth, the indices of its n_d anchors among the anchors of depths 1 to its own.
        whole: layout in which every slot is a query.
        layouts: for each depth, the depth-0 rows that its anchors attend to.
    """

    def __init__(self, batch: SlotBatch, shares: list[float], layouts: list[Layout]):
        count, device = len(batch.query_rows), batch.query_rows.device
        going = batch.later_rows
        draws = torch.zeros(len(going)) if batch.sample_draws is None else batch.sample_draws
        self.trained_slots = [torch.arange(count, device=device)]
        self.layouts = [layouts[0]]
        for share, layout in zip(shares, layouts[1:], strict=True):
            rows = going[(draws < share).to(device)]
            self.trained_slots.append(rows)
            self.layouts.append(layout.of_rows(rows.tolist()))
        self.trained_rows = batch.query_rows
        anchors = [batch.key_positions[batch.query_rows[rows]] + d for d, rows in enumerate(self.trained_slots) if d]
        self.positions = torch.cat((batch.key_positions, *anchors))
        self.before = [
            [torch.searchsorted(self.trained_slots[before], rows) for before in range(1, depth)] + [slice(None)]
            for depth, rows in enumerate(self.trained_slots)
            if depth
        ]
        self.whole = layouts[0].whole

    def spread(self, slots: int) -> Tensor:
        """Index [M + Σ n_d] of every row's input: its own slot, or the shared mask row at the end."""
        masked = sum(len(rows) for rows in self.trained_slots[1:])
        return torch.cat((torch.arange(slots), torch.full((masked,), slots))).to(self.positions.device)

    def split(self, x: Tensor) -> list[Tensor]:
        """Split rows [M + Σ n_d, ...] into depth 0 and each further depth."""
        deeper = [len(rows) for rows in self.trained_slots[1:]]
        return list(x.split([len(x) - sum(deeper), *deeper]))


def _layer(layer: HeadLayer, residual: Tensor, inputs: Tensor, rollouts: Rollouts, last: bool) -> Tensor:
    """Run one layer over all rows; the `last` layer returns only the trained rows [N + Σ n_d, H]."""
    keys, values = map(rollouts.split, layer.key_and_value(inputs, rollouts.positions))
    layout, positions = rollouts.whole, rollouts.positions
    if last:
        layout = rollouts.layouts[0]
        kept = torch.cat((rollouts.trained_rows, torch.arange(len(keys[0]), len(inputs), device=inputs.device)))
        residual, inputs, positions = residual[kept], inputs[kept], positions[kept]
    parts = rollouts.split(layer.query(inputs, positions))
    seen = [attention(parts[0], keys[0], values[0], [], layout)]
    for depth, before in enumerate(rollouts.before, 1):
        own = [(key[rows], value[rows]) for key, value, rows in zip(keys[1:], values[1:], before, strict=False)]
        seen.append(attention(parts[depth], keys[0], values[0], own, rollouts.layouts[depth]))
    return layer.layer_output(residual, torch.cat(seen))
