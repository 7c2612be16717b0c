"""Find and read a target's MTP layer in its files: naming schemes, and checks that our head can compute it.

`transformers` leaves these layers out when it loads a target, so they are read from the target's own safetensors.

- `mimo`: `model.mtp_layers.0.*` of MiMo-7B. `input_proj` reads the state first, then the embedding; the embedding at
  position 0 is zero (`MiMoMTP` of vLLM and of SGLang).
- `qwen`: `mtp.*`, the names of Qwen3-Next and Qwen3.5 (`Qwen3NextMTP` of vLLM), around a plain Qwen3 or Llama layer,
  which `speculators` trains. Qwen3-Next and Qwen3.5 themselves have gated attention and are not supported as targets.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from specctl.decoding.models.loading import load_config, model_directory
from specctl.decoding.models.supported import DENSE, ropes
from specctl.decoding.models.weight_files import WeightFiles
from specctl.errors import CheckpointError
from specctl.recipe.sections import TargetRecipe

MODEL_TYPES = DENSE | {"mimo"}  # decoder layers like Llama's, Qwen2's or Qwen3's
WHICH = "use a target with tensors model.mtp_layers.* (MiMo) or mtp.* around a dense Llama or Qwen layer"


@dataclass(frozen=True)
class MtpLayout:
    """Naming scheme of an MTP layer's tensors in one kind of target.

    Attributes:
        prefix: common prefix of all names.
        first: prefix of the names of the first MTP layer.
        names: our name prefixes → theirs after `first`; all other names follow our `layer.` unchanged.
        state_first: the first half of the projection reads the state, not the embedding.
        normed: engines feed the layer the state after the target's final norm.
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
NORMED = "mtp_normed_features"  # key of config.json: our exported layer was trained on normed states
FINAL_NORM = "model.norm.weight"  # name of the target's final norm in its files
DEEPSEEK = re.compile(r"model\.layers\.\d+\.(eh_proj|enorm|hnorm)\.")
FOREIGN = {
    "experts": "a mixture of experts",
    "kv_a_proj": "multi-head latent attention",
    "q_a_proj": "multi-head latent attention",
}
"""Parts of tensor names that a dense layer with plain attention does not have."""


@dataclass(frozen=True)
class NativeLayer:
    """MTP layer of a target. `shapes` maps our names of its tensors to their shapes."""

    target: str
    layout: str
    shapes: dict[str, tuple[int, ...]]


def kind_of(names: Iterable[str]) -> str | None:
    """Return the layout that matches the tensor `names`, or None if they include no MTP layer."""
    known = list(names)
    return next((kind for kind, one in LAYOUTS.items() if any(n.startswith(one.prefix) for n in known)), None)


def to_our_names(layout: MtpLayout, tensors: Mapping[str, Tensor], target: str) -> dict[str, Tensor]:
    """Select the MTP layer's tensors from a `target` and rename them to the names of `MtpHead`.

    `fc` is reordered to read the embedding first. Raises CheckpointError if there are several layers.
    """
    mine = {name: tensor for name, tensor in tensors.items() if name.startswith(layout.prefix)}
    found = {_our_name(layout, name, target): tensor for name, tensor in mine.items()}
    return _with_swapped_inputs(found) if layout.state_first else found


def to_target_names(layout: MtpLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of an `MtpHead` to the names of a layout; weights that are the target's own are left out."""
    weights = {name: tensor for name, tensor in tensors.items() if name != "target_norm"}
    if layout.state_first:
        weights = _with_swapped_inputs(weights)
    prefixes = {name: next(p for p in layout.names if name.startswith(p)) for name in weights}
    return {
        layout.first + layout.names[prefix] + name.removeprefix(prefix): weights[name]
        for name, prefix in prefixes.items()
    }


def find(target: str, revision: str | None = None) -> NativeLayer:
    """Find the MTP layer of a target with files on this machine.

    Raises CheckpointError, which names the target, if it has no MTP layer, or one that our head cannot compute.
    """
    directory = model_directory(target, revision)
    if directory is None:
        raise CheckpointError(f"target {target} is not on this machine", f"run `hf download {target}`")
    with _readable(target):
        files = WeightFiles(str(directory))
    kind = kind_of(files.files)
    if kind is None:
        if any(DEEPSEEK.match(name) for name in files.files):
            raise CheckpointError(
                f"target {target}: its MTP layer has DeepSeek's layout (eh_proj), which is not supported", WHICH
            )
        raise CheckpointError(f"target {target} has no MTP layer (tensors mtp.* or model.mtp_layers.*)", WHICH)
    names = [name for name in files.files if name.startswith(LAYOUTS[kind].prefix)]
    for part, what in FOREIGN.items():
        if any(part in name for name in names):
            raise CheckpointError(
                f"target {target}: its MTP layer has {what}; only dense layers with plain attention are supported",
                WHICH,
            )
    with _readable(target):
        shapes = {_our_name(LAYOUTS[kind], name, target): files.shape(name) for name in names}
    return NativeLayer(target, kind, shapes)


def read(layer: NativeLayer, revision: str | None = None) -> dict[str, Tensor]:
    """The tensors of a layer that was found, under our names. Raises CheckpointError if a file is damaged."""
    layout = LAYOUTS[layer.layout]
    with _readable(layer.target):
        files = WeightFiles(str(model_directory(layer.target, revision)))
        found = {name: files.tensor(name) for name in files.files if name.startswith(layout.prefix)}
    return to_our_names(layout, found, layer.target)


def check(target: TargetRecipe) -> None:
    """Raise CheckpointError if a target on this machine has no MTP layer that can be trained."""
    directory = model_directory(target.name, target.revision)
    if directory is None:
        return  # it is downloaded first and checked then
    layer = find(target.name, target.revision)
    config = load_config(str(directory), trust_remote_code=target.trust_remote_code)  # does not ask the hub
    check_computable(layer, config.get_text_config())


def check_computable(layer: NativeLayer, config: Any) -> None:
    """Raise CheckpointError if our head cannot compute the MTP layer of a target with this (text) configuration."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rows = layer.shapes.get("layer.self_attn.q_proj.weight", (heads * dim,))[0]
    scaled = {kind: rope for kind, rope in ropes(config).items() if kind != "default"}
    if config.model_type not in MODEL_TYPES:
        reason = f"model type {config.model_type!r}, which is not one of {', '.join(sorted(MODEL_TYPES))}"
    elif rows == 2 * heads * dim:
        reason = "gated attention (q_proj is twice as wide); only plain attention is supported"
    elif scaled or any(rope.get("partial_rotary_factor", 1.0) != 1.0 for rope in ropes(config).values()):
        reason = f"scaled or partial RoPE ({', '.join(scaled) or 'partial'}); only plain RoPE is supported"
    elif "sliding_attention" in (getattr(config, "layer_types", None) or []):
        reason = "a sliding window; only full attention is supported"
    elif getattr(config, "hidden_act", "silu") != "silu":
        reason = f"activation {config.hidden_act!r}; only silu is supported"
    else:
        return
    raise CheckpointError(f"target {layer.target}: its MTP layer has {reason}", WHICH)


@contextmanager
def _readable(target: str) -> Iterator[None]:
    """Turn errors of reading the target's files in this context into CheckpointError."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"target {target}: its weights cannot be read: {error}", "copy the target again"
        ) from error


def _our_name(layout: MtpLayout, name: str, target: str) -> str:
    if not name.startswith(layout.first) or (layout.first == layout.prefix and re.match(r"mtp\.layers\.[1-9]", name)):
        raise CheckpointError(f"target {target}: {name}: it has more than one MTP layer; only one is supported", WHICH)
    rest = name.removeprefix(layout.first)
    mine = next((our for our, their in layout.names.items() if their and rest.startswith(their)), None)
    if mine is None:
        mine = "layer."
    return mine + rest.removeprefix(layout.names[mine])


def _with_swapped_inputs(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the two halves of the columns of `fc.weight` swapped."""
    return {n: torch.cat(t.chunk(2, -1)[::-1], -1) if n == "fc.weight" else t for n, t in tensors.items()}
