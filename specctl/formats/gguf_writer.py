"""Writer of GGUF files: metadata and tensors of a draft head."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.decoding.models.gguf_file import ARCHITECTURE, Numbers


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file. Tensors are of bf16, fp32 or int64. Integers of the metadata become uint32, or uint64 if they are
    larger. Empty arrays, which the format cannot express, are left out."""
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    writer = GGUFWriter(path, metadata[ARCHITECTURE])
    for key, value in metadata.items():
        if isinstance(value, list | Numbers) and not value:
            continue
        if isinstance(value, Numbers):
            kind = GGUFValueType[value.dtype.name.upper()]
            writer.add_key_value(key, list(value), GGUFValueType.ARRAY, kind)
        elif type(value) is int and value >= 0:
            (writer.add_uint32 if value < 2**32 else writer.add_uint64)(key, value)
        elif key != ARCHITECTURE:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:  # numpy has no such type: bytes
            writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
