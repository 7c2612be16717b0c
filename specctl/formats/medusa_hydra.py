"""Code that the Medusa and Hydra formats share: lists of heads, shaped by the target's configuration."""

import re
from typing import Any

from torch import Tensor

from specctl.decoding.models.loading import ORIGINAL, is_gguf
from specctl.errors import CheckpointError
from specctl.formats.head import Head, TargetFacts

NOT_SERVED = "neither vLLM nor SGLang serves this format: it is for its original repository"

NO_GGUF = (
    "the repository reads no GGUF files: in config.json, replace base_model_name_or_path "
    f"{ORIGINAL} by the directory or hub id of the target's original"
)


def serving_notes(facts: TargetFacts) -> list[str]:
    """Notes on the use of heads by their repository."""
    return [NOT_SERVED, NO_GGUF] if is_gguf(facts.name) else [NOT_SERVED]


def check_full_vocabulary(head: Head) -> None:
    if head.architecture["draft_vocab_size"] != head.architecture["vocab_size"]:
        raise CheckpointError(
            f"the {head.family} heads have a draft vocabulary of {head.architecture['draft_vocab_size']}",
            hint="the published format supports only the target's whole vocabulary: train without drafter.vocab_size",
        )


def count(tensors: dict[str, Tensor], pattern: str) -> int:
    """Number of heads in the tensors' names."""
    return len({match[1] for name in tensors if (match := re.match(pattern, name))})


def without_padding_rows(tensor: Tensor, vocab: int, facts: TargetFacts) -> Tensor:
    """A vocabulary matrix or bias without the padding rows that the target lacks.

    Raises CheckpointError if it lacks rows instead: these heads cannot leave tokens out.
    """
    if vocab < facts.vocab_size:
        raise CheckpointError(
            f"the heads have {vocab} tokens, but target {facts.name} has {facts.vocab_size}",
            hint="import them for the target that they were trained for",
        )
    return tensor[: facts.vocab_size]


def shape(facts: TargetFacts, heads: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": facts.vocab_size,
        "draft_heads": heads,
        "num_layers": layers,
        "taps": [facts.num_layers],
    }
