"""Targets that only engines run: small random models of `transformers`, and a fake vLLM server that runs them."""

from functools import cache

import torch
import transformers

from specctl.decoding.models.loading import builtin_path
from tests.toys.capture import CapturingEngine

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4224,  # the tokenizer has 4096 ids, the others are padding
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 3,
    "initializer_range": 0.2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
GDN = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
TURNS = {"layer_types": ["linear_attention", "full_attention"] * 2}
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {"image_size": 28, "patch_size": 14}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
MAMBA = {"mamba_d_state": 16, "mamba_d_head": 16}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16}
V32 = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
V32 |= {"q_lora_rank": 16, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "first_k_dense_replace": 1}

TARGETS = {
    "qwen3-next": ("Qwen3NextConfig", GDN | MOE, "model.norm"),
    "qwen3.5": (
        "Qwen3_5Config",
        {"text_config": GDN | {"tie_word_embeddings": True}, "vision_config": VISION, "tie_word_embeddings": True},
        "model.language_model.norm",
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeConfig",
        {"text_config": GDN | MOE, "vision_config": VISION},
        "model.language_model.norm",
    ),
    "kimi-linear": (
        "KimiLinearConfig",
        MLA | TURNS | {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32},
        "model.norm",
    ),
    "nemotron-h": (
        "NemotronHConfig",
        NEMOTRON | {"layers_block_type": ["mamba", "attention"] * 2, "num_hidden_layers": None},
        "model.norm_f",
    ),
    "falcon-h1": (
        "FalconH1Config",
        MAMBA | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_chunk_size": 16, "lm_head_multiplier": 0.5},
        "model.final_layernorm",
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        MAMBA
        | {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4}
        | {"logits_scaling": 6.0},
        "model.norm",
    ),
    "minimax": ("MiniMaxConfig", {"num_local_experts": 4}, "model.norm"),
    "deepseek-v3.2": ("DeepseekV32Config", MLA | V32, "model.norm"),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}, "model.embedding_norm"),
    "llama4": (
        "Llama4Config",
        {
            "text_config": {"num_local_experts": 2, "intermediate_size_mlp": 96},
            "vision_config": TOWER
            | PATCHES
            | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        },
        "language_model.model.norm",
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        {"text_config": MROPE | {"tie_word_embeddings": True}, "vision_config": VISION, "tie_word_embeddings": True},
        "model.language_model.norm",
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        {"text_config": {}, "vision_config": VISION | {"deepstack_visual_indexes": [0]}},
        "model.language_model.norm",
    ),
    "llava": (
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32} | TOWER | PATCHES,
        },
        "model.language_model.norm",
    ),
}
"""Configuration class of `transformers`, keys besides `SIZES`, and the name of the final norm."""


def write(name, directory):
    """Save the model of a target in `directory`, with the built-in tokenizer. Returns the model."""
    kind, special, _ = TARGETS[name]
    torch.manual_seed(0)
    if "text_config" in special:
        config = getattr(transformers, kind)(**special | {"text_config": SIZES | special["text_config"]})
    else:
        values = {key: value for key, value in (SIZES | special).items() if value is not None or key == "bos_token_id"}
        config = getattr(transformers, kind)(**values)
    multimodal = type(config) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    made = transformers.AutoModelForMultimodalLM if multimodal else transformers.AutoModelForCausalLM
    model = made.from_config(config).eval()
    for parameter in model.parameters():  # norms start at 0 or 1, so that ignoring one would not show
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(builtin_path()).save_pretrained(directory)
    return model


@torch.no_grad()
def forward(name, model, ids):
    """(logits [S, V], states before every layer and after the last one, the latter before the final norm)."""
    before = []
    hook = model.get_submodule(TARGETS[name][2]).register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    try:
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    return output.logits[0], [states[0] for states in (*output.hidden_states[:-1], before[-1])]


class TargetEngine(CapturingEngine):
    """A vLLM server that serves this target: greedy texts, and the target's log probabilities."""

    def __init__(self, name, model, tokenizer, place):
        super().__init__(tokenizer, "vllm", place, None)
        # Without its kernels a step of Kimi-Linear takes seconds.
        self.forward = cache(lambda *ids: forward(name, model, list(ids)))
        self.logprobs = self.own_logprobs

    def layered(self, ids, layers):
        """States [tokens, layers, H], the last one before the final norm."""
        with self.lock:
            states = self.forward(*ids)[1]
        return torch.stack([states[layer] for layer in layers], 1)

    def own_logprobs(self, ids):
        with self.lock:
            rows = self.forward(*ids)[0]
        rows = rows[:-1].float().log_softmax(-1)
        return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def text(self, ids, limit, temperature, seed):
        out = []
        while len(out) < limit:
            with self.lock:
                out.append(int(self.forward(*ids, *out)[0][-1][: len(self.tokenizer)].argmax()))
            if out[-1] == self.tokenizer.eos_token_id:
                return out, "stop"
        return out, "length"
