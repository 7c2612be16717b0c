"""Files by which peft reads a LoRA drafter, written next to our own.

adapter_config.json         settings, with the base drafter's path as the base model
adapter_model.safetensors   the weights of model.safetensors, under peft's names

peft applies them to the base drafter's module, whose projections have the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's name of a wrapped module


def settings(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Content of adapter_config.json.

    `config`: content of the drafter's config.json, with a section "lora". `tensors`: the adapter's weights by name.
    """
    lora = config["lora"]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": (lora.get("base") or {}).get("path"),
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "target_modules": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}),
        "inference_mode": True,
    }


def weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's weights under peft's names."""
    return {PREFIX + name: tensor for name, tensor in tensors.items()}
