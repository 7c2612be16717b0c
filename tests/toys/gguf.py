"""Models as GGUF files, written by llama.cpp's rules."""

import json

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from specctl.decoding.models.loading import builtin_path

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def stored(key: str, weights: torch.Tensor, config, kind: Kind) -> tuple[str, np.ndarray, Kind, torch.Tensor]:
    """A tensor as in llama.cpp's conversion: name, data and type, and its weights after the quantization."""
    for ours, theirs in NAMES.items():
        key = key.replace(ours, theirs)
    kind = kind if weights.dim() == 2 else Kind.F32
    data = gguf.quantize(weights.numpy(), kind)  # in rows, so that their order does not matter
    left = torch.from_numpy(np.array(gguf.dequantize(data, kind), np.float32))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(key.split(".")[-2])
    if config.model_type == "llama" and heads:
        data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
    return key, data, kind, left


def write(directory, path, kind=Kind.F32, *, leave_out=(), beside=None, arch=None, splits=0, tokenizer=True, **more):
    """Write the model in `directory` as a GGUF file. Return it, and a `transformers` model with the same weights.

    more: metadata that replaces the default values, by the last part of their names. A key with None is omitted.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    config, kept = model.config, {}
    arch = arch or config.model_type
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=splits)
    for key, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if config.model_type == "qwen3" else None,
        **more,
    }.items():
        if value is not None and "tokenizer." not in key:
            writer.add_uint32(f"{arch}.{key}", value)
    rope = config.rope_parameters
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, 16, 2) / 16)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
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
        name, data, held, kept[key] = stored(key, weights, config, kind)
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
