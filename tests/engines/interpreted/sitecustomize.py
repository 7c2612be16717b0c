"""Found by Python where this directory is on its path: vLLM's Triton kernels on a CPU, interpreted.

vLLM's V2 runner, the only one that drafts with DSpark heads, asks for a Triton with a CPU backend, which no package
index has. Triton's interpreter needs none: it runs kernels on tensors of any device, slowly and to the same numbers.
"""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from triton import backends  # reads the variable
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter


class Driver:
    """What is asked of a driver before a kernel is interpreted."""

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
    """A masked load or store whose mask, its argument at `place`, may be of integers, as interpreted ones become."""

    def masked(self, *arguments):
        mask = arguments[place]
        mask.data = mask.data.astype(bool)
        return run(self, *arguments)

    return masked


for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
    setattr(interpreter.InterpreterBuilder, name, with_bits(getattr(interpreter.InterpreterBuilder, name), place))
