"""A backend is checked before it is used."""

import types

import pytest
import torch

from specctl import kernels
from specctl.kernels import reference, self_check

CPU = torch.device("cpu")


def like_reference(**changed):
    names = (
        *("uniform", "argmax", "row_params", "sample_rows", "sample_tree", "walk_tree"),
        *("accept_chain",),
        *("expand_topk", "distill_rows"),
    )
    return types.SimpleNamespace(**{name: getattr(reference, name) for name in names} | changed)


def test_every_backend_passes_the_check(backend):
    assert self_check.mismatch(backend, CPU) is None


@pytest.mark.parametrize(
    "name",
    [
        *("uniform", "argmax", "sample_rows", "sample_tree", "walk_tree", "accept_chain"),
        *("expand_topk", "row_params", "distill_rows"),
    ],
)
def test_a_wrong_result_is_noticed(name):
    """A single wrong element is enough."""
    right = getattr(reference, name)

    def wrong(*args):
        found = right(*args)
        if isinstance(found, torch.Tensor):
            return found.index_fill(0, torch.tensor([0]), found.flatten()[-1].item() + 1)
        return (
            type(found)(*(part * 1.01 if part.is_floating_point() else part for part in found))
            if hasattr(found, "_fields")
            else tuple(part + 1 for part in found)
        )

    assert name in self_check.mismatch(like_reference(**{name: wrong}), CPU)


def test_a_wrong_gradient_is_noticed():
    """The losses are right, but the gradient does not replace the logits."""

    def wrong(logits, *others):
        return reference.distill_rows(logits.clone(), *others)

    assert "distill_rows" in self_check.mismatch(like_reference(distill_rows=wrong), CPU)


def test_a_missing_compiler_is_named():
    def fails(*args):
        raise RuntimeError("In file:\nFailed to find C compiler")

    assert self_check.mismatch(like_reference(argmax=fails), CPU) == "argmax fails: Failed to find C compiler"


def test_a_failing_backend_falls_back_to_the_reference(monkeypatch):
    kernels.checked_backend.cache_clear()
    monkeypatch.setattr(self_check, "mismatch", lambda module, device: "argmax fails: no compiler")
    with pytest.warns(UserWarning, match="plain PyTorch.*no compiler"):
        assert kernels.checked_backend("cpu", CPU) == "reference"
    kernels.checked_backend.cache_clear()
