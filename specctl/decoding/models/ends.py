"""Embedding, final norm and vocabulary head of a target that only engines run, from its safetensors files.

`transformers` builds the model on the meta device, so that its own modules compute the norm (Gemma and Qwen3-Next store
the factor minus one) and the logits (scales, caps). The tensors are found by the end of their name and by their shape.
"""

from typing import Any

import torch
from torch import Tensor, nn

from specctl.decoding.models.loading import load_errors, load_generation_config, location
from specctl.decoding.models.weight_files import EMBEDDINGS, WeightFiles
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
        """Read the weights from the target's files. CheckpointError if a tensor is missing."""

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


def load_ends(
    name: str, config: Any, *, device: torch.device, dtype: torch.dtype, revision: str | None, trust_remote_code: bool
) -> ModelEnds:
    """Load the ends of the target `name`. CheckpointError if its files lack them, or the model has none that can be
    used alone."""
    with load_errors(name):
        ends = ModelEnds(model_on_meta(config, trust_remote_code=trust_remote_code))
        files = WeightFiles(location(name), revision)
        if not files.files:
            raise CheckpointError(
                f"target {name} has no safetensors files", "put model.safetensors, or its parts, next to config.json"
            )
        ends.fill(files, name, device, dtype)
    ends.generation_config = load_generation_config(name, config, revision=revision)
    return ends.eval()
