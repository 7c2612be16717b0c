"""Heads in llama.cpp's GGUF files, architectures `eagle3` and `dflash` (DFlash and DSpark).

The file follows the sources of llama.cpp (src/models/eagle3.cpp, src/models/dflash.cpp). It differs from the published
directories in six points: `d2t` holds target ids instead of offsets, and there is no `t2d`; the query and key rows of
an EAGLE-3 layer have their rotary dimensions in pairs; `target_layers` are indices into hidden_states for both
architectures; a DFlash head with a mask embedding ships a whole embedding matrix; all layers of a DFlash head have a
causal mask, or none has one; and the file holds the target's tokenizer, which is copied from the target's own GGUF
file.

Matrices are rounded to bf16, in which engines run heads anyway. Norms stay in fp32.
"""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.decoding.models import gguf_file
from specctl.decoding.models.gguf_file import ARCHITECTURE, Numbers
from specctl.decoding.models.loading import is_gguf
from specctl.errors import CheckpointError
from specctl.families import FULL, SLIDING
from specctl.formats import block_attention, dflash, eagle3
from specctl.formats.block import EMBEDDING, MARKOV, MASK_FILE
from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
from specctl.formats.head_directory import HeadDirectory

WEIGHTS = "model.gguf"
TOKENIZER = "tokenizer."
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
CAUSAL = "attention.causal"
MASK_TOKEN = "tokenizer.ggml.mask_token_id"
BF16 = 32  # llama.cpp's number of a file with matrices in bf16
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
}
REALS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base"}
"""Keys of config.json → keys of the metadata, after the architecture's name."""
STEMS = {
    "eagle3": {"input_norm": "enc.output_norm"},
    "dflash": {
        "hidden_norm": "enc.output_norm",
        "embed_tokens": "token_embd",
        "markov_head.markov_w1": "markov_w1",
        "markov_head.markov_w2": "markov_w2",
        "confidence_head.proj": "conf_proj",
    },
}
SHARED = {"fc": "fc", "norm": "output_norm", "lm_head": "output"}
"""Tensors outside the layers: our name → llama.cpp's name, without `.weight`."""
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "hidden_norm": "attn_norm_2",
}
"""The same for the tensors of a layer."""
METHODS = {"eagle3": "draft-eagle3", dflash.DFLASH: "draft-dflash", dflash.DSPARK: "draft-dspark"}
UNREAD = ("fc_norm", "norm_output", eagle3.WINDOW, eagle3.COUNT)
"""Options of an EAGLE-3 head that llama.cpp does not compute."""


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """The GGUF file of a head. Raises CheckpointError if llama.cpp could not run it, or would draft differently."""
    check_target(facts.name)
    files = _eagle3(head, facts, tokens) if head.family == "eagle3" else _dflash(head, facts, tokens)
    rounded = {name: _rounded(tensor) for name, tensor in head.tensors.items()}
    if "mask_embedding" in rounded:  # a row of the embedding matrix
        rounded["mask_embedding"] = _rounded(head.tensors["mask_embedding"][None])[0]
    return replace(files, weights=WEIGHTS, pickles={}, held=replace(head, tensors=rounded))


def check_target(name: str) -> None:
    """Raise CheckpointError if llama.cpp cannot serve the target with this name."""
    if not is_gguf(name):
        hint = "name the target's file: --target FILE.gguf; llama.cpp's convert_hf_to_gguf.py makes one of a directory"
        raise CheckpointError(f"llama.cpp serves GGUF files, but the target is {name}", hint)


def _eagle3(head: Head, facts: TargetFacts, tokens: int) -> Files:
    unread = eagle3.options(head, UNREAD)
    if unread:
        raise CheckpointError(
            f"the head has {' and '.join(unread)}, which llama.cpp does not compute: its drafts would differ",
            "train one that llama.cpp reads: specctl train-drafter --recipe train-drafter/llama-cpp",
        )
    files = eagle3.write(head, facts, tokens, "vllm")
    metadata = {
        "target_layers": Numbers.of(np.array(head.architecture["taps"], np.int32)),
        "target_hidden_size": facts.hidden_size,
        "norm_before_residual": bool(files.config.get("norm_before_residual")),
        "norm_before_fc": bool(files.config.get("norm_before_fc")),
    }
    paired = {
        f"midlayer.self_attn.{name}.weight": files.config[count]
        for name, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads"))
    }
    tensors = files.tensors | {name: in_pairs(files.tensors[name], heads) for name, heads in paired.items()}
    return _translated("eagle3", files.config, metadata, tensors, facts)


def _dflash(head: Head, facts: TargetFacts, tokens: int) -> Files:
    kind = dflash.kind_of(head)
    if kind == dflash.DFLASH2:
        raise CheckpointError(
            "the head has convolutions and a candidate selector (DFlash 2), which specctl does not write for llama.cpp",
            "use --to vllm, or train without drafter.conv_kernel_size and drafter.selector_rank",
        )
    causal = block_attention.causal_windows(head.architecture, alike=True)
    files, shape = dflash.write(head, facts, tokens, "vllm"), head.architecture
    tensors = files.tensors
    if MASK_FILE in files.pickles:
        row = files.pickles[MASK_FILE]["embedding"]
        embedding = facts.token_embedding().to(row.dtype, copy=True)
        embedding[shape["mask_token_id"]] = row
        tensors = tensors | {EMBEDDING: embedding}
    metadata = {
        "target_layers": Numbers.of(np.array(shape["taps"], np.int32)),
        "target_hidden_size": facts.hidden_size,
        "block_size": shape["block_size"],
        "sample_from_anchor": shape["sample_from_anchor"],
        "has_confidence_head": bool(shape.get("confidence")),
        **({CAUSAL: True} if causal else {}),
    }
    if shape.get(block_attention.WINDOW):
        sliding = [kind == SLIDING for kind in block_attention.kinds(shape)]
        metadata |= {WINDOW: shape[block_attention.WINDOW], PATTERN: Numbers.of(np.array(sliding))}
    files = _translated("dflash", files.config, metadata, tensors, facts)
    return replace(files, config=files.config | {MASK_TOKEN: shape["mask_token_id"]})


def _translated(
    kind: str, config: Mapping[str, Any], own: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: TargetFacts
) -> Files:
    """The contents of a file: config and tensors of a published directory, and the architecture's `own` metadata."""
    keys = {theirs: config[ours] for ours, theirs in (SIZES | REALS).items()}
    keys |= {"attention.value_length": config["head_dim"], "rope.dimension_count": config["head_dim"], **own}
    contents = gguf_file.read(Path(facts.name))
    metadata = {ARCHITECTURE: kind, "general.type": "model", "general.file_type": BF16}
    metadata |= {f"{kind}.{key}": value for key, value in keys.items()}
    metadata |= {key: value for key, value in contents.metadata.items() if key.startswith(TOKENIZER)}
    places = _places(kind, config["num_hidden_layers"])
    placed = {_renamed(name, places): _rounded(tensor) for name, tensor in tensors.items() if name != "t2d"}
    if "d2t" in placed:
        placed["d2t"] = placed["d2t"] + torch.arange(len(placed["d2t"]))
    return Files(metadata, placed)


def _rounded(tensor: Tensor) -> Tensor:
    """Matrices in bf16, norms and biases in fp32, integers as they are."""
    return tensor.to(torch.bfloat16 if tensor.dim() > 1 else torch.float32) if tensor.is_floating_point() else tensor


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in llama.cpp's order: the two rotary dimensions of a pair stand together."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def in_halves(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `in_pairs`."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _places(kind: str, layers: int) -> dict[str, str]:
    """Our name of every tensor → llama.cpp's name, without `.weight`."""
    prefixes = ["midlayer"] if kind == "eagle3" else [f"layers.{k}" for k in range(layers)]
    return (
        SHARED
        | STEMS[kind]
        | {
            f"{prefix}.{ours}": f"blk.{k}.{theirs}"
            for k, prefix in enumerate(prefixes)
            for ours, theirs in LAYER.items()
        }
    )


def _renamed(name: str, places: Mapping[str, str]) -> str:
    stem, dot, end = name.rpartition(".")
    return f"{places.get(stem, stem)}{dot}{end}"


def claims(found: HeadDirectory) -> bool:
    """Whether a directory holds a draft head for llama.cpp."""
    return found.config.get(ARCHITECTURE) in STEMS


def read(found: HeadDirectory, facts: TargetFacts) -> Head:
    """Read a head. Raises CheckpointError if our head cannot represent it, or it does not fit the target."""
    kind = found.config[ARCHITECTURE]
    own = {key.removeprefix(f"{kind}."): value for key, value in found.config.items()}
    config = {key: own.get(theirs) for key, theirs in SIZES.items()}
    config |= {key: gguf_file.shortest(own[theirs]) for key, theirs in REALS.items() if theirs in own}
    if own.get("rope.scaling.type", "none") != "none":
        raise found.invalid(f"{kind}.rope.scaling.type", own["rope.scaling.type"], "must be plain RoPE")
    layers = own.get("target_layers")
    taps = list(layers) if isinstance(layers, Numbers) else []
    if not taps or not all(type(tap) is int for tap in taps):
        raise found.invalid(f"{kind}.target_layers", layers, "must be the layers of the target that the head reads")
    count = config["num_hidden_layers"]
    if type(count) is not int or not 0 < count <= 64:
        raise found.invalid(f"{kind}.block_count", count, "must be the number of decoder layers, at most 64")
    names = {theirs: ours for ours, theirs in _places(kind, count).items()}
    tensors = {_renamed(name, names): tensor for name, tensor in found.tensors.items()}
    if "d2t" in tensors:
        tensors |= _offsets(found, tensors["d2t"], config["vocab_size"])
    if kind == "eagle3":
        config |= {key: own.get(key) for key in ("norm_before_residual", "norm_before_fc")} | {eagle3.LAYERS: taps}
        for name, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            weight, heads = tensors.get(f"midlayer.self_attn.{name}.weight"), config[key]
            if weight is not None and type(heads) is int and heads > 0 and len(weight) % (2 * heads) == 0:
                tensors[f"midlayer.self_attn.{name}.weight"] = in_halves(weight, heads)
        return eagle3.read(replace(found, config=config, tensors=tensors), facts)
    spark = MARKOV[0] in tensors
    config[block_attention.CAUSAL] = own.get(CAUSAL, False)
    if own.get(WINDOW):
        pattern = own.get(PATTERN)
        sliding = pattern if isinstance(pattern, Numbers) else ()
        types = [SLIDING if slides else FULL for slides in sliding]
        config |= {block_attention.WINDOW: own[WINDOW], block_attention.TYPES: types}
    nested = {"target_layer_ids": [tap - 1 for tap in taps], "mask_token_id": found.config.get(MASK_TOKEN)}
    config |= {
        "architectures": [dflash.ARCHITECTURES[dflash.DSPARK if spark else dflash.DFLASH]],
        "block_size": own.get("block_size"),
        "dflash_config": nested,
    }
    if spark:
        config |= {"sample_from_anchor": own.get("sample_from_anchor", True), "confidence_head_with_markov": True}
        config["markov_rank"] = tensors[MARKOV[0]].shape[-1]
    return dflash.read(replace(found, config=config, tensors=tensors), facts)


def _offsets(found: HeadDirectory, ids: Tensor, vocab_size: Any) -> dict[str, Tensor]:
    """The mapping of a published directory, from target ids. With t2d no reader takes the offsets for ids."""
    if ids.dim() != 1 or ids.is_floating_point() or type(vocab_size) is not int or not _fit(ids, vocab_size):
        raise found.invalid("d2t", f"of shape {list(ids.shape)}", f"must hold target ids below {vocab_size}, as int64")
    return eagle3.mapping_of(ids, vocab_size)


def _fit(ids: Tensor, size: int) -> bool:
    return len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < size <= 2**31


def serving(head: Head, to: str, use: Deployment) -> Serving:
    """The command line of llama.cpp's server."""
    method = METHODS["eagle3" if head.family == "eagle3" else dflash.kind_of(head)]
    files = f"-m {shlex.quote(use.facts.name)} -md {shlex.quote(str(use.place / WEIGHTS))}"
    return Serving([f"llama-server {files} --spec-type {method} --spec-draft-n-max {use.tokens} --metrics"])
