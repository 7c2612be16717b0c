"""Run-time form of a P-EAGLE head's upper decoder layers."""

import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.rope import Rope
from specctl.decoding.target import Target
from specctl.drafters.feature.head import NormedLayer
from specctl.drafters.feature.layer import HeadWeights
from specctl.drafters.peagle.head import PEagleHead


class UpperPass(HeadWeights):
    """Decoder layer over the output rows of the previous layer."""

    def __init__(self, head: PEagleHead, layer: NormedLayer, target: Target):
        super().__init__(head, target)
        self.heads, self.kv_heads, self.dim = layer.config.num_heads, layer.config.num_kv_heads, layer.config.head_dim
        self.take_layer(layer)
        self.input_norm = self.rms_norm(layer.input_layernorm)

    def project(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys concatenated with values [N, 2·Hkv, D], and queries [N, Hq, D], rotated, for rows [N, H]."""
        qkv = self.qkv(self.input_norm(x)).view(len(x), self.heads + 2 * self.kv_heads, self.dim)
        qkv = Rope.rotate(qkv, table)
        return qkv[:, self.heads :], qkv[:, : self.heads]

    def layer_output(self, x: Tensor, attended: Tensor) -> Tensor:
        """Output [N, H] fp32 of the layer, from its residual stream and the attention output [N, Hq·D]."""
        x = x + self.o(attended)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate).mul_(up))
