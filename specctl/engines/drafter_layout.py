"""The form of an exported drafter: config and tensor shapes, which decide whether it fits a running engine.

vLLM's workers import this file too (`vllm_worker.py`), so it uses the standard library only.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DrafterLayout:
    """The form of an exported drafter: its configuration, and the kind and shape of every tensor."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
