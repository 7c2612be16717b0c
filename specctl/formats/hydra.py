"""Hydra heads for their own repository (zankner/Hydra): one pickle, `hydra_lm_head.pt`."""

import re
from dataclasses import fields
from typing import Any, cast

from specctl.decoding.models.loading import servable
from specctl.decoding.target import Target
from specctl.drafters.feature.head import DraftConfig, head_config
from specctl.errors import CheckpointError
from specctl.formats import llama, medusa_hydra
from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
from specctl.formats.head_directory import HeadDirectory
from specctl.recipe import DrafterRecipe


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """Files of the prefix-attention heads. Layers 2 … n are one module, which the file repeats as K.3, K.5, …

    Raises CheckpointError if the prefix layer's shape differs from the target's layers: the loader builds it from the
    target's config.
    """
    medusa_hydra.check_full_vocabulary(head)
    for key, value in _prefix_shape(facts).items():
        if head.architecture[key] != value and key != "max_position_embeddings":  # it changes no computation
            raise CheckpointError(
                f"the prefix layer has {key} {head.architecture[key]}, but the target's layers have {value}",
                hint="Hydra's loader gives it the shape of the target's layers: train without overriding it",
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
        "base_model_name_or_path": servable(facts.name),
    }
    return Files(config, tensors, "hydra_lm_head.pt")


def claims(found: HeadDirectory) -> bool:
    return "hydra_num_heads" in found.config or any(name.startswith("hydra_mlp.") for name in found.tensors)


def read(found: HeadDirectory, facts: TargetFacts) -> Head:
    """Read grounded prefix-MLP heads (Hydra++). Raises CheckpointError for other architectures of the repository."""
    config = found.config
    for key, wanted, default in (
        ("hydra_head_arch", "prefix-mlp", "mlp"),
        ("grounded_heads", True, False),
        ("hidden_state_offset", 0, 0),
    ):
        if config.get(key, default) != wanted:
            raise found.invalid(
                key, config.get(key, default), f"must be {wanted}: no other Hydra heads can be imported"
            )
    heads, layers = medusa_hydra.count(found.tensors, r"hydra_mlp\.(\d+)\."), config.get("hydra_num_layers", 1)
    if type(layers) is not int or layers < 2:
        raise found.invalid("hydra_num_layers", layers, "must be 2 or more: specctl's heads have a repeated layer")
    unused = re.compile(
        r"hydra_mlp\.\d+\.(?:[5-9]|\d\d+)\..*|.*\.inv_freq|(?:input_embed_fn|prefix_embeding_layer\.embed_tokens)\..*"
    )
    found = found.with_tensors({name: tensor for name, tensor in found.tensors.items() if not unused.fullmatch(name)})
    size, prefix = facts.hidden_size, _prefix_shape(facts)
    vocab = llama.row_count(found, "hydra_lm_head.0.1.weight") or facts.vocab_size
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
    tensors = llama.take_exactly(found, shapes)
    fitted = {
        name: medusa_hydra.without_padding_rows(t, vocab, facts) if name.startswith("hydra_lm_head.") else t
        for name, t in tensors.items()
    }
    return Head("hydra", medusa_hydra.shape(facts, heads, layers) | prefix, fitted, tuple(notes))


def serving(head: Head, to: str, use: Deployment) -> Serving:
    """The line of Python for the repository, the only reader of these heads."""
    line = f"HydraModel.from_pretrained({str(use.place)!r})  # python, hydra.model.hydra_model"
    return Serving([line], medusa_hydra.serving_notes(use.facts))


def _prefix_shape(facts: TargetFacts) -> dict[str, Any]:
    """Shape of the prefix layer, which is the shape of the target's layers."""
    layer, outer = head_config(DrafterRecipe(), cast(Target, facts)), {field.name for field in fields(DraftConfig)}
    return {name: value for name, value in vars(layer).items() if name not in outer}
