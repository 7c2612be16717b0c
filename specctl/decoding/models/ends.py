"""A target's model without its layers: embedding, final norm and vocabulary head.

Training a draft head on features from another machine needs no more. For a 70B model in bf16 this is 4 GB instead of
141 GB.

For a target that only engines run, `transformers` builds the model on the meta device, so that its own modules compute
the norm (Gemma and Qwen3-Next store the factor minus one) and the logits (scales, caps). The tensors are found by the
end of their name and by their shape.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from specctl.decoding.models import supported
from specctl.decoding.models.lean import LeanModel, unsupported_reason
from specctl.decoding.models.loading import (
    from_pretrained_of,
    is_gguf,
    load_config,
    load_errors,
    load_generation_config,
    location,
)
from specctl.decoding.models.model import PREFILL_ROWS
from specctl.decoding.models.supported import quiet
from specctl.decoding.models.weight_files import EMBEDDINGS, GGUFWeightFiles, WeightFiles
from specctl.errors import CheckpointError


def model_on_meta(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The model of a target's configuration without memory for its weights; a vision-language model with its towers.

    Raises any exception that the code of the architecture raises.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    only_text = trust_remote_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    builder: Any = AutoModelForCausalLM if only_text else AutoModelForMultimodalLM
    with torch.device("meta"):
        model = builder.from_config(config, **({"trust_remote_code": True} if trust_remote_code else {}))
    return getattr(model, "thinker", model)  # the part of a model with speech that writes text


class ModelEnds(nn.Module):
    """Embedding, final norm and vocabulary head of a model, as its own modules. It can stand for the model in a
    `Target` without layers.

    ValueError if the model has no final norm or no vocabulary head that can be used alone.
    """

    def __init__(self, model: Any):
        from specctl.decoding.models.hf import without_decoder

        super().__init__()
        inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
        places = {id(module): name for name, module in model.named_modules()}
        width = model.config.get_text_config().hidden_size
        self.embedding_name = f"{places[id(inputs)]}.weight"
        beside = model.get_submodule(places[id(inputs)].rpartition(".")[0]).named_children()
        norms = [
            (name, module)
            for name, module in beside
            if (sizes := {tuple(weight.shape) for weight in module.parameters()}) and sizes == {(width,)}
        ]
        if outputs is None or not norms:
            raise ValueError(f"{type(model).__name__} has no final norm or no vocabulary head that can be used alone")
        self.norm_name, self.norm = norms[-1]  # some models also have a norm after the embedding
        self.inputs, self.outputs, self.head_name = inputs, outputs, places[id(outputs)]
        self.config, self.generation_config, self.hidden_size = model.config, model.generation_config, width
        # In a list, and so no submodule: it may have other modules, which are never filled.
        self.tail = [without_decoder(model, self.embedding_name.partition(".")[0])]

    @property
    def embedding(self) -> Tensor:
        return self.inputs.weight.detach()

    @property
    def device(self) -> torch.device:
        return self.inputs.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs.weight.dtype

    def get_input_embeddings(self) -> Any:
        return self.inputs

    def get_output_embeddings(self) -> Any:
        return self.outputs

    def normed(self, states: Tensor) -> Tensor:
        """Apply the final norm, like `LeanModel.normed`."""
        return self.norm(states.to(self.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, like `LeanModel.logits`, with the model's own code."""
        from specctl.decoding.models.hf import logits_of

        return logits_of(self.tail[0], hidden)

    def fill(self, files: WeightFiles, target: str, device: torch.device, dtype: torch.dtype) -> None:
        """Read the weights from the target's files. CheckpointError if there are none, or a tensor is missing."""
        if not files.files:
            raise CheckpointError(
                f"target {target} has no safetensors files", "put model.safetensors, or its parts, next to config.json"
            )

        def read(module: nn.Module, key: str, name: str | None, otherwise: str) -> None:
            shape = tuple(module.get_parameter(key).shape)
            if name is None or name not in files.files or files.shape(name) != shape:
                raise CheckpointError(
                    f"target {target}: its files lack {otherwise} of shape {list(shape)}, which config.json requires",
                    "copy the weights again, or the config.json that belongs to them",
                )
            tensor = files.tensor(name).to(device, dtype)
            module.register_parameter(key, nn.Parameter(tensor, requires_grad=False))

        parts = self.config, self.config.get_text_config()
        tied = self.outputs.weight is self.inputs.weight or any(getattr(x, "tie_word_embeddings", False) for x in parts)
        place = files.find(EMBEDDINGS, tuple(self.inputs.weight.shape), self.embedding_name)
        read(self.inputs, "weight", place, self.embedding_name)
        assert place is not None
        prefix = place.removesuffix(max((end for end in EMBEDDINGS if place.endswith(end)), key=len))
        for key in dict(self.norm.named_parameters()):
            name = f"{prefix}{self.norm_name}.{key}"
            read(self.norm, key, name, name)
        end = f"{self.head_name.rpartition('.')[2]}.weight"
        head = files.find((end,), tuple(self.outputs.weight.shape), self.embedding_name)
        if head is None and tied:
            self.outputs.weight = self.inputs.weight
        else:  # like transformers, which does not tie a head that is stored
            read(self.outputs, "weight", head, f"{self.head_name}.weight")
            if tied and torch.equal(self.outputs.weight, self.inputs.weight):
                self.outputs.weight = self.inputs.weight
        for key in set(dict(self.outputs.named_parameters())) - {"weight"}:
            name = f"{(head or end).removesuffix('weight')}{key}"
            read(self.outputs, key, name, name)


class LayerlessModel:
    """The parts of a `LeanModel` outside of the layers, or a `ModelEnds`. A forward needs layers, so it raises
    RuntimeError."""

    def __init__(self, model: LeanModel | ModelEnds):
        self.dtype, self.device, self.hidden_size = model.dtype, model.device, model.hidden_size
        self.embedding: Tensor = model.embedding
        self.prefill_rows = PREFILL_ROWS
        self.normed, self.logits = model.normed, model.logits

    def new_cache(self, *_: Any) -> NoReturn:
        _refuse()

    def forward(self, *_: Any) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise RuntimeError("forward pass of a target that was loaded without its layers")


def without_layers(config: Any) -> Any:
    """A copy of a target's configuration for the model without its layers."""
    ends = copy.deepcopy(config)
    text = ends.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
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
        with load_errors(name):
            found = ModelEnds(model_on_meta(config, trust_remote_code=trust_remote_code))
            files = GGUFWeightFiles(name, dtype) if is_gguf(name) else WeightFiles(location(name), revision)
            found.fill(files, name, device, dtype)
        found.generation_config = load_generation_config(name, config, revision=revision)
        return found.eval()
    with load_errors(name), quiet():  # the layers' tensors are unexpected here, as intended
        loaded: Any = from_pretrained_of(name, config, dtype)(
            config=without_layers(config),
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            **supported.REPORT,
        )
    model, info = loaded
    try:
        supported.check_loaded(f"target {name}", model, info)
    except CheckpointError as error:
        hint = f"{error.hint}; or load the whole target with features.whole_target=true"
        raise CheckpointError(error.message, hint) from error
    whole, ends = config.get_text_config(), model.config.get_text_config()
    ends.num_hidden_layers = whole.num_hidden_layers
    if getattr(whole, "layer_types", None):
        ends.layer_types = whole.layer_types
    return model.to(device).eval()
