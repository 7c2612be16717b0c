"""Arithmetic of vLLM, SGLang and the reference repositories, reimplemented from their sources.

No code of specctl is used, because an error there would be repeated here. Every consumer drafts a chain after
`committed` while being fed the tokens of `forced`. It returns one row of logits per step over the target's vocabulary,
with −inf for tokens outside the draft vocabulary.
"""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


def config_and_tensors(directory, weights="model.safetensors"):
    config = json.loads((directory / "config.json").read_text())
    file = directory / weights
    return config, load_file(file) if weights.endswith("safetensors") else torch.load(file, weights_only=True)


class Layer:
    """One Llama layer with its cache. `prefix` is the prefix of its tensor names."""

    def __init__(self, config, tensors, prefix):
        self.get = lambda name: tensors[f"{prefix}{name}.weight"]
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.inv_freq = config["rope_theta"] ** -(torch.arange(0, self.dim, 2).float() / self.dim)
        sliding = set(config.get("layer_types") or []) == {
            "sliding_attention"
        }  # vLLM's LlamaAttention checks only these
        self.window = config["sliding_window"] if sliding else None
        self.keys, self.values = torch.empty(0, self.kv, self.dim), torch.empty(0, self.kv, self.dim)

    def norm(self, x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def rotate(self, x, positions):
        angle = torch.outer(positions.float(), self.inv_freq).repeat(1, 2)[:, None]
        low, high = x.chunk(2, -1)
        return x * angle.cos() + torch.cat((-high, low), -1) * angle.sin()

    def run(self, inputs, residual, positions):
        """Return the residual stream after the layer. Attention is causal, with a window over the cache."""
        q, k, v = (inputs @ self.get(f"self_attn.{name}_proj").T for name in "qkv")
        q = self.rotate(q.view(len(q), self.heads, self.dim), positions)
        self.keys = torch.cat((self.keys, self.rotate(k.view(len(k), self.kv, self.dim), positions)))
        self.values = torch.cat((self.values, v.view(len(v), self.kv, self.dim)))
        group = self.heads // self.kv
        keys, values = (t.repeat_interleave(group, 1) for t in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) / self.dim**0.5
        distance = (keys.shape[0] - len(q) + torch.arange(len(q)))[:, None] - torch.arange(keys.shape[0])[None]
        hidden = (distance < 0) | (distance >= (self.window or len(keys)))
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
        x = residual + attended.flatten(1) @ self.get("self_attn.o_proj").T
        y = self.norm(x, self.get("post_attention_layernorm"))
        y = F.silu(y @ self.get("mlp.gate_proj").T) * (y @ self.get("mlp.up_proj").T)
        return x + y @ self.get("mlp.down_proj").T


def states(model, committed):
    """Return (hidden_states, embedding) for all committed tokens except the last, which has no known successor."""
    with torch.no_grad():
        out = model(torch.tensor([committed[:-1]]), output_hidden_states=True)
    return [state[0] for state in out.hidden_states], model.get_input_embeddings().weight.detach()


def vllm_layers(config, layers):
    """Layer ids in vLLM's gpu_model_runner: the top-level key, else the target's default; states before layer idx."""
    return sorted(set(config.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)))


def sglang_layers(config, layers):
    """Layer ids in SGLang's model_runner: the key in eagle_config; set_eagle3_layers_to_capture adds 1 to each."""
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return sorted({i + 1 for i in ids} if ids else {2, layers // 2, layers - 3})


def speculators_in_vllm(config):
    """Config after vLLM's update_eagle3: the layer's keys and the known speculator keys (norm_before_residual defaults
    to true)."""
    layer = dict(config["transformer_layer_config"])
    layer["draft_vocab_size"] = config["draft_vocab_size"]
    layer["norm_before_residual"] = config.get("norm_before_residual", True)
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        layer[key] = config.get(key, False)
    if config.get("eagle_aux_hidden_state_layer_ids"):
        layer["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]
    return layer


def eagle3(directory, model, committed, forced, layers_of=vllm_layers):
    """vLLM's and SGLang's llama_eagle3.py.

    SGLang ignores `norm_before_residual` and the window keys, and uses another name for the norm before attention in
    layers after the first.
    """
    config, tensors = config_and_tensors(directory)
    if "speculators_model_type" in config:
        config = speculators_in_vllm(config)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    assert "fc.bias" not in tensors and not config["tie_word_embeddings"]
    if layers_of is sglang_layers:
        config = {key: value for key, value in config.items() if key not in ("norm_before_residual", "layer_types")}
    hidden, embedding = states(model, committed)
    aux = layers_of(config, len(hidden) - 1)
    assert all(i < len(hidden) - 1 for i in aux), "no engine has a state behind the last layer"
    layer, *upper = (Layer(config, tensors, f"layers.{place}.") for place in range(config["num_hidden_layers"]))
    upper_norm = "hidden_norm" if layers_of is sglang_layers else "input_layernorm"
    aux = [hidden[i] for i in aux]
    if config.get("fc_norm"):
        aux = [layer.norm(state, tensors[f"fc_norm.{i}.weight"]) for i, state in enumerate(aux)]
    x = torch.cat(aux, -1)
    if (config.get("eagle_config") or {}).get("norm_before_fc", config.get("norm_before_fc")):
        x = layer.norm(x, tensors["input_norm.weight"])
    x = x @ tensors["fc.weight"].T
    tokens, positions = torch.tensor(committed[1:]), torch.arange(len(committed) - 1)
    rows = []
    for step in range(len(forced) + 1):
        normed = layer.norm(x, layer.get("hidden_norm"))
        residual = normed if config.get("norm_before_residual", False) else x
        inputs = torch.cat((layer.norm(embedding[tokens], layer.get("input_layernorm")), normed), -1)
        x = layer.run(inputs, residual, positions)
        for one in upper:
            x = one.run(one.norm(x, one.get(upper_norm)), x, positions)
        x = x[-1:]
        normed = layer.norm(x, tensors["norm.weight"])
        rows.append(spread((normed @ tensors["lm_head.weight"].T)[0], tensors.get("d2t"), config))
        x = normed if config.get("norm_output") else x
        if step < len(forced):
            tokens, positions = torch.tensor([forced[step]]), positions[-1:] + 1
    return torch.stack(rows)


def peagle(directory, model, committed, forced):
    """vLLM's llama_eagle3.py with parallel_drafting: one pass over committed tokens and masks.

    It reads the mask token from the outer keys, and ignores `fc_norm` in files of speculators. `forced` only sets the
    length.
    """
    config, tensors = config_and_tensors(directory)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    mask = config["mask_token_id"]
    if "speculators_model_type" in config:
        assert config["speculators_model_type"] == "peagle"
        config = {**speculators_in_vllm(config), "fc_norm": False, "norm_output": False}
    assert not config["tie_word_embeddings"] and "fc.bias" not in tensors
    hidden, embedding = states(model, committed)
    embedding = tensors.get("embed_tokens.weight", embedding)
    layers = [Layer(config, tensors, f"layers.{place}.") for place in range(config["num_hidden_layers"])]
    taps = torch.cat([hidden[i] for i in vllm_layers(config, len(hidden) - 1)], -1)
    masks = len(forced)
    taps = torch.cat((taps, tensors["mask_hidden"].view(1, -1).expand(masks, -1)))
    if config.get("norm_before_fc"):
        taps = layers[0].norm(taps, tensors["input_norm.weight"])
    if config.get("fc_norm"):
        chunks = taps.chunk(sum(name.startswith("fc_norm.") for name in tensors), -1)
        taps = torch.cat([layers[0].norm(c, tensors[f"fc_norm.{i}.weight"]) for i, c in enumerate(chunks)], -1)
    x = taps @ tensors["fc.weight"].T
    tokens = torch.tensor([*committed[1:], *[mask] * masks])
    positions = torch.arange(len(tokens))
    for place, layer in enumerate(layers):
        residual = x
        if place == 0:
            normed = layer.norm(x, layer.get("hidden_norm"))
            residual = normed if config.get("norm_before_residual") else x
            inputs = torch.cat((layer.norm(embedding[tokens], layer.get("input_layernorm")), normed), -1)
        else:
            inputs = layer.norm(x, layer.get("input_layernorm"))
        x = layer.run(inputs, residual, positions)
    rows = layers[0].norm(x[len(committed) - 2 :], tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    return torch.stack([spread(row, tensors.get("d2t"), config) for row in rows])


def spread(logits, d2t, config):
    """compute_logits / hot_token_id: draft id i is target id i + d2t[i]; without d2t the ids are equal."""
    if d2t is None:
        assert len(logits) == config["vocab_size"]
        return logits
    assert len(logits) == config["draft_vocab_size"] and d2t.dtype == torch.int64
    return torch.full((config["vocab_size"],), -torch.inf).index_put((torch.arange(len(d2t)) + d2t,), logits)


class BlockLayer(Layer):
    """A Qwen3 layer with keys and values of the context that come from another input."""

    def __init__(self, config, tensors, prefix):
        super().__init__(config, tensors, prefix)
        self.base = lambda name: tensors.get(f"{prefix}{name}.base_kernel")
        self.group = config.get("dflash_config", {}).get("conv_group_size")
        self.window, self.causal = None, False

    def pairs(self, inputs, positions):
        k, v = ((inputs @ self.get(f"self_attn.{name}_proj").T).view(len(inputs), self.kv, self.dim) for name in "kv")
        return self.rotate(self.norm(k, self.get("self_attn.k_norm")), positions), v

    def over(self, x, positions, context):
        """Return the stream after the layer for the block x.

        A row sees its window of the context and of the block. In a causal layer it does not see later rows of the
        block.
        """
        normed = self.norm(x, self.get("input_layernorm"))
        normed, attended = self.convolved("attention_conv", normed)
        q = (normed @ self.get("self_attn.q_proj").T).view(len(x), self.heads, self.dim)
        q = self.rotate(self.norm(q, self.get("self_attn.q_norm")), positions)
        own, before = self.pairs(normed, positions), self.pairs(context, torch.arange(len(context)))
        keys, values = (
            torch.cat(two).repeat_interleave(self.heads // self.kv, 1) for two in zip(before, own, strict=True)
        )
        places = torch.cat((torch.arange(len(context)), positions))
        far = positions[:, None] - places
        hidden = far >= (self.window or len(places))
        if self.causal:
            hidden |= far < 0
        scores = torch.einsum("qhd,khd->hqk", q, keys) / self.dim**0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        x = x + attended(torch.einsum("hqk,khd->qhd", weights, values).flatten(1) @ self.get("self_attn.o_proj").T)
        y, fed = self.convolved("mlp_conv", self.norm(x, self.get("post_attention_layernorm")))
        return x + fed(
            (F.silu(y @ self.get("mlp.gate_proj").T) * (y @ self.get("mlp.up_proj").T)) @ self.get("mlp.down_proj").T
        )

    def convolved(self, name, inputs):
        """DFlashGroupedConv: return the input after the first convolution, and the second convolution as a function."""
        base = self.base(name)
        if base is None:
            return inputs, lambda out: out
        delta = (inputs @ self.get(f"{name}.kernel_projection").T).view(len(inputs), *base.shape[:2], -1)

        def side(which, x):
            out = torch.zeros_like(x)
            for slot in range(len(x)):
                for tap in range(min(base.shape[1], slot + 1)):
                    kernel = base[which, tap] + delta[slot, which, tap].repeat_interleave(self.group)
                    out[slot] += kernel * x[slot - tap]
            return out

        return side(0, inputs), lambda out: side(1, out)


def attention_in_vllm(config, layer):
    """(window, causal) by `_resolve_layer_attention` of qwen3_dflash.py, on a config read by `transformers`."""
    nested, types = config.get("dflash_config") or {}, config.get("layer_types")
    sliding = types is not None and types[layer] == "sliding_attention"
    causal = sliding
    for said in (nested.get("causal"), config.get("is_causal")):
        causal = causal if said is None else said
    if nested.get("use_swa") and "sliding_attention" not in (types or []):
        sliding = True
    window = nested.get("swa_window_size", config["sliding_window"] if config["use_sliding_window"] else None)
    assert not sliding or window is not None, "the engine stops"
    return (window if sliding else None), causal


def attention_in_sglang(config, layer):
    """(window, causal) by `_get_dflash_layer_attention_params` of models/dflash.py, which ignores dflash_config."""
    sliding = config["layer_types"][layer] == "sliding_attention"
    assert not sliding or (config["use_sliding_window"] and config["sliding_window"] is not None), "the engine stops"
    said = config.get("is_causal")
    return (config["sliding_window"] if sliding else None), (sliding if said is None else said)


def speculators_block_in_vllm(config):
    """Config after vLLM's update_dflash and update_dspark: the layers' keys and the known speculator keys."""
    layer = dict(config["transformer_layer_config"])
    layer["draft_vocab_size"] = config["draft_vocab_size"]
    below, anchor = [i - 1 for i in config["aux_hidden_state_layer_ids"]], config.get("sample_from_anchor", False)
    if config["speculators_model_type"] in ("dflash", "dflash2"):
        layer |= {"architectures": config["architectures"]}
        causal = not config.get("sliding_window_non_causal", True)
        nested = {"mask_token_id": config["mask_token_id"], "target_layer_ids": below, "sample_from_anchor": anchor}
        local = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        layer["dflash_config"] = nested | {"causal": causal} | {key: config[key] for key in local if key in config}
        return layer
    layer |= {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": below, "sample_from_anchor": anchor}
    more = ("mask_token_id", "markov_rank", "block_size", "enable_confidence_head", "confidence_head_with_markov")
    return layer | {key: config[key] for key in more if key in config}


def block(directory, model, committed, forced, engine, tokens):
    """DFlash, DSpark and DFlash 2 with `tokens` tokens drafted at once.

    vLLM: qwen3_dflash.py, qwen3_dspark.py, qwen3_dflash2.py and their proposers. SGLang: models/dflash.py,
    models/dspark.py and the workers, with the target's vocabulary head. The main difference is the embedding of the
    masks.
    """
    config, tensors = config_and_tensors(directory)
    if "speculators_model_type" in config:
        config = speculators_block_in_vllm(config)
    (name,), nested = config["architectures"], config.get("dflash_config", {})
    spark = {"DFlashDraftModel": False, "DFlash2DraftModel": False, "Qwen3DSparkModel": True}[name]
    selects = name == "DFlash2DraftModel"
    assert ("candidate_selector.predecessor_codebook" in tensors) == selects
    assert config["model_type"] == "qwen3" and nested.get("sample_from_anchor", spark) is spark
    assert config.get("sample_from_anchor", True)
    if engine == "sglang":
        assert config["block_size"] == (tokens if spark else tokens + 1), "of a dspark the slots that draft"
        assert not spark or config["markov_head_type"] == "vanilla"
        assert config["draft_vocab_size"] == config["vocab_size"]
    hidden, embedding = states(model, committed)
    layers = nested.get("target_layer_ids") or config["target_layer_ids"]
    assert all(0 <= i < len(hidden) - 2 for i in layers), "no engine has a state behind the last layer"
    mask = nested.get("mask_token_id", config.get("mask_token_id"))
    row = embedding[mask]
    if spark and engine == "vllm" and "embed_tokens.weight" in tensors:
        embedding = tensors["embed_tokens.weight"]
        row = embedding[mask]
    elif not spark and (directory / "mask_embedding.pt").exists():
        saved = torch.load(directory / "mask_embedding.pt", weights_only=True)
        assert saved["mask_token_id"] == mask
        row = saved["embedding"].reshape(-1)
    parts = [BlockLayer(config, tensors, f"layers.{k}.") for k in range(config["num_hidden_layers"])]
    resolve = attention_in_sglang if engine == "sglang" else attention_in_vllm
    for k, part in enumerate(parts):
        part.window, part.causal = resolve(config, k)
    norm = parts[0].norm
    context = torch.cat([hidden[i + 1] for i in sorted(layers)], -1) @ tensors["fc.weight"].T
    context = norm(context, tensors["hidden_norm.weight"])
    slots = tokens if spark else tokens + 1
    x = torch.cat((embedding[committed[-1:]], row.expand(slots - 1, -1)))
    positions = len(committed) - 1 + torch.arange(slots)
    for part in parts:
        x = part.over(x, positions, context)
    head = model.get_output_embeddings().weight.detach()
    if engine == "vllm" and "lm_head.weight" in tensors:
        head = tensors["lm_head.weight"]
    x = norm(x[0 if spark else 1 :], tensors["norm.weight"])
    logits = x @ head.T
    rows = []
    for k, before in enumerate([committed[-1], *forced]):
        said = logits[k]
        if spark:
            said = said + tensors["markov_head.markov_w1.weight"][before] @ tensors["markov_head.markov_w2.weight"].T
        if selects:  # only `selector_top_k` candidates by these logits
            first, second = (tensors[f"candidate_selector.{part}cessor_codebook"] for part in ("prede", "suc"))
            said = said + (first[before] * (tensors["candidate_selector.hidden_projection.weight"] @ x[k])) @ second.T
        rows.append(spread(said, tensors.get("d2t") if engine == "vllm" else None, config))
    return torch.stack(rows)


def eagle1(directory, model, committed, forced, engine):
    config, tensors = config_and_tensors(directory)
    bias = tensors.get("fc.bias", torch.zeros(config["hidden_size"]))
    if engine == "sglang":
        assert config["architectures"] == ["LlamaForCausalLMEagle"] and "fc.bias" in tensors
    else:
        assert config["architectures"] == ["LlamaForCausalLM"] and "fc.bias" not in tensors and config["bias"] is False
    assert not any("input_layernorm" in name or name.startswith(("norm", "lm_head")) for name in tensors)
    hidden, embedding = states(model, committed)
    layer = Layer(config, tensors, "layers.0.")
    x, tokens, positions = hidden[-1], torch.tensor(committed[1:]), torch.arange(len(committed) - 1)
    rows = []
    for step in range(len(forced) + 1):
        x = torch.cat((embedding[tokens], x), -1) @ tensors["fc.weight"].T + bias
        x = layer.run(x, x, positions)[-1:]
        rows.append((x @ model.get_output_embeddings().weight.detach().T)[0])
        if step < len(forced):
            tokens, positions = torch.tensor([forced[step]]), positions[-1:] + 1
    return torch.stack(rows)


def medusa(directory, model, committed, forced):
    """medusa_model.py with the vocabulary matrix inside each head's Sequential."""
    config, tensors = config_and_tensors(directory, "medusa_lm_head.pt")
    h = states(model, committed)[0][-1][-1]
    rows = []
    for k in range(config["medusa_num_heads"]):
        block = F.silu(h @ tensors[f"{k}.0.linear.weight"].T + tensors[f"{k}.0.linear.bias"])
        rows.append((h + block) @ tensors[f"{k}.1.weight"].T)
    return torch.stack(rows)


def medusa_in_vllm(directory, model, committed, forced):
    """vllm/model_executor/models/medusa.py: a block with a bias if `medusa_fc_bias`, and a matrix per head."""
    config, tensors = config_and_tensors(directory)
    assert config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"]
    assert config["num_hidden_layers"] == 1 and config["medusa_fc_bias"] is True
    assert not config.get("original_lm_head") and "truncated_vocab_size" not in config
    h = states(model, committed)[0][-1][-1]
    rows = []
    for k in range(config["num_heads"]):
        weight, bias = (tensors.pop(f"blocks.{k}.layers.0.{part}") for part in ("weight", "bias"))
        head = tensors.pop(f"lm_heads.{k}.weight")
        assert head.shape == (config["vocab_size"], config["hidden_size"]), "the loader asserts it"
        rows.append((h + F.silu(h @ weight.T + bias)) @ head.T)
    assert not tensors, "the loader passes over them in silence"
    return torch.stack(rows)


def hydra(directory, model, committed, forced):
    """prefix_mlp_head.py with grounded heads: a Sequential is Dropout, ResBlock, Dropout, ResBlock, …"""
    config, tensors = config_and_tensors(directory, "hydra_lm_head.pt")
    assert (config["hydra_head_arch"], config["grounded_heads"]) == ("prefix-mlp", True)
    hidden, embedding = states(model, committed)
    base = model.config.to_dict()
    base |= {"rope_theta": base["rope_parameters"]["rope_theta"]}
    layer = Layer(base, tensors, "prefix_embeding_layer.layers.0.")
    x = layer.run(layer.norm(hidden[-1], layer.get("input_layernorm")), hidden[-1], torch.arange(len(hidden[-1])))
    inputs, rows = [layer.norm(x, tensors["prefix_embeding_layer.norm.weight"])[-1]], []
    for k in range(config["hydra_num_heads"]):
        inputs.append(embedding[[committed[-1], *forced][k]])
        x = torch.cat(inputs)
        for place in range(config["hydra_num_layers"]):
            name = f"hydra_mlp.{k}.{2 * place + 1}"

            def linear(part, x, name=name):
                return x @ tensors[f"{name}.{part}.weight"].T + tensors[f"{name}.{part}.bias"]

            x = (linear("res_connection", x) if place == 0 else x) + F.silu(linear("linear", x))
        rows.append(x @ tensors[f"hydra_lm_head.{k}.1.weight"].T + tensors[f"hydra_lm_head.{k}.1.bias"])
    return torch.stack(rows)


def causal_lm(directory, committed, forced):
    """Any engine that loads a plain `transformers` directory."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([[*committed, *forced]])).logits[0, len(committed) - 1 :]
