"""Models as GGUF files, written by llama.cpp's rules."""

import json

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from specctl.decoding.models.loading import builtin_path

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen3_moe": "qwen3moe",
}
"""GGUF's names of architectures that `transformers` names differently."""
IN_PAIRS = {"granite", "llama", "ministral3", "mixtral", "smollm3"}
"""Models with rotary dimensions in pairs in a GGUF file."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def parts(key: str, weights: torch.Tensor, config) -> dict[str, torch.Tensor]:
    """The tensors of a file for a parameter of `transformers`, by their names: only the order of values changes."""
    kind, oss = config.model_type, config.model_type == "gpt_oss"
    if "experts.gate_up_proj" in key:
        start, end = key.replace("model.layers.", "blk.").split("mlp.")[0], "bias" if "bias" in key else "weight"
        gate, up = (weights[..., 0::2], weights[..., 1::2]) if oss else weights.chunk(2, 1)
        if oss and end == "weight":
            gate, up = gate.mT, up.mT
        return {f"{start}ffn_gate_exps.{end}": gate, f"{start}ffn_up_exps.{end}": up}
    if key.endswith("experts.down_proj") and oss:
        weights = weights.mT
    alone = kind.startswith(("gemma2", "gemma3", "olmo")) or oss
    names = NAMES | {"post_attention_layernorm": "post_attention_norm" if alone else "ffn_norm"}
    for ours, theirs in names.items():
        key = key.replace(ours, theirs)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(key.split(".")[-2])
    if kind in IN_PAIRS and heads:
        weights = weights.reshape(heads, 2, -1, *weights.shape[1:]).transpose(1, 2).reshape(weights.shape)
    return {key: weights}


def facts(config) -> dict[str, object]:
    """Metadata of an architecture besides the common ones, by the last part of their names."""
    kind, rope = config.model_type, config.rope_parameters
    found: dict[str, object] = {}
    if kind == "qwen3" or kind.startswith(("gemma", "gpt", "ministral", "qwen3_moe")):
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if kind in ("gpt_oss", "mixtral", "qwen3_moe"):
        found |= {"expert_count": config.num_local_experts if kind != "qwen3_moe" else config.num_experts}
        found |= {"expert_used_count": config.num_experts_per_tok}
        found |= {"expert_feed_forward_length": getattr(config, "moe_intermediate_size", config.intermediate_size)}
    if kind in ("gemma2", "gemma3_text", "gpt_oss", "olmo3", "phi3"):
        found["attention.sliding_window"] = config.sliding_window or 0
    if kind == "olmo3":
        found["attention.sliding_window_pattern"] = [one == "sliding_attention" for one in config.layer_types]
    if kind == "gemma2":
        found |= {key: getattr(config, key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    if kind == "granite":
        found |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        found |= {"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
    rope = rope.get("full_attention", rope)
    found["rope.freq_base"] = rope["rope_theta"]
    if kind == "phi3":
        head = config.hidden_size // config.num_attention_heads
        found["rope.dimension_count"] = int(head * rope["partial_rotary_factor"])
        found["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if rope["rope_type"] == "longrope":
        found["rope.scaling.attn_factor"] = rope["attention_factor"]
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "ministral3":
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    return found


def rope_tensors(model) -> dict[str, np.ndarray]:
    """RoPE's divisors, which a file has for some kinds of scaling."""
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{key}.weight": np.array(rope[f"{key}_factor"], np.float32) for key in ("long", "short")}
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, 16, 2) / 16)
        return {"rope_freqs.weight": (plain / model.model.rotary_emb.inv_freq).numpy()}
    return {}


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (writer.add_array if isinstance(value, list) else kinds[type(value)])(key, value)


def write(directory, path, kind=Kind.F32, *, leave_out=(), beside=None, arch=None, splits=0, tokenizer=True, **more):
    """Write the model in `directory` as a GGUF file. Return it, and a `transformers` model with the same weights.

    more: metadata that replaces the default values, by the last part of their names. A key with None is omitted.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    config, kept = model.config, {}
    arch = arch or ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=splits)
    for key, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        **facts(config),
        **more,
    }.items():
        if value is not None and "tokenizer." not in key:
            add(writer, f"{arch}.{key}", value)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, divisors in rope_tensors(model).items():
        writer.add_tensor(name, divisors)
    if tokenizer:
        document = json.loads((builtin_path() / "tokenizer.json").read_text())["model"]
        tokens = sorted(document["vocab"], key=document["vocab"].get)
        writer.add_tokenizer_model(more.get("tokenizer.model", "gpt2"))
        writer.add_tokenizer_pre(more.get("tokenizer.pre", "gpt-2"))
        writer.add_token_list(tokens)
        writer.add_token_types([3 if number < 8 else 1 for number in range(len(tokens))])
        writer.add_token_merges([" ".join(merge) for merge in document["merges"]])
        writer.add_eos_token_id(more.get("tokenizer.eos", 3))
        if "tokenizer.bos" in more:
            writer.add_bos_token_id(more["tokenizer.bos"])
        if more.get("tokenizer.template", TEMPLATE):
            writer.add_chat_template(TEMPLATE)
    for key, weights in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        offset = 1.0 if "gemma" in config.model_type and "norm" in key else 0.0
        places, kept[key] = parts(key, torch.arange(weights.numel()).view(weights.shape), config), weights.clone()
        for name, part in parts(key, weights + offset, config).items():
            held = kind if name.endswith(".weight") and part.dim() > 1 else Kind.F32
            data = gguf.quantize(np.ascontiguousarray(part.numpy()), held)
            left = torch.from_numpy(np.array(gguf.dequantize(data, held), np.float32)) - offset
            kept[key].view(-1)[places[name].flatten()] = left.flatten()
            if name not in leave_out:
                writer.add_tensor(name, data, raw_dtype=held)
    if beside:
        writer.add_tensor(beside, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(kept, strict=False)
    return model
