"""MTP layers in the files of their targets: whose names they have, which of them our head can be, and reading one.

`transformers` leaves them out when it loads a target, so they are read from the target's own safetensors.

- `mimo`: `model.mtp_layers.0.*` of MiMo-7B. `input_proj` reads the state first, then the embedding; the embedding at
  position 0 is zero (`MiMoMTP` of vLLM and of SGLang).
- `qwen`: `mtp.*` as Qwen3-Next's and Qwen3.5's (`Qwen3NextMTP` of vLLM), around a plain Qwen3 or Llama layer, which
  `speculators` trains. Those two models themselves have gated attention, and are no targets here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specctl.decoding.models import lean
from specctl.decoding.models.loading import load_config, model_directory
from specctl.decoding.models.supported import ropes
from specctl.decoding.models.tensors import weight_files
from specctl.errors import CheckpointError
from specctl.recipe import TargetRecipe

MODEL_TYPES = lean.FAMILIES | {"mimo"}  # whose decoder layer is Llama's, Qwen2's or Qwen3's
WHICH = "a target with tensors model.mtp_layers.* (MiMo) or mtp.* around a dense Llama or Qwen layer"


@dataclass(frozen=True)
class MtpLayout:
    """The tensors of a kind of target.

    Attributes:
        prefix: of all names; `first`: of those of its first layer.
        names: beginnings of our names → of theirs behind `first`; all others are the same behind our `layer.`.
        state_first: the projection's first half reads the state, not the embedding.
        normed: engines feed it the state behind the target's final norm.
    """

    prefix: str
    first: str
    names: Mapping[str, str]
    state_first: bool
    normed: bool


LAYOUTS = {
    "mimo": MtpLayout(
        "model.mtp_layers.",
        "model.mtp_layers.0.",
        {"token_norm.": "token_layernorm.", "hidden_norm.": "hidden_layernorm.", "fc.": "input_proj.",
         "norm.": "final_layernorm.", "layer.": ""},
        state_first=True,
        normed=False,
    ),
    "qwen": MtpLayout(
        "mtp.",
        "mtp.",
        {"token_norm.": "pre_fc_norm_embedding.", "hidden_norm.": "pre_fc_norm_hidden.", "fc.": "fc.",
         "norm.": "norm.", "layer.": "layers.0."},
        state_first=False,
        normed=True,
    ),
}  # fmt: skip
NORMED = "mtp_normed_features"  # key of config.json: the side of the final norm that our own exports were trained on
FINAL_NORM = "model.norm.weight"  # of the target, in its files
DEEPSEEK = re.compile(r"model\.layers\.\d+\.(eh_proj|enorm|hnorm)\.")
FOREIGN = {
    "experts": "a mixture of experts",
    "kv_a_proj": "multi-head latent attention",
    "q_a_proj": "multi-head latent attention",
}
"""Parts of names that say what a dense layer with plain attention does not have."""


@dataclass(frozen=True)
class NativeLayer:
    """A target's MTP layer where it is. `files`: of every tensor, by its name in them; `shapes` by ours."""

    target: str
    layout: str
    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors under our names. CheckpointError where a file is damaged."""
        found = {}
        for name, file in self.files.items():
            try:
                with safe_open(file, framework="pt") as weights:
                    found[name] = weights.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: {name} cannot be read: {error}", "copy the target again") from error
        return ours(LAYOUTS[self.layout], found, self.target)


def kind_of(names: Iterable[str]) -> str | None:
    """The layout of which there are `names`; None where there is none."""
    known = list(names)
    return next((kind for kind, one in LAYOUTS.items() if any(n.startswith(one.prefix) for n in known)), None)


def ours(layout: MtpLayout, tensors: Mapping[str, Tensor], target: str) -> dict[str, Tensor]:
    """The layer's tensors among those of a `target` under the names of `MtpHead`, its `fc` as there. CheckpointError
    where there are several layers."""
    mine = {name: tensor for name, tensor in tensors.items() if name.startswith(layout.prefix)}
    found = {_our_name(layout, name, target): tensor for name, tensor in mine.items()}
    return _turned(found, "fc.weight") if layout.state_first else found


def theirs(layout: MtpLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an `MtpHead` under the names of a layout; what is the target's own is left out."""
    weights = {name: tensor for name, tensor in tensors.items() if name != "target_norm"}
    if layout.state_first:
        weights = _turned(weights, "fc.weight")
    prefixes = {name: next(p for p in layout.names if name.startswith(p)) for name in weights}
    return {
        layout.first + layout.names[prefix] + name.removeprefix(prefix): weights[name]
        for name, prefix in prefixes.items()
    }


def find(target: str, revision: str | None = None) -> NativeLayer:
    """The MTP layer of a target whose files are on this machine. CheckpointError, which names the target: there is
    none, or none that our head can be."""
    directory = model_directory(target, revision)
    if directory is None:
        raise CheckpointError(f"target {target} is not on this machine", f"hf download {target}")
    try:
        places = {name: file for file in weight_files(directory) for name in _names(file)}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"target {target}: its weights cannot be read: {error}", "copy it again") from error
    kind = kind_of(places)
    if kind is None:
        if any(DEEPSEEK.match(name) for name in places):
            raise CheckpointError(
                f"target {target}: its MTP layer has DeepSeek's layout (eh_proj), not supported", WHICH
            )
        raise CheckpointError(f"target {target} has no MTP layer (tensors mtp.* or model.mtp_layers.*)", WHICH)
    files = {name: file for name, file in places.items() if name.startswith(LAYOUTS[kind].prefix)}
    for part, what in FOREIGN.items():
        if any(part in name for name in files):
            raise CheckpointError(
                f"target {target}: its MTP layer has {what}, ours is dense with plain attention", WHICH
            )
    shapes = {}
    for name, file in files.items():
        with safe_open(file, framework="pt") as weights:
            shapes[_our_name(LAYOUTS[kind], name, target)] = tuple(weights.get_slice(name).get_shape())
    return NativeLayer(target, kind, files, shapes)


def check(target: TargetRecipe) -> None:
    """Raise CheckpointError where a target, as far as it is on this machine, has no MTP layer that can be trained."""
    if model_directory(target.name, target.revision) is None:
        return  # it is downloaded first, and looked at then
    layer = find(target.name, target.revision)
    config = load_config(target.name, revision=target.revision, trust_remote_code=target.trust_remote_code)
    check_computable(layer, config.get_text_config())


def check_computable(layer: NativeLayer, config: Any) -> None:
    """Raise CheckpointError where our head cannot compute the layer of a target of this (text) configuration."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rows = layer.shapes.get("layer.self_attn.q_proj.weight", (heads * dim,))[0]
    scaled = {kind: rope for kind, rope in ropes(config).items() if kind != "default"}
    if config.model_type not in MODEL_TYPES:
        reason = f"a layer of model type {config.model_type!r}, which is none of {', '.join(sorted(MODEL_TYPES))}"
    elif rows == 2 * heads * dim:
        reason = "gated attention (q_proj is twice as wide), ours is plain"
    elif scaled or any(rope.get("partial_rotary_factor", 1.0) != 1.0 for rope in ropes(config).values()):
        reason = f"scaled or partial RoPE ({', '.join(scaled) or 'partial'}), ours rotates by plain RoPE"
    elif "sliding_attention" in (getattr(config, "layer_types", None) or []):
        reason = "a sliding window, ours attends all tokens"
    elif getattr(config, "hidden_act", "silu") != "silu":
        reason = f"activation {config.hidden_act!r}, ours is silu"
    else:
        return
    raise CheckpointError(f"target {layer.target}: its MTP layer has {reason}", WHICH)


def _names(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        return []
    with safe_open(file, framework="pt") as weights:
        return list(weights.keys())


def _our_name(layout: MtpLayout, name: str, target: str) -> str:
    if not name.startswith(layout.first) or (layout.first == layout.prefix and re.match(r"mtp\.layers\.[1-9]", name)):
        raise CheckpointError(f"target {target}: {name}: it has more than one MTP layer, ours is one", WHICH)
    rest = name.removeprefix(layout.first)
    mine = next((our for our, their in layout.names.items() if their and rest.startswith(their)), None)
    if mine is None:
        mine = "layer."
    return mine + rest.removeprefix(layout.names[mine])


def _turned(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """`tensors` with the two halves of the columns of one exchanged."""
    return {n: torch.cat(t.chunk(2, -1)[::-1], -1).contiguous() if n == name else t for n, t in tensors.items()}
