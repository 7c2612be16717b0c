"""Configuration of a GGUF model in the form of `transformers`: the architectures that are read, and their metadata.

llama.cpp's converter drops numbers that are equal in all models of an architecture. They are written here, next to the
architecture that they belong to.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from specctl.decoding.models import gguf_file
from specctl.decoding.models.gguf_file import GGUFContents, StoredTensor, dequantised, shortest
from specctl.errors import CheckpointError

LARGEST = 2**31  # upper limit of the sizes in the metadata
MOST_LAYERS = 1000
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = {FREQUENCIES, LONG, SHORT}
"""Tensors that are part of the configuration in `transformers`."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ORIGINAL = "rope.scaling.original_context_length"
SCALES = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")
"""Factors of RoPE's scaling that are 1 in files that are read."""
GELU = "gelu_pytorch_tanh"
Config = dict[str, Any]


def configuration(name: str, contents: GGUFContents) -> Config:
    """The config.json of a GGUF model. Its special tokens are null, until the tokenizer is known.

    Raises CheckpointError: the architecture or its variant is not supported; or a number is missing or impossible.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    facts = Metadata(name, contents)
    kind, architecture = facts.architecture, ARCHITECTURES[facts.architecture]
    hidden, heads = facts.size("embedding_length"), facts.size("attention.head_count")
    dimension = facts.size("attention.key_length", hidden // heads)
    wanted = {"attention.value_length": dimension}
    if kind != "phi3":
        wanted["rope.dimension_count"] = dimension
    if not architecture.experts:
        wanted["expert_count"] = 0
    for key, only in wanted.items():
        held = facts.get(key, only)
        if held != only:
            raise facts.unsupported(f"{kind}.{key} is {held}; only {only} is supported")
    embedding = contents.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"target {name}: the GGUF file lacks token_embd.weight", gguf_file.REDOWNLOAD_HINT)
    layers = facts.size("block_count")
    if layers > MOST_LAYERS:
        raise facts.unsupported(f"{kind}.block_count is {layers}; at most {MOST_LAYERS} layers are supported")
    config: Config = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": facts.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": facts.size("attention.head_count_kv", heads),
        "head_dim": dimension,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": facts.size("context_length"),
        "rms_norm_eps": facts.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(facts, dimension),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in contents.tensors,
        "attention_bias": "blk.0.attn_q.bias" in contents.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in contents.tensors,
        "dtype": "float32",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    config |= architecture.more(facts, config)
    return config | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]}


class Metadata:
    """Checked access to the metadata of a file, and to its tensors."""

    def __init__(self, name: str, contents: GGUFContents):
        self.name, self.metadata, self.tensors = name, contents.metadata, contents.tensors
        self.architecture: Any = self.metadata.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"target {name}: the GGUF file is of architecture {self.architecture!r:.60}, which is not supported",
                f"use one of {', '.join(ARCHITECTURES)}, or the model's safetensors files; or let llama.cpp's server "
                "run the file: specctl distill --server URL --target ORIGINAL-MODEL, which needs no weights",
            )

    def unsupported(self, what: str) -> CheckpointError:
        return CheckpointError(f"target {self.name}: {what}", "use the model's safetensors files")

    def has(self, key: str) -> bool:
        """Whether the file has a key of this architecture."""
        return f"{self.architecture}.{key}" in self.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of this architecture. CheckpointError if it is missing and there is no `default`."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise CheckpointError(
                f"target {self.name}: the metadata of the GGUF file lacks {self.architecture}.{key}",
                gguf_file.REDOWNLOAD_HINT,
            )
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < LARGEST:
            shown = "a list (the layers differ)" if isinstance(value, gguf_file.Numbers) else f"{value!r:.60}"
            raise self.unsupported(f"{self.architecture}.{key} is {shown}, not a single positive integer")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number, as `shortest` of the file's."""
        value = self.get(key, default)
        found = shortest(value)
        if type(found) is not float or not (math.isfinite(found) and found > 0):
            raise self.unsupported(f"{self.architecture}.{key} is {value!r:.60}, not a positive number in fp32")
        return found


def _rope(facts: Metadata, dimension: int) -> dict[str, Any]:
    """The `rope_parameters` for config.json."""
    theta = facts.real("rope.freq_base", 10000.0)
    factors = ("rope.scaling.factor", "rope.scale_linear")  # the second in files of 2023
    factor = next((key for key in factors if facts.has(key)), None)
    kind = facts.get("rope.scaling.type", "linear" if factor else "none")  # as in llama.cpp
    frequencies = facts.tensors.get(FREQUENCIES)
    if frequencies is not None:
        found = _llama3(facts.name, frequencies, theta, dimension)
        if found and kind != "none":
            raise facts.unsupported(f"its RoPE is scaled twice, by {FREQUENCIES} and by {kind!r:.60}")
        if found:
            return found
    if LONG in facts.tensors:
        return _longrope(facts, theta)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn") or any(facts.get(f"rope.scaling.{key}", 1.0) != 1.0 for key in SCALES):
        raise facts.unsupported(f"its RoPE is scaled by {kind!r:.60}, which is not supported")
    scaled = {"rope_type": kind, "rope_theta": theta, "factor": facts.real(factor or factors[0])}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = facts.size(ORIGINAL)
        for key in ("beta_fast", "beta_slow"):
            if facts.has(f"rope.scaling.yarn_{key}"):
                scaled[key] = facts.real(f"rope.scaling.yarn_{key}")
        if facts.get("rope.scaling.yarn_log_multiplier", 0.0):
            scaled |= {"mscale": 1.0, "mscale_all_dim": facts.real("rope.scaling.yarn_log_multiplier")}
    return scaled


def _longrope(facts: Metadata, theta: float) -> dict[str, Any]:
    """LongRoPE's parameters, from its two tensors of divisors."""
    if SHORT not in facts.tensors:
        raise facts.unsupported(f"it has the tensor {LONG} without {SHORT}")
    divisors = {
        f"{key}_factor": [shortest(one) for one in dequantised(facts.tensors[tensor], torch.float32).tolist()]
        for key, tensor in (("long", LONG), ("short", SHORT))
    }
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "original_max_position_embeddings": facts.size(ORIGINAL),
        "attention_factor": facts.real("rope.scaling.attn_factor", 1.0),
        **divisors,
    }


def _llama3(name: str, frequencies: StoredTensor, theta: float, dimension: int) -> dict[str, Any] | None:
    """Recover Llama 3's RoPE scaling from the frequency divisors in a file. Returns None if they are all 1.

    llama.cpp's converter computes the divisors and drops the four numbers they follow from. Three of these are the same
    in all of Meta's models, and the fourth is the largest divisor. CheckpointError if other divisors are found.
    """
    if frequencies.shape != (dimension // 2,):
        raise CheckpointError(
            f"target {name}: {FREQUENCIES} has shape {list(frequencies.shape)}, not [{dimension // 2}]",
            gguf_file.REDOWNLOAD_HINT,
        )
    held = dequantised(frequencies, torch.float32).double()
    if bool((held == 1).all()):
        return None
    factor = round(float(held.max()), 3)
    low, high, original = LLAMA3.values()
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, dimension, 2).double() / dimension)
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(1 / ((1 - smooth) / factor + smooth), held, rtol=1e-4):
        raise CheckpointError(
            f"target {name}: {FREQUENCIES} scales RoPE differently from Llama 3",
            "use the model's safetensors files",
        )
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3}


def _layer_types(facts: Metadata, layers: int, period: int) -> list[str]:
    """The kind of attention of each layer. Every `period`-th attends to all positions, if the file does not say."""
    pattern = facts.get("attention.sliding_window_pattern", period)
    if type(pattern) is int and pattern > 0:
        pattern = [(layer + 1) % pattern for layer in range(layers)]
    if not isinstance(pattern, list | tuple) or len(pattern) != layers:
        raise facts.unsupported(f"{facts.architecture}.attention.sliding_window_pattern is {pattern!r:.60}")
    return ["sliding_attention" if sliding else "full_attention" for sliding in pattern]


def _windows(facts: Metadata, config: Config, period: int) -> Config:
    return {
        "sliding_window": facts.size("attention.sliding_window"),
        "layer_types": _layer_types(facts, config["num_hidden_layers"], period),
    }


def _by_layer_type(facts: Metadata, config: Config, default: float) -> Config:
    """`rope_parameters` by kind of attention: RoPE is only scaled in layers that attend to all positions."""
    plain = {"rope_type": "default", "rope_theta": facts.real("rope.freq_base_swa", default)}
    return {"rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": plain}}


def _experts(facts: Metadata) -> Config:
    count = facts.size("expert_count")
    # The configurations of `transformers` use both names.
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": facts.size("expert_used_count")}


def _llama(facts: Metadata, config: Config) -> Config:
    return {"model_type": "mixtral", **_experts(facts)} if facts.get("expert_count", 0) else {}


def _qwen3moe(facts: Metadata, config: Config) -> Config:
    inner = facts.size("expert_feed_forward_length")
    return {"moe_intermediate_size": inner, "norm_topk_prob": True, **_experts(facts)}


def _gpt_oss(facts: Metadata, config: Config) -> Config:
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # the limits of the ramp are not rounded
    return {**_windows(facts, config, 2), **_experts(facts)}


def _gemma(facts: Metadata, config: Config) -> Config:
    return {"hidden_act": GELU, "hidden_activation": GELU}


def _gemma2(facts: Metadata, config: Config, period: int = 2, largest: int = 46) -> Config:
    """In the largest model, which has `largest` layers, the scores are not divided by the root of a head's size."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    plain = config["hidden_size"] // config["num_attention_heads"]
    return {
        **{key: facts.real(key) if facts.has(key) else None for key in caps},
        "query_pre_attn_scalar": plain if config["num_hidden_layers"] == largest else config["head_dim"],
        **_windows(facts, config, period),
        **_gemma(facts, config),
    }


def _gemma3(facts: Metadata, config: Config) -> Config:
    return _gemma2(facts, config, 6, 62) | _by_layer_type(facts, config, 10000.0)


def _granite(facts: Metadata, config: Config) -> Config:
    if not facts.get("rope.scaling.finetuned", True):
        raise facts.unsupported("its layers have no RoPE")
    return {
        "attention_multiplier": facts.real("attention.scale"),
        "logits_scaling": facts.real("logit_scale"),
        "embedding_multiplier": facts.real("embedding_scale", 1.0),
        "residual_multiplier": facts.real("residual_scale", 1.0),
    }


def _mistral3(facts: Metadata, config: Config) -> Config:
    rope = config["rope_parameters"]
    if facts.has("attention.temperature_scale"):
        if "original_max_position_embeddings" not in rope:
            raise facts.unsupported("its attention has a temperature, but its RoPE is not scaled by YaRN")
        rope["llama_4_scaling_beta"] = facts.real("attention.temperature_scale")
    return {}


def _olmo2(facts: Metadata, config: Config) -> Config:
    """OLMo 3 has windows."""
    if not facts.has("attention.sliding_window"):
        return {}
    ropes = _by_layer_type(facts, config, config["rope_parameters"]["rope_theta"])
    return {"model_type": "olmo3", **_windows(facts, config, 4), **ropes}


def _phi3(facts: Metadata, config: Config) -> Config:
    rope = config["rope_parameters"]
    rope["partial_rotary_factor"] = facts.size("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    return {
        "original_max_position_embeddings": facts.size(ORIGINAL, config["max_position_embeddings"]),
        "sliding_window": facts.get("attention.sliding_window", 0) or None,  # 0: attends to all positions
    }


class Architecture(NamedTuple):
    """How llama.cpp stores the models of an architecture.

    Attributes:
        model_type: in `transformers`, if `more` does not replace it.
        more: keys of config.json besides the common ones, which it gets.
        pairs: whether rotary dimensions of queries and keys are in pairs (llama.cpp), not in halves (`transformers`).
        experts: whether layers may have experts.
        norm_offset: number that is added to the weights of norms.
    """

    model_type: str
    more: Callable[[Metadata, Config], Config] = lambda facts, config: {}
    pairs: bool = False
    experts: bool = False
    norm_offset: float = 0.0


ARCHITECTURES = {
    "llama": Architecture("llama", _llama, pairs=True, experts=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _qwen3moe, experts=True),
    "mistral3": Architecture("ministral3", _mistral3, pairs=True),
    "gemma": Architecture("gemma", _gemma, norm_offset=1.0),
    "gemma2": Architecture("gemma2", _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", _gemma3, norm_offset=1.0),
    "phi3": Architecture("phi3", _phi3),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, experts=True),
    "granite": Architecture("granite", _granite, pairs=True),
    "olmo2": Architecture("olmo2", _olmo2),
    "smollm3": Architecture("smollm3", pairs=True),
}
"""By the names in GGUF files."""
