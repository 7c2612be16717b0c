"""Importing foreign heads: conversion, refusals with their messages, and no code execution."""

import os
import pickle
import random
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl import api
from specctl.decoding.models.loading import builtin_path
from specctl.drafters import checkpoint, pool
from specctl.errors import CheckpointError, UsageError
from specctl.formats import head_directory, registry
from specctl.formats.head import TargetFacts
from specctl.recipe import DraftingRecipe
from tests.drafters.variants import NORMS, VARIANTS
from tests.formats.conftest import CUSTOM, STEPS, export, import_head

FORMATS = [
    *(("eagle3", to, "eagle3") for to in ("vllm", "sglang")),
    ("eagle3", "speculators", "speculators"),
    ("peagle", "vllm", "peagle"),
    ("peagle", "speculators", "speculators"),
    *(("eagle", to, "eagle") for to in ("vllm", "sglang", "eagle")),
    *((family, family, family) for family in ("medusa", "hydra")),
    ("medusa", "vllm", "medusa"),
    ("lm", "hf", "hf"),
]


@pytest.fixture
def head(make, tmp_path):
    """Return `write(family, to, change)`, which writes a foreign directory modified by `change(config, tensors)`."""

    def write(family="eagle3", to="vllm", change=None, **options):
        if family == "eagle3":
            options = {"draft_vocab": 300, "taps": CUSTOM, **options}
        return export(make(family, **options), to, tmp_path / "head", change)

    return write


@pytest.mark.parametrize(("family", "to", "name"), FORMATS)
def test_an_exported_head_is_imported_unchanged(head, make, target, tmp_path, family, to, name):
    place = head(family, to)
    result = import_head(place, target, tmp_path / "drafter")
    assert (result.format, result.family, result.notes) == (name, family, [])
    options = {"draft_vocab": 300, "taps": CUSTOM} if family == "eagle3" else {}
    before, after = checkpoint.load(make(family, **options)), checkpoint.load(tmp_path / "drafter")
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    assert after.config["target"] == target.identity
    differing = {
        key for key, value in before.config["architecture"].items() if after.config["architecture"].get(key) != value
    }
    assert differing <= {"max_position_embeddings"}
    pool.load_drafter(str(tmp_path / "drafter"), target, DraftingRecipe())


def test_default_layers_and_a_full_vocabulary_need_no_keys(head, target, tmp_path):
    place = head(taps=(2, 5, 7), draft_vocab=None)
    assert "d2t" not in load_file(place / "model.safetensors")
    import_head(place, target, tmp_path / "drafter")
    found = checkpoint.load(tmp_path / "drafter")
    assert found.config["architecture"]["taps"] == [2, 5, 7]
    assert not found.tensors["d2t"].any() and found.tensors["t2d"].all()


def only_nested(config, tensors):
    del config["eagle_aux_hidden_state_layer_ids"]


def only_top(config, tensors):
    del config["eagle_config"]


def names_with_prefix(config, tensors):
    for name in list(tensors):
        if name not in ("d2t", "t2d", "lm_head.weight"):
            tensors[f"model.{name.replace('midlayer.', 'layers.0.')}"] = tensors.pop(name)


def new_rope_keys(config, tensors):
    theta = config.pop("rope_theta")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}


def zero_bias(config, tensors):
    tensors["fc.bias"] = torch.zeros(config["hidden_size"])


@pytest.mark.parametrize("change", [only_nested, only_top, names_with_prefix, new_rope_keys, zero_bias])
def test_other_spellings_give_the_same_head(head, make, target, tmp_path, change):
    """SpecForge nests layer ids (one less), vLLM has them at the top, and transformers 5 uses other RoPE keys."""
    import_head(head(change=change), target, tmp_path / "drafter")
    found = checkpoint.load(tmp_path / "drafter")
    assert found.config["architecture"]["taps"] == list(CUSTOM)
    assert found.config["architecture"]["rope_theta"] == 5000.0
    original = checkpoint.load(make("eagle3", draft_vocab=300, taps=CUSTOM)).tensors
    assert all(torch.equal(tensor, found.tensors[name]) for name, tensor in original.items())


@pytest.mark.parametrize("family", ["eagle", "peagle"])
def test_a_prefix_of_all_names_does_not_hide_the_format(head, target, tmp_path, family):
    """An EAGLE head with the prefix was taken for a language model that lacks its embedding."""
    assert import_head(head(family, change=names_with_prefix), target, tmp_path / "drafter").family == family


def old_frequencies(config, tensors):
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


SAME_LAYER = {
    "a window that is off": lambda config, tensors: config.update(sliding_window=131072, use_sliding_window=False),
    "a window of no layer": lambda config, tensors: config.update(sliding_window=512, layer_types=["full_attention"]),
    "a kind for each layer of the target": lambda config, tensors: config.update(
        layer_types=["full_attention"] * 40, sliding_window=None
    ),
    "the number of the target's layers": lambda config, tensors: config.update(num_hidden_layers=40),
    "frequencies of old files": old_frequencies,
}


@pytest.mark.parametrize("family", ["eagle3", "eagle", "peagle", "speculators"])
@pytest.mark.parametrize("change", SAME_LAYER)
def test_leftover_keys_of_the_target_are_ignored(head, make, target, tmp_path, family, change):
    """Configs copied from the target: SpecForge's for Qwen2.5 and Gemma, EAGLE's for Vicuna."""
    if family == "peagle" and "number" in change:
        pytest.skip("its files have several layers, and say how many")

    def changed(config, tensors):
        SAME_LAYER[change](config.get("transformer_layer_config", config), tensors)

    kind, to = ("eagle3", "speculators") if family == "speculators" else (family, "vllm")
    options = {"draft_vocab": 300, "taps": CUSTOM} if kind == "eagle3" else {}
    import_head(head(kind, to, change=changed, **options), target, tmp_path / "drafter")
    before, after = checkpoint.load(make(kind, **options)), checkpoint.load(tmp_path / "drafter")
    assert after.config["architecture"].get("sliding_window") is None
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def absolute(config, tensors):
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def test_absolute_d2t_is_converted_if_t2d_proves_it(head, make, target, tmp_path):
    result = import_head(head(change=absolute), target, tmp_path / "drafter")
    assert "from target ids to offsets" in result.notes[0]
    original = checkpoint.load(make("eagle3", draft_vocab=300, taps=CUSTOM)).tensors
    assert torch.equal(checkpoint.load(tmp_path / "drafter").tensors["d2t"], original["d2t"])


@pytest.mark.parametrize("draft_vocab", [300, None], ids=["pruned", "full"])
@pytest.mark.parametrize("more", [64, -64])
def test_a_vocabulary_with_other_padding_is_adapted(head, target, tmp_path, monkeypatch, draft_vocab, more):
    """Only unused rows may differ; here the tokenizer uses all but the last hundred."""
    original = TargetFacts.of_target

    def padded(target):
        facts = original(target)
        return TargetFacts(**{**vars(facts), "num_tokens": facts.vocab_size - 100})

    monkeypatch.setattr(TargetFacts, "of_target", padded)

    def change(config, tensors):
        config["vocab_size"] += more
        if draft_vocab is None:
            config["draft_vocab_size"] += more
            weight = tensors["lm_head.weight"]
            tensors["lm_head.weight"] = torch.cat((weight, weight[:64])) if more > 0 else weight[:more].clone()
        else:
            member = tensors["t2d"].clone()
            if more < 0:  # move draft tokens out of the removed rows
                member[-64:] = False
                spare = (~member).nonzero().squeeze(1)[: int(tensors["t2d"][-64:].sum())]
                member[spare] = True
                tensors["d2t"] = member.nonzero().squeeze(1) - torch.arange(draft_vocab)
                member = member[:more].clone()
            else:
                member = torch.cat((member, torch.zeros(64, dtype=torch.bool)))
            tensors["t2d"] = member

    result = import_head(head(change=change, draft_vocab=draft_vocab), target, tmp_path / "drafter")
    assert "padding" in result.notes[0]
    found = checkpoint.load(tmp_path / "drafter")
    assert found.config["architecture"]["vocab_size"] == target.vocab_size == len(found.tensors["t2d"])
    assert found.config["architecture"]["draft_vocab_size"] == (draft_vocab or target.vocab_size + min(more, 0))
    pool.load_drafter(str(tmp_path / "drafter"), target, DraftingRecipe())


def test_medusa_heads_without_biases_are_imported(make, ours, target, tmp_path):
    """vLLM's blocks have no bias unless `medusa_fc_bias` says so. Its older files name the tensors `medusa_heads.*`."""

    def change(config, tensors):
        del config["medusa_fc_bias"]
        for name in list(tensors):
            tensor = tensors.pop(name)
            if not name.endswith(".bias"):
                tensors[f"medusa_heads.{name}"] = tensor

    place = export(make("medusa"), "vllm", tmp_path / "head", change)
    import_head(place, target, tmp_path / "drafter")
    found = checkpoint.load(make("medusa"))
    for name in found.tensors:
        if name.endswith(".bias"):
            found.tensors[name].zero_()
    checkpoint.save(tmp_path / "zero", config=found.config, tensors=found.tensors, info={})
    torch.testing.assert_close(ours(tmp_path / "drafter"), ours(tmp_path / "zero"))


@pytest.mark.parametrize("more", [64, -64])
def test_an_embedding_with_other_padding_is_adapted(make, target, tmp_path, monkeypatch, more):
    """A P-EAGLE head with a trained embedding was refused, as if it had a copy of another target's."""
    original = TargetFacts.of_target
    monkeypatch.setattr(TargetFacts, "of_target", lambda target: replace(original(target), num_tokens=4000))

    def change(config, tensors):
        config["vocab_size"] += more
        for name in ("embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat((tensors[name], tensors[name][:64]))[: len(tensors[name]) + more].clone()
        config["draft_vocab_size"] += more

    drafter = make("peagle", own_embedding=True)
    place = export(drafter, "vllm", tmp_path / "head", change)
    assert "padding" in import_head(place, target, tmp_path / "drafter").notes[0]
    before, after = (checkpoint.load(path).tensors["embed_tokens.weight"] for path in (drafter, tmp_path / "drafter"))
    assert after.shape == before.shape and torch.equal(after[:4000], before[:4000])
    pool.load_drafter(str(tmp_path / "drafter"), target, DraftingRecipe())


def setting(**values):
    return lambda config, tensors: config.update(values)


def without(*names):
    return lambda config, tensors: [tensors.pop(name) for name in names]


def with_tensor(name, *shape):
    return lambda config, tensors: tensors.update({name: torch.ones(shape)})


def both(*changes):
    return lambda config, tensors: [change(config, tensors) for change in changes]


def reshaped(config, tensors):
    tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()


def repeated_d2t(config, tensors):
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def not_finite(config, tensors):
    tensors["norm.weight"][3] = torch.nan


BAD = {
    "other hidden size": (setting(hidden_size=128), "hidden_size is 128", "256"),
    "other target": (setting(target_hidden_size=128), "target_hidden_size is 128", "256"),
    "other vocabulary": (setting(vocab_size=32000), "vocab_size is 32000", "4096"),
    "vocabulary that only looks padded": (setting(vocab_size=4000), "vocab_size is 4000", "4096"),
    "two layers": (with_tensor("layers.1.mlp.up_proj.weight", 160, 256), "num_hidden_layers is 1", "must be 2"),
    "a part of a layer": (
        both(setting(num_hidden_layers=2), with_tensor("layers.1.mlp.up_proj.weight", 160, 256)),
        *("layers.1.self_attn.q_proj.weight is missing", "[128, 256]"),
    ),
    "window that is off and on": (
        setting(layer_types=["sliding_attention"], use_sliding_window=False), "use_sliding_window is False", "true"
    ),
    "tied": (setting(tie_word_embeddings=True), "tie_word_embeddings is True", "False"),
    "attention bias": (setting(attention_bias=True), "attention_bias is True", "False"),
    "norms of another type": (setting(norm_output="yes"), "norm_output is yes", "true or false"),
    "norm without its tensors": (setting(fc_norm=True), "fc_norm.0.weight is missing", "[256]"),
    "tensors without their norm": (with_tensor("input_norm.weight", 768), "input_norm.weight is a tensor", "no exact"),
    "two norms before fc": (setting(fc_norm=True, norm_before_fc=True), "fc_norm is True", "norm_before_fc"),
    "other activation": (setting(hidden_act="gelu"), "hidden_act is gelu", "silu"),
    "window without a layer": (setting(sliding_window=512), "sliding_window is 512", "layer_types"),
    "layer without a window": (setting(layer_types=["sliding_attention"]), "sliding_window is None", "64"),
    "short window": (setting(layer_types=["sliding_attention"], sliding_window=63), "sliding_window is 63", "64"),
    "layer of another type": (setting(layer_types=["chunked_attention"]), "layer_types is", "full_attention"),
    "quantised": (setting(quantization_config={"bits": 4}), "quantization_config", "None"),
    "scaled RoPE": (setting(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "rope_scaling is", "default"),
    "old scaled RoPE": (setting(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling is", "default"),
    "new scaled RoPE": (
        setting(rope_parameters={"rope_type": "yarn", "rope_theta": 1.0}), "rope_parameters is", "default"
    ),
    "layers out of range": (
        both(only_top, setting(eagle_aux_hidden_state_layer_ids=[1, 4, 10])), "[1, 4, 10]", "0 … 9"
    ),
    "layers not ascending": (
        both(only_top, setting(eagle_aux_hidden_state_layer_ids=[4, 1, 9])), "[4, 1, 9]", "ascend"
    ),
    "layers of another number": (both(only_top, setting(eagle_aux_hidden_state_layer_ids=[1, 4])), "fc.weight", "512"),
    "layers in no convention": (setting(eagle_aux_hidden_state_layer_ids=[0, 3, 8]), "while eagle_config", "SGLang"),
    "layers as text": (setting(eagle_aux_hidden_state_layer_ids="1,4,9"), "is 1,4,9", "list"),
    "no keys at all": (lambda config, tensors: config.clear(), "hidden_size is None", "Llama"),
    "missing tensor": (without("midlayer.mlp.up_proj.weight"), "midlayer.mlp.up_proj.weight is missing", "[160, 256]"),
    "no head": (without("lm_head.weight"), "d2t", "0"),
    "unknown tensor": (with_tensor("midlayer.self_attn.q_norm.weight", 16), "q_norm.weight is a tensor", "no exact"),
    "bias": (with_tensor("midlayer.self_attn.q_proj.bias", 128), "q_proj.bias is a bias", "no exact"),
    "wrong shape": (reshaped, "norm.weight is of shape [255]", "[256]"),
    "own embedding": (with_tensor("embed_tokens.weight", 4096, 256), "embed_tokens.weight is not", "builtin"),
    "no d2t": (without("d2t", "t2d"), "d2t is missing", "offsets"),
    "d2t absolute, unproven": (both(absolute, without("t2d")), "strictly increasing", "i + d2t[i]"),
    "d2t repeats": (repeated_d2t, "not a mapping", "distinct"),
    "other draft vocabulary": (setting(draft_vocab_size=299), "draft_vocab_size is 299", "must be 300"),
    "not finite": (not_finite, "norm.weight contains values", "again"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_unsupported_heads_are_refused_by_key(head, target, tmp_path, case):
    """Otherwise each would load, draft, and be rejected nearly always, without an error."""
    change, says, right = BAD[case]
    with pytest.raises(CheckpointError) as error:
        import_head(head(change=change), target, tmp_path / "drafter", format="eagle3")
    assert says in error.value.message
    assert str(tmp_path / "head") in error.value.message, "the file is named"
    assert right in (error.value.hint or "")
    assert not (tmp_path / "drafter").exists()


TYPES = {
    "rope_scaling": 3,
    "rope_parameters": [1],
    "eagle_config": True,
    "rms_norm_eps": None,
    "rope_theta": None,
    "num_key_value_heads": "2",
    "head_dim": [],
    "max_position_embeddings": "x",
    "draft_vocab_size": "300",
    "hidden_size": -1,
    "eagle_aux_hidden_state_layer_ids": ["1"],
}


@pytest.mark.parametrize("key", TYPES)
def test_a_value_of_the_wrong_type_is_named(head, target, tmp_path, key):
    """A wrong type used to raise TypeError or AttributeError."""
    place = head(change=lambda config, tensors: config.update({key: TYPES[key]}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}") as error:
        import_head(place, target, tmp_path / "drafter", format="eagle3")
    assert str(place) in error.value.message


def test_a_head_that_is_not_from_speculators_is_refused_by_key(head, target, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: speculators_model_type is None"):
        import_head(head(), target, tmp_path / "drafter", format="speculators")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_eagle31_heads_are_imported_unchanged(head, make, target, tmp_path, to, variant):
    """One of the variants is the default of `speculators`."""
    options = {"draft_vocab": 300, "taps": CUSTOM, **VARIANTS[variant]}
    import_head(head(to=to, **options), target, tmp_path / "drafter")
    before, after = checkpoint.load(make("eagle3", **options)), checkpoint.load(tmp_path / "drafter")
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    kept = {key: after.config["architecture"].get(key) for key in (*NORMS, "sliding_window", "num_layers")}
    assert {key: value for key, value in kept.items() if value is not None} == VARIANTS[variant]
    pool.load_drafter(str(tmp_path / "drafter"), target, DraftingRecipe())


def as_of_sglang(config, tensors):
    """Names that only SGLang runs: its name of the norm without vLLM's."""
    tensors["layers.1.hidden_norm.weight"] = tensors.pop("layers.1.input_layernorm.weight")


def under_both_names(config, tensors):
    tensors["layers.1.hidden_norm.weight"] = tensors["layers.1.input_layernorm.weight"].clone()


@pytest.mark.parametrize("change", [as_of_sglang, under_both_names, names_with_prefix])
def test_names_of_several_layers_are_recognized(head, make, target, tmp_path, change):
    options = {"draft_vocab": 300, "num_layers": 2}
    import_head(head(change=change, **options), target, tmp_path / "drafter")
    before, after = checkpoint.load(make("eagle3", **options)), checkpoint.load(tmp_path / "drafter")
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


SEVERAL = {
    "other norm in SGLang": (
        with_tensor("layers.1.hidden_norm.weight", 256), "layers.1.hidden_norm.weight", "vLLM computes"
    ),
    "fewer layers": (setting(num_hidden_layers=1), "num_hidden_layers is 1", "must be 2"),
    "more layers": (setting(num_hidden_layers=3), "num_hidden_layers is 3", "must be 2"),
    "one kind": (setting(layer_types=["sliding_attention"], sliding_window=64), "layer_types is", "2 equal kinds"),
    "mixed kinds": (
        setting(layer_types=["sliding_attention", "full_attention"], sliding_window=64), "layer_types", "one window"
    ),
    "missing norm": (without("layers.1.input_layernorm.weight"), "layers.1.input_layernorm.weight is missing", "[256]"),
}  # fmt: skip


@pytest.mark.parametrize("case", SEVERAL)
def test_unsupported_layers_are_refused_by_key(head, target, tmp_path, case):
    change, says, right = SEVERAL[case]
    with pytest.raises(CheckpointError) as error:
        import_head(head(change=change, draft_vocab=300, num_layers=2), target, tmp_path / "drafter")
    assert says in error.value.message and right in error.value.hint
    assert not (tmp_path / "drafter").exists()


def older_name(config, tensors):
    config["use_aux_norm"] = config.pop("fc_norm")


def nested(config, tensors):
    config["eagle_config"]["norm_before_fc"] = config.pop("norm_before_fc")


@pytest.mark.parametrize(("key", "change"), [("fc_norm", older_name), ("norm_before_fc", nested)])
def test_other_spellings_of_norms_are_recognized(head, target, tmp_path, key, change):
    """SGLang has an older name for fc_norm, and both engines accept norm_before_fc inside eagle_config."""
    import_head(head(change=change, **{key: True}), target, tmp_path / "drafter")
    assert checkpoint.load(tmp_path / "drafter").config["architecture"][key] is True


def test_an_eagle1_head_with_norm_keys_is_refused(head, target, tmp_path):
    place = head("eagle", change=setting(norm_output=True))
    with pytest.raises(CheckpointError, match=r"config\.json: norm_output is True"):
        import_head(place, target, tmp_path / "drafter")


@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize("options", [{"own_embedding": True}, {"sliding_window": 64, "layers": 3}, {"fc_norm": True}])
def test_peagle_heads_are_imported_unchanged(head, make, target, tmp_path, to, options):
    options = {"draft_vocab": 300, **options}
    import_head(head("peagle", to, **options), target, tmp_path / "drafter")
    before, after = checkpoint.load(make("peagle", **options)), checkpoint.load(tmp_path / "drafter")
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    architecture = after.config["architecture"]
    changed = {key for key, value in before.config["architecture"].items() if architecture.get(key) != value}
    assert changed <= {"max_position_embeddings"}


def engines_names(config, tensors):
    """Names saved by vLLM's classes: an extra feature norm per layer, and the older key of the mask token."""
    config["pard_token"] = config.pop("mask_token_id")
    tensors["layers.1.hidden_norm.weight"] = torch.ones(config["hidden_size"])


def test_peagle_heads_with_vllm_names_are_imported(head, make, target, tmp_path):
    import_head(head("peagle", change=engines_names, draft_vocab=300), target, tmp_path / "drafter")
    assert checkpoint.load(tmp_path / "drafter").config["architecture"]["mask_token_id"] == 9


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda config, tensors: config.pop("mask_token_id"), "mask_token_id"),
        (lambda config, tensors: config.update(mask_token_id=10**6), "mask_token_id"),
        (lambda config, tensors: config.update(num_hidden_layers=3), "num_hidden_layers is 3"),
        (lambda config, tensors: config.update(num_hidden_layers=1), "num_hidden_layers is 1"),
        (lambda config, tensors: config.update(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
        (lambda config, tensors: tensors.update(mask_hidden=torch.zeros(1, 1, 5)), "mask_hidden"),
        (setting(num_depths="["), r"num_depths is \["),
        (
            setting(num_depths=0, speculators_config={"proposal_methods": [{"speculative_tokens": 2.5}]}),
            "depths is 2.5",
        ),
    ],
)
def test_an_invalid_peagle_head_is_refused(head, target, tmp_path, change, key):
    with pytest.raises(CheckpointError, match=key):
        import_head(head("peagle", change=change, draft_vocab=300), target, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_tensors_of_the_wrong_dtype_are_named(head, target, tmp_path, family):
    def whole_numbers(config, tensors):
        name = sorted(name for name in tensors if name.endswith("weight"))[0]
        tensors[name] = tensors[name].to(torch.int32)

    place = head(family, "vllm", change=whole_numbers)
    with pytest.raises(CheckpointError, match=r"int32") as error:
        import_head(place, target, tmp_path / "drafter")
    assert str(place) in error.value.message and not (tmp_path / "drafter").exists()


def test_a_damaged_pickle_gives_a_one_line_error(head, target, tmp_path):
    """`weights_only` raises IndexError, KeyError, TypeError, AssertionError and others for broken opcodes."""
    place = head()
    torch.save(
        load_file(place / "model.safetensors"), place / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    (place / "model.safetensors").unlink()
    whole = (place / "pytorch_model.bin").read_bytes()
    draw, kinds = random.Random(0), set()
    for _ in range(60):
        damaged = bytearray(whole[:20_000])
        for _ in range(3):
            damaged[draw.randrange(1500)] = draw.randrange(256)
        (place / "pytorch_model.bin").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged") as error:
            head_directory.read(place)
        kinds.add(type(error.value.__cause__))
    usual = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError)
    assert any(not issubclass(kind, usual) for kind in kinds), "or nothing was tried"


@pytest.mark.parametrize("make_other", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipes_and_directories_are_not_opened(head, name, make_other):
    place = head()
    (place / name).unlink()
    make_other(place / name)
    with pytest.raises(CheckpointError, match=str(place)):
        head_directory.read(place)


def test_a_pickle_that_is_a_pipe_is_not_opened(tmp_path, pipe):
    with pytest.raises(CheckpointError, match="a named pipe, not a regular file"):
        head_directory.unpickled(pipe(tmp_path / "pytorch_model.bin"))


def test_an_lm_config_that_selects_code_is_refused(head, target, tmp_path):
    for key, value in {"attn_implementation": "a/b", "quantization_config": {"quant_method": "awq"}}.items():
        place = head("lm", "hf", change=lambda config, tensors: config.update({key: value}))  # noqa: B023
        with pytest.raises(CheckpointError, match=rf"config\.json: {key}") as error:
            import_head(place, target, tmp_path / "drafter")
        assert str(place) in error.value.message
        shutil.rmtree(place)


def test_speculators_heads_must_state_norm_before_residual(head, target, tmp_path):
    """If the flag is missing, vLLM assumes true and the package false."""
    place = head(to="speculators", change=lambda config, tensors: config.pop("norm_before_residual"))
    with pytest.raises(CheckpointError, match="norm_before_residual is missing"):
        import_head(place, target, tmp_path / "drafter")


def test_eagle1_copies_are_dropped_and_a_bias_is_refused(head, target, tmp_path):
    def with_copies(config, tensors):
        tensors["embed_tokens.weight"] = target.model.embedding.bfloat16()
        tensors["lm_head.weight"] = target.head_weight.clone()

    import_head(head("eagle", "sglang", change=with_copies), target, tmp_path / "drafter")
    (tmp_path / "head/export.json").write_text("{}")  # will be overwritten
    place = tmp_path / "head"
    tensors = load_file(place / "model.safetensors")
    save_file({**tensors, "fc.bias": tensors["fc.bias"] + 0.1}, place / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.bias is a bias that is not zero"):
        import_head(place, target, tmp_path / "two")


class Bomb:
    """A pickle that runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_a_malicious_pickle_is_not_run(head, target, tmp_path, name):
    place = head()
    (place / "model.safetensors").unlink()
    torch.save({"fc.weight": torch.ones(2), "x": Bomb(tmp_path / "executed")}, place / name)
    with pytest.raises(CheckpointError, match="not loaded"):
        import_head(place, target, tmp_path / "drafter")
    assert not (tmp_path / "executed").exists()
    torch.load(place / name, weights_only=False)
    assert (tmp_path / "executed").exists(), "negative control: it does run where it is let"


def test_pickled_tensors_are_read_and_safetensors_preferred(head, target, tmp_path):
    place = head()
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    import_head(place, target, tmp_path / "drafter")
    torch.save([1, 2], place / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="named tensors"):
        import_head(place, target, tmp_path / "two")
    save_file(checkpoint.load(tmp_path / "drafter").tensors, place / "model.safetensors")
    import_head(place, target, tmp_path / "two")


def test_directories_without_a_head_are_refused(target, tmp_path):
    with pytest.raises(UsageError, match="no head directory") as gone:
        head_directory.read(tmp_path / "nowhere")
    assert "hf download OWNER/NAME" in gone.value.hint  # not the local path, which the hub does not know
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        head_directory.read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights"):
        head_directory.read(tmp_path)
    save_file({"something": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="unknown format"):
        registry.detect(head_directory.read(tmp_path))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not JSON"):
        head_directory.read(tmp_path)


def test_an_lm_with_a_smaller_vocabulary_is_refused(head, target, tmp_path):
    def smaller(config, tensors):
        config["vocab_size"] = 4000
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:4000].clone()

    with pytest.raises(CheckpointError, match="vocab_size is 4000"):
        import_head(head("lm", "hf", change=smaller), target, tmp_path / "drafter")


def test_a_tied_lm_gets_a_vocabulary_matrix(head, target, tmp_path):
    def tie(config, tensors):
        config["tie_word_embeddings"] = True
        del tensors["lm_head.weight"]

    import_head(head("lm", "hf", change=tie), target, tmp_path / "drafter")
    found = checkpoint.load(tmp_path / "drafter").tensors
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_the_probe_warns_about_a_head_that_is_never_accepted(head, target, tmp_path, capsys):
    probe = {"prompts": 2, "max_new_tokens": 8}
    result = import_head(head(), target, tmp_path / "drafter", probe=probe)
    assert result.probe.prompts == 2 and result.probe.accept_rate < 0.05
    assert "wrong layer ids, d2t or RoPE" in capsys.readouterr().err


def test_the_probe_does_not_warn_about_a_good_head(target, tmp_path, capsys):
    """The target as its own drafter is accepted nearly always."""
    place = tmp_path / "lm"
    place.mkdir()
    for name in ("config.json", "model.safetensors"):
        (place / name).write_bytes((builtin_path() / name).read_bytes())
    result = import_head(place, target, tmp_path / "drafter", probe={"prompts": 2, "max_new_tokens": STEPS})
    assert result.probe.mat > 1.5
    assert "warning" not in capsys.readouterr().err


def test_an_existing_drafter_is_overwritten_only_when_asked(head, target, tmp_path):
    place = head()
    import_head(place, target, tmp_path / "drafter")
    with pytest.raises(UsageError, match="already contains a drafter"):
        import_head(place, target, tmp_path / "drafter")
    import_head(place, target, tmp_path / "drafter", overwrite=True)


def test_import_head_as_a_python_function(head, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = api.import_head(head=str(head()), target__dtype="fp32", probe__prompts=1, probe__max_new_tokens=4)
    assert result.drafter == "drafters/head"
    assert checkpoint.load(tmp_path / "drafters/head").info["format"] == "eagle3"
