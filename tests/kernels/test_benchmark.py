"""The benchmark of kernels. It is for GPUs, which tests lack, so its inputs and the order of its calls are checked."""

import pytest
import torch

from specctl.decoding.device import graphs
from tests.benchmarks import kernels


def test_every_kernel_is_timed_on_a_cpu():
    found = {}
    for kernel, _, ours, eager, _ in kernels.cases([2], [300], 4, torch.device("cpu")):
        found[kernel] = kernels.timed(kernel, ours, eager, 1, torch.device("cpu"))
    names = {"argmax + walk_tree", "row_params + accept_chain", "expand_topk", "linear_distill"}
    assert found.keys() == names | {f"the same + panorama, N {count}" for count in kernels.DRAFTERS}
    assert all(seconds["ours"] > 0 and seconds["eager"] > 0 for seconds in found.values())


@pytest.mark.parametrize("rows", [1, 5])
def test_attention_kernels_are_compared_on_equal_outputs(monkeypatch, rows):
    monkeypatch.setattr(kernels, "LAYERS", 1)
    _, size, ours, eager, read = kernels.attention(torch.device("cpu"), torch.float32, 2, rows, 40)
    assert size == f"B 2, T {rows}, context 40" and read == 2 * (40 + rows) * 2 * 8 * 128 * 4
    found = ours().view(2, rows, kernels.HEADS, kernels.HEAD_DIM)
    torch.testing.assert_close(found, eager().transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_gpu_kernels_are_replayed_with_cold_caches(monkeypatch):
    """Order of calls: flush the cache, start the timer, replay, stop the timer."""
    order = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            order.append("event")

        def elapsed_time(self, other):
            return 2.0 if order[-3] == "ours replayed" else 6.0

    class Cache:
        def zero_(self):
            order.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(kernels, "synchronise", lambda device: order.append("wait"))
    monkeypatch.setattr(graphs, "replay_of", lambda run, device: lambda: order.append(f"{run} replayed"))
    monkeypatch.setattr(torch, "empty", lambda *size, **options: Cache())
    times = kernels.timed("attention", "ours", "eager", 2, torch.device("cuda"))
    assert times == {"ours": 0.002, "eager": 0.006}
    turn = [step for name in ("ours", "eager") for step in ("flush", "event", f"{name} replayed", "event", "wait")]
    assert order == (2 + kernels.WARM_UP) * turn
    asking = {name: lambda name=name: order.append(name) for name in ("ours", "eager")}
    kernels.timed("linear_distill", *asking.values(), 1, torch.device("cuda"))
    assert "ours" in order  # not replayed
