"""Parts of a lean layer."""

import pytest
import torch

from specctl.decoding.models.layers import RMSNorm


@pytest.mark.parametrize("shape", [(3, 48), (5, 2, 16)])
def test_the_fused_norm_equals_the_plain_norm(shape):
    """Only a GPU uses the fused one, so texts on a CPU would not show an error."""
    norm = RMSNorm(1 + torch.rand(shape[-1]), 1e-5, torch.float32)
    x = torch.randn(shape)
    x[0] = 0
    torch.testing.assert_close(norm.fused(x), norm(x), rtol=1e-5, atol=1e-6)
