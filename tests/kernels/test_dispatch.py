"""Kernels are dispatched by device, unless SPECCTL_KERNELS overrides it."""

import inspect
import subprocess
import sys

import pytest
import torch

from specctl import kernels
from specctl.kernels import cpu, reference

FUNCTIONS = [
    *("accept_chain", "add_rms_norm", "argmax", "attention", "distill_rows", "expand_topk", "finite_rows"),
    *("drafter_feedback", "rope_and_cache", "row_params", "sample_rows", "sample_tree", "silu_and_mul"),
    *("uniform", "walk_tree"),
]


def test_the_device_selects_the_backend(monkeypatch):
    monkeypatch.delenv("SPECCTL_KERNELS", raising=False)
    assert kernels.backend("cpu") == "cpu"
    assert kernels.backend("cuda") == ("triton" if kernels.TRITON else "reference")
    assert kernels.backend("mps") == "reference"


def test_triton_runs_on_a_cpu_only_in_its_interpreter(monkeypatch):
    """Seeds always live on the CPU, so SPECCTL_KERNELS=triton must not break their uniforms."""
    monkeypatch.setenv("SPECCTL_KERNELS", "triton")
    monkeypatch.setattr(kernels, "TRITON", True)
    for interpret, name in (("0", "cpu"), ("1", "triton")):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        assert kernels.backend("cpu") == name
        assert kernels.backend("cuda") == "triton"


def test_missing_triton_is_an_error_if_requested(monkeypatch):
    monkeypatch.setenv("SPECCTL_KERNELS", "triton")
    monkeypatch.setattr(kernels, "TRITON", False)
    with pytest.raises(ImportError, match="Triton is not installed"):
        kernels.argmax(torch.zeros(1, 2))


def test_using_kernels_does_not_import_triton():
    """Triton is slow to import and not installed everywhere."""
    code = (
        "import sys, torch\nfrom specctl import kernels\nkernels.argmax(torch.zeros(1, 2))\n"
        "sys.exit('specctl.kernels.triton_backend' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_environment_overrides_the_backend(monkeypatch):
    called = []
    for name, module in (("cpu", cpu), ("reference", reference)):
        monkeypatch.setattr(module, "walk_tree", lambda *_, name=name: called.append(name))
        monkeypatch.setenv("SPECCTL_KERNELS", name)
        kernels.walk_tree(torch.zeros(1, 1, dtype=torch.int64), None, None)
    assert called == ["cpu", "reference"]


def test_unknown_backend_names_the_valid_ones(monkeypatch):
    monkeypatch.setenv("SPECCTL_KERNELS", "cuda")
    with pytest.raises(ValueError, match=r"SPECCTL_KERNELS='cuda'.*reference, cpu, triton"):
        kernels.expand_topk(torch.zeros(1, 2), 1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_backends_have_the_signatures_of_the_reference(name):
    expected = inspect.signature(getattr(reference, name), eval_str=True)
    assert inspect.signature(getattr(cpu, name), eval_str=True) == expected
    assert inspect.signature(getattr(kernels, name), eval_str=True) == expected
    if kernels.TRITON:
        from specctl.kernels import triton_backend

        assert inspect.signature(getattr(triton_backend, name), eval_str=True) == expected


def test_rows_are_dispatched_by_their_logits(monkeypatch):
    monkeypatch.delenv("SPECCTL_KERNELS", raising=False)
    one = torch.ones(1)
    rows = kernels.row_params(torch.tensor([[0.0, 3.0]]), one * 0, torch.zeros(1, dtype=torch.int64), one)
    assert isinstance(rows, kernels.Rows)
    assert kernels.sample_rows(rows, one * 0).tolist() == [1]
