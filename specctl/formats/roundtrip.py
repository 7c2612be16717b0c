"""Check that two copies of a drafter compute the same: run their modules on one random batch, in fp32."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specctl.drafters.family import load_family
from specctl.drafters.feature.head import SlotBatch
from specctl.drafters.feature.ttt_attention import Layout
from specctl.errors import CheckpointError
from specctl.families import FAMILIES
from specctl.formats.head import Head

TOLERANCE = 1e-4
SLOTS, QUERIES = 24, 12  # of the random document
WINDOWS = ("sliding_window", "layer_types")  # the random document is shorter than any window
KNOWN = 1000  # distinct tokens in it: a full random embedding would take gigabytes


def difference(one: Head, other: Head, steps: int) -> float:
    """Largest absolute difference between the outputs of two modules' parts, including logits of steps 1 … `steps`.

    Infinite if even their shapes or windows differ.
    """
    if one.family != other.family or any(one.architecture.get(k) != other.architecture.get(k) for k in WINDOWS):
        return float("inf")
    first, second = (_outputs(head, steps) for head in (one, other))
    if [part.shape for part in first] != [part.shape for part in second]:
        return float("inf")
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def check(head: Head, back: Head, steps: int) -> float:
    """Return the difference if it is small enough. Raises CheckpointError otherwise."""
    found = difference(head, back, steps)
    if not found < TOLERANCE:
        raise CheckpointError(
            f"the exported drafter, read back, differs by {found:.3g} at draft steps 1 … {steps} (allowed: "
            f"{TOLERANCE:g})",
            hint="nothing was written; this is a bug in specctl: report it with the drafter's config.json",
        )
    return found


def build_module(head: Head) -> nn.Module:
    """The module of a head. Raises CheckpointError for an unknown family, or weights that do not fit."""
    if head.family not in FAMILIES:
        raise CheckpointError(
            f"a head of family {head.family!r} cannot draft here", hint=f"known families: {', '.join(FAMILIES)}"
        )
    return load_family(head.family).restore({"architecture": head.architecture}, head.tensors)


@torch.no_grad()
def _outputs(head: Head, steps: int) -> list[Tensor]:
    """The output of every leaf of the module, in the order of their calls, followed by the module's results."""
    module: Any = build_module(head).float().eval()
    found: list[Tensor] = []

    def keep(part: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found.append(output)

    for part in module.modules():
        if not list(part.children()):
            part.register_forward_hook(keep)
    result = _run(head, module, steps)
    return found + list(result)  # the losses: without a vocabulary matrix in the head, only they depend on its logits


def _run(head: Head, module: Any, steps: int) -> tuple[Tensor, ...]:
    """Run the module on a random batch, which is the same for equal architectures. Returns losses, if it has them."""
    random = torch.Generator().manual_seed(0)
    vocab, size = head.architecture["vocab_size"], head.architecture["hidden_size"]
    known = min(vocab, KNOWN)
    if "mask_token_id" in head.architecture:  # the only other token with an embedding that is read
        module.config = replace(module.config, mask_token_id=head.architecture["mask_token_id"] % known)
    tokens = torch.randint(known, (SLOTS,), generator=random)
    if FAMILIES[head.family].is_lm:
        module.model(input_ids=tokens[None], use_cache=False)
        return ()
    if FAMILIES[head.family].unrolls_steps:  # other families have one step per head, or one step that repeats
        module.steps = steps
    rows = torch.arange(SLOTS - QUERIES, SLOTS)
    layout = Layout([(0, SLOTS)], [(0, QUERIES)], rows.tolist())
    teachers = QUERIES + module.steps
    batch = SlotBatch(
        features=torch.randn(SLOTS, len(module.taps) * size, generator=random),
        key_tokens=tokens,
        key_positions=torch.arange(SLOTS),
        query_rows=rows,
        later_rows=torch.arange(QUERIES),
        teacher=torch.randn(teachers, size, generator=random),
        in_draft_vocab=torch.ones(teachers, dtype=torch.bool),
        labels=torch.zeros(teachers, dtype=torch.long),
        valid_steps=torch.arange(QUERIES, 0, -1),
        layout=layout,
        later_layout=layout,
    )
    embedding = torch.randn(known, size, generator=random)
    target_head = torch.randn(len(module.draft_ids), size, generator=random)
    return module(batch, embedding, target_head)
