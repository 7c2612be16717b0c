"""Medusa heads, for their own repository (FasterDecoding/Medusa) and for vLLM.

The repository loads one pickle, `medusa_lm_head.pt`. Its trainer writes safetensors, but its loader does not look for
them. vLLM reads the heads under other names (vllm/model_executor/models/medusa.py). SGLang does not read them.
"""

import re

import torch

from specctl.decoding.models.loading import servable
from specctl.formats import llama, medusa_hydra, serving_commands
from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
from specctl.formats.head_directory import HeadDirectory

TO_VLLM = {r"(\d+)\.0\.linear\.(.+)": r"blocks.\1.layers.0.\2", r"(\d+)\.1\.weight": r"lm_heads.\1.weight"}
FROM_VLLM = {r"blocks\.(\d+)\.layers\.0\.(.+)": r"\1.0.linear.\2", r"lm_heads\.(\d+)\.weight": r"\1.1.weight"}
"""Rules that rename Medusa's tensors between the published names and vLLM's names."""
UNTIL_VLLM_33 = (
    "vLLM serves Medusa heads up to version 0.32 (0.33 dropped them): the most probable token of each, without a tree"
)


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """The directory of heads with the target's whole vocabulary. Raises CheckpointError for a smaller vocabulary."""
    medusa_hydra.check_full_vocabulary(head)
    return _files_of_vllm(head) if to == "vllm" else _files_of_repository(head, facts)


def _files_of_repository(head: Head, facts: TargetFacts) -> Files:
    """Files in which head K is the Sequential of a block, K.0, and a vocabulary matrix, K.1."""
    config = {
        "medusa_num_heads": head.architecture["draft_heads"],
        "medusa_num_layers": head.architecture["num_layers"],
        "base_model_name_or_path": servable(facts.name),
    }
    return Files(config, head.tensors, "medusa_lm_head.pt")


def _files_of_vllm(head: Head) -> Files:
    """Files for vLLM's model type `medusa`. Its blocks have a bias if `medusa_fc_bias` is true.

    Its `token_map` for a smaller vocabulary requires one vocabulary head shared by all (`original_lm_head`), which our
    heads do not have.
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
    """The tensor's name, rewritten by the first of the `rules` that matches."""
    for pattern, other in rules.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, other, name)
    return name


def claims(found: HeadDirectory) -> bool:
    names = {"0.0.linear.weight", "blocks.0.layers.0.weight"}
    named = "medusa_num_heads" in found.config or found.config.get("model_type") == "medusa"
    return named or not names.isdisjoint(found.tensors)


def read(found: HeadDirectory, facts: TargetFacts) -> Head:
    """Read heads of one layer. Counts them from the tensors: a published config.json says 2 for 5 heads."""
    in_vllm = found.config.get("model_type") == "medusa"
    prefix, key = ("", "num_hidden_layers") if in_vllm else ("medusa_", "medusa_num_layers")
    if found.config.get(key, 1) != 1:
        raise found.invalid(key, found.config[key], "must be 1: specctl's heads have one layer")
    stripped = {
        _spelled(re.sub(r"^medusa_heads?\.", "", name), FROM_VLLM): tensor for name, tensor in found.tensors.items()
    }
    found, heads = found.with_tensors(stripped), medusa_hydra.count(stripped, r"(\d+)\.")
    size, vocab = facts.hidden_size, llama.row_count(found, "0.1.weight") or facts.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        if in_vllm and not found.config.get("medusa_fc_bias"):  # vLLM's default: blocks without a bias
            found.tensors.setdefault(f"{k}.0.linear.bias", torch.zeros(size))
        shapes |= {f"{k}.0.linear.weight": (size, size), f"{k}.0.linear.bias": (size,), f"{k}.1.weight": (vocab, size)}
    notes = llama.check_vocabulary(found, vocab, facts)
    tensors = llama.take_exactly(found, shapes)
    fitted = {
        name: medusa_hydra.without_padding_rows(tensor, vocab, facts) if name.endswith(".1.weight") else tensor
        for name, tensor in tensors.items()
    }
    declared = found.config.get(f"{prefix}num_heads", heads)
    if declared != heads:
        notes.append(
            f"config.json says {prefix}num_heads {declared}, but {found.file.name} contains {heads} heads; all of "
            "these are used"
        )
    return Head("medusa", medusa_hydra.shape(facts, heads, 1), fitted, tuple(notes))


def serving(head: Head, to: str, use: Deployment) -> Serving:
    """The command line of vLLM, or the line of Python for the repository, with a note on support."""
    if to == "vllm":
        found = serving_commands.serving("vllm", "medusa", use)
        return Serving(found.commands, [UNTIL_VLLM_33, *found.notes])
    line = f"MedusaModel.from_pretrained({str(use.place)!r})  # python, medusa.model.medusa_model"
    first, *more = medusa_hydra.serving_notes(use.facts)
    return Serving([line], [f"{first}; vLLM serves the files of --to vllm", *more])
