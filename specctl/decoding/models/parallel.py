"""Tensor parallelism: one target in slices over the processes of torchrun, with one GPU each.

Query and key heads, the inner size of the MLP and the vocabulary are cut into equal parts, as in Megatron-LM (Shoeybi
et al. 2019, §3). Each layer sums its parts twice, after the attention and after the MLP; the logits are gathered. An
all-reduce gives every rank the same bits, with gloo and with NCCL, because each sum is computed in one place and then
sent to all. All ranks therefore have the same hidden states and logits, and make the same decisions.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl import regular_files
from specctl.decoding.models import gguf_target, supported
from specctl.decoding.models.loading import is_gguf, is_hub_id, load_errors, load_generation_config, model_directory
from specctl.errors import CheckpointError

COPY = "copy the weights again, or the config.json that belongs to them"
CUT = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.(weight|bias)$")


@dataclass(frozen=True)
class Slice:
    """Part `rank` of `count` equal parts of a target. With one part it is the whole target."""

    rank: int = 0
    count: int = 1

    def of(self, total: int) -> range:
        """Indices of this part among `total` units. If there are fewer units than parts, several parts share a unit."""
        size = max(total // self.count, 1)
        start = self.rank * total // self.count
        return range(start, start + size)

    def sum(self, part: Tensor) -> Tensor:
        """All-reduce `part` in place: the sum over all ranks."""
        if self.count > 1:
            torch.distributed.all_reduce(part)
        return part

    def gather(self, part: Tensor, total: int) -> Tensor:
        """Concatenate the parts [..., ⌈total / count⌉] of all ranks to [..., total]. Excess entries of the last parts
        are padding."""
        if self.count == 1:
            return part
        parts = part.new_empty(self.count, *part.shape)
        torch.distributed.all_gather(list(parts), part.contiguous())
        return parts.movedim(0, -2).flatten(-2)[..., :total].contiguous()


WHOLE = Slice()


def load_slice(
    name: str, config: Any, part: Slice, *, device: torch.device, dtype: torch.dtype, revision: str | None = None
) -> Any:
    """Load the `transformers` model of a Llama-shaped target with one slice of the weights. No other weights are read.
    CheckpointError if it has no safetensors files or they lack a tensor."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with load_errors(name):
        held = _tensors(name, revision, dtype)
        supported.check_headers(f"target {name}", model_directory(name, revision), config)
        for key, parameter in list(model.named_parameters()):  # a tied head appears once, as the embedding
            if key not in held:
                raise CheckpointError(f"target {name}: its safetensors files lack {key}", COPY)
            if list(parameter.shape) != held[key].get_shape():
                shapes = f"{held[key].get_shape()} in its files, but config.json requires {list(parameter.shape)}"
                raise CheckpointError(f"target {name}: {key} has shape {shapes}", COPY)
            tensor = _cut(held[key], key, parameter.shape, config, part)
            module = model.get_submodule(key.rpartition(".")[0])
            setattr(module, key.rpartition(".")[2], _fixed(tensor.to(device, dtype)))
    if config.tie_word_embeddings:
        model.lm_head.weight = _fixed(_rows_of_vocabulary(model.model.embed_tokens.weight, part, config.vocab_size))
    for layer in model.model.layers if part.rank else ():  # the biases are added on rank 0 only, as outputs are summed
        layer.self_attn.o_proj.bias = layer.mlp.down_proj.bias = None
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.generation_config = load_generation_config(name, config, revision=revision)
    return model.eval()


def _tensors(name: str, revision: str | None, dtype: torch.dtype) -> dict[str, Any]:
    """All tensors of a target, each read when it is indexed. Tensors of a GGUF file are in `dtype`."""
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    if is_gguf(name):
        return dict(gguf_target.weights(name, dtype))
    if is_hub_id(name):
        snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors"])
    directory = model_directory(name, revision)
    paths = [] if directory is None else supported.weight_files(directory)
    if not paths or any(path.suffix != ".safetensors" for path in paths):
        raise CheckpointError(
            f"target {name} has no safetensors files, which tensor parallelism needs",
            "load it with transformers and save it with save_pretrained",
        )
    for path in paths:
        regular_files.check(path)
    files = [safe_open(path, "pt") for path in paths]
    return {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118  # a file is no mapping


def _cut(tensor: Any, key: str, shape: torch.Size, config: Any, part: Slice) -> Tensor:
    """This slice's part of a stored tensor (`safe_open(…).get_slice`), which has `shape` as a whole."""
    if key.startswith("lm_head."):
        return _rows_of_vocabulary(tensor, part, shape[0])
    place = CUT.search(key)
    if place is None:
        return tensor[:]
    name, kind = place.groups()
    units = {
        **dict.fromkeys("qo", config.num_attention_heads),
        **dict.fromkeys("kv", config.num_key_value_heads),
    }.get(name, config.intermediate_size)
    if name in ("o", "down"):
        return tensor[:] if kind == "bias" else tensor[:, _scaled(part.of(units), shape[1] // units)]
    return tensor[_scaled(part.of(units), shape[0] // units)]


def _scaled(units: range, size: int) -> slice:
    return slice(units.start * size, units.stop * size)


def _rows_of_vocabulary(weight: Any, part: Slice, total: int) -> Tensor:
    """Vocabulary rows of this part, padded with zeros to the same number in all parts. `weight` is a head or its
    bias."""
    size = -(-total // part.count)
    rows = weight[min(part.rank * size, total) : min((part.rank + 1) * size, total)]
    return F.pad(rows, (*[0] * (2 * rows.ndim - 1), size - len(rows)))


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
