"""Loaded by Python at its start if this directory is on its path: runs vLLM's Triton kernels on a CPU, interpreted.

vLLM's V2 runner, the only one that drafts with DSpark heads, needs a Triton with a CPU backend, which no package
index has. Triton's interpreter needs no backend: it runs kernels on tensors of any device, slowly, with equal results.
"""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from triton import backends  # reads the variable
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter


class Driver:
    """The parts of a driver that Triton needs before it interprets a kernel."""

    @staticmethod
    def is_active():
        return True

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_current_target(self):
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")


backends.backends.clear()
backends.backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)


def with_bits(run, place):
    """Wrap a masked load or store, so that its mask, the argument at `place`, may be of integers, as in the
    interpreter."""

    def masked(self, *arguments):
        mask = arguments[place]
        mask.data = mask.data.astype(bool)
        return run(self, *arguments)

    return masked


for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
    setattr(interpreter.InterpreterBuilder, name, with_bits(getattr(interpreter.InterpreterBuilder, name), place))
