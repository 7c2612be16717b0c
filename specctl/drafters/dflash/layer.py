"""Run-time form of a block-parallel head's decoder layers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.models.layers import RMSNorm
from specctl.decoding.rope import Rope
from specctl.decoding.target import Target
from specctl.drafters.dflash.head import BlockHead, BlockLayer, GroupedConv, convolve, kernels
from specctl.drafters.feature.layer import HeadWeights


class HeadNorms(RMSNorm):
    """RMSNorms of several heads [N, heads, D], with a separate weight per head [heads, D]."""

    def fused(self, x: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), x.shape[-1:], None, self.eps) * self.weight).to(self.dtype)


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
        return self._convolved(x, kernel[:, :, 0]).to(x.dtype), kernel[:, :, 1]

    def convolve_output(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Convolve the sublayer's output. Returns [N, H] in fp32."""
        return self._convolved(x, kernel)

    def _convolved(self, x: Tensor, kernel: Tensor) -> Tensor:
        return convolve(x.unflatten(0, (-1, self.size)), kernel).flatten(0, 1)


class BlockPass(HeadWeights):
    """Decoder layer over the rows of a block."""

    def __init__(self, head: BlockHead, layer: BlockLayer, target: Target):
        super().__init__(head, target)
        config, attention = layer.config, layer.self_attn
        self.normed = config.num_heads + config.num_kv_heads  # heads
        self.take_layer(layer)
        self.input_norm = self.rms_norm(layer.input_layernorm)
        query = attention.q_norm.weight.expand(config.num_heads, -1)
        key = attention.k_norm.weight.expand(config.num_kv_heads, -1)
        self.norms = HeadNorms(torch.cat((query, key)).to(self.device), config.rms_norm_eps, self.dtype)
        self.key_norms = HeadNorms(key.to(self.device), config.rms_norm_eps, self.dtype)
        convs = layer.attention_conv, layer.mlp_conv
        self.convs = [ConvPass(head, conv, target) for conv in convs if conv is not None]

    def project(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Normed and rotated queries, keys and values [N, Hq + 2·Hkv, D] for rows [N, H].

        Also returns the convolution kernels that `layer_output` needs, or None.
        """
        heads, kernel, inputs = table[0].shape[1], None, self.input_norm(x)
        if self.convs:
            inputs, kernel = self.convs[0].convolve_input(inputs)
        qkv = self.qkv(inputs).view(len(x), heads, -1)
        return Rope.rotate(torch.cat((self.norms(qkv[:, : self.normed]), qkv[:, self.normed :]), 1), table), kernel

    def layer_output(self, x: Tensor, attended: Tensor, kernel: Tensor | None) -> Tensor:
        """Output [N, H] fp32 of the layer, from its residual stream and the attention output [N, Hq·D]."""
        out = self.o(attended)
        x = x + (out if kernel is None else self.convs[0].convolve_output(out, kernel))
        inputs = self.post_norm(x)
        if kernel is not None:
            inputs, kernel = self.convs[1].convolve_input(inputs)
        gate, up = self.gate_up(inputs).chunk(2, -1)
        out = self.down(F.silu(gate).mul_(up))
        return x + (out if kernel is None else self.convs[1].convolve_output(out, kernel))
