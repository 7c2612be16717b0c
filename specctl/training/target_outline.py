"""Sizes of a target without its weights: its configuration, built on torch's meta device."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from specctl.decoding.models.ends import ModelEnds, model_on_meta, without_layers
from specctl.decoding.models.supported import engine_only_reason
from specctl.decoding.target import Target
from specctl.drafters.family import load_family
from specctl.kernels.distill import Squash
from specctl.recipe import TrainRecipe


@dataclass(frozen=True)
class Outline:
    """The part of a `Target` that families read to build a drafter, and its numbers of parameters.

    Attributes:
        parameters: all parameters; shared ones count once.
        active: parameters of matrices that every token is multiplied with (a mixture uses a few of its experts per
            token).
        non_layer_parameters: parameters outside the layers.
        only_engines: only an engine can run the target.
    """

    config: Any
    parameters: int
    active: int
    non_layer_parameters: int
    hidden_size: int
    vocab_size: int
    num_layers: int
    context_length: int
    head_weight: Tensor
    norm_weight: Tensor
    model: Any
    dtype: torch.dtype
    device: torch.device
    only_engines: bool = False
    squash: Squash = field(default_factory=Squash)
    eos_ids: frozenset[int] = frozenset()
    tokenizer: Any = field(default_factory=lambda: SimpleNamespace(bos_token_id=None, pad_token_id=None))

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> Outline:
        """Build the outline from `config`, as `load_config` returns it."""
        model = model_on_meta(config)
        only_engines = engine_only_reason(config) is not None
        ends = ModelEnds(model) if only_engines else model_on_meta(without_layers(config))
        text = config.get_text_config()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        matrices = [(name, p.numel()) for name, p in model.named_parameters() if p.ndim >= 2]
        looked_up = 0 if head is embedding else embedding.numel()
        return cls(
            config=text,
            parameters=sum(p.numel() for p in model.parameters()),
            active=round(sum(count * _visited(name, text) for name, count in matrices)) - looked_up,
            only_engines=only_engines,
            non_layer_parameters=sum(p.numel() for p in ends.parameters()),
            hidden_size=embedding.shape[1],
            vocab_size=embedding.shape[0],
            num_layers=text.num_hidden_layers,
            context_length=int(getattr(text, "max_position_embeddings", 0) or 2048),
            head_weight=head.detach(),
            norm_weight=torch.empty(embedding.shape[1], device="meta"),
            model=SimpleNamespace(embedding=embedding.detach()),
            dtype=dtype,
            device=torch.device("meta"),
        )

    def drafter(self, recipe: TrainRecipe) -> nn.Module:
        """The drafter that the recipe would train, on the meta device."""
        family = load_family(recipe.arch)
        with torch.device("meta"):
            return family.build(recipe, cast(Target, self), lambda size: list(range(size)))


def _visited(name: str, config: Any) -> float:
    """Share of a parameter that each token is multiplied with; less than 1 for experts of a mixture."""
    chosen = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return chosen / experts if chosen and experts and ".experts." in name else 1.0
