"""Whether an engine can read the head that a training would write. It says so before the training, not at export."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specctl.drafters.family import load_family
from specctl.errors import CheckpointError
from specctl.formats import registry
from specctl.formats.head import Head, TargetFacts

LLAMA_CPP = "llama.cpp"  # its writer needs values of tensors, and it reads no head that the other readers refuse


def unread(family: str, module: nn.Module, name: str, config: Any) -> str | None:
    """Reason why no engine reads a head with the shape of `module`, or None if one does.

    Args:
        name, config: of the target; `config` is the configuration of its text model.
    """
    architecture = load_family(family).stored_architecture(module)
    if "taps" not in architecture:
        return None
    head = Head(family, architecture, load_family(family).stored_state(module.state_dict()))
    vocab_size = architecture["vocab_size"]
    embedding = torch.empty(vocab_size, config.hidden_size, device="meta")
    facts = TargetFacts.of_config(name, config, vocab_size, revision=None, embedding=embedding)
    reason = None
    for form, row in registry.FORMATS.items():
        for reader in row.readers if family in row.families and form != LLAMA_CPP else ():
            try:
                registry.load(form).write(head, facts, head.draft_length(1), reader)
                return None
            except CheckpointError as refusal:
                reason = reason or f"no engine will read this head: {refusal.message}"
    return reason
