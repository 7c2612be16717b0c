"""Arithmetic of llama.cpp on a head's GGUF file, reimplemented from src/models/eagle3.cpp, src/models/dflash.cpp and
common/speculative.cpp.

No code of specctl is used. Every consumer drafts a chain after `committed` while being fed the tokens of `forced`. It
returns one row of logits per step over the target's vocabulary, with −inf for tokens outside the draft vocabulary.
"""

import gguf
import torch

from tests.formats.consumers import BlockLayer, Layer, states

LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "ffn_norm": "post_attention_layernorm",
}


def opened(file):
    """Return (architecture, metadata without its prefix, tensors, config) of a file."""
    reader = gguf.GGUFReader(file)
    kind = reader.fields["general.architecture"].contents()
    metadata = {name.removeprefix(f"{kind}."): field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for one in reader.tensors:
        whole = one.tensor_type == gguf.GGMLQuantizationType.I64
        data = one.data if whole else gguf.dequantize(one.data, one.tensor_type)
        tensors[one.name] = torch.from_numpy(data.copy())
    config = {
        "num_attention_heads": metadata["attention.head_count"],
        "num_key_value_heads": metadata["attention.head_count_kv"],
        "head_dim": metadata["attention.key_length"],
        "rms_norm_eps": metadata["attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["rope.freq_base"],
    }
    assert metadata["rope.dimension_count"] == config["head_dim"]
    return kind, metadata, tensors, config


class Paired(Layer):
    """A layer with rotary dimensions in pairs: ggml's type NORM."""

    def rotate(self, x, positions):
        angle = torch.outer(positions.float(), self.inv_freq)[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = angle.cos(), angle.sin()
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def named(tensors, block):
    """Return the tensors of a block under the names that `Layer` uses."""
    return {f"{ours}.weight": tensors[f"blk.{block}.{theirs}.weight"] for theirs, ours in LAYER.items()
            if f"blk.{block}.{theirs}.weight" in tensors}  # fmt: skip


def scattered(logits, tensors, size):
    """Spread draft logits to the target vocabulary: `d2t` gives the target ids, all others are −inf."""
    if "d2t" not in tensors:
        return logits
    assert tensors["d2t"].dtype == torch.int64 and len(tensors["d2t"]) == len(logits)
    return torch.full((size,), -torch.inf).index_put((tensors["d2t"],), logits)


def eagle3(file, model, committed, forced):
    kind, metadata, tensors, config = opened(file)
    assert kind == "eagle3" and metadata["block_count"] == 1 and len(metadata["target_layers"]) == 3
    hidden, embedding = states(model, committed)
    layer = Paired(config, named(tensors, 0), "")
    x = torch.cat([hidden[i] for i in metadata["target_layers"]], -1)
    assert x.shape[1] == 3 * metadata["target_hidden_size"]
    if metadata["norm_before_fc"]:
        x = layer.norm(x, tensors["enc.output_norm.weight"])
    x = x @ tensors["fc.weight"].T
    tokens, positions = torch.tensor(committed[1:]), torch.arange(len(committed) - 1)
    rows = []
    for step in range(len(forced) + 1):
        normed = layer.norm(x, layer.get("hidden_norm"))
        inputs = torch.cat((layer.norm(embedding[tokens], layer.get("input_layernorm")), normed), -1)
        x = layer.run(inputs, normed if metadata["norm_before_residual"] else x, positions)[-1:]
        logits = layer.norm(x, tensors["output_norm.weight"]) @ tensors["output.weight"].T
        rows.append(scattered(logits[0], tensors, len(embedding)))
        if step < len(forced):
            tokens, positions = torch.tensor([forced[step]]), positions[-1:] + 1
    return torch.stack(rows)


def block(file, model, committed, forced, tokens):
    """DFlash and DSpark, with features from the inputs of `target_layers`.

    One flag says for all layers whether a row sees later rows of its block; windows are set per layer.
    """
    kind, metadata, tensors, config = opened(file)
    assert kind == "dflash"
    spark = "markov_w1.weight" in tensors
    slots = tokens if spark and metadata["sample_from_anchor"] else tokens + 1
    assert slots <= metadata["block_size"]
    hidden, shared = states(model, committed)
    embedding = tensors.get("token_embd.weight", shared)
    parts = [BlockLayer(config, named(tensors, k), "") for k in range(metadata["block_count"])]
    window = metadata.get("attention.sliding_window", 0)
    pattern = metadata["attention.sliding_window_pattern"] if window else [False] * len(parts)
    for part, slides in zip(parts, pattern, strict=True):
        part.window, part.causal = (window if slides else None), metadata.get("attention.causal", False)
    norm = parts[0].norm
    context = torch.cat([hidden[i] for i in metadata["target_layers"]], -1) @ tensors["fc.weight"].T
    context = norm(context, tensors["enc.output_norm.weight"])
    mask = embedding[metadata["tokenizer.ggml.mask_token_id"]]
    x = torch.cat((embedding[committed[-1:]], mask.expand(slots - 1, -1)))
    for part in parts:
        x = part.over(x, len(committed) - 1 + torch.arange(slots), context)
    x = norm(x[slots - tokens :], tensors["output_norm.weight"])
    head = tensors.get("output.weight", model.get_output_embeddings().weight.detach())
    rows = []
    for k, before in enumerate([committed[-1], *forced]):
        said = x[k] @ head.T
        if spark:
            said = said + tensors["markov_w1.weight"][before] @ tensors["markov_w2.weight"].T
        rows.append(scattered(said, tensors, len(shared)))
    return torch.stack(rows)
