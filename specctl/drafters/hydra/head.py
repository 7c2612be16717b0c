"""Hydra heads as a trainable module (Ankner et al. 2024, arXiv 2402.05109, §3 and 4.3: "Hydra++").

Head k reads cat(p_i, emb(x_{i+1}), …, emb(x_{i+k+1})) and predicts x_{i+2+k}. Unlike a Medusa head, it knows the tokens
drafted before its own. p_i is the output of the prefix attention, one decoder layer over the target's last states h_0 …
h_i.

In the published files layers 2 … n of a head are one shared module, repeated in a `Sequential`. Here this module is
also shared, and stored once (`hydra_mlp.K.3`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.decoding.target import Target
from specctl.drafters.depth.head import DepthHeads, HeadsConfig, ResBlock
from specctl.drafters.feature.head import (
    HeadConfig,
    NormedLayer,
    SlotBatch,
    copy_vocabulary_head,
    layer_pass,
    pass_through,
)


@dataclass(frozen=True)
class HydraConfig(HeadsConfig, HeadConfig):
    """Shape of the heads and of the prefix attention's layer."""


class Prefix(nn.Module):
    """Prefix attention: the layer and its output norm."""

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.layers = nn.ModuleList([NormedLayer(config)])
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def layer(self) -> NormedLayer:
        return cast(NormedLayer, self.layers[0])


class HydraHeads(DepthHeads):
    """Hydra module. Parameters have the names of the published `hydra_lm_head` ("prefix-mlp", grounded)."""

    config: HydraConfig

    def __init__(self, config: HydraConfig, draft_ids: Tensor | None = None):
        super().__init__(config, draft_ids)
        size = config.hidden_size
        self.prefix_embeding_layer = Prefix(config)  # the published spelling
        self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(), nn.ModuleList()
        for k in range(config.draft_heads):
            again = [nn.Dropout(0.0), ResBlock(size)] if config.num_layers > 1 else []
            self.hydra_mlp.append(nn.Sequential(nn.Dropout(0.0), ResBlock(size, k + 2), *again))
            self.hydra_lm_head.append(nn.Sequential(nn.Dropout(0.0), nn.Linear(size, config.draft_vocab_size)))

    @torch.no_grad()
    def initialise(self, target: Target) -> None:
        """Start as the target's vocabulary head after an MLP that passes the prefix state through."""
        for k, mlp in enumerate(cast(Iterable[Any], self.hydra_mlp)):
            copy_vocabulary_head(self.vocabulary(k), self.draft_ids, target)
            pass_through(mlp[1].res_connection, slice(self.config.hidden_size))

    def states(self, batch: SlotBatch) -> Tensor:
        """Prefix states p [N, H] of the response slots; the other slots are keys and values only."""
        layer, rows = self.prefix_embeding_layer.layer, batch.query_rows
        x = batch.features.float()
        inputs, at = layer.input_layernorm(x), batch.key_positions
        pair = layer.key_and_value(inputs, at)
        return self.prefix_embeding_layer.norm(
            layer_pass(layer, (x[rows], inputs[rows]), at[rows], pair, [], batch.layout)
        )

    def hidden(self, k: int, inputs: Tensor) -> Tensor:
        mlp: Any = self.hydra_mlp[k]
        head: Any = self.hydra_lm_head[k]
        x = mlp[:2](inputs)
        for _ in range(self.config.num_layers - 1):
            x = mlp[2:](x)
        return head[0](x)

    def vocabulary(self, k: int) -> nn.Linear:
        head: Any = self.hydra_lm_head[k]
        return head[1]

    def inputs(self, k: int, batch: SlotBatch, states: Tensor, row: Tensor, embedding: Tensor) -> Tensor:
        # Slot s + j holds token x_{s+j+1}; past the end of a document the row is invalid.
        ahead = batch.query_rows[row].unsqueeze(1) + torch.arange(k + 1, device=row.device)
        tokens = batch.key_tokens[ahead.clamp_max(len(batch.key_tokens) - 1)]
        return torch.cat((states, F.embedding(tokens, embedding).float().flatten(1)), -1)
