"""Medusa and Hydra heads as their own repositories read them (FasterDecoding/Medusa, zankner/Hydra).

Both load one pickle, `medusa_lm_head.pt` or `hydra_lm_head.pt` (Medusa's trainer writes safetensors, its loader does
not look for them), and take every shape from the target's configuration. vLLM reads Medusa heads under names of its own
(vllm/model_executor/models/medusa.py), SGLang none.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from specctl.errors import CheckpointError
from specctl.formats import llama
from specctl.formats.foreign import Foreign
from specctl.formats.head import Files, Head, TargetFacts

TO_VLLM = {r"(\d+)\.0\.linear\.(.+)": r"blocks.\1.layers.0.\2", r"(\d+)\.1\.weight": r"lm_heads.\1.weight"}
FROM_VLLM = {r"blocks\.(\d+)\.layers\.0\.(.+)": r"\1.0.linear.\2", r"lm_heads\.(\d+)\.weight": r"\1.1.weight"}
"""Names of Medusa's tensors, published and in vLLM."""


def write_medusa(head: Head, facts: TargetFacts, tokens: int) -> Files:
    """Head K is the Sequential of a block, K.0, and a vocabulary matrix, K.1."""
    _check_whole(head)
    config = {
        "medusa_num_heads": head.architecture["draft_heads"],
        "medusa_num_layers": head.architecture["num_layers"],
        "base_model_name_or_path": facts.name,
    }
    return Files(config, head.tensors, "medusa_lm_head.pt")


def write_medusa_for_vllm(head: Head, facts: TargetFacts, tokens: int) -> Files:
    """A configuration of vLLM's model type `medusa`, whose blocks have a bias where `medusa_fc_bias` says so.

    Its `token_map` for a smaller vocabulary goes with one head shared by all (`original_lm_head`), which ours have not.
    """
    _check_whole(head)
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


def claims_medusa(found: Foreign) -> bool:
    return "medusa_num_heads" in found.config or bool(
        found.tensors.keys() & {"0.0.linear.weight", "blocks.0.layers.0.weight"}
    )


def read_medusa(found: Foreign, facts: TargetFacts) -> Head:
    """Heads of one layer. How many there are is counted: config.json of published ones is known to say 2 for 5."""
    prefix = "" if found.config.get("model_type") == "medusa" else "medusa_"  # vLLM's keys, or the repository's
    key = "medusa_num_layers" if prefix else "num_hidden_layers"
    if found.config.get(key, 1) != 1:
        raise found.refuse(key, found.config[key], "1: our heads have one layer")
    stripped = {
        _spelled(name.removeprefix("medusa_head."), FROM_VLLM): tensor for name, tensor in found.tensors.items()
    }
    found, heads = found.renamed(stripped), _count(stripped, r"(\d+)\.")
    size, vocab = facts.hidden_size, _rows(found, "0.1.weight", facts)
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        shapes |= {f"{k}.0.linear.weight": (size, size), f"{k}.0.linear.bias": (size,), f"{k}.1.weight": (vocab, size)}
    notes = llama.check_vocabulary(found, vocab, facts)
    tensors = llama.take(found, shapes)
    fitted = {
        name: _fit(tensor, vocab, facts) if name.endswith(".1.weight") else tensor for name, tensor in tensors.items()
    }
    said = found.config.get(f"{prefix}num_heads", heads)
    if said != heads:
        notes.append(f"config.json says {prefix}num_heads {said}; {found.file.name} holds {heads}, which are taken")
    return Head("medusa", _shape(facts, heads, 1), fitted, tuple(notes))


def write_hydra(head: Head, facts: TargetFacts, tokens: int) -> Files:
    """The prefix-attention heads. Their layers 2 … n are one module, which the file repeats as K.3, K.5, …

    CheckpointError where the prefix layer is not shaped as the target's: the loader makes it from the target's config.
    """
    _check_whole(head)
    for key, value in _prefix_shape(facts).items():
        if head.architecture[key] != value:
            raise CheckpointError(
                f"the prefix layer has {key} {head.architecture[key]}, the target's layers {value}",
                hint="Hydra's loader shapes it as the target's layers: train without overriding it",
            )
    layers = head.architecture["num_layers"]
    tensors = {}
    for name, tensor in head.tensors.items():
        repeated = re.fullmatch(r"(hydra_mlp\.\d+)\.3\.(.+)", name)
        if not repeated:
            tensors[name] = tensor
        else:
            tensors |= {f"{repeated[1]}.{2 * layer + 1}.{repeated[2]}": tensor for layer in range(1, layers)}
    config = {
        "hydra_num_heads": head.architecture["draft_heads"],
        "hydra_num_layers": layers,
        "hydra_head_arch": "prefix-mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": facts.name,
    }
    return Files(config, tensors, "hydra_lm_head.pt")


def claims_hydra(found: Foreign) -> bool:
    return "hydra_num_heads" in found.config or any(name.startswith("hydra_mlp.") for name in found.tensors)


def read_hydra(found: Foreign, facts: TargetFacts) -> Head:
    """Grounded prefix-MLP heads (Hydra++). CheckpointError for the other architectures of that repository."""
    config = found.config
    for key, wanted, default in (
        ("hydra_head_arch", "prefix-mlp", "mlp"),
        ("grounded_heads", True, False),
        ("hidden_state_offset", 0, 0),
    ):
        if config.get(key, default) != wanted:
            raise found.refuse(key, config.get(key, default), f"{wanted}: no other Hydra heads can be imported")
    heads, layers = _count(found.tensors, r"hydra_mlp\.(\d+)\."), config.get("hydra_num_layers", 1)
    if type(layers) is not int or layers < 2:
        raise found.refuse("hydra_num_layers", layers, "2 or more: our heads have a layer that is repeated")
    unused = re.compile(
        r"hydra_mlp\.\d+\.(?:[5-9]|\d\d+)\..*|.*\.inv_freq|(?:input_embed_fn|prefix_embeding_layer\.embed_tokens)\..*"
    )
    found = found.renamed({name: tensor for name, tensor in found.tensors.items() if not unused.fullmatch(name)})
    size, vocab, prefix = facts.hidden_size, _rows(found, "hydra_lm_head.0.1.weight", facts), _prefix_shape(facts)
    layer = llama.layer_shapes(prefix | {"hidden_size": size}, size) | {"input_layernorm.weight": (size,)}
    shapes: dict[str, tuple[int, ...]] = {
        f"prefix_embeding_layer.layers.0.{name}": shape for name, shape in layer.items()
    }
    shapes["prefix_embeding_layer.norm.weight"] = (size,)
    for k in range(heads):
        for part, columns in (("1.linear", (k + 2) * size), ("1.res_connection", (k + 2) * size), ("3.linear", size)):
            shapes |= {f"hydra_mlp.{k}.{part}.weight": (size, columns), f"hydra_mlp.{k}.{part}.bias": (size,)}
        shapes |= {f"hydra_lm_head.{k}.1.weight": (vocab, size), f"hydra_lm_head.{k}.1.bias": (vocab,)}
    notes = llama.check_vocabulary(found, vocab, facts)
    tensors = llama.take(found, shapes)
    fitted = {name: _fit(t, vocab, facts) if name.startswith("hydra_lm_head.") else t for name, t in tensors.items()}
    return Head("hydra", _shape(facts, heads, layers) | prefix, fitted, tuple(notes))


def _check_whole(head: Head) -> None:
    if head.architecture["draft_vocab_size"] != head.architecture["vocab_size"]:
        raise CheckpointError(
            f"the {head.family} heads have a draft vocabulary of {head.architecture['draft_vocab_size']}",
            hint="the published format knows only the target's whole vocabulary: train without drafter.vocab_size",
        )


def _count(tensors: dict[str, Tensor], pattern: str) -> int:
    """How many heads the names speak of."""
    return len({match[1] for name in tensors if (match := re.match(pattern, name))})


def _rows(found: Foreign, name: str, facts: TargetFacts) -> int:
    return llama.rows(found, name) or facts.vocab_size


def _fit(tensor: Tensor, vocab: int, facts: TargetFacts) -> Tensor:
    """A vocabulary matrix or bias without the rows of padding that the target has not.

    CheckpointError where it lacks some instead: these heads cannot leave tokens out.
    """
    if vocab < facts.vocab_size:
        raise CheckpointError(
            f"the heads know {vocab} tokens, target {facts.name} has {facts.vocab_size}",
            hint="import them for the target that they were trained with",
        )
    return tensor[: facts.vocab_size]


def _shape(facts: TargetFacts, heads: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": facts.vocab_size,
        "draft_heads": heads,
        "num_layers": layers,
        "taps": [facts.num_layers],
    }


def _prefix_shape(facts: TargetFacts) -> dict[str, Any]:
    """The prefix layer: one of the target's."""
    text = facts.text_config
    heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    return {
        "intermediate_size": text.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or facts.hidden_size // heads,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta", 10_000.0)),
        "max_position_embeddings": facts.context_length,
    }
