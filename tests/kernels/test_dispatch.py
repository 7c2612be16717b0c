"""The one dispatch point: by device, overridden by SPECCTL_KERNELS."""

import inspect

import pytest
import torch

from specctl import kernels
from specctl.kernels import cpu, reference

FUNCTIONS = ["uniform", "row_params", "sample_rows", "walk_tree", "accept_chain", "expand_topk"]


def test_device_decides(monkeypatch):
    monkeypatch.delenv("SPECCTL_KERNELS", raising=False)
    assert kernels.backend("cpu") == "cpu"
    assert kernels.backend("cuda") == "reference"


def test_environment_overrides(monkeypatch):
    called = []
    for name, module in (("cpu", cpu), ("reference", reference)):
        monkeypatch.setattr(module, "walk_tree", lambda *_, name=name: called.append(name))
        monkeypatch.setenv("SPECCTL_KERNELS", name)
        kernels.walk_tree(torch.zeros(1, 1, dtype=torch.int64), None, None)
    assert called == ["cpu", "reference"]


def test_unknown_backend_names_the_valid_ones(monkeypatch):
    monkeypatch.setenv("SPECCTL_KERNELS", "cuda")
    with pytest.raises(ValueError, match=r"SPECCTL_KERNELS='cuda'.*reference, cpu"):
        kernels.expand_topk(torch.zeros(1, 2), 1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_backends_have_the_signatures_of_the_reference(name):
    expected = inspect.signature(getattr(reference, name))
    assert inspect.signature(getattr(cpu, name)) == expected
    assert inspect.signature(getattr(kernels, name)) == expected


def test_rows_are_dispatched_by_their_logits(monkeypatch):
    monkeypatch.delenv("SPECCTL_KERNELS", raising=False)
    one = torch.ones(1)
    rows = kernels.row_params(torch.tensor([[0.0, 3.0]]), one * 0, torch.zeros(1, dtype=torch.int64), one)
    assert isinstance(rows, kernels.Rows)
    assert kernels.sample_rows(rows, one * 0).tolist() == [1]
