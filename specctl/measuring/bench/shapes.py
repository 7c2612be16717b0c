"""Targets with random weights, for measuring speed: their sizes, and whether one fits into free memory."""

from typing import NamedTuple

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specctl.decoding.models.lean import pick_target_dtype
from specctl.decoding.models.loading import load_tokenizer, pick_device
from specctl.decoding.target import LoadedAs, Target
from specctl.errors import UsageError
from specctl.measuring.transformers_baseline import in_fastest_dtype
from specctl.recipe import BenchRecipe
from specctl.training.target_outline import Outline

MEMORY_FACTOR = 1.1  # memory needed ÷ weights: the rest holds a cache, logits, the layer being packed


class Shape(NamedTuple):
    """Sizes of a decoder-only transformer."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    inner: int  # width of the MLP
    vocabulary: int
    head_dim: int


SHAPES = {
    "1b": Shape(16, 2048, 32, 8, 8192, 128_256, 64),  # Llama 3.2 1B
    "8b": Shape(32, 4096, 32, 8, 14336, 128_256, 128),  # Llama 3.1 8B
    "32b": Shape(64, 5120, 64, 8, 25600, 151_936, 128),  # Qwen3 32B
    "70b": Shape(80, 8192, 64, 8, 28672, 128_256, 128),  # Llama 3.3 70B
}
"""Sizes by the values of the recipe key `shape` of `bench`."""


def config_of(name: str) -> LlamaConfig:
    shape = SHAPES[name]
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40_960,  # room for the longest context that is timed
        eos_token_id=shape.vocabulary - 1,
        architectures=["LlamaForCausalLM"],
    )


def load(recipe: BenchRecipe, name: str, device: torch.device) -> tuple[Target, LlamaForCausalLM | None]:
    """Load a target of a shape; also return its `transformers` model if the part `steps` times that, too."""
    before = torch.get_default_dtype()
    torch.manual_seed(recipe.data.seed)
    try:
        torch.set_default_dtype(pick_target_dtype(recipe.target.dtype, device, config_of(name)))
        with device:
            model = LlamaForCausalLM(config_of(name)).eval()
    finally:
        torch.set_default_dtype(before)
    twice = "steps" in recipe.parts
    target = Target(name, model, load_tokenizer("builtin"), loaded=LoadedAs(consume=not twice))
    return target, in_fastest_dtype(model) if twice else None


def check_memory(recipe: BenchRecipe) -> None:
    """Raise UsageError if the weights of the recipe's shape do not fit into free memory."""
    if recipe.shape is None:
        return
    device = pick_device(recipe.target.device)
    dtype = pick_target_dtype(recipe.target.dtype, device, config_of(recipe.shape))
    weights = Outline.of(config_of(recipe.shape), dtype).parameters * dtype.itemsize
    there = free_memory(device)
    if weights * MEMORY_FACTOR > there:
        needed = f"{weights / 1e9:.0f} GB of weights and needs {weights * MEMORY_FACTOR / 1e9:.1f} GB"
        raise UsageError(
            f"shape {recipe.shape} has {needed}, but {device} has {there / 1e9:.1f} GB free", "name a smaller shape"
        )
    if "steps" in recipe.parts and weights * (1 + MEMORY_FACTOR) > there:
        raise UsageError(
            f"the part steps also loads shape {recipe.shape} in transformers: twice {weights / 1e9:.0f} GB of weights, "
            f"but {device} has {there / 1e9:.0f} GB free",
            "--parts rounds,decoding loads them once",
        )


def free_memory(device: torch.device) -> int:
    """Bytes of memory that are free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
