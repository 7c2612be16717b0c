"""A target's model without its layers: embedding, final norm and vocabulary head.

Training a draft head on features from another machine needs no more. For a 70B model in bf16 this is 4 GB instead of
141 GB.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from specctl.decoding.models import tensors
from specctl.decoding.models.lean import LeanModel, unsupported_reason
from specctl.decoding.models.loading import from_pretrained_of, load_config, load_errors
from specctl.errors import CheckpointError

if TYPE_CHECKING:
    from specctl.decoding.models.ends import ModelEnds


class LayerlessModel:
    """The parts of a `LeanModel` outside of the layers, or a `ModelEnds`. A forward needs layers, so it raises
    RuntimeError."""

    def __init__(self, model: LeanModel | ModelEnds):
        self.dtype, self.device, self.hidden_size = model.dtype, model.device, model.hidden_size
        self.embedding: Tensor = model.embedding
        self.normed, self.logits = model.normed, model.logits

    def new_cache(self, *_: Any) -> NoReturn:
        _refuse()

    def forward(self, *_: Any) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise RuntimeError("forward pass of a target that was loaded without its layers")


def without_layers(config: Any) -> Any:
    """A copy of a target's configuration for the model without its layers. It drops the quantization: embedding and
    head are rarely quantized."""
    ends = copy.deepcopy(config)
    text = ends.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    for part in {id(part): part for part in (ends, text)}.values():
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return ends


def load_layerless(
    name: str, *, device: torch.device, dtype: torch.dtype, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load a target without its layers, and without reading their tensors: as its `transformers` model if the lean step
    computes it, with a configuration that keeps the number of layers, otherwise as a `ModelEnds`.

    Raises CheckpointError: the files lack other tensors, or the architecture cannot be built without layers.
    """
    config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    if unsupported_reason(config) is not None:
        from specctl.decoding.models.ends import load_ends

        options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        return load_ends(name, config, device=device, dtype=dtype, **options)
    with load_errors(name), tensors.quiet():  # the layers' tensors are unexpected here, as intended
        loaded: Any = from_pretrained_of(name, config, dtype)(
            config=without_layers(config),
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            **tensors.REPORT,
        )
    model, info = loaded
    try:
        tensors.check_loaded(f"target {name}", model, info)
    except CheckpointError as error:
        hint = f"{error.hint}; or load the whole target with features.whole_target=true"
        raise CheckpointError(error.message, hint) from error
    whole, ends = config.get_text_config(), model.config.get_text_config()
    ends.num_hidden_layers = whole.num_hidden_layers
    if getattr(whole, "layer_types", None):
        ends.layer_types = whole.layer_types
    for part, original in ((model.config, config), (ends, whole)):
        if getattr(original, "quantization_config", None) is not None:
            part.quantization_config = original.quantization_config
    return model.to(device).eval()
