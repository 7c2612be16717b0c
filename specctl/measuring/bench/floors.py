"""Lower bounds of decoding times on GPUs that need not be present, from data sheets: nothing is measured.

A step of plain decoding reads all weights, and the keys and values of every sequence. A step that verifies drafts has
several rows per sequence. It reads as much and computes more, so above some batch size its products take longer than
the reading.
"""

from dataclasses import dataclass
from typing import Any

import torch

from specctl.decoding.models.loading import load_config
from specctl.decoding.models.supported import check_decodable
from specctl.measuring.bench.shapes import config_of
from specctl.recipe import BenchRecipe
from specctl.training.machine import DEVICES, GB, Device
from specctl.training.target_outline import Outline

USABLE = 0.9  # share of a GPU's memory for weights, keys and values


@dataclass(frozen=True)
class FloorRow:
    """Floors of `batch` sequences of `context` tokens each, on as many GPUs of one type as hold them.

    The GPUs share all work evenly.

    Attributes:
        gpus: number of GPUs, a power of two.
        weights_ms, kv_ms: time to read the weights, and the keys and values of all sequences.
        plain_ms: least time of a step with one row per sequence.
        tokens_per_s: highest throughput of plain decoding.
        rows: rows per sequence in a step that verifies drafts.
        rows_ms, of_plain: least time of that step, and its ratio to a plain step.
    """

    gpu: str
    gpus: int
    batch: int
    context: int
    weights_ms: float
    kv_ms: float
    plain_ms: float
    tokens_per_s: float
    rows: int
    rows_ms: float
    of_plain: float


def measure(recipe: BenchRecipe) -> list[FloorRow]:
    """Floors of every GPU and batch size of the recipe, for its shape or the configuration of its target."""
    about = recipe.target.described
    config = config_of(recipe.shape) if recipe.shape else load_config(**about)
    check_decodable(recipe.shape or recipe.target.name, config)
    outline = Outline.of(config, torch.float32 if recipe.target.dtype == "fp32" else torch.bfloat16)
    context, rows = recipe.context, recipe.drafted + 1
    return [row(gpu, DEVICES[gpu], outline, batch, context, rows) for gpu in recipe.gpus for batch in recipe.batches]


def row(gpu: str, device: Device, outline: Outline, batch: int, context: int, rows: int) -> FloorRow:
    """Floors of one GPU type and batch size. A mixture counts only the experts that one token visits."""
    size = outline.dtype.itemsize
    weights, kv = outline.active * size, batch * context * kv_bytes(outline.config, size)
    count = 1
    while count * device.memory_gb * GB * USABLE < outline.parameters * size + kv:
        count *= 2
    reading, computing = 1000 / (count * device.bandwidth * 1e12), 1000 / (count * device.tflops * 1e12)

    def step(rows: int) -> float:
        """Least milliseconds of a step, without the products of attention."""
        return max((weights + kv) * reading, 2 * outline.active * batch * rows * computing)

    plain, drafted = step(1), step(rows)
    return FloorRow(
        gpu=gpu,
        gpus=count,
        batch=batch,
        context=context,
        weights_ms=weights * reading,
        kv_ms=kv * reading,
        plain_ms=plain,
        tokens_per_s=1000 * batch / plain,
        rows=rows,
        rows_ms=drafted,
        of_plain=drafted / plain,
    )


def kv_bytes(config: Any, size: int) -> int:
    """Bytes of keys and values per token, over all layers, with `size` bytes per number."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * dim * size
