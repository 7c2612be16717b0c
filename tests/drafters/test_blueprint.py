"""Each wrong value in a drafter's config.json gives a one-line error that names the file and the key."""

import json
import math
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.drafters import checkpoint, pool
from specctl.drafters.feature.head import HeadConfig
from specctl.drafters.lm import drafter as lm
from specctl.drafters.lm.config import configuration
from specctl.drafters.retrieval.drafter import FAMILY as retrieval
from specctl.errors import CheckpointError
from specctl.recipe import DraftingRecipe, TrainRecipe

LORA = {"rank": 2, "alpha": 4}
TINY = {"preset": "tiny", "num_layers": 1}


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    """Save one directory per family, and one adapter of the eagle3 head."""
    root = tmp_path_factory.mktemp("drafters")
    made = {}
    for name in ("eagle3", "eagle", "hydra", "medusa", "lm"):
        kind = pool.load_family(name)
        sizes = {"lm": TINY, "eagle": {}}.get(name, {"vocab_size": 256})
        module = kind.build(TrainRecipe(arch=name, drafter=sizes), target, lambda size: list(range(size)))
        config, tensors = kind.checkpoint_config(module, target.identity), kind.stored_state(module.state_dict())
        made[name] = checkpoint.save(root / name, config=config, tensors=tensors, info={})
    store = retrieval.collect([(list(range(40)), 4)])
    config = retrieval.checkpoint_config(store, target.identity)
    made["retrieval"] = checkpoint.save(root / "retrieval", config=config, tensors=retrieval.tensors(store), info={})
    base = made["eagle3"]
    weight = load_file(base / "model.safetensors")["fc.weight"]
    update = {"fc.lora_A.weight": torch.ones(2, weight.shape[1]), "fc.lora_B.weight": torch.ones(len(weight), 2)}
    origin = {"path": "../eagle3", "sha256": checkpoint.weights_digest(base)}
    config = json.loads((base / "config.json").read_text()) | {"lora": LORA | {"base": origin}}
    made["lora"] = checkpoint.save(root / "lora", config=config, tensors=update, info={})
    return made


@pytest.fixture
def changed(drafters, target):
    """Return `load(family, …)`, which changes a checkpoint and its manifest and returns the loading error."""

    def load(family, architecture=None, top=None, tensors=None):
        source = drafters[family]
        config = json.loads((source / "config.json").read_text()) | (top or {})
        if architecture is not None:
            config["architecture"] = config["architecture"] | architecture
        place = source.parent / "changed"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(source, place)
        if tensors:
            weights = load_file(source / "model.safetensors") | tensors
            save_file(
                {name: tensor for name, tensor in weights.items() if tensor is not None}, place / "model.safetensors"
            )
        (place / "config.json").write_text(json.dumps(config))
        (place / "manifest.json").write_text(
            json.dumps({"format": checkpoint.FORMAT, "files": checkpoint.digests(place)})
        )
        with warnings.catch_warnings(action="error"), pytest.raises(CheckpointError) as error:
            pool.load_drafter(str(place), target, DraftingRecipe())
        assert str(place) in error.value.message and "\n" not in error.value.message
        assert len(error.value.message) < 800 and error.value.exit_code == 4
        return error.value.message

    return load


@pytest.mark.parametrize("family", ["eagle3", "eagle", "hydra", "medusa", "lm", "retrieval", "lora"])
def test_an_unchanged_drafter_loads_without_random_values(drafters, target, family):
    """A head of a billion weights would draw them for seconds, and then replace them by its own."""
    before = torch.get_rng_state()
    pool.load_drafter(str(drafters[family]), target, DraftingRecipe())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", ["eagle3", "hydra"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rms_norm_eps", value) for value in ([], None, "x", -1, math.nan, True)),
        *(("taps", value) for value in ([-1, -2, -3], ["1", "2", "3"], [None] * 3, [], 3, [2, 5, 99], [0] * 999)),
        *(("rope_theta", value) for value in (10**30, 1e30, 0, None)),
        *(("hidden_size", value) for value in (0, -1, 256.0, 2**40, 128, True)),
        *(("num_heads", value) for value in (0, 3, 10**9)),
        *(("head_dim", value) for value in (31, 10**30)),
        *(("vocab_size", value) for value in (0, 5000, 10**9)),
        ("unknown", 1),
    ],
    ids=str,
)
def test_a_wrong_field_of_a_head_is_named(changed, family, key, value):
    """Most of these values used to build a head that failed in the middle of a text, or not at all."""
    said = changed(family, {key: value})
    assert "config.json" in said and (key in said or "requires" in said)


def test_a_deeply_nested_lm_config_is_refused():
    """JSON may be nested more deeply than Python's recursion limit."""
    value = []
    for _ in range(2000):
        value = [value]
    with pytest.raises(CheckpointError, match="nested too deeply"):
        configuration({"model_type": "llama", "rope_parameters": value})


@pytest.mark.parametrize(
    "value", [None, 1, "x", {"base": {}}, {"rank": 0, "alpha": 1, "base": {}}, {"rank": 2}], ids=str
)
def test_a_wrong_origin_of_an_adapter_is_named(changed, value):
    assert "config.json: lora" in changed("lora", top={"lora": value})


@pytest.mark.parametrize("path", ["a" * 300, "../gone", "\0", "/"])
def test_a_missing_base_of_an_adapter_is_named(changed, path):
    said = changed("lora", top={"lora": {"rank": 2, "alpha": 4, "base": {"path": path, "sha256": "0" * 64}}})
    assert "is an adapter of" in said


@pytest.mark.parametrize(
    "tensors",
    [
        {"fc.lora_A.weight": None},
        {"fc.lora_A.weight": torch.ones(2, 3)},
        {"fc.lora_B.weight": torch.ones(3, 2)},
        {"gone.lora_A.weight": torch.ones(2, 3), "gone.lora_B.weight": torch.ones(3, 2)},
        {"fc.weight": torch.ones(2)},
    ],
)
def test_an_update_that_does_not_fit_its_base_is_named(changed, tensors):
    assert "model.safetensors: " in changed("lora", tensors=tensors)


def test_families_without_adapters_refuse_an_adapter(changed, drafters):
    origin = {"path": "../medusa", "sha256": checkpoint.weights_digest(drafters["medusa"])}
    assert "do not support adapters" in changed("medusa", top={"lora": {"rank": 2, "alpha": 4, "base": origin}})


@pytest.mark.parametrize(
    "tensors",
    [
        {"fc.weight": None},
        {"fc.weight": torch.zeros(0)},
        {"fc.weight": torch.zeros(256, 768, dtype=torch.int32)},
        {"more": torch.zeros(2)},
        {"d2t": torch.full((2048,), 10**6)},
    ],
)
def test_weights_of_the_wrong_name_shape_or_type_are_named(changed, tensors):
    assert f"model.safetensors: {next(iter(tensors))}" in changed("eagle3", tensors=tensors).replace("'", "")


@pytest.mark.parametrize("family", ["eagle3", "hydra", "lm", "lora"])
def test_weights_that_are_not_finite_are_refused(changed, drafters, family):
    """Such a drafter used to load, and its drafts were never accepted."""
    weights = load_file(drafters[family] / "model.safetensors")
    name, tensor = next((name, one) for name, one in weights.items() if one.dim() == 2)
    tensor[1, 1] = math.nan
    assert f"model.safetensors: {name}: contains values that are not finite" in changed(family, tensors={name: tensor})


@pytest.mark.parametrize("id", [4096, 10**6, -2])
def test_a_store_with_token_ids_outside_the_vocabulary_is_refused(changed, drafters, id):
    tokens = load_file(drafters["retrieval"] / "model.safetensors")["tokens"].clone()
    tokens[3] = id
    assert f"model.safetensors: tokens: contains ids {min(id, -1)} …" in changed(
        "retrieval", tensors={"tokens": tokens}
    )


CODE = {
    "attn_implementation": "kernels-community/x@rev",
    "_attn_implementation": "flash_attention_2",
    "_attn_implementation_internal": "a/b",
    "experts_implementation": "a/b",
    "quantization_config": {"quant_method": "awq"},
    "auto_map": {"AutoModelForCausalLM": "evil.Model"},
    "trust_remote_code": True,
}


@pytest.mark.parametrize("key", CODE)
def test_an_lm_config_cannot_select_code(changed, key):
    """`transformers` would download and load kernels from a repository if the package `kernels` is installed."""
    assert f"config.json: architecture.{key}" in changed("lm", {key: CODE[key]})


def test_a_nested_lm_config_cannot_select_code(changed):
    said = changed("lm", {"model_type": "gemma3", "text_config": {"attn_implementation": "a/b"}})
    assert "attn_implementation" in said or "text_config" in said or "is not a key" in said


@pytest.mark.parametrize(
    "architecture",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 900},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 2.5},
        {"vocab_size": 10**12},
        {"vocab_size": 2**31 - 1},
        {"hidden_size": 2**30},
        {"hidden_size": 0},
        {"hidden_size": -128},
        {"intermediate_size": 1e30},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"head_dim": 2**31},
        {"dtype": "nope"},
        {"hidden_act": "../x"},
        {"rms_norm_eps": []},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"model_type": "bert-and-more"},
        {"model_type": ["llama"]},
        {"eos_token_id": [0] * 5000},
    ],
    ids=str,
)
def test_an_lm_config_with_wrong_sizes_is_refused_before_the_model_is_built(changed, architecture):
    """The loader used to build the model first, which took 28 GB and more."""
    assert "config.json" in changed("lm", architecture)


def test_an_lm_config_without_sizes_is_refused(changed):
    """By default, `transformers` assumes the sizes of a 7B model."""
    assert "the files do not match" in changed("lm", top={"architecture": {"model_type": "llama"}})
    for other in ({}, [], None, "llama", 1):
        assert "config.json: architecture" in changed("lm", top={"architecture": other})


def test_an_lm_with_a_smaller_vocabulary_is_refused(changed, drafters):
    """A smaller vocabulary used to fail at the first missing token, in the middle of a text."""
    tensors = load_file(drafters["lm"] / "model.safetensors")
    fewer = {name: tensors[name][:4000].clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert "architecture.vocab_size: is 4000" in changed("lm", {"vocab_size": 4000}, tensors=fewer)


def test_an_lm_config_survives_saving_and_loading(drafters, target):
    config = json.loads((drafters["lm"] / "config.json").read_text())
    again = lm.stored(configuration(config["architecture"]))
    assert again == config["architecture"]


def test_a_file_that_is_not_safetensors_is_named(drafters, target, tmp_path):
    place = tmp_path / "d"
    found = checkpoint.load(drafters["eagle3"])
    checkpoint.save(place, config=found.config, tensors=found.tensors, info={})
    save_file({"x": torch.zeros(1)}, place / "model.safetensors")
    with pytest.raises(CheckpointError, match=str(place)):
        pool.load_drafter(str(place), target, DraftingRecipe())


def test_head_config_annotations_resolve(target):
    """The annotations of `HeadConfig` are defined in several modules."""
    shape = dict(hidden_size=4, vocab_size=9, draft_vocab_size=9, taps=[1], intermediate_size=4, num_heads=2)
    shape |= dict(num_kv_heads=1, head_dim=2, rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=8)
    assert HeadConfig.from_dict(shape).taps == (1,)
