"""Check that the files of an export hold the drafter: read back, it has the same shape and the same weights."""

from specctl.errors import CheckpointError
from specctl.formats.block_attention import CAUSAL, causal_layers
from specctl.formats.head import Head

TOLERANCE = 1e-4


def difference(one: Head, other: Head) -> float:
    """Largest absolute difference between the weights of two heads; infinite if the other has another shape."""
    # Files state the target's context if it is longer, and leave out the default of causal layers.
    free = ("max_position_embeddings", CAUSAL)
    if any(other.architecture.get(key) != value for key, value in one.architecture.items() if key not in free):
        return float("inf")
    if one.family != other.family or (
        one.family == "dflash" and causal_layers(one.architecture) != causal_layers(other.architecture)
    ):
        return float("inf")
    if {n: t.shape for n, t in one.tensors.items()} != {n: t.shape for n, t in other.tensors.items()}:
        return float("inf")
    return max(float((one.tensors[name].float() - other.tensors[name].float()).abs().max()) for name in one.tensors)


def check(head: Head, back: Head) -> float:
    """Return the difference if it is small enough. Raises CheckpointError otherwise."""
    found = difference(head, back)
    if not found < TOLERANCE:
        raise CheckpointError(
            f"the exported drafter, read back, differs by {found:.3g} (allowed: {TOLERANCE:g})",
            hint="nothing was written; this is a bug in specctl: report it with the drafter's config.json",
        )
    return found
