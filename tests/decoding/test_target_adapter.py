"""LoRA adapters of a target: texts equal the texts of the model merged by peft, and unusable adapters are refused."""

import json
import shutil
import weakref

import gguf
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.decoding.models import target_adapter
from specctl.decoding.models.loading import DTYPES, load_config, load_model, load_tokenizer
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.decoding.target_text import load_target_text, weights_digest
from specctl.drafters.text.lookup import Lookup
from specctl.errors import CheckpointError
from specctl.kernels import PAGE, native
from specctl.recipe import TargetRecipe
from tests.conftest import SIZES, write_tiny
from tests.toys.decoding import decode, engine_for
from tests.toys.gguf import write

CPU = torch.device("cpu")
PROMPT = [(37 * place) % 500 + 10 for place in range(24)]
LINEAR = ["q_proj", "v_proj", "down_proj"]


def plain_model(base, dtype=torch.float32):
    return load_model(base, device=CPU, dtype=dtype)


def write_adapter(base, place, **settings):
    """Write an adapter with large random matrices for a target to the directory `place`."""
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "task_type": "CAUSAL_LM"} | settings
    model = peft.get_peft_model(plain_model(base), peft.LoraConfig(**settings))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(place)
    return str(place)


def merged_by_peft(base, adapter, dtype=torch.float32):
    return peft.PeftModel.from_pretrained(plain_model(base, dtype), adapter).merge_and_unload()


@pytest.fixture
def base(tiny_directory):
    return tiny_directory("llama")


@pytest.fixture
def lora(base, tmp_path):
    return write_adapter(base, tmp_path / "lora")


ADAPTERS = {
    "lora": ("llama", {}),
    "every linear layer": ("llama-bias-tied", {"target_modules": "all-linear", "bias": "lora_only"}),
    "dora": ("qwen3", {"use_dora": True}),
    "ranks by layer": ("qwen2", {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "one layer": ("mistral-window", {"layers_to_transform": [1]}),
    "a whole head": ("qwen2", {"modules_to_save": ["lm_head"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tokens of a tied vocabulary": ("llama-bias-tied", {"trainable_token_indices": PROMPT[:5]}),
    "on transformers' forward": ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
    "caps and windows": ("gemma2", {}),
}


@pytest.mark.filterwarnings("ignore")  # peft warns about its own files
@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_and_text_equal_the_model_merged_by_peft(tiny_directory, tmp_path, name):
    architecture, settings = ADAPTERS[name]
    base = tiny_directory(architecture)
    adapter = write_adapter(base, tmp_path / "adapter", **settings)
    merged = merged_by_peft(base, adapter)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": 3, "pad_token_id": 0}
    wanted = merged.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    target = load_target(base, device="cpu", dtype="fp32", adapter=adapter)
    with torch.no_grad():
        logits = merged(torch.tensor([PROMPT])).logits[0, -1]
        before = plain_model(base)(torch.tensor([PROMPT])).logits[0, -1]
    own = target.prefill([PROMPT], target.new_cache(1, 32))[0][0]
    torch.testing.assert_close(own, logits, atol=1e-4, rtol=1e-4)
    assert (own - before).abs().max() > 0.1
    for drafter in (None, Lookup()):
        asked = {"sampling": GREEDY, "max_new_tokens": 16, "seeds": [0], "drafter": drafter}
        assert decode(target, [PROMPT], **asked)[0].output_ids == wanted


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_adapted_target_equals_one_with_merged_weights_in_its_file(tmp_path, dtype):
    """In bf16 a CPU with AVX2 runs the C++ step."""
    lora = write_adapter("builtin", tmp_path / "lora")
    merged_by_peft("builtin", lora, DTYPES[dtype]).save_pretrained(tmp_path / "m")
    load_tokenizer("builtin").save_pretrained(tmp_path / "m")
    asked = {"sampling": GREEDY, "max_new_tokens": 16, "seeds": [0]}
    merged = load_target(str(tmp_path / "m"), device="cpu", dtype=dtype)
    adapted = load_target("builtin", device="cpu", dtype=dtype, adapter=lora)
    texts = [decode(target, [PROMPT], **asked)[0].output_ids for target in (merged, adapted)]
    assert texts[0] == texts[1]
    assert merged.model.native == adapted.model.native


def test_a_gguf_target_takes_an_adapter(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # peft looks for the base of the adapter that it writes
    file = str(tmp_path / "m.gguf")
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 96}  # multiples of the block size
    write(write_tiny(tmp_path / "m", "LlamaConfig", sizes), tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q4_0)
    adapter = write_adapter(file, tmp_path / "lora")
    merged = merged_by_peft(file, adapter)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": 3, "pad_token_id": 0}
    wanted = merged.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    target = load_target(file, device="cpu", dtype="fp32", adapter=adapter)
    asked = {"sampling": GREEDY, "max_new_tokens": 16, "seeds": [0]}
    assert decode(target, [PROMPT], **asked)[0].output_ids == wanted


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_switched_adapter_equals_a_loaded_one(tiny_directory, tmp_path, architecture):
    """Bit for bit, also after switching back. The old weights are freed before the new ones are read."""
    base = tiny_directory(architecture)
    adapters = [write_adapter(base, tmp_path / name, target_modules=LINEAR[:n]) for n, name in ((1, "a"), (3, "b"))]
    target = load_target(base, device="cpu", dtype="fp32")
    read, alive = target.read_again, []

    def spied(adapter):
        alive.append(model() is not None)
        return read(adapter)

    target.read_again = spied
    for adapter in (*adapters, adapters[1], None):
        model = weakref.ref(target.model)
        target.use_adapter(adapter)
        own = target.prefill([PROMPT], target.new_cache(1, 32), (1,))
        loaded = load_target(base, device="cpu", dtype="fp32", adapter=adapter)
        for mine, theirs in zip(own, loaded.prefill([PROMPT], loaded.new_cache(1, 32), (1,)), strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(target.head_weight, loaded.head_weight) and target.row_flops == loaded.row_flops
    assert alive == [False] * 3  # the active adapter is not read again


def test_texts_share_no_pages_across_a_switch(base, lora, monkeypatch):
    """An engine that was still alive lent the next one its keys, which other weights had computed."""
    monkeypatch.setenv("SPECCTL_KV", "paged")
    target = load_target(base, device="cpu", dtype="fp32")
    prompt = [7 * i % 500 for i in range(PAGE + 2)]
    found, engines = [], []  # all engines stay alive
    for adapter in (None, lora):
        target.use_adapter(adapter)
        engines.append(engine_for(target))
        engines[-1].on_prefill = lambda state, slots, logits: found.append(logits)
        decode(target, [prompt], engine=engines[-1], sampling=GREEDY, max_new_tokens=2, seeds=[0])
    assert torch.allclose(found[1], target.prefill([prompt], target.new_cache(1, len(prompt)))[0], atol=1e-5)


def test_a_failed_switch_restores_the_previous_adapter(base, lora, tmp_path):
    """If the files of the previous adapter are gone as well, the error names both."""
    target = load_target(base, device="cpu", dtype="fp32")
    target.use_adapter(lora)
    before = target.prefill([PROMPT], target.new_cache(1, 32))[0]
    damaged = shutil.copytree(lora, tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"{}")
    for wrong, says in ((str(tmp_path / "gone"), "does not exist"), (str(damaged), "cannot be read")):
        with pytest.raises(CheckpointError, match=says):
            target.use_adapter(wrong)
        assert target.adapter == lora
        assert torch.equal(target.prefill([PROMPT], target.new_cache(1, 32))[0], before)
    shutil.rmtree(lora)
    with pytest.raises(CheckpointError, match=r"gone does not exist; and target .* cannot be read again: .*lora does"):
        target.use_adapter(str(tmp_path / "gone"))


@pytest.mark.skipif(native.library() is None, reason="no AVX2, or no C++ compiler")
def test_a_gguf_target_is_quantized_again_without_its_adapter(tmp_path, monkeypatch):
    """With an adapter the weights of a GGUF file are dequantized."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = write_tiny(tmp_path / "m", "LlamaConfig", SIZES | {"hidden_size": 64, "intermediate_size": 96})
    write(base, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    file, adapter = str(tmp_path / "m.gguf"), write_adapter(str(base), tmp_path / "lora")
    target = load_target(file, device="cpu", dtype="bf16")
    logits = [target.prefill([PROMPT], target.new_cache(1, 32))[0]]
    for change in (adapter, None):
        target.use_adapter(change)
        assert target.model.quantized == (change is None)
        logits.append(target.prefill([PROMPT], target.new_cache(1, 32))[0])
    loaded = load_target(file, device="cpu", dtype="bf16", adapter=adapter)
    assert torch.equal(loaded.prefill([PROMPT], loaded.new_cache(1, 32))[0], logits[1])
    assert torch.equal(logits[0], logits[2]) and not torch.equal(logits[0], logits[1])


def test_the_identity_depends_on_the_adapters_weights(base, lora, tmp_path):
    """The identity tells features, resumed runs and drafters of different adapters apart."""
    other = shutil.copytree(lora, tmp_path / "other")
    tensors = load_file(other / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, other / "adapter_model.safetensors")
    plain, first, second = (load_target_text(base, adapter=one) for one in (None, lora, str(other)))
    assert len({one.identity["weights"] for one in (plain, first, second)}) == 3
    assert first.identity["adapter"] == lora and "adapter" not in plain.identity
    assert first.identity["adapter_weights"] != second.identity["adapter_weights"]
    assert load_target(base, device="cpu", dtype="fp32", adapter=lora).identity == first.identity
    moved = shutil.copytree(lora, tmp_path / "moved")
    assert weights_digest(base, None, str(moved)) == first.identity["weights"]


def test_a_layerless_target_refuses_adapters_outside_of_the_layers(base, lora, tmp_path):
    ends = load_target(base, device="cpu", dtype="fp32", adapter=lora, whole=False)
    assert torch.equal(ends.head_weight, load_target(base, device="cpu", dtype="fp32").head_weight)
    outer = write_adapter(base, tmp_path / "outer", modules_to_save=["lm_head"])
    with pytest.raises(CheckpointError, match=r"outer changes lm_head of target .* without its layers"):
        load_target(base, device="cpu", dtype="fp32", adapter=outer, whole=False)


def changed(lora, place, **settings):
    """A copy of an adapter with other settings."""
    shutil.copytree(lora, place)
    said = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(said | settings))
    return place


def test_unusable_adapters_are_refused(base, lora, tiny_directory, tmp_path):
    """Both before the weights are read and when they are loaded."""
    deeper = write_adapter(tiny_directory("llama"), tmp_path / "deeper")
    tensors = load_file(f"{deeper}/adapter_model.safetensors")
    more = {name.replace("layers.0", "layers.7"): one.clone() for name, one in tensors.items() if "layers.0" in name}
    save_file(tensors | more, f"{deeper}/adapter_model.safetensors")
    fewer = shutil.copytree(lora, tmp_path / "fewer")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.self_attn.q_proj.lora_B" not in name}
    save_file(kept, fewer / "adapter_model.safetensors")
    wide = write_adapter("builtin", tmp_path / "wide")
    (tmp_path / "empty").mkdir()
    cut = shutil.copytree(lora, tmp_path / "cut")
    (cut / "adapter_model.safetensors").write_bytes((cut / "adapter_model.safetensors").read_bytes()[:100])
    weightless = shutil.copytree(lora, tmp_path / "weightless")
    (weightless / "adapter_model.safetensors").unlink()
    text = shutil.copytree(lora, tmp_path / "text")
    (text / "adapter_config.json").write_text("[]")
    for adapter, says in {
        "nowhere": "adapter directory nowhere does not exist",
        text / "adapter_config.json": "adapter_config.json is a file, not a directory",
        tmp_path / "empty": "is not an adapter directory: it has no adapter_config.json",
        weightless: "has no adapter_model.safetensors",
        text: "adapter_config.json cannot be read",
        cut: "adapter_model.safetensors cannot be read",
        changed(lora, tmp_path / "prompt", peft_type="PROMPT_TUNING"): "is of peft type 'PROMPT_TUNING', not 'LORA'",
        changed(lora, tmp_path / "ia3", peft_type="IA3"): "is of peft type 'IA3', not 'LORA'",
        changed(lora, tmp_path / "twice", layer_replication=[[0, 1], [0, 2]]): "repeats layers of the target",
        changed(lora, tmp_path / "modules", target_modules=["query"]): "Target modules {'query'} not found",
        changed(lora, tmp_path / "rank", r=8): r"q_proj has a matrix of shape [4, 48], but the target needs [8, 48]",
        changed(
            lora, tmp_path / "less", target_modules=["q_proj"]
        ): "v_proj, but the target has none, or adapter_config.json does not name",
        changed(lora, tmp_path / "scale", lora_alpha=float("inf")): "lora_alpha or alpha_pattern is no finite number",
        wide: "layers.0.self_attn.q_proj has a matrix of shape [4, 256], but the target needs [4, 48]",
        deeper: "it changes model.layers.7.",
        fewer: "adapter_model.safetensors lacks the weights of model.layers.1.self_attn.q_proj",
    }.items():
        for load in (load_target_text, load_target):
            with pytest.raises(CheckpointError) as error:
                load(base, adapter=str(adapter))
            assert says in error.value.message, error.value.message
            assert str(adapter) in error.value.message and "\n" not in error.value.message


def test_an_adapter_with_nan_is_refused(base, lora):
    tensors = load_file(f"{lora}/adapter_model.safetensors")
    next(iter(tensors.values()))[0] = torch.nan
    save_file(tensors, f"{lora}/adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="values that are not finite"):
        load_target(base, device="cpu", dtype="fp32", adapter=lora)


def test_a_quantized_target_is_refused(base, lora):
    config = load_config(base)
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(CheckpointError, match="is quantized"):
        target_adapter.check(lora, base, config)


def test_adapter_and_tensor_parallel_exclude_each_other():
    with pytest.raises(ValueError, match="adapter and tensor_parallel exclude each other"):
        TargetRecipe(adapter="lora", tensor_parallel=2)
