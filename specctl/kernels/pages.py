"""Memory in huge pages of 2 MB, for the packed weights that every step reads.

With pages of 4 KB, the products of SmolLM2's four-bit weights take 1.1 to 1.2 times as long (Zen 4, one to eight rows).
Most Linux systems give huge pages only on request.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

SMALLEST = 2**21  # bytes


def zeros(nbytes: int) -> Tensor:
    """Zeros [nbytes] in uint8, in huge pages if the system has them and there are at least `SMALLEST` bytes."""
    if nbytes < SMALLEST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
