"""Requirements of speculative decoding on a target's architecture, and limits on its sequence length."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specctl.errors import CheckpointError, brief

DENSE = {"llama", "mistral", "qwen2", "qwen3"}
"""Model types of text models that the lean step may compute; their layers have no recurrent state."""
ATTENTION = {"full_attention", "sliding_attention"}
WITH_ENGINES = (
    "it works where an engine runs it: distill --server or --from-log, train-drafter --features-from, eval-server, "
    "export; specctl doctor --target lists the commands"
)
ALIBI = {"bloom", "mpt"}  # in addition to configurations with `alibi`


def unsupported_reason(config, model_class: type | None = None) -> str | None:
    """Reason why drafts cannot be verified on this architecture, or None if they can.

    A rejected draft must leave no trace, and tree nodes have positions that differ from their cache slots. Only
    attention over stored keys and values, with an arbitrary mask and explicit positions, supports this. If this table
    lets an unsuitable model through, `self_check.py` detects it on loading.
    """
    text = config.get_text_config()
    if getattr(model_class, "_is_stateful", False):
        return "its layers keep a recurrent state, which cannot be rolled back after a rejected draft"
    other = sorted(set(getattr(text, "layer_types", None) or []) - ATTENTION)
    if other:
        return f"layers of type {', '.join(other)}: only full attention and sliding-window attention are supported"
    if text.model_type in ALIBI or getattr(text, "alibi", False):
        return "ALiBi attention biases, which depend on cache slots, but a draft tree needs positions"
    if "local" in (getattr(text, "attention_layers", None) or []):
        return "local attention layers, which depend on cache slots, but a draft tree needs positions"
    if getattr(text, "index_topk", None):
        return "sparse attention through an indexer that has a separate cache"
    return None


def engine_only_reason(config) -> str | None:
    """Reason why only an engine can run a target that `load_config` has read, or None if our own loop can, too."""
    if (quantized := quantisation(config)) is not None and (reason := _unreadable_reason(quantized)) is not None:
        return reason
    if config.model_type in DENSE:
        # without the mapping, which imports the models' code
        return unsupported_reason(config) or _unknown_rope_reason(config)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return "it is a vision-language or speech model, and specctl itself runs only text models"
    return unsupported_reason(config, model)


def quantisation(config: Any) -> Any:
    """The `quantization_config` of a model or of its text part, or None if it is not quantized."""
    parts = (config, config.get_text_config())
    return next((held for part in parts if (held := getattr(part, "quantization_config", None))), None)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress `transformers`' warnings about missing or unexpected tensors."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _unreadable_reason(quantized: Any) -> str | None:
    """Reason why `transformers` cannot read quantized weights on this machine, such as a package that is not installed.
    None if it can, or if the configuration is faulty, which `check_quantisation` reports."""
    import torch
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        with quiet():
            quantizer = AutoHfQuantizer.from_config(quantized, pre_quantized=True)
            quantizer.validate_environment(device_map=None, weights_only=True, dtype=torch.bfloat16)
    except (ImportError, RuntimeError) as error:
        return f"its weights are quantized, and transformers cannot read them here: {brief(str(error))}"
    except Exception:  # a configuration can make a quantizer raise anything
        return None
    return None


def check_decodable(name: str, config: Any) -> None:
    """Raise CheckpointError if only an engine can run the target `name`."""
    reason = engine_only_reason(config)
    if reason is not None:
        raise unsupported_error(name, reason)


def unsupported_error(name: str, reason: str) -> CheckpointError:
    """Error for a target that `unsupported_reason` or a trial has rejected, where specctl itself would decode it."""
    return CheckpointError(f"target {name} cannot verify drafts: {reason}", WITH_ENGINES)


def ropes(config) -> dict[str, dict[str, Any]]:
    """RoPE parameters by `rope_type`: several entries if kinds of layers differ, no entry without RoPE."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {one.get("rope_type", "default"): one for one in nested or [parameters] if one}


def check_ropes(config) -> None:
    """Raise ValueError for a type of RoPE that is no name."""
    for kind in ropes(config):
        if not isinstance(kind, str):
            raise ValueError(f"rope_type is {kind!r:.60}, not a name such as 'default'")


def _unknown_rope_reason(config) -> str | None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    unknown = ropes(config.get_text_config()).keys() - ROPE_INIT_FUNCTIONS.keys() - {"default"}
    return f"RoPE of type {brief(', '.join(sorted(unknown)))}, which transformers does not have" if unknown else None


def context_limit(config) -> int | None:
    """Longest sequence that can be decoded, or None if the configuration names no limit.

    LongRoPE changes the frequencies of *every* position once a sequence outgrows the original context. Cached keys
    would then have wrong frequencies, and a draft that crosses the limit would change the text. Sequences therefore end
    at the original context.
    """
    limit = getattr(config, "max_position_embeddings", None) or None
    longrope = ropes(config).get("longrope")
    if longrope is None:
        return limit
    original = longrope["original_max_position_embeddings"]
    return min(limit or original, original)


def window_size(config) -> int | None:
    """Window of the sliding-window layers, or None if every layer attends to all positions."""
    kinds = getattr(config, "layer_types", None)
    if not getattr(config, "use_sliding_window", True) or (kinds and "sliding_attention" not in kinds):
        return None
    return getattr(config, "sliding_window", None)
