"""Run-time form of a block-parallel head's decoder layers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.target import Target
from specctl.drafters.dflash.head import BlockHead, BlockLayer, GroupedConv, convolve, kernels
from specctl.drafters.feature.layer import HeadWeights


class ConvPass(HeadWeights):
    """Convolutions around a sublayer, over the rows of blocks."""

    def __init__(self, head: BlockHead, conv: GroupedConv, target: Target):
        super().__init__(head, target)
        self.size, self.group = head.config.block_size, conv.group
        self.base = conv.base_kernel.detach().to(self.device, torch.float32)
        self.delta = self.linear(conv.kernel_projection)

    def convolve_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve the rows [N, H] to the sublayer's input. Also returns the kernels [n, S, T, H] of the output."""
        kernel = kernels(self.base, self.delta(x), self.group).unflatten(0, (-1, self.size))
        return self.convolve(x, kernel[:, :, 0]).to(x.dtype), kernel[:, :, 1]

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Convolve the sublayer's output, or its input. Returns [N, H] in fp32."""
        return convolve(x.unflatten(0, (-1, self.size)), kernel).flatten(0, 1)


class BlockPass(HeadWeights):
    """Decoder layer over the rows of a block."""

    def __init__(self, head: BlockHead, layer: BlockLayer, target: Target):
        super().__init__(head, target)
        self.take_layer(layer)
        self.input_norm = self.rms_norm(layer.input_layernorm)
        convs = layer.attention_conv, layer.mlp_conv
        self.convs = [ConvPass(head, conv, target) for conv in convs if conv is not None]

    def project(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Normed and rotated queries, keys and values [N, Hq + 2·Hkv, D] for rows [N, H].

        Also returns the convolution kernels that `layer_output` needs, or None.
        """
        kernel, inputs = None, self.input_norm(x)
        if self.convs:
            inputs, kernel = self.convs[0].convolve_input(inputs)
        return self.rotated(inputs, table), kernel

    def layer_output(self, x: Tensor, attended: Tensor, kernel: Tensor | None) -> Tensor:
        """Output [N, H] fp32 of the layer, from its residual stream and the attention output [N, Hq·D]."""
        out = self.o(attended)
        x = x + (out if kernel is None else self.convs[0].convolve(out, kernel))
        inputs = self.post_norm(x)
        if kernel is not None:
            inputs, kernel = self.convs[1].convolve_input(inputs)
        gate, up = self.gate_up(inputs).chunk(2, -1)
        out = self.down(F.silu(gate).mul_(up))
        return x + (out if kernel is None else self.convs[1].convolve(out, kernel))
