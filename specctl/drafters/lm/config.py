"""Validate `transformers` configurations read from files: only known keys with plain values are accepted.

A configuration may also name kernels to fetch and load, a quantizer, or custom code. All of these are rejected.
"""

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specctl.drafters.blueprint import CONFIG, build_or_raise, config_error, shortened_repr

FORBIDDEN = re.compile("implementation|kernel|quantization|auto_map|remote_code")
"""Pattern in names of keys that choose code instead of a shape."""

_WORD = re.compile(r"[\w.+-]{0,64}")  # excludes paths, addresses and repositories
CONFIDENCE = "confidence_head."  # names of its tensors begin so
LARGEST, MOST_LAYERS, MOST_ITEMS, DEEPEST = 2**31, 1000, 4096, 20


def configuration(architecture: Any) -> PretrainedConfig:
    """Build the configuration of an `lm` drafter from its "architecture".

    Raises CheckpointError, which names the key, if a key is wrong or not allowed.
    """
    if not isinstance(architecture, dict):
        raise config_error(CONFIG, "architecture", f"is {shortened_repr(architecture)}, not an object")
    known = keys(architecture.get("model_type"))
    for key in architecture:
        if key not in known and (FORBIDDEN.search(key) or not key.startswith("_")):
            why = f"is not a key of a {architecture['model_type']} configuration that a drafter may set"
            raise config_error(CONFIG, f"architecture.{shortened_repr(key)[1:-1]}", why)
    kept = {key: value for key, value in architecture.items() if key in known}
    check_plain(kept, "architecture")
    return build_or_raise(lambda: AutoConfig.for_model(**kept))


def split_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the causal LM, and of the confidence head without its prefix."""
    head = {name.removeprefix(CONFIDENCE): part for name, part in tensors.items() if name.startswith(CONFIDENCE)}
    return {name: part for name, part in tensors.items() if not name.startswith(CONFIDENCE)}, head


def stored(config: PretrainedConfig) -> dict[str, Any]:
    """Convert a configuration to the "architecture" that `configuration` reads."""
    known = keys(config.model_type)
    return {key: value for key, value in config.to_diff_dict().items() if key in known}


def keys(model_type: Any) -> set[str]:
    """Keys that the configuration of a causal LM type may have. Raises CheckpointError if it is not a causal LM."""
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise config_error(
            CONFIG,
            "architecture.model_type",
            f"is {shortened_repr(model_type)}, which is not a causal LM in transformers",
        )
    return {"model_type", *inspect.signature(CONFIG_MAPPING[model_type].__init__).parameters} - {"self", "kwargs"}


def check_plain(value: Any, place: str = "") -> None:
    """Raise CheckpointError at the first value that is not a number, a word, or a small list or mapping."""
    if place.count(".") > DEEPEST:
        raise config_error(CONFIG, place, "is nested too deeply")
    if isinstance(value, Mapping):
        for key, one in value.items():
            below = f"{place}.{shortened_repr(key)[1:-1]}".lstrip(".")
            if FORBIDDEN.search(str(key)) and one is not None:
                raise config_error(CONFIG, below, "selects code, which a drafter must not do")
            if "layer" in str(key) and isinstance(one, int) and one > MOST_LAYERS:
                raise config_error(CONFIG, below, f"is {one}; at most {MOST_LAYERS} is allowed")
            check_plain(one, below)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value[:MOST_ITEMS]):
            check_plain(one, f"{place}.{number}")
    if not _ordinary(value):
        raise config_error(
            CONFIG, place, f"is {shortened_repr(value)}, not a word or a number or list of ordinary size"
        )


def _ordinary(value: Any) -> bool:
    match value:
        case None | bool():
            return True
        case int():
            return abs(value) <= LARGEST
        case float():
            return math.isfinite(value)
        case str():
            return _WORD.fullmatch(value) is not None
        case list() | tuple() | dict():
            return len(value) <= MOST_ITEMS
    return False
