"""Targets with an MTP layer: extra tensors in a model's files, which `transformers` does not read."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specctl.decoding.models.loading import builtin_path
from specctl.drafters.mtp import drafter, layouts
from specctl.drafters.mtp.head import MtpHead
from specctl.drafters.mtp.layouts import NativeLayer
from specctl.recipe import DrafterRecipe

NAMES = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "model.mtp_layers.0.", ""),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "mtp.", "layers.0."),
}


def tensors(layout, config, *, bias=False, qk_norm=False, seed=0):
    """A random MTP layer with the tensor names of a layout, for a target with this config.json."""
    random = torch.Generator().manual_seed(seed)
    size, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or size // heads
    matrix = {
        "self_attn.q_proj": (heads * dim, size),
        "self_attn.k_proj": (kv * dim, size),
        "self_attn.v_proj": (kv * dim, size),
        "self_attn.o_proj": (size, heads * dim),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    norms = {"input_layernorm": size, "post_attention_layernorm": size}
    norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim} if qk_norm else {}
    token, hidden, fc, norm, first, inside = NAMES[layout]
    found = {f"{first}{inside}{name}.weight": _random(random, *shape) for name, shape in matrix.items()}
    found |= {f"{first}{inside}{name}.weight": 1 + 0.2 * _random(random, n) for name, n in norms.items()}
    found |= {f"{first}{name}.weight": 1 + 0.2 * _random(random, size) for name in (token, hidden, norm)}
    found[f"{first}{fc}.weight"] = _random(random, size, 2 * size)
    for name in ("q_proj", "k_proj", "v_proj") if bias else ():
        found[f"{first}{inside}self_attn.{name}.bias"] = _random(random, matrix[f"self_attn.{name}"][0])
    return found


def _random(random, *shape):
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
    return scale * torch.randn(*shape, generator=random, device=random.device)


def head(target, layout="mimo", **options):
    """A random MTP layer for a loaded target, with or without a native layer."""
    held = layouts.to_our_names(layouts.LAYOUTS[layout], tensors(layout, target.config.to_dict(), **options), "toy")
    native = NativeLayer("toy", layout, {name: tuple(tensor.shape) for name, tensor in held.items()})
    made = MtpHead(drafter.architecture(native, DrafterRecipe(), target))
    made.load_state_dict(held | ({} if made.target_norm is None else {"target_norm": target.norm_weight.float()}))
    return made.eval()


def write(place, layout, source=None, *, shards=False, **options):
    """The target in directory `source` (default: the built-in target) with a random MTP layer, in `place`.

    `shards`: put the layer in a separate file, with an index.
    """
    source, place = Path(source or builtin_path()), Path(place)
    place.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, place)
    config = json.loads((source / "config.json").read_text())
    layer = tensors(layout, config, **options)
    weights = load_file(source / "model.safetensors")
    if not shards:
        save_file(weights | layer, place / "model.safetensors", metadata={"format": "pt"})
        return str(place)
    files = {"model-00001-of-00002.safetensors": weights, "model-00002-of-00002.safetensors": layer}
    for name, part in files.items():
        save_file(part, place / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not os.path.exists(place / "model.safetensors")
    return str(place)


def as_mimo(place):
    """The built-in target in Qwen2's format, with zero biases and a random MTP layer: engines load it as a MiMo
    model."""
    shaped = Path(place).with_name(Path(place).name + "-qwen2")
    shutil.copytree(builtin_path(), shaped)
    config = json.loads((shaped / "config.json").read_text())
    for key in ("attention_bias", "mlp_bias", "head_dim", "pretraining_tp"):
        del config[key]
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (shaped / "config.json").write_text(json.dumps(config))
    weights = load_file(shaped / "model.safetensors")
    projections = [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
    biases = {name.replace(".weight", ".bias"): torch.zeros_like(weights[name][:, 0]) for name in projections}
    save_file(weights | biases, shaped / "model.safetensors", metadata={"format": "pt"})
    return write(place, "mimo", shaped, bias=True)
