import torch

from specctl.drafters.objectives import CHUNK, soft_cross_entropy


def test_soft_cross_entropy_equals_autograd():
    """Value and gradient against log_softmax, with more rows than one chunk, masked rows and zero probabilities."""
    torch.manual_seed(0)
    rows = CHUNK + 37
    logits = torch.randn(rows, 53, dtype=torch.float32, requires_grad=True)
    teacher = torch.randn(rows, 53).mul_(9).softmax(-1)
    teacher[:5] = torch.nn.functional.one_hot(torch.arange(5), 53).float()
    weight = (torch.rand(rows) > 0.3).float()
    scale = torch.rand(rows)
    (scale * soft_cross_entropy(logits, teacher, weight)).sum().backward()
    ours, logits.grad = logits.grad.clone(), None
    expected = -(weight[:, None] * teacher * logits.log_softmax(-1)).sum(-1)
    (scale * expected).sum().backward()
    torch.testing.assert_close(soft_cross_entropy(logits, teacher, weight), expected)
    torch.testing.assert_close(ours, logits.grad, atol=1e-6, rtol=1e-5)
