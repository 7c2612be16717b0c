"""New weights for a drafter in place: CUDA graphs of its rounds hold the addresses of its weights."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from specctl.decoding.models.linear import Linear
from specctl.decoding.protocols import Drafter
from specctl.decoding.rope import Rope
from specctl.decoding.target import Target


def take_weights(drafter: Drafter, source: Drafter) -> bool:
    """Copy the weights of `source` into `drafter`, a drafter of the same family and sizes. Returns False, and changes
    nothing, if they differ in more than the values of their tensors, or if a CPU's packed products hold the weights."""
    pairs = list(zip_longest(weights_of(drafter), weights_of(source)))
    if any(isinstance(one, Linear) for pair in pairs for one in pair):
        return False
    if any(old is None or new is None or _form(old) != _form(new) for old, new in pairs):
        return False
    for old, new in pairs:
        if old.data_ptr() != new.data_ptr():
            _stored(old).copy_(_stored(new))
    return True


def _stored(tensor: Tensor) -> Tensor:
    """The part of a tensor that has own memory: expanded dimensions are cut to one."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def weights_of(owner: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Tensors of an object of this package, and its products with packed weights. The target's tensors, which drafters
    share, and rotary tables are left out."""
    seen = set() if seen is None else seen
    if id(owner) in seen or isinstance(owner, Target | Rope):
        return
    seen.add(id(owner))
    parts: Any = ()
    if isinstance(owner, Tensor) or (isinstance(owner, Linear) and owner.packed):
        yield owner
    elif isinstance(owner, nn.Module):
        parts = owner.state_dict().values()
    elif isinstance(owner, list | tuple):
        parts = owner
    elif isinstance(owner, dict):
        parts = owner.values()
    elif type(owner).__module__.startswith("specctl."):
        parts = getattr(owner, "__dict__", {}).values()
    for part in parts:
        yield from weights_of(part, seen)
