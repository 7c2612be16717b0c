"""The parts of a lean layer."""

import pytest
import torch

from specctl.decoding.models.layers import RMSNorm


@pytest.mark.parametrize("shape", [(3, 48), (5, 2, 16)])
def test_the_norm_of_a_gpu_is_that_of_a_cpu(shape):
    """Two ways to write one norm; only a GPU takes the second, and no test of a text would miss it here."""
    norm = RMSNorm(1 + torch.rand(shape[-1]), 1e-5, torch.float32)
    x = torch.randn(shape)
    x[0] = 0
    torch.testing.assert_close(norm.fused(x), norm(x), rtol=1e-5, atol=1e-6)
