"""Print by how much the process grows while a model in its memory becomes a target, as shares of weights and a layer.

A process of its own, because the largest size that a process ever had is all that the kernel tells: of its own memory,
that is; `getrusage` includes what the process was before it became this program, a test run of gigabytes.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specctl.decoding.lean import LeanModel
from specctl.decoding.loading import keep_freed_memory

LAYERS, WIDTH = 12, 512


def peak() -> int:
    """In bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def size(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


keep_freed_memory()
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=1024,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
)
weights, layer = size(model), size(model.model.layers[0])
before = peak()
lean = LeanModel(model, consume=sys.argv[1] == "consume")
print((peak() - before) / weights, layer / weights)
