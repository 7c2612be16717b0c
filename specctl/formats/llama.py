"""Code that the EAGLE formats share: the keys of a Llama configuration, and one decoder layer's tensors."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from specctl.drafters.blueprint import LayerIndex, Length, Size
from specctl.families import FULL, SLIDING
from specctl.formats.head import TargetFacts
from specctl.formats.head_directory import HeadDirectory

NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
"""Our name of a field → its key in config.json."""

MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "norm_before_residual": (False,),
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "use_aux_norm": (False,),
    "norm_output": (False,),
    "sliding_window": (None,),
    "layer_types": (None, ["full_attention"]),
    "quantization_config": (None,),
    "logit_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
}
"""Keys that change what a head computes, and the values with which it computes the same as our head.

`num_hidden_layers` is not checked here: published heads of one layer give the target's number there.
"""

Positive = Annotated[float, Field(strict=True, gt=0, le=1e12)]


class RopeKeys(BaseModel):
    rope_type: str = "default"
    type: str = "default"
    rope_theta: Positive = 10_000.0
    partial_rotary_factor: Positive | None = None


class Keys(BaseModel):
    """Types of keys of config.json that may be missing. Other keys may hold anything."""

    hidden_size: Size = 1
    target_hidden_size: Size | None = None
    intermediate_size: Size = 1
    num_attention_heads: Size = 1
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size = 1
    draft_vocab_size: Size | None = None
    max_position_embeddings: Length | None = None
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeKeys | None = None
    rope_parameters: RopeKeys | None = None
    eagle_config: dict[str, Any] | None = None
    eagle_aux_hidden_state_layer_ids: list[LayerIndex] | None = None


PADDING = 1024  # vocabularies are padded to multiples of at most this number


def write_config(architecture: Mapping[str, Any], facts: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
    """The Llama keys of config.json.

    `bias` repeats `attention_bias` and `mlp_bias` for readers that check only this key.
    """
    return {
        "model_type": "llama",
        **{key: architecture[name] for name, key in NAMES.items()},
        "rope_scaling": None,
        "num_hidden_layers": architecture.get("num_layers", 1),
        "hidden_act": "silu",
        # vLLM limits the context of the *target* to the context length in the drafter's configuration.
        "max_position_embeddings": max(architecture["max_position_embeddings"], facts.context_length),
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def read_config(
    found: HeadDirectory, config: Mapping[str, Any], facts: TargetFacts, own: Collection[str] = ()
) -> dict[str, Any]:
    """The fields of a head's layers from the Llama keys in `config` (all or a part of `found.config`).

    `own` are keys of `MUST_BE` that the family reads itself.

    Raises CheckpointError if a key is missing, has another type, does not fit the target, or asks for a computation
    that our head does not have.
    """
    check_types(found, config)
    config = without_unused_window(found, config)
    for key, allowed in MUST_BE.items():
        value = config.get(key, allowed[0])
        if key not in own and value not in allowed and not (value is None and not allowed[0]):
            raise found.invalid(
                key, value, f"must be {allowed[0]}, the {key} of specctl's head: no exact conversion exists"
            )
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not isinstance(config.get(key), int):
            raise found.invalid(
                key, config.get(key), "a head's config.json must have the keys of a Llama configuration"
            )
    for key in ("hidden_size", "target_hidden_size"):
        if config.get(key, facts.hidden_size) not in (facts.hidden_size, None):
            raise found.invalid(key, config[key], f"target {facts.name} has hidden size {facts.hidden_size}")
    heads = config["num_attention_heads"]
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": facts.vocab_size,
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": _rope_theta(found, config),
        "max_position_embeddings": max(int(config.get("max_position_embeddings") or 0), facts.context_length),
    }


def without_unused_window(found: HeadDirectory, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`config` without the size of a window that no layer uses.

    A window is unused if `use_sliding_window` is false, or `layer_types` names only full attention. Some files list as
    many types as the target has layers.

    Raises CheckpointError if `layer_types` names a window while `use_sliding_window` is false.
    """
    kinds, off = config.get("layer_types"), config.get("use_sliding_window") is False
    named = {str(kind) for kind in kinds} if isinstance(kinds, list) else set()
    if off and SLIDING in named:
        raise found.invalid("use_sliding_window", False, f"must be true, or remove {SLIDING} from layer_types")
    if off or named == {FULL}:
        config = {**config, "sliding_window": None}
    return {**config, "layer_types": None} if named == {FULL} else config


def check_types(found: HeadDirectory, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the first of the `Keys` with a value of another type."""
    try:
        Keys.model_validate(dict(config))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise found.invalid(".".join(map(str, first["loc"])), first["input"], first["msg"]) from error


def _rope_theta(found: HeadDirectory, config: Mapping[str, Any]) -> float:
    """Base of plain rotary embeddings: keys of `transformers` 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise found.invalid(key, rope, "must be plain RoPE (rope_type default), with any rope_theta")
    return float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))


def check_vocabulary(found: HeadDirectory, vocab_size: int, facts: TargetFacts) -> list[str]:
    """Check that the head's vocabulary is the target's, up to padding rows. Returns a note about padding.

    Raises CheckpointError if the vocabulary differs.
    """
    if vocab_size == facts.vocab_size:
        return []
    least = min(vocab_size, facts.vocab_size)
    if abs(vocab_size - facts.vocab_size) > PADDING or (facts.num_tokens or facts.vocab_size) > least:
        raise found.invalid("vocab_size", vocab_size, f"target {facts.name} has a vocabulary of {facts.vocab_size}")
    return [f"vocab_size is {vocab_size}, but the target's is {facts.vocab_size}: the difference is treated as padding"]


def layer_shapes(shape: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a decoder layer with an attention that reads `width` columns."""
    size, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    query, key = shape["num_heads"] * dim, shape["num_kv_heads"] * dim
    return {
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (size, query),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
        "post_attention_layernorm.weight": (size,),
    }


def row_count(found: HeadDirectory, name: str) -> int | None:
    """Number of rows of a matrix, or None if there is no such tensor. Raises CheckpointError if it is not a matrix."""
    tensor = found.tensors.get(name)
    if tensor is not None and tensor.dim() != 2:
        raise found.invalid(name, f"of shape {list(tensor.shape)}", "must be a matrix", where=found.file)
    return None if tensor is None else len(tensor)


def take_exactly(found: HeadDirectory, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the tensors in `shapes`. All must be present, and only biases of zero may be left over.

    Raises CheckpointError that names the first tensor that is missing, has another shape, or has no place in our head.
    """
    for name, shape in shapes.items():
        if name not in found.tensors:
            raise found.invalid(name, "missing", f"expected a tensor {list(shape)}", where=found.file)
        if tuple(found.tensors[name].shape) != shape:
            got = list(found.tensors[name].shape)
            raise found.invalid(
                name, f"of shape {got}", f"config.json and target require {list(shape)}", where=found.file
            )
    for name, tensor in found.tensors.items():
        if name in shapes or (name.endswith(".bias") and not tensor.any()):
            continue
        what = "a bias that is not zero" if name.endswith(".bias") else f"a tensor {list(tensor.shape)}"
        raise found.invalid(
            name, what, "specctl's head does not have this tensor: no exact conversion exists", where=found.file
        )
    return {name: found.tensors[name] for name in shapes}


def fitted_rows(matrix: Tensor, rows: int) -> Tensor:
    """The first `rows` of a matrix, padded with zeros. The added rows belong to no token."""
    return torch.cat((matrix[:rows], matrix.new_zeros(max(rows - len(matrix), 0), matrix.shape[1])))


def same_matrix(shipped: Tensor, original: Tensor) -> bool:
    """Whether two matrices differ by no more than rounding to bf16, in the rows that both have."""
    if shipped.dim() != 2 or shipped.shape[1:] != original.shape[1:]:
        return False
    common = min(len(shipped), len(original))
    theirs, ours = shipped[:common].float(), original[:common].float().to(shipped.device)
    return bool((theirs - ours).abs().max() <= 2**-7 * ours.abs().max())


def without_copies(found: HeadDirectory, facts: TargetFacts, copies: Mapping[str, Tensor | None]) -> HeadDirectory:
    """`found` without shipped copies of the target's matrices. Our heads read the target's matrices themselves.

    Raises CheckpointError if a copy differs from the target's matrix by more than rounding to bf16.
    """
    for name, original in copies.items():
        shipped = found.tensors.get(name)
        if shipped is None or original is None:
            continue
        if not same_matrix(shipped, original):
            raise found.invalid(
                name, "not the target's",
                f"specctl's head uses the tensor of {facts.name}, but this head was trained with another",
                where=found.file,
            )  # fmt: skip
    return found.without(copies)
