"""Targets in GGUF files have the logits and texts of `transformers` with the dequantized weights.

The files are written here from random models, by llama.cpp's rules. Catches rotary dimensions in another order, lost
biases or head norms, guessed head sizes or RoPE settings, weights rounded too early, and bad files that end in a
traceback or fill the memory.
"""

import functools
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from specctl.decoding import target_text
from specctl.decoding.models import gguf_blocks, gguf_file, gguf_target, gguf_tokenizer
from specctl.decoding.models.describe import describe
from specctl.decoding.models.ends import load_layerless
from specctl.decoding.models.gguf_file import Numbers
from specctl.decoding.models.loading import is_hub_id, load_config, load_model, load_tokenizer
from specctl.decoding.models.parallel import Slice, load_slice
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.drafters.text.lookup import Lookup
from specctl.errors import CheckpointError
from specctl.kernels import native
from specctl.measuring import lossless
from tests.conftest import LLAMA3_ROPE, write_tiny
from tests.toys.decoding import decode
from tests.toys.gguf import write

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROPE8192 = LLAMA3_ROPE | {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "llama": ("LlamaConfig", SIZES),
    "llama-bias": ("LlamaConfig", SIZES | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3": ("LlamaConfig", SIZES | {"rope_parameters": ROPE8192, "rms_norm_eps": 1e-5}),
    "qwen2": ("Qwen2Config", SIZES | {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 32}),
    "phi3": (
        "Phi3Config",
        SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    ),
    "smollm3": ("SmolLM3Config", SIZES | {"num_hidden_layers": 4}),  # the fourth layer has no RoPE
    "gemma3": (
        "Gemma3TextConfig",
        SIZES
        | {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 32}
        | {"tie_word_embeddings": True},
    ),
    "granite": (
        "GraniteConfig",
        SIZES
        | {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
}
CPU = torch.device("cpu")
REAL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """`directories(name)`: the directory of a random model of `MODELS`."""

    @functools.cache
    def make(name):
        return write_tiny(tmp_path_factory.mktemp(name), *MODELS[name])

    return make


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache directory for one test. Returns its path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(directories, tmp_path):
    """A complete GGUF file."""
    write(directories("llama"), tmp_path / "m.gguf", Kind.Q8_0)
    return tmp_path / "m.gguf"


def refused(path, *says):
    """Check that loading fails with a one-line error that contains all of `says`. Returns the error text."""
    with pytest.raises(CheckpointError) as error:
        load_config(str(path))
    said = f"{error.value.message} {error.value.hint}"
    assert all(one in said for one in says) and "\n" not in said, said
    return said


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1, Kind.Q8_0])
def test_weights_equal_those_of_the_file(directories, tmp_path, kind):
    original = write(directories("llama"), tmp_path / "m.gguf", kind)
    loaded = load_model(str(tmp_path / "m.gguf"), device=CPU, dtype=torch.float32).state_dict()
    assert loaded.keys() == original.state_dict().keys()
    assert all(torch.equal(loaded[key], weights) for key, weights in original.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_texts_equal_transformers(directories, tmp_path, name):
    original = write(directories(name), tmp_path / "m.gguf", Kind.Q4_1)
    ids = [(37 * i) % 500 + 10 for i in range(90)]  # past the original context of YaRN
    loaded = load_model(str(tmp_path / "m.gguf"), device=CPU, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(torch.tensor([ids])).logits, original(torch.tensor([ids])).logits)
    text = original.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=3)[0, len(ids) :]
    target = load_target(str(tmp_path / "m.gguf"), device="cpu", dtype="fp32")
    for drafter in (None, Lookup()):
        options = {"sampling": GREEDY, "max_new_tokens": 12, "seeds": [0], "drafter": drafter}
        assert decode(target, [ids], **options)[0].output_ids == text.tolist()


@pytest.mark.parametrize("kind", gguf_blocks.KINDS, ids=lambda kind: kind.name)
def test_dequantized_blocks_equal_the_gguf_package(tmp_path, kind):
    """Random blocks with every code, bit for bit."""
    generator, (values, width) = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[kind]
    data = generator.integers(0, 256, (40 * 3, width), np.uint8)
    for at in {Kind.Q6_K: [208], Kind.Q4_0: [0], Kind.Q5_0: [0], Kind.Q8_0: [0]}.get(kind, [0, 2]):  # fp16 numbers
        data[:, at : at + 2] = generator.standard_normal((len(data), 1)).astype(np.float16).view(np.uint8)
    (tmp_path / "tensor").write_bytes(data.tobytes())
    stored = gguf_file.StoredTensor(tmp_path / "tensor", int(kind), (40, 3 * values), 0, data.size)
    found = gguf_blocks.read(stored).dequantized().numpy()
    assert np.array_equal(found, gguf.dequantize(data.reshape(40, -1), kind))


@pytest.mark.skipif(native.library() is None, reason="no AVX2, or no C++ compiler")
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q5_0, Kind.Q8_0])
@pytest.mark.parametrize("name", MODELS)
def test_weights_stay_quantized_in_the_step_of_a_cpu(directories, tmp_path, monkeypatch, name, kind):
    """Inputs rounded to bytes cost precision: the error against fp32 is at most four times the error of bf16. Drafts do
    not change a single token."""
    original = write(directories(name), tmp_path / "m.gguf", kind)
    ids = [(37 * i) % 500 + 10 for i in range(90)]  # past the window
    with torch.no_grad():
        exact = original(torch.tensor([ids])).logits[0, -1]
    errors, texts, read, heads = {}, [], {}, []
    for switch in ("dequantized", "quantized"):
        monkeypatch.setenv("SPECCTL_GGUF", switch)
        target = load_target(str(tmp_path / "m.gguf"), device="cpu", dtype="bf16")
        assert target.quantized == target.model.quantized == (switch == "quantized")
        assert lossless.tolerance_of_transformers(target) == (2**-4 if target.quantized else 2**-6)
        logits = target.prefill([ids], target.new_cache(1, 96))[0]
        errors[switch] = (logits[0].float() - exact).norm().item()
        read[switch] = target.step_bytes
        held_quantized = isinstance(target._head, gguf_target.Weight)
        assert held_quantized == (target.model.quantized and not original.config.tie_word_embeddings)
        with torch.inference_mode():  # a drafter may be the first to read it, and a learner trains on it later
            heads.append(target.head_weight)
        assert not heads[-1].is_inference()
        if switch == "quantized":
            packed = sum(product.native.nbytes for product in target.model.products[1:])  # without the head
            if isinstance(target._head, gguf_target.Weight):
                packed += target.model.head.native.nbytes
            stored = gguf_target.quantized_weights(str(tmp_path / "m.gguf"), torch.bfloat16)
            size = sum(weight.nbytes for weight in stored.values())
            assert size == pytest.approx(packed + target.model.embedding.nbytes, rel=0.02)
    # The share of bf16's bytes: a block has 32 codes and two fp16 numbers.
    shares = {Kind.Q4_1: 5 / 16, Kind.Q5_0: 9 / 16, Kind.Q8_0: 9 / 16}
    assert read["quantized"] == pytest.approx(shares[kind] * read["dequantized"], rel=0.02)
    assert torch.equal(*heads)
    assert errors["quantized"] < min(4 * errors["dequantized"], 0.1 * exact.norm().item())
    for drafter in (None, Lookup()):
        options = {"sampling": GREEDY, "max_new_tokens": 24, "seeds": [0], "drafter": drafter}
        texts.append(decode(target, [ids], **options)[0].output_ids)
    assert texts[0] == texts[1]


@pytest.mark.skipif(native.library() is None, reason="no AVX2, or no C++ compiler")
def test_weights_are_dequantized_on_all_other_paths(directories, tmp_path, monkeypatch):
    """In fp32, with PyTorch's step, on transformers' path, and for types that the quantized step cannot read."""
    for kind in (Kind.F16, Kind.Q8_0):
        write(directories("qwen3"), tmp_path / f"{kind.name}.gguf", kind)
    cases = [("F16", "bf16", "auto", ""), ("Q8_0", "fp32", "auto", ""), ("Q8_0", "bf16", "auto", "torch")]
    for name, dtype, path, step in cases:
        monkeypatch.setenv("SPECCTL_STEP", step)
        target = load_target(str(tmp_path / f"{name}.gguf"), device="cpu", dtype=dtype, path=path)
        assert not target.model.quantized
        if not torch.cuda.is_available():
            assert describe(str(tmp_path / f"{name}.gguf")).quantized == (name == "Q8_0" and not step)
        assert target.prefill([[5, 6, 7]], target.new_cache(1, 8))[0].isfinite().all()
    monkeypatch.delenv("SPECCTL_STEP")
    target = load_target(str(tmp_path / "Q8_0.gguf"), device="cpu", dtype="bf16", path="transformers")
    assert target.prefill([[5, 6, 7]], target.new_cache(1, 8))[0].isfinite().all()


def test_layerless_and_sliced_weights_equal_the_whole_file(directories, tmp_path):
    original = write(directories("llama-bias"), tmp_path / "m.gguf", Kind.Q8_0)
    name, options = str(tmp_path / "m.gguf"), {"device": CPU, "dtype": torch.float32}
    ends = load_layerless(name, **options)
    assert torch.equal(ends.get_input_embeddings().weight, original.get_input_embeddings().weight)
    parts = [load_slice(name, load_config(name), Slice(rank, 2), **options) for rank in range(2)]
    for projection, side in (("q_proj", 0), ("o_proj", 1)):
        cut = [part.model.layers[1].self_attn.get_submodule(projection).weight for part in parts]
        assert torch.equal(torch.cat(cut, side), original.model.layers[1].self_attn.get_submodule(projection).weight)


def test_tokenizer_template_and_ends_come_from_the_file(file):
    tokenizer, config = load_tokenizer(str(file)), load_config(str(file))
    text = "Hello 123,\n\n  wörld 🙂<|user|>x"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and 1 in ids
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<|user|>a"
    assert config.eos_token_id == [3] and not is_hub_id(str(file))


def test_the_pre_tokenizer_splits_digits_as_the_file_requires(directories, tmp_path):
    for pre, count in (("gpt-2", 1), ("smollm", 3), ("qwen2", 3), ("llama-bpe", 1)):
        write(directories("llama"), tmp_path / "m.gguf", **{"tokenizer.pre": pre})
        cuts = load_tokenizer(str(tmp_path / "m.gguf")).backend_tokenizer.pre_tokenizer.pre_tokenize_str("123")
        assert len(cuts) == count


@pytest.mark.parametrize(
    ("pre", "text", "cuts"),
    [
        ("gpt-4o", "helloWorld don't 1234", ["hello", "World", "Ġdon't", "Ġ", "123", "4"]),
        ("tekken", "helloWorld don't 12", ["hello", "World", "Ġdon", "'t", "Ġ", "1", "2"]),
        ("tekken", "aÉb", ["aÃīb"]),  # llama.cpp knows the case of no other letters than A to Z
    ],
)
def test_words_are_cut_as_in_llama_cpp(directories, tmp_path, pre, text, cuts):
    write(directories("llama"), tmp_path / "m.gguf", **{"tokenizer.pre": pre})
    splitter = load_tokenizer(str(tmp_path / "m.gguf")).backend_tokenizer.pre_tokenizer
    assert [cut for cut, _ in splitter.pre_tokenize_str(text)] == cuts


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_ids_are_those_of_the_tokenizer_in_the_file(directories, tmp_path, name):
    """Catches a class of transformers for the model type: it normalizes texts and leaves out the first token."""
    write(directories(name), tmp_path / "m.gguf", **{"tokenizer.pre": "llama-bpe", "tokenizer.bos": 1})
    tokenizer = load_tokenizer(str(tmp_path / "m.gguf"))
    decomposed = "e\u0301"
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.decode(tokenizer.encode(decomposed, add_special_tokens=False)) == decomposed
    assert len(tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("123")) == 1


@pytest.mark.parametrize("unknown", [0, 2**32 - 1])
def test_sentencepiece_merges_by_score(unknown):
    """Some files say -1 for a token that they do not have, which is a large unsigned number."""
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab"]
    scores = [0.0] * 258 + [-9.0, -8.0, -7.0, -1.0, -2.0, -3.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": Numbers.of(np.array(scores)),
        "tokenizer.ggml.token_type": Numbers.of(np.array([2, 3] + [6] * 256 + [1] * 6)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": unknown,
    }
    built = Tokenizer.from_str(gguf_tokenizer.build("m", metadata, len(tokens)).document)
    assert built.encode("ab é").tokens == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert built.decode(built.encode("ab é").ids) == "ab é"


def test_a_split_model_is_loaded_from_all_its_parts(directories, tmp_path):
    original = write(directories("llama"), tmp_path / "m.gguf", splits=8)
    parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(parts) > 1
    loaded = load_model(str(parts[1]), device=CPU, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[key], weights) for key, weights in original.state_dict().items())
    parts[1].unlink()
    refused(parts[0], parts[1].name, "missing", "llama-gguf-split --merge")


def test_a_directory_with_a_gguf_file_is_refused_with_the_name_of_the_file(file):
    refused(file.parent, "has no config.json", f"--target {file}")


def test_the_rope_factor_is_read_from_the_tensor(directories, tmp_path):
    """Llama 3's RoPE factor is in no header: files with equal headers can have different factors."""
    original = write(directories("llama3"), tmp_path / "first.gguf")
    changed = original.config
    changed.rope_parameters = ROPE8192 | {"factor": 32.0}
    plain = changed.rope_parameters["rope_theta"] ** -(torch.arange(0, 16, 2) / 16)
    held = gguf_file.read(tmp_path / "first.gguf").tensors["rope_freqs.weight"]
    data = bytearray((tmp_path / "first.gguf").read_bytes())
    divisors = plain / LlamaForCausalLM(changed).model.rotary_emb.inv_freq
    data[held.start : held.start + held.size] = divisors.numpy().tobytes()
    (tmp_path / "second.gguf").write_bytes(data)
    found = [load_config(str(tmp_path / f"{name}.gguf")).rope_parameters["factor"] for name in ("first", "second")]
    assert found == pytest.approx([8.0, 32.0])


def test_the_digest_depends_on_every_tensor(file, monkeypatch, tmp_path):
    monkeypatch.setattr(target_text, "WHOLE", 0)
    first = target_text.weights_digest(str(file))
    copied = tmp_path / "copy.gguf"
    copied.write_bytes(file.read_bytes())
    assert target_text.weights_digest(str(copied)) == first
    found = {first}
    for name in ("output_norm.weight", "blk.1.ffn_up.weight"):
        held, data = gguf_file.read(file).tensors[name], bytearray(file.read_bytes())
        data[held.start + held.size // 2] ^= 1
        copied.write_bytes(data)
        found.add(target_text.weights_digest(str(copied)))
    assert len(found) == 3


def test_concurrent_loads_write_one_cache_directory(file, own_cache):
    with ThreadPoolExecutor(8) as pool:
        places = {*pool.map(lambda _: gguf_target.directory(str(file)), range(8))}
    assert [place.name for place in (own_cache / "specctl" / "gguf").iterdir()] == [places.pop().name]


def test_an_unwritable_cache_is_reported(file, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused(file, "cannot be written", "XDG_CACHE_HOME")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arch": "lfm2"}, ["'lfm2'", "llama, qwen2, qwen3", "gemma3", "distill --server"]),
        ({"leave_out": ["blk.1.attn_k.weight"]}, ["lacks", "blk.1.attn_k.weight"]),
        ({"leave_out": ["token_embd.weight"]}, ["lacks", "token_embd.weight"]),
        ({"beside": "blk.0.attn_sinks.weight"}, ["blk.0.attn_sinks.weight", "does not have"]),
        ({"feed_forward_length": 97}, ["blk.0.ffn_gate.weight", "[96, 64]", "[97, 64]"]),
        ({"feed_forward_length": None}, ["lacks llama.feed_forward_length"]),
        ({"block_count": 10**6}, ["block_count", "1000"]),
        ({"attention.head_count": 0}, ["attention.head_count is 0"]),
        ({"attention.head_count": 5, "attention.key_length": 16}, ["not a multiple of the number of attention heads"]),
        ({"expert_count": 8}, ["lacks llama.expert_used_count"]),
        ({"arch": "qwen2", "expert_count": 8}, ["expert_count is 8"]),
        ({"tokenizer": False}, ["no tokenizer"]),
        ({"tokenizer.model": "bert"}, ["'bert'", "gpt2 or llama"]),
        ({"tokenizer.pre": "youtu"}, ["'youtu'", "qwen2"]),
        ({"tokenizer.eos": 10**6}, ["eos_token_id is 1000000"]),
    ],
)
def test_unsupported_or_incomplete_models_are_refused(directories, tmp_path, own_cache, options, says):
    write(directories("llama"), tmp_path / "m.gguf", **options)
    refused(tmp_path / "m.gguf", "m.gguf", *says)
    assert not own_cache.exists()


def test_a_file_without_a_template_loads(directories, tmp_path):
    write(directories("llama"), tmp_path / "m.gguf", **{"tokenizer.template": None})
    assert load_tokenizer(str(tmp_path / "m.gguf")).chat_template is None


def pairs(*entries: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(entries) if count is None else count) + b"".join(entries)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 and so on", "not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(99), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (pairs()[:20], "ends inside its header"),
        (pairs(count=2**62), "more than fit in the file"),
        (pairs(tensors=2**63), "more than fit in the file"),
        (pairs(key(b"a", 9, struct.pack("<IQ", 0, 2**63))), "more than fit in the file"),
        (pairs(key(b"a", 9, struct.pack("<IQ", 8, 2**60))), "more than fit in the file"),
        (pairs(key(b"a", 9, struct.pack("<IQ", 9, 1) + bytes(99))), "type 9"),
        (pairs(key(b"a", 8, struct.pack("<Q", 2**64 - 1))), "more than fit in the file"),
        (pairs(key(b"a", 8, struct.pack("<Q", 1) + b"\xff")), "not UTF-8"),
        (pairs(key(b"a", 77, bytes(9))), "type 77"),
        (pairs(key(b"general.architecture", 9, struct.pack("<IQI", 4, 1, 1))), "general.architecture is no name"),
        (pairs(key(b"general.alignment", 4, struct.pack("<I", 0))), "general.alignment"),
        (pairs(struct.pack("<QI", 0, 2**31) + bytes(99), tensors=1, count=0), "dimensions"),
        (pairs(struct.pack("<QIQQIQ", 0, 2, 2**63, 2**63, 0, 0) + bytes(99), tensors=1, count=0), "ends at byte"),
        (pairs(struct.pack("<QIQIQ", 0, 1, 32, 4, 0) + bytes(99), tensors=1, count=0), "type 4"),
        (pairs(struct.pack("<QIQIQ", 0, 1, 32, 26, 0) + bytes(999), tensors=1, count=0), "I32"),
        (pairs(struct.pack("<QIQIQ", 0, 1, 33, 8, 0) + bytes(999), tensors=1, count=0), "blocks of 32"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, content, says):
    (tmp_path / "m.gguf").write_bytes(content)
    refused(tmp_path / "m.gguf", "m.gguf", says)


LIST = Numbers.of(np.array([1, 2]))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("llama.attention.value_length", LIST, "value_length is (1, 2)"),
        ("llama.rope.scaling.type", LIST, "scaled by (1, 2)"),
        ("llama.rope.freq_base", 1e300, "rope.freq_base is 1e+300"),
        ("tokenizer.ggml.model", LIST, "has kind (1, 2)"),
        ("tokenizer.ggml.pre", LIST, "tokenizer.ggml.pre is (1, 2)"),
        ("tokenizer.ggml.eos_token_id", LIST, "eos_token_id is (1, 2)"),
        ("tokenizer.ggml.token_type", LIST, "token_type has 2 entries for 4,096 tokens"),
        ("tokenizer.ggml.token_type", 0, "token_type is 0"),
        ("tokenizer.ggml.merges", LIST, "merges is (1, 2)"),
        ("tokenizer.ggml.add_bos_token", 0, "add_bos_token is 0"),
        ("tokenizer.chat_template", 0, "chat_template is 0"),
        ("tokenizer.ggml.tokens", ["x" * 5000], "5,000 characters"),
    ],
)
def test_metadata_of_a_wrong_type_are_refused(file, monkeypatch, name, value, says):
    """A list in place of a single value used to raise, and a wrong list of token types or merges to be ignored: texts
    then had other ids."""
    held = gguf_file.read(file)
    metadata = held.metadata | {name: value}
    if name.endswith("tokens"):
        del metadata["tokenizer.ggml.token_type"]
    monkeypatch.setattr(gguf_file, "read", lambda _: replace(held, metadata=metadata))
    refused(file, says)


def test_a_vocabulary_without_merges_is_refused(file, monkeypatch):
    held = gguf_file.read(file)
    metadata = {key: value for key, value in held.metadata.items() if key != "tokenizer.ggml.merges"}
    monkeypatch.setattr(gguf_file, "read", lambda _: replace(held, metadata=metadata))
    refused(file, "tokenizer.ggml.merges is missing")


def test_a_key_or_a_tensor_that_comes_twice_is_refused(tmp_path):
    entry = struct.pack("<QIQIQ", 0, 1, 8, 0, 0)
    for content in (pairs(key(b"a", 4, bytes(4)), key(b"a", 4, bytes(4))), pairs(entry * 2, tensors=2, count=0)):
        (tmp_path / "m.gguf").write_bytes(content + bytes(999))
        refused(tmp_path / "m.gguf", "damaged", "twice")


def test_a_tensor_in_another_place_is_refused(tmp_path):
    """It would have the weights of another tensor."""
    (tmp_path / "m.gguf").write_bytes(pairs(struct.pack("<QIQIQ", 0, 1, 8, 0, 32), tensors=1, count=0) + bytes(999))
    refused(tmp_path / "m.gguf", "has offset 32, expected 0")


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_scaling_factor_without_a_type_scales_linearly(directories, tmp_path, key):
    """As in llama.cpp, which also reads the older key. Both used to be ignored."""
    write(directories("llama"), tmp_path / "m.gguf", **{key: 4})
    rope = load_config(str(tmp_path / "m.gguf")).rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)


def test_a_truncated_file_is_refused(file, tmp_path):
    data = file.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 1000, 25):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        refused(tmp_path / "cut.gguf", "damaged")


def test_missing_files_pipes_and_directories_are_refused(tmp_path, pipe):
    refused(tmp_path / "none.gguf", "does not exist")
    refused(pipe(tmp_path / "pipe.gguf"), "named pipe")
    (tmp_path / "directory.gguf").mkdir()
    refused(tmp_path / "directory.gguf", "no config.json")


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="make real-target fetches it")
def test_the_text_of_a_real_model_equals_transformers():
    target = load_target(str(REAL), device="cpu", dtype="fp32")
    model = load_model(str(REAL), device=CPU, dtype=torch.float32)
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    options = {"sampling": GREEDY, "max_new_tokens": 20, "seeds": [0]}
    assert decode(target, [prompt], **options)[0].output_ids == expected
    assert "Paris" in target.tokenizer.decode(expected)
