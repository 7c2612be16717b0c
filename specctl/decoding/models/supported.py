"""Targets that can be used: what speculation needs of an architecture, and how long its sequences may be."""

from __future__ import annotations

from typing import Any

from specctl.errors import CheckpointError

ATTENTION = {"full_attention", "sliding_attention"}
ALIBI = {"bloom", "mpt"}  # and the configurations that say so


def why_unusable(config, model_class: type | None = None) -> str | None:
    """None when drafts can be verified on this architecture; otherwise what is in the way, by name.

    A rejected draft must leave no trace, and the nodes of a tree stand at positions that are not their cache slots:
    only attention over stored keys and values with an arbitrary mask and explicit positions can do that. What this
    table lets through and is wrong all the same, `self_check.py` finds on loading.
    """
    text = config.get_text_config()
    if getattr(model_class, "_is_stateful", False):
        return "its layers keep a recurrent state, which cannot be rolled back behind a rejected draft"
    other = sorted(set(getattr(text, "layer_types", None) or []) - ATTENTION)
    if other:
        return f"layers of type {', '.join(other)}: only attention over all keys and values, or a window, is supported"
    if text.model_type in ALIBI or getattr(text, "alibi", False):
        return "ALiBi attention biases, which count cache slots where a draft tree needs positions"
    if "local" in (getattr(text, "attention_layers", None) or []):
        return "local attention layers, which count cache slots where a draft tree needs positions"
    if getattr(text, "index_topk", None):
        return "sparse attention by an indexer with a cache of its own"
    return None


def unusable(name: str, reason: str) -> CheckpointError:
    """The error where `why_unusable`, or a trial, has found something."""
    return CheckpointError(
        f"target {name} cannot verify drafts: {reason}", "choose a causal LM such as Llama, Qwen, Mistral or Gemma"
    )


def ropes(config) -> dict[str, dict[str, Any]]:
    """RoPE parameters by `rope_type`: several where kinds of layers have their own, none without RoPE."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {one.get("rope_type", "default"): one for one in nested or [parameters] if one}


def context_limit(config) -> int | None:
    """The longest sequence that can be decoded, None where the configuration names none.

    LongRoPE takes other frequencies for *every* position once a sequence outgrows the original context. Cached keys
    would have the wrong ones, and a draft that reaches over the border would change the text: so it ends there.
    """
    limit = getattr(config, "max_position_embeddings", None) or None
    longrope = ropes(config).get("longrope")
    if longrope is None:
        return limit
    original = longrope["original_max_position_embeddings"]
    return min(limit or original, original)


def window_size(config) -> int | None:
    """How many positions the windowed layers attend, None where every layer attends all."""
    kinds = getattr(config, "layer_types", None)
    if not getattr(config, "use_sliding_window", True) or (kinds and "sliding_attention" not in kinds):
        return None
    return getattr(config, "sliding_window", None)
