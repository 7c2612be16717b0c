"""Medusa heads: as their own repository (FasterDecoding/Medusa) reads them, and as vLLM does.

The repository loads one pickle, `medusa_lm_head.pt` (its trainer writes safetensors, its loader does not look for
them). vLLM reads the heads under names of its own (vllm/model_executor/models/medusa.py), SGLang not at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from specctl.formats import engines, head_lists, llama
from specctl.formats.foreign import Foreign
from specctl.formats.head import Files, Head, LengthRange, Serving, TargetFacts

TO_VLLM = {r"(\d+)\.0\.linear\.(.+)": r"blocks.\1.layers.0.\2", r"(\d+)\.1\.weight": r"lm_heads.\1.weight"}
FROM_VLLM = {r"blocks\.(\d+)\.layers\.0\.(.+)": r"\1.0.linear.\2", r"lm_heads\.(\d+)\.weight": r"\1.1.weight"}
"""Names of Medusa's tensors, published and in vLLM."""
UNTIL_VLLM_33 = (
    "vLLM up to 0.32 serves Medusa heads (0.33 has dropped them): the most probable token of each, without a tree"
)


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """The directory of heads that draft with the target's whole vocabulary: CheckpointError for others."""
    head_lists.check_whole(head)
    return _files_of_vllm(head) if to == "vllm" else _files_of_repository(head, facts)


def _files_of_repository(head: Head, facts: TargetFacts) -> Files:
    """Head K is the Sequential of a block, K.0, and a vocabulary matrix, K.1."""
    config = {
        "medusa_num_heads": head.architecture["draft_heads"],
        "medusa_num_layers": head.architecture["num_layers"],
        "base_model_name_or_path": facts.name,
    }
    return Files(config, head.tensors, "medusa_lm_head.pt")


def _files_of_vllm(head: Head) -> Files:
    """A configuration of vLLM's model type `medusa`, whose blocks have a bias where `medusa_fc_bias` says so.

    Its `token_map` for a smaller vocabulary goes with one head shared by all (`original_lm_head`), which ours have not.
    """
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": head.architecture["hidden_size"],
        "vocab_size": head.architecture["vocab_size"],
        "num_heads": head.architecture["draft_heads"],
        "num_hidden_layers": head.architecture["num_layers"],
        "medusa_fc_bias": True,
        "torch_dtype": str(head.tensors["0.1.weight"].dtype).removeprefix("torch."),
    }
    return Files(config, {_spelled(name, TO_VLLM): tensor for name, tensor in head.tensors.items()})


def _spelled(name: str, rules: dict[str, str]) -> str:
    """A tensor's name under the first of the `rules` that it follows."""
    for pattern, other in rules.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, other, name)
    return name


def claims(found: Foreign) -> bool:
    return "medusa_num_heads" in found.config or bool(
        found.tensors.keys() & {"0.0.linear.weight", "blocks.0.layers.0.weight"}
    )


def read(found: Foreign, facts: TargetFacts) -> Head:
    """Heads of one layer. How many there are is counted: config.json of published ones is known to say 2 for 5."""
    prefix = "" if found.config.get("model_type") == "medusa" else "medusa_"  # vLLM's keys, or the repository's
    key = "medusa_num_layers" if prefix else "num_hidden_layers"
    if found.config.get(key, 1) != 1:
        raise found.refuse(key, found.config[key], "1: our heads have one layer")
    stripped = {
        _spelled(name.removeprefix("medusa_head."), FROM_VLLM): tensor for name, tensor in found.tensors.items()
    }
    found, heads = found.renamed(stripped), head_lists.count(stripped, r"(\d+)\.")
    size, vocab = facts.hidden_size, head_lists.rows(found, "0.1.weight", facts)
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        shapes |= {f"{k}.0.linear.weight": (size, size), f"{k}.0.linear.bias": (size,), f"{k}.1.weight": (vocab, size)}
    notes = llama.check_vocabulary(found, vocab, facts)
    tensors = llama.take(found, shapes)
    fitted = {
        name: head_lists.fit(tensor, vocab, facts) if name.endswith(".1.weight") else tensor
        for name, tensor in tensors.items()
    }
    said = found.config.get(f"{prefix}num_heads", heads)
    if said != heads:
        notes.append(f"config.json says {prefix}num_heads {said}; {found.file.name} holds {heads}, which are taken")
    return Head("medusa", head_lists.shape(facts, heads, 1), fitted, tuple(notes))


def serving(
    head: Head, to: str, place: Path, facts: TargetFacts, tokens: int, schedule: Sequence[LengthRange] = ()
) -> Serving:
    """vLLM's command line, or the line of Python of the repository; and who still serves them."""
    if to == "vllm":
        found = engines.serving("vllm", "medusa", place, facts, tokens, schedule)
        return Serving(found.commands, [UNTIL_VLLM_33, *found.notes])
    line = f"MedusaModel.from_pretrained({str(place)!r})  # python, medusa.model.medusa_model"
    return Serving([line], [f"{head_lists.NOT_SERVED}; --to vllm is served"])
