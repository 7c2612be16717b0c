"""GGUF files of architectures besides Llama and Qwen have the logits and texts of `transformers`.

Catches metadata that are ignored (windows, caps, multipliers, RoPE by kind of layer), norms with an offset, experts in
another order, and numbers that a file does not have and that depend on the size of a model.
"""

import dataclasses

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from specctl.decoding.models import gguf_file, gguf_target, gguf_tokenizer
from specctl.decoding.models.describe import describe
from specctl.decoding.models.gguf_configuration import configuration
from specctl.decoding.models.gguf_file import Numbers
from specctl.decoding.models.loading import load_config, load_generation_config, load_model
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.drafters.text.lookup import Lookup
from specctl.errors import CheckpointError
from tests.conftest import write_tiny
from tests.decoding.test_gguf import CPU, SIZES, YARN
from tests.toys.decoding import decode
from tests.toys.gguf import write

WINDOW = {"sliding_window": 24, "head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA3 = WINDOW | {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": PLAIN,
    }
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "attention_factor": 1.19,
    "partial_rotary_factor": 0.75,
}
MODELS = {
    "mixtral": ("MixtralConfig", SIZES | EXPERTS),
    "qwen3moe": (
        "Qwen3MoeConfig",
        SIZES
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
        | {"norm_topk_prob": True},
    ),
    "mistral3": (
        "Ministral3Config",
        SIZES
        | {"head_dim": 16}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1}},
    ),
    "gemma": ("GemmaConfig", SIZES | {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        SIZES | WINDOW | {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3TextConfig", SIZES | GEMMA3 | {"num_hidden_layers": 7, "query_pre_attn_scalar": 32}),
    "phi3": ("Phi3Config", SIZES),
    "phi3-window": ("Phi3Config", SIZES | {"sliding_window": 40}),
    "phi3-longrope": (
        "Phi3Config",
        SIZES
        | {"max_position_embeddings": 512, "original_max_position_embeddings": 256, "tie_word_embeddings": True}
        | {"rope_parameters": LONGROPE},
    ),
    "gpt-oss": (
        "GptOssConfig",
        SIZES | WINDOW | EXPERTS | {"num_hidden_layers": 4, "rope_parameters": YARN | {"truncate": False}},
    ),
    "granite": (
        "GraniteConfig",
        SIZES
        | {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "olmo2": ("Olmo2Config", SIZES),
    "olmo3": (
        "Olmo3Config",
        SIZES
        | {"num_hidden_layers": 5, "sliding_window": 24}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    ),
    "smollm3": ("SmolLM3Config", SIZES | {"num_hidden_layers": 5}),
}
IDS = [(37 * i) % 500 + 10 for i in range(90)]  # longer than the windows and the original context of YaRN


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_texts_equal_transformers(tmp_path, name):
    file = tmp_path / "m.gguf"
    original = write(write_tiny(tmp_path / "hf", *MODELS[name]), file, Kind.Q8_0)
    loaded = load_model(str(file), device=CPU, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(torch.tensor([IDS])).logits, original(torch.tensor([IDS])).logits)
    text = original.generate(torch.tensor([IDS]), max_new_tokens=12, do_sample=False, eos_token_id=3)[0, len(IDS) :]
    target = load_target(str(file), device="cpu", dtype="fp32")
    for drafter in (None, Lookup()):
        options = {"sampling": GREEDY, "max_new_tokens": 12, "seeds": [0], "drafter": drafter}
        assert decode(target, [IDS], **options)[0].output_ids == text.tolist()


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_models_scale_attention_scores_differently(tmp_path, name, layers):
    """The number is not in the file."""
    write(write_tiny(tmp_path / "hf", *MODELS[name]), tmp_path / "m.gguf")
    held = gguf_file.read(tmp_path / "m.gguf")
    for count, expected in ((layers, 64 // 4), (layers - 1, 32)):
        more = dataclasses.replace(held, metadata=held.metadata | {f"{name}.block_count": count})
        assert configuration("m", more)["query_pre_attn_scalar"] == expected


def test_a_file_with_a_tensor_for_each_expert_is_named(tmp_path):
    """The hint of a Mixtral file of 2023 was to download it again."""
    write(write_tiny(tmp_path / "hf", *MODELS["mixtral"]), tmp_path / "m.gguf")
    held = gguf_file.read(tmp_path / "m.gguf")
    tensors = {}
    for name, tensor in held.tensors.items():
        names = [name.replace("_exps.", f".{expert}.") for expert in range(4)] if "_exps." in name else [name]
        tensors |= dict.fromkeys(names, tensor)
    old = dataclasses.replace(held, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"a tensor for each expert, such as blk\.0\.ffn_.*\.0\.weight") as error:
        gguf_target._parameters("m", old, configuration("m", old))
    assert "convert" in error.value.hint and "download" not in error.value.hint


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_a_description_counts_dequantized_weights(tmp_path, name):
    original = write(write_tiny(tmp_path / "hf", *MODELS[name]), tmp_path / "m.gguf", Kind.Q8_0)
    found = describe(str(tmp_path / "m.gguf"))
    assert (found.path, found.quantized, found.sliding_window) == ("transformers", False, 24)
    assert found.bytes == original.num_parameters() * {"bf16": 2, "fp32": 4}[found.dtype]


@pytest.mark.parametrize("name", ["gemma3", "granite", "phi3"])
def test_embedding_norm_and_head_are_read_without_layers(tmp_path, name):
    """Used to ask for safetensors files."""
    original = write(write_tiny(tmp_path / "hf", *MODELS[name]), tmp_path / "m.gguf", Kind.Q8_0)
    ends = load_target(str(tmp_path / "m.gguf"), device="cpu", dtype="fp32", whole=False).model
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ends.embedding, original.get_input_embeddings().weight)
    torch.testing.assert_close(ends.normed(states), original.model.norm(states))
    with torch.no_grad():
        scaled = original.lm_head(states) / getattr(original.config, "logits_scaling", 1.0)
    torch.testing.assert_close(ends.logits(states), scaled)


def test_norms_lose_their_offset_before_they_are_rounded(tmp_path):
    """In bf16, 1 plus a small weight has lost most of its digits."""
    write(write_tiny(tmp_path / "hf", *MODELS["gemma"]), tmp_path / "m.gguf")
    loaded = [
        load_model(str(tmp_path / "m.gguf"), device=CPU, dtype=dtype).model.norm.weight
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert torch.equal(loaded[0].bfloat16(), loaded[1])


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gemma3", {"attention.sliding_window": None}, "lacks gemma3.attention.sliding_window"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern is (True,)"),
        ("granite", {"rope.scaling.finetuned": False}, "no RoPE"),
        ("granite", {"attention.scale": None}, "lacks granite.attention.scale"),
        ("qwen3moe", {"expert_used_count": None}, "lacks qwen3moe.expert_used_count"),
        ("mistral3", {"rope.scaling.type": "none"}, "temperature"),
        ("mistral3", {"rope.scaling.yarn_ext_factor": 2.0}, "scaled by 'yarn'"),
        ("phi3-longrope", {"leave_out": ["rope_factors_short.weight"]}, "without rope_factors_short.weight"),
    ],
)
def test_files_with_other_arithmetic_are_refused(tmp_path, monkeypatch, name, changes, says):
    write(write_tiny(tmp_path / "hf", *MODELS[name]), tmp_path / "m.gguf")
    held = gguf_file.read(tmp_path / "m.gguf")
    metadata, tensors = dict(held.metadata), dict(held.tensors)
    for key, value in changes.items():
        if key == "leave_out":
            del tensors[value[0]]
        elif value is None:
            del metadata[f"{metadata[gguf_file.ARCHITECTURE]}.{key}"]
        else:
            metadata[f"{metadata[gguf_file.ARCHITECTURE]}.{key}"] = (
                Numbers.of(np.array(value)) if isinstance(value, list) else value
            )
    monkeypatch.setattr(gguf_file, "read", lambda _: dataclasses.replace(held, metadata=metadata, tensors=tensors))
    with pytest.raises(CheckpointError) as error:
        load_config(str(tmp_path / "m.gguf"))
    assert says in error.value.message


def test_experts_of_another_number_are_refused(tmp_path):
    write(write_tiny(tmp_path / "hf", *MODELS["qwen3moe"]), tmp_path / "m.gguf", expert_count=5)
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.ffn_gate_exps\.weight and blk\.0\.ffn_up_exps\.weight .* \[4, 32, 64\] and"
    ):
        load_config(str(tmp_path / "m.gguf"))


def test_special_tokens_that_a_file_lacks_are_none(tmp_path):
    """They used to be the ids of another vocabulary: the defaults of the configuration's class."""
    write(write_tiny(tmp_path / "hf", *MODELS["olmo2"]), tmp_path / "m.gguf")
    config = load_config(str(tmp_path / "m.gguf"))
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (None, None, [3])
    assert load_generation_config(str(tmp_path / "m.gguf"), config).eos_token_id == [3]


def built(tokens: list[str], kinds: list[int], name: str = "", **more: object) -> gguf_tokenizer.GGUFTokenizer:
    """The SentencePiece tokenizer of a file without merges."""
    metadata = {
        "general.name": name,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": Numbers.of(np.zeros(len(tokens))),
        "tokenizer.ggml.token_type": Numbers.of(np.array(kinds)),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        **more,
    }
    return gguf_tokenizer.build("m", metadata, len(tokens))


def test_the_channel_tokens_of_gpt_oss_end_no_text():
    """With `<|return|>` and `<|call|>`, `<|end|>` only ends a part of an answer. llama.cpp has the same rule."""
    tokens = ["<unk>", "<|end|>", "<|return|>", "<|call|>"]
    assert built(tokens, [2, 3, 3, 3]).ends == [2, 3]
    assert built(tokens[:2], [2, 3]).ends == [1]


def test_end_tokens_are_control_tokens_of_any_type():
    """As in llama.cpp: some files have them as usual tokens."""
    found = built(["<unk>", "<end_of_turn>", "a"], [2, 1, 1])
    assert found.ends == [1]
    assert Tokenizer.from_str(found.document).encode("a<end_of_turn>a").ids == [2, 1, 2]


@pytest.mark.parametrize(("name", "count"), [("Phi-3 mini", 2), ("Phi3", 2), ("Llama", 3)])
def test_special_tokens_of_phi_3_swallow_white_space(name, count):
    found = built(["<unk>", "<|user|>", "▁", "a", "<|endoftext|>"], [2, 3, 1, 1, 3], name)
    assert len(Tokenizer.from_str(found.document).encode("<|user|> a").ids) == count
    assert len(Tokenizer.from_str(found.document).encode("<|endoftext|> a").ids) == 3
