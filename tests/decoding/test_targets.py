"""The model families that users bring, with random weights and the special features of each.

Catches RoPE scalings ignored or applied twice, windows ignored in trees, soft caps and logit scales lost, biases
dropped, head sizes taken from the hidden size, tied heads untied.
"""

import json
import math
import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specctl.decoding.models import lean, loading
from specctl.decoding.models.describe import path_of
from specctl.decoding.models.loading import DTYPES, load_config, load_model, load_tokenizer
from specctl.decoding.plan import plan_rows
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.target import Target, load_target
from specctl.decoding.target_text import load_target_text
from specctl.drafters.retrieval.datastore import Datastore
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.errors import CheckpointError, DataError
from specctl.kernels.distill import Teacher
from tests.conftest import write_tiny
from tests.lossless.drafters import bushes, constant, full_tree, ragged
from tests.toys.decoding import decode, plain_answers, whole

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WINDOW = 4  # shorter than prompts and drafts, so that slots differ from positions
PROMPTS = [[(37 * i) % 500 + 10 for i in range(40)], [88, 4, 7], [(53 * i) % 400 + 20 for i in range(22)]]
NEW = 12
SEEDS = [11, 12, 13]
WARM = Sampling(0.8, 20, 1.0)  # top 20: with all 4096 tokens a rounding error would change a drawn token now and then
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LINEAR, DYNAMIC = rope("linear", factor=4.0), rope("dynamic", factor=4.0)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
LONGROPE = rope(
    "longrope",
    original_max_position_embeddings=64,
    short_factor=[1.0 + i / 10 for i in range(6)],
    long_factor=[2.0 + i for i in range(6)],
)
TIED = {"tie_word_embeddings": True}
GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

GRANITE4 = {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 80,
    "layer_types": ["full_attention"] * 2,
    "position_embedding_type": "rope",
    "mamba_n_heads": 4,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
}

GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "head_dim": 16,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 4096,
}

VISION_TEXT = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
VISION_TEXT |= {"vocab_size": 4096, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 3}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}

# family → (path, configuration class, special settings)
TARGETS = {
    "Llama 2": ("lean", "LlamaConfig", {"num_key_value_heads": 4}),
    "Llama 3.1": ("lean", "LlamaConfig", LLAMA3),
    "Llama 3.2": ("lean", "LlamaConfig", LLAMA3 | TIED),
    "Llama, linear RoPE": ("lean", "LlamaConfig", LINEAR),
    "Llama, dynamic RoPE": ("transformers", "LlamaConfig", DYNAMIC),
    "Llama, YaRN": ("lean", "LlamaConfig", YARN),
    "Qwen2.5": ("lean", "Qwen2Config", TIED),
    "Qwen2, window": ("lean", "Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW,
                                              "max_window_layers": 1}),
    "Qwen3": ("lean", "Qwen3Config", {"head_dim": 16}),
    "Qwen3, YaRN": ("lean", "Qwen3Config", {"head_dim": 16} | YARN),
    "Mistral v0.1": ("lean", "MistralConfig", {"sliding_window": WINDOW}),
    "Mistral v0.3": ("lean", "MistralConfig", {"sliding_window": None}),
    "Mistral Nemo": ("lean", "MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "Gemma": ("lean", "GemmaConfig", {"head_dim": 16}),
    "Gemma 2": ("transformers", "Gemma2Config", {"head_dim": 16, "sliding_window": WINDOW,
                                                 "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0,
                                                 "final_logit_softcapping": 5.0}),
    "Gemma 3": ("lean", "Gemma3TextConfig", {"head_dim": 16, "query_pre_attn_scalar": 8, "sliding_window": WINDOW,
                                             "layer_types": ["sliding_attention", "full_attention"]} | GEMMA3_ROPE),
    "Gemma 3, vision": ("transformers", "Gemma3Config", {"text_config": SMALL | VISION_TEXT, "vision_config": VISION,
                                                         "mm_tokens_per_image": 4}),
    "Gemma 4": ("transformers", "Gemma4TextConfig", GEMMA4),
    "Phi-2": ("transformers", "PhiConfig", {"num_key_value_heads": 4}
              | rope("default", partial_rotary_factor=0.5)),
    "Phi-3, window": ("lean", "Phi3Config", {"sliding_window": WINDOW}),
    "Phi-3": ("lean", "Phi3Config", {"sliding_window": 512, "num_key_value_heads": 4}),
    "Phi-3, longrope": ("lean", "Phi3Config", LONGROPE | {"original_max_position_embeddings": 64}),
    "Phi-4 mini": ("lean", "Phi3Config", TIED | rope("default", partial_rotary_factor=0.5)),
    "Mixtral": ("transformers", "MixtralConfig", {"num_local_experts": 4}),
    "Qwen3 MoE": ("transformers", "Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2,
                                                     "moe_intermediate_size": 16, "head_dim": 16}),
    "DeepSeek V3": ("transformers", "DeepseekV3Config", MLA),
    "gpt-oss": ("transformers", "GptOssConfig", {"sliding_window": WINDOW, "head_dim": 16, "num_local_experts": 4,
                                                 "num_experts_per_tok": 2}),
    "Command R": ("transformers", "CohereConfig", {"logit_scale": 0.25}),
    "Granite": ("lean", "GraniteConfig", {"logits_scaling": 4.0, "residual_multiplier": 0.5,
                                                  "embedding_multiplier": 3.0, "attention_multiplier": 0.2}),
    "Granite 4": ("lean", "GraniteMoeHybridConfig", GRANITE4),
    "OLMo 2": ("lean", "Olmo2Config", {}),
    "OLMo 3": ("lean", "Olmo3Config", {"sliding_window": WINDOW,
                                       "layer_types": ["sliding_attention", "full_attention"]}),
    "EXAONE 4": ("lean", "Exaone4Config", {"head_dim": 16, "sliding_window": WINDOW,
                                           "layer_types": ["sliding_attention", "full_attention"]}),
    "EXAONE 4, no window": ("lean", "Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "CWM": ("lean", "CwmConfig", {"bos_token_id": 1, "head_dim": 16, "sliding_window": WINDOW,
                                  "layer_types": ["sliding_attention", "full_attention"]}),
    "Ministral": ("lean", "MinistralConfig", {"head_dim": 16, "sliding_window": WINDOW,
                                              "layer_types": ["sliding_attention", "full_attention"]}),
    "InternLM3": ("lean", "InternLM3Config", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "Llama, partial RoPE": ("transformers", "LlamaConfig", rope("default", partial_rotary_factor=0.5)),
    "SmolLM3": ("lean", "SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "GLM": ("lean", "GlmConfig", {"head_dim": 16, "attention_bias": True} | rope("default", partial_rotary_factor=0.5)),
    "Ernie 4.5": ("lean", "Ernie4_5Config", {"head_dim": 16, "use_bias": True}),
    "Seed-OSS": ("lean", "SeedOssConfig", {"head_dim": 16, "attention_out_bias": True, "residual_dropout": 0.0}),
    "Helium": ("lean", "HeliumConfig", {"head_dim": 12}),
    "GLM-4": ("lean", "Glm4Config", {"head_dim": 16}),
    "Falcon": ("transformers", "FalconConfig", {"alibi": False, "multi_query": True}),
    "OPT": ("transformers", "OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def short_windows():
    """Let the lean step run windows that are shorter than drafts: in PyTorch, with masks, it computes them exactly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lean, "SHORTEST_WINDOW", WINDOW)
        yield


@pytest.fixture(scope="module", params=TARGETS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def directory(family, tmp_path_factory):
    _, kind, special = TARGETS[family]
    return write_tiny(tmp_path_factory.mktemp("target"), kind, SMALL | special)


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory, device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(target):
    """`plain(sampling)`: the texts of plain decoding, one prompt at a time."""
    answers = plain_answers(target, PROMPTS, SEEDS, NEW)
    return lambda sampling: whole(answers(sampling))


def misprinted(text):
    return [token ^ 1 if at % 5 == 4 else token for at, token in enumerate(text)]


DRAFTERS = {
    "chains": lambda target, texts: ragged(texts, 0, target.vocab_size),
    "trees": lambda target, texts: bushes(texts, 0, target.vocab_size),
    "twins": lambda target, texts: full_tree(texts),
    "suffix": lambda target, texts: Suffix(corpus=Datastore.of(misprinted(text) for text in texts)),
}


def test_logits_and_states_equal_transformers(family, directory, target, model):
    """In a ragged prefill and a step of three tokens."""
    path = TARGETS[family][0]
    assert target.path == path and (lean.unsupported_reason(load_config(directory)) is None) == (path == "lean")
    taps, more = (0, 1, target.num_layers), [5, 300, 41]
    cache = target.model.new_cache(3, 64)
    last, hidden, _ = target.prefill(PROMPTS, cache, taps)
    plan = plan_rows([len(p) for p in PROMPTS], 3, device=target.device, dtype=target.dtype)
    rows, _, tapped = target.step(torch.tensor([more] * 3), cache, plan, taps)
    for b, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            truth = model(torch.tensor([prompt + more]), output_hidden_states=True)
        logits, states = truth.logits[0], torch.cat([truth.hidden_states[tap][0] for tap in taps], -1)
        torch.testing.assert_close(last[b], logits[len(prompt) - 1], **CLOSE)
        torch.testing.assert_close(hidden[b, : len(prompt)], states[: len(prompt), -48:], **CLOSE)
        torch.testing.assert_close(rows[b], logits[len(prompt) :], **CLOSE)
        torch.testing.assert_close(tapped[b], states[len(prompt) :], **CLOSE)


@pytest.mark.parametrize("path", ["lean", "transformers"])
def test_a_window_of_a_llama_counts(tmp_path, monkeypatch, path):
    """Its `config.json` may have `sliding_window`, such as a Mistral that was saved as a Llama. vLLM hides what lies
    outside of the window, and both steps do. The Llama of `transformers` hides it in `generate` alone, and only from
    tokens after the prompt; its Mistral, with the same weights, is the reference."""
    monkeypatch.setattr(lean, "SHORTEST_WINDOW", {"lean": 64, "transformers": 65}[path])
    place = write_tiny(tmp_path / "window", "MistralConfig", SMALL | {"sliding_window": 64})
    ids = [(37 * i) % 500 + 10 for i in range(90)]
    model = load_model(place, device=torch.device("cpu"), dtype=torch.float32)
    text = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
    file = Path(place) / "config.json"
    llama = json.loads(file.read_text()) | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    file.write_text(json.dumps(llama))
    config = load_config(place)
    assert (path_of(config)[0], type(config).__name__) == (path, "LlamaConfig")
    options = {"sampling": GREEDY, "max_new_tokens": NEW, "seeds": [0]}
    (found,) = decode(load_target(place, device="cpu", dtype="fp32"), [ids], **options)
    assert found.output_ids == text
    file.write_text(json.dumps(llama | {"sliding_window": None}))
    (whole,) = decode(load_target(place, device="cpu", dtype="fp32"), [ids], **options)
    assert whole.output_ids != text, "the window changes nothing"


def test_taps_of_gemma_3n_are_its_active_stream(tmp_path):
    """Its hidden states are [streams, B, T, H]: the training of a head or a datastore ended in a RuntimeError."""
    sizes = {"layer_types": ["full_attention"] * 2, "intermediate_size": [64] * 2, "activation_sparsity_pattern": None}
    sizes |= {"head_dim": 16, "laurel_rank": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 4096}
    directory = write_tiny(tmp_path, "Gemma3nTextConfig", SMALL | sizes | {"num_kv_shared_layers": 0})
    target = load_target(directory, device="cpu", dtype="fp32")
    _, _, tapped = target.prefill(PROMPTS[:1], target.model.new_cache(1, 64), (0, 1, 2))
    with torch.inference_mode():
        model = load_model(directory, device=torch.device("cpu"), dtype=torch.float32)
        truth = model.model(torch.tensor(PROMPTS[:1]), output_hidden_states=True)
    states = torch.cat((truth.hidden_states[0][0], truth.hidden_states[1][0], truth.last_hidden_state), -1)
    torch.testing.assert_close(tapped, states, **CLOSE)


@pytest.mark.parametrize("path", ["sdpa", "kernel"])
def test_windows_of_a_lean_step_are_not_shorter_than_drafts(tmp_path, monkeypatch, path):
    """A kernel hides committed slots alone (`Plan.with_window`), so an old draft node would stay visible."""
    monkeypatch.setattr(lean, "SHORTEST_WINDOW", 64)
    sizes = {size: SMALL | {"sliding_window": size} for size in (63, 64)}
    places = {size: write_tiny(tmp_path / f"{size}", "MistralConfig", sizes[size]) for size in sizes}
    assert lean.unsupported_reason(load_config(places[63])) == (
        "a sliding window of 63 positions, which is shorter than a draft may be"
    )
    assert lean.unsupported_reason(load_config(places[64])) is None
    monkeypatch.setenv("SPECCTL_ATTENTION", path)
    ids = [(37 * i) % 500 + 10 for i in range(90)]
    model = load_model(places[64], device=torch.device("cpu"), dtype=torch.float32)
    text = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0].tolist()
    target = load_target(places[64], device="cpu", dtype="fp32")
    for drafter in (None, full_tree([text])):
        options = {"sampling": GREEDY, "max_new_tokens": NEW, "seeds": [0], "drafter": drafter}
        assert whole(decode(target, [ids], **options)) == [text]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"final_logit_softcapping": 5.0}, "capped logits"),
        ({"attn_logit_softcapping": 5.0}, "capped logits"),
        ({"use_bidirectional_attention": True}, "bidirectional attention"),
        ({"hidden_activation": "gelu"}, "activation 'gelu'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_gemmas_with_other_arithmetic_run_on_transformers(setting, reason):
    """Embedding models attend in both directions, and Gemma 2 caps its logits."""
    sizes = SMALL | {"head_dim": 16, "sliding_window": 64}
    assert lean.unsupported_reason(transformers.Gemma3TextConfig(**sizes)) is None
    assert lean.unsupported_reason(transformers.Gemma3TextConfig(**sizes, **setting)) == reason


def test_equal_prompts_run_once(target, monkeypatch):
    """Several answers to one prompt cost a prefill each."""
    prompts, taps = [PROMPTS[1], PROMPTS[0], PROMPTS[1], PROMPTS[1]], (1,)
    wanted = [target.prefill([prompt], target.new_cache(1, 64), taps) for prompt in prompts]
    rows, forward = [], target.model.forward

    def counted(tokens, *more):
        rows.append(tokens.numel())
        return forward(tokens, *more)

    monkeypatch.setattr(target.model, "forward", counted)
    cache = target.new_cache(5, 64)
    logits, hidden, tapped = target.prefill(prompts, cache, taps, [4, 0, 1, 3])
    assert rows == [len(PROMPTS[1]), len(PROMPTS[0])]
    for place, (prompt, (one, states, features)) in enumerate(zip(prompts, wanted, strict=True)):
        size = len(prompt)
        assert torch.equal(logits[place], one[0]) and torch.equal(hidden[place, :size], states[0])
        assert torch.equal(tapped[place, :size], features[0])
    for slot in (1, 3):
        assert torch.equal(cache.first_rows(slot, len(PROMPTS[1])), cache.first_rows(4, len(PROMPTS[1])))


def test_norm_weight_is_the_factor_of_the_final_norm(family, target, model):
    """Drafters initialize their norm with this factor. Gemma stores the factor minus one."""
    norm = getattr(getattr(model, "model", None), "norm", None)
    if "RMSNorm" not in type(norm).__name__:
        pytest.skip("no RMS norm under that name")
    x = torch.randn(3, 48)
    with torch.no_grad():
        expected = norm(x)
    found = torch.nn.functional.rms_norm(x, (48,), target.norm_weight, eps=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_greedy_text_equals_transformers(model, plain):
    for prompt, text in zip(PROMPTS, plain(GREEDY), strict=True):
        assert model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0].tolist() == text


FIRST = {"chains": WARM, "trees": GREEDY, "suffix": WARM}
"""The sampling that each drafter is tested with by default; the family's computation does not depend on it. `twins`
are slow tests, because they are trees, too."""


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        pytest.param(drafter, sampling, marks=() if FIRST.get(drafter) is sampling else pytest.mark.slow)
        for drafter in DRAFTERS
        for sampling in (GREEDY, WARM)
    ],
    ids=[f"{drafter}-{how}" for drafter in DRAFTERS for how in ("greedy", "warm")],
)
def test_speculative_text_equals_plain_text(target, plain, sampling, drafter):
    """A ragged batch of three, and the first prompt alone: chains and trees, over windows and RoPE scalings."""
    texts = plain(sampling)
    options = {"sampling": sampling, "max_new_tokens": NEW}
    make = DRAFTERS[drafter]
    together = decode(target, PROMPTS, seeds=SEEDS, drafter=make(target, texts), **options)
    alone = decode(target, PROMPTS[:1], seeds=SEEDS[:1], drafter=make(target, texts), **options)
    assert whole(together) == texts
    assert whole(alone) == texts[:1]
    assert sum(one.accepted for one in together) > 0


# --- refused targets ------------------------------------------------------------------------------------------------

REFUSED = {
    "Mamba": ("MambaConfig", {}, "recurrent state"),
    "Jamba": ("JambaConfig", {}, "recurrent state"),
    "Qwen3-Next": ("Qwen3NextConfig", {}, "recurrent state"),
    "Granite 4 with Mamba": ("GraniteMoeHybridConfig", {"layer_types": ["mamba", "attention"]}, "recurrent state"),
    "RecurrentGemma": ("RecurrentGemmaConfig", {}, "recurrent state"),
    "LFM2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "Llama 4": ("Llama4TextConfig", {}, "layers of type chunked_attention"),
    "DeepSeek V3.2": ("DeepseekV32Config", {}, "layers of type indexed_attention"),
    "BLOOM": ("BloomConfig", {}, "ALiBi"),
    "MPT": ("MptConfig", {}, "ALiBi"),
    "Falcon RW": ("FalconConfig", {"alibi": True}, "ALiBi"),
    "GPT-Neo": ("GPTNeoConfig", {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "local attention"),
    "T5": ("T5Config", {}, "not a decoder-only causal LM"),
    "BERT": ("BertConfig", {"architectures": ["BertForMaskedLM"]}, "not a decoder-only causal LM"),
    "ViT": ("ViTConfig", {}, "no causal LM"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_rollback_are_refused_before_weights_are_read(name, tmp_path):
    kind, special, why = REFUSED[name]
    config = getattr(transformers, kind)(**({"num_hidden_layers": 2} if kind != "GPTNeoConfig" else {}) | special)
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=why) as caught:
        load_target(str(tmp_path), device="cpu")
    assert str(tmp_path) in caught.value.message


def without(argument):
    """A decoder forward that drops one argument, as a model with its own code may."""
    forward = transformers.GPTNeoXModel.forward

    def deaf(self, *args, **kwargs):
        return forward(self, *args, **{**kwargs, argument: None})

    return deaf


@pytest.mark.parametrize("argument", ["attention_mask", "position_ids", "past_key_values"])
def test_code_that_ignores_an_argument_is_refused_on_loading(argument, tmp_path, monkeypatch):
    """No configuration shows this, and the text would look plausible."""
    directory = write_tiny(tmp_path, "GPTNeoXConfig", SMALL)
    assert load_target(directory, device="cpu", dtype="fp32").path == "transformers"
    monkeypatch.setattr(transformers.GPTNeoXModel, "forward", without(argument))
    with pytest.raises(CheckpointError, match=r"cannot verify drafts: .*(differ from its forward|does not)"):
        load_target(directory, device="cpu", dtype="fp32")


def test_a_target_that_overflows_fp16_is_refused(tmp_path):
    directory = write_tiny(tmp_path, "GPTNeoXConfig", SMALL)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    model.gpt_neox.layers[0].mlp.dense_4h_to_h.weight.data *= 1e6
    model.save_pretrained(directory)
    with pytest.raises(CheckpointError, match="not finite in float16"):
        load_target(directory, device="cpu", dtype="fp16")


def test_a_model_with_its_own_code_does_not_use_the_lean_path(tmp_path):
    """It may call itself a Llama and compute something else."""
    directory = write_tiny(tmp_path, "LlamaConfig", SMALL)
    model = load_model(directory, device=torch.device("cpu"), dtype=torch.float32)

    class Other(type(model)):
        """Stands for a class that `trust_remote_code` imports."""

    model.__class__ = Other
    assert Target("other", model, load_tokenizer(directory)).path == "transformers"


def config_with(**changes):
    def change(directory):
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | changes))

    return change


def a_pickle(directory):
    (directory / "model.safetensors").unlink()
    torch.save({"x": os.system}, directory / "pytorch_model.bin")


def nothing_but_nan(directory):
    tensors = {name: torch.full_like(tensor, math.nan) for name, tensor in load_file(directory / WEIGHTS).items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


WEIGHTS = "model.safetensors"
DAMAGED = {
    "NaN": (nothing_but_nan, r"model\.norm\.weight contains values that are not finite"),
    "pickle": (a_pickle, "cannot load target .*Unpickling"),
    "tokenizer": (lambda directory: (directory / "tokenizer.json").write_text("[]"), "tokenizer of"),
    "architectures": (config_with(architectures=1), "architectures"),
    "head_dim": (config_with(head_dim=1e30), "head_dim"),
    "text": (config_with(text_config="gpt_oss"), r"config\.json"),
    "rope": (config_with(rope_parameters={"rope_type": [None]}), r"config\.json"),
    "nameless rope": (config_with(rope_parameters={"rope_type": None}), "rope_type is None, not a name"),
    "unknown rope": (config_with(rope_parameters={"rope_type": "zzz"}), "RoPE of type zzz"),
    "eps": (config_with(rms_norm_eps=math.nan), "rms_norm_eps is nan"),
    "end": (
        lambda directory: (directory / "generation_config.json").write_text('{"eos_token_id": "x"}'),
        "eos_token_id",
    ),
    "size": (
        config_with(vocab_size=10**7),
        r"has shape \[\d+, 48\] in its files, but config.json requires \[10000000, 48\]",
    ),
    "vision": (
        config_with(model_type="llava", text_config={"model_type": "llama"}),
        "cannot verify drafts: it is a vision-language or speech model",
    ),
    "layers": (config_with(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "dtype": (config_with(dtype=math.nan), r"config\.json"),
    "kernels": (config_with(attn_implementation="kernels-community/x"), "attn_implementation is 'kernels-community/x'"),
    "flash": (config_with(_attn_implementation="flash_attention_2"), "attn_implementation is 'flash_attention_2'"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_target_gives_a_one_line_error(tmp_path, damage):
    """These were library errors that named neither the target nor the file; `kernels` would have loaded code from a
    repository."""
    directory = write_tiny(tmp_path, "LlamaConfig", SMALL)
    change, says = DAMAGED[damage]
    change(tmp_path)
    with pytest.raises(CheckpointError, match=says) as error:
        load_target(directory, device="cpu", dtype="fp32")
    assert directory in error.value.message and "\n" not in error.value.message


def test_ends_outside_of_the_vocabulary_end_nothing(tmp_path):
    """The training of a head ended in an IndexError, or wrote -1 into its draft vocabulary."""
    directory = write_tiny(tmp_path, "LlamaConfig", SMALL)
    own = load_tokenizer(directory).eos_token_id
    for ends, known in ((99_999, []), (-1, []), ([-1, 7, 4096], [7])):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        config_with(eos_token_id=ends)(tmp_path)
        text = load_target_text(directory)
        assert text.eos_ids == {own, *known} and max(text.eos_ids) < text.vocab_size == 4096
        assert text.end_id == (known[0] if known else own)


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_out_of_memory_is_not_reported_as_damage(tmp_path, monkeypatch, kind):
    """A user who reads of damage downloads the target again."""
    directory = write_tiny(tmp_path, "LlamaConfig", SMALL)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", Mock(side_effect=kind("of 9 TiB")))
    with pytest.raises(kind):
        load_target(directory, device="cpu", dtype="fp32")


# --- the end of the context -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Phi-3, longrope", "Llama, dynamic RoPE"], indirect=True)
def test_drafts_do_not_change_rope_frequencies(family, target, model):
    """RoPE frequencies change at a certain length. Drafts and padding beyond that length must not change them for the
    text."""
    end = target.context_length
    assert end == (64 if family == "Phi-3, longrope" else 256)
    prompts = [[(37 * i) % 500 + 10 for i in range(end - 7)], PROMPTS[1]]
    options = {"sampling": GREEDY, "max_new_tokens": 20, "seeds": [0, 0]}
    truth = model.generate(torch.tensor(prompts[:1]), max_new_tokens=7, do_sample=False)[0].tolist()
    expected = [whole(decode(target, [p], sampling=GREEDY, max_new_tokens=20, seeds=[0]))[0] for p in prompts]
    assert expected[0] == truth
    for drafter in (constant([1] * 20), bushes(expected, 3, target.vocab_size, nodes=30)):
        assert whole(decode(target, prompts, drafter=drafter, **options)) == expected
    with pytest.raises(DataError, match=f"takes 1 to {end - 1}"):
        decode(target, [[5] * end], **options | {"seeds": [0]})


# --- half precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama 3.1", "Gemma 2"], indirect=True)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_exact_in_exact_mode(family, directory, dtype):
    """Chains in fixed shapes give equal bits at any precision."""
    target = load_target(directory, device="cpu", dtype=dtype)
    assert target.dtype == DTYPES[dtype]
    for sampling in (GREEDY, WARM):
        options = {"sampling": sampling, "max_new_tokens": NEW, "exact": True}
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True):
            text = whole(decode(target, [prompt], seeds=[seed], **options))
            for drafter in (ragged(text, 0, target.vocab_size), Lookup()):
                assert whole(decode(target, [prompt], seeds=[seed], drafter=drafter, **options)) == text


SQUASHED = {
    "Llama": ("LlamaConfig", {}, (1.0, None)),
    "Command R": ("CohereConfig", {"logit_scale": 0.0625}, (0.0625, None)),
    "Granite": ("GraniteConfig", {"logits_scaling": 8.0}, (0.125, None)),
    "Gemma 2": ("Gemma2Config", {"head_dim": 16, "final_logit_softcapping": 2.0}, (1.0, 2.0)),
    "Phi": ("PhiConfig", {}, (1.0, None)),
    "Gemma 2 without": ("Gemma2Config", {"head_dim": 16, "final_logit_softcapping": None}, (1.0, None)),
}


@pytest.mark.parametrize("name", SQUASHED)
def test_the_distillation_teacher_equals_the_target(tmp_path, name):
    """Without the logit scale, cap or bias the teacher would be sharper than the target."""
    kind, sizes, (scale, cap) = SQUASHED[name]
    target = load_target(write_tiny(tmp_path, kind, SMALL | sizes), device="cpu", dtype="fp32")
    assert target.squash[:2] == (pytest.approx(scale, rel=1e-4), cap)
    assert (target.squash.shift is not None) == (name == "Phi")
    states = 3 * torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        p = Teacher(states, target.head_weight, target.squash).known(torch.arange(5))
        q = target.model.logits(states).float()
        torch.testing.assert_close(p, q.softmax(-1), rtol=1e-4, atol=1e-7)
        some = torch.tensor([7, 3, 90])  # as in a draft vocabulary
        p = Teacher(states, target.head_weight[some], target.squash.of(some)).known(torch.arange(5))
        torch.testing.assert_close(p, q[:, some].softmax(-1), rtol=1e-4, atol=1e-7)


def test_an_unknown_id_fails_at_once_without_the_hub(monkeypatch):
    """huggingface_hub tried six times per file, for more than a minute."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(CheckpointError, match=r"nobody/unknown is neither .* 127.0.0.1 cannot be reached"):
        loading.load_config("nobody/unknown")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = proxy.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
        monkeypatch.setattr("urllib.request.getproxies", lambda: {"all": f"socks5://127.0.0.1:{port}"})
        loading.check_within_reach("nobody/unknown")  # the proxy may reach it
    for url in (f"http://user:secret@127.0.0.1:{port}", f"127.0.0.1:{port}", "http://127.0.0.1:port"):
        monkeypatch.setattr("urllib.request.getproxies", lambda url=url: {"https": url})
        with pytest.raises(CheckpointError, match=r"and the proxy 127.0.0.1 cannot be reached"):
            loading.check_within_reach("nobody/unknown")


def test_a_file_of_a_model_is_not_its_directory(tmp_path):
    """The message used to be that the file does not exist."""
    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a file, not a directory") as error:
        loading.load_config(str(tmp_path / "model.safetensors"))
    assert error.value.hint == f"--target {tmp_path}"


def test_a_sentencepiece_file_that_cannot_be_read_is_explained(tmp_path, monkeypatch):
    """The advice was to install tiktoken, from transformers."""
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    directory = Path(write_tiny(tmp_path, "LlamaConfig", SMALL))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    (directory / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(
        CheckpointError, match=r"sentencepiece, which reads tokenizer\.model, is not installed"
    ) as error:
        loading.load_tokenizer(str(directory))
    assert "pip install sentencepiece protobuf" in error.value.hint
