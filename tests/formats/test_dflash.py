"""Importing block-parallel heads: equivalent spellings give the same head, and unsupported heads are refused by key."""

import pytest
import torch

from specctl.drafters import checkpoint, pool
from specctl.errors import CheckpointError
from specctl.formats import registry
from specctl.formats.head import TargetFacts
from specctl.recipe import DraftingRecipe
from tests.formats.conftest import export, import_head

PRUNED, MARKOV = {"draft_vocab": 300}, {"rank": 8}
CONFIDENT = MARKOV | {"confidence": True}
OWN = {"own_mask": False}
DFLASH2 = {"conv_kernel_size": 2, "selector_rank": 4}


@pytest.fixture
def head(make, tmp_path):
    """Return `head(to, change, **options)`, which writes a foreign directory modified by `change(config, tensors)`."""

    return lambda to="vllm", change=None, **options: export(make("dflash", **options), to, tmp_path / "head", change)


@pytest.mark.parametrize(
    "options", [{}, PRUNED, MARKOV, PRUNED | MARKOV, OWN, OWN | MARKOV, CONFIDENT, DFLASH2], ids=str
)
@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_an_exported_head_is_imported_unchanged(head, make, target, tmp_path, to, options):
    result = import_head(head(to, **options), target, tmp_path / "drafter")
    assert (result.format, result.family, result.notes) == ("dflash" if to == "vllm" else to, "dflash", [])
    before, after = checkpoint.load(make("dflash", **options)), checkpoint.load(tmp_path / "drafter")
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    one, two = before.config["architecture"], after.config["architecture"]
    assert {key for key in one if one[key] != two.get(key)} <= {"max_position_embeddings"}
    pool.load_drafter(str(tmp_path / "drafter"), target, DraftingRecipe())


def names_of_others(config, tensors):
    for name in list(tensors):
        other = name.replace("hidden_norm.", "encoder.output_norm_enc.")
        other = f"model.{other}" if other.startswith("layers.") else other
        tensors[f"encoder.{other}" if other.startswith("fc.") else other] = tensors.pop(name)


def keys_at_the_top(config, tensors):
    config |= config.pop("dflash_config")
    del config["draft_vocab_size"]


def as_published(config, tensors):
    """Spelling of Qwen3-8B: a tie and a window without effect, and rotary keys of transformers 5."""
    config |= {"tie_word_embeddings": True, "sliding_window": 4096, "use_sliding_window": False, "num_target_layers": 8}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    config["dflash_config"].pop("causal")


@pytest.mark.parametrize("change", [names_of_others, keys_at_the_top, as_published])
def test_other_spellings_give_the_same_head(head, make, target, tmp_path, change):
    import_head(head(change=change), target, tmp_path / "drafter")
    before, after = checkpoint.load(make("dflash")), checkpoint.load(tmp_path / "drafter")
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    assert after.config["architecture"]["taps"] == before.config["architecture"]["taps"]
    assert after.config["architecture"]["rope_theta"] == 5000.0


def test_a_missing_rope_theta_defaults_to_the_engine_value(head, target, tmp_path):
    import_head(head(change=lambda config, tensors: config.pop("rope_theta")), target, tmp_path / "drafter")
    assert checkpoint.load(tmp_path / "drafter").config["architecture"]["rope_theta"] == 1e6


def without_markov(config, tensors):
    config["confidence_head_with_markov"] = False
    tensors["confidence_head.proj.weight"] = torch.ones(1, 256)


@pytest.mark.parametrize(
    ("change", "why"),
    [(lambda config, tensors: config.update(enable_confidence_head=False), "off"), (without_markov, "Markov")],
)
def test_an_unsupported_confidence_head_is_dropped_with_a_note(head, target, tmp_path, change, why):
    result = import_head(head(change=change, **CONFIDENT), target, tmp_path / "drafter")
    assert "confidence head" in result.notes[0] and why in result.notes[0]
    assert not any("confidence" in name for name in checkpoint.load(tmp_path / "drafter").tensors)


def with_embedding(target, row=None):
    def change(config, tensors):
        embedding = target.model.embedding.float().clone()
        if row is not None:
            embedding[row] += 1.0
        tensors["embed_tokens.weight"] = embedding.bfloat16()
        tensors["lm_head.weight"] = target.head_weight.clone()

    return change


def test_copies_of_target_matrices_are_recognized(head, target, tmp_path):
    """If only the mask row of the embedding differs, it becomes the head's own mask; other differences are refused."""
    import_head(head(change=with_embedding(target), **OWN), target, tmp_path / "one")
    found = checkpoint.load(tmp_path / "one")
    assert not found.config["architecture"]["own_mask"] and "lm_head.weight" not in found.tensors
    for file in (tmp_path / "head").iterdir():
        file.unlink()
    import_head(head(change=with_embedding(target, row=9), **OWN), target, tmp_path / "two")
    found = checkpoint.load(tmp_path / "two")
    expected = (target.model.embedding[9].float() + 1.0).bfloat16().float()
    assert found.config["architecture"]["own_mask"] and torch.equal(found.tensors["mask_embedding"], expected)
    for file in (tmp_path / "head").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is not the target's"):
        import_head(head(change=with_embedding(target, row=10), **OWN), target, tmp_path / "three")


@pytest.mark.parametrize("more", [64, -64])
@pytest.mark.parametrize("options", [MARKOV | OWN, MARKOV | PRUNED | OWN], ids=str)
def test_a_vocabulary_with_other_padding_is_adapted(head, target, tmp_path, monkeypatch, options, more):
    original = TargetFacts.of_target
    monkeypatch.setattr(
        TargetFacts, "of_target", lambda target: TargetFacts(**{**vars(original(target)), "num_tokens": 3000})
    )

    def change(config, tensors):
        config["vocab_size"] += more
        if "draft_vocab" not in options:
            config["draft_vocab_size"] += more
        if "t2d" in tensors:
            del tensors["t2d"]  # used in training only
            tensors["d2t"] = torch.full_like(tensors["d2t"], 7)
        for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
            weight = tensors[name]
            if len(weight) == target.vocab_size:
                tensors[name] = torch.cat((weight, weight[:64])) if more > 0 else weight[:more].clone()

    result = import_head(head(change=change, **options), target, tmp_path / "drafter")
    assert "padding" in result.notes[0]
    pool.load_drafter(str(tmp_path / "drafter"), target, DraftingRecipe())


def setting(**values):
    return lambda config, tensors: config.update(values)


def nested(**values):
    return lambda config, tensors: config["dflash_config"].update(values)


def without(*names):
    return lambda config, tensors: [(config if name in config else tensors).pop(name) for name in names]


def with_tensor(name, *shape):
    return lambda config, tensors: tensors.update({name: torch.ones(shape)})


BAD = {
    "no block size": ({}, without("block_size"), "block_size is None", "at least 2"),
    "block of one": ({}, setting(block_size=1), "block_size is 1", "at least 2"),
    "no mask token": ({}, lambda config, _: (config.pop("mask_token_id"), config["dflash_config"].pop("mask_token_id")),
                      "mask_token_id is None", "0 … 4095"),
    "mask outside": ({}, nested(mask_token_id=4096), "mask_token_id is 4096", "0 … 4095"),
    "no layers": ({}, lambda config, _: config["dflash_config"].pop("target_layer_ids"), "target_layer_ids is None",
                  "from 0"),
    "layers beyond": ({}, nested(target_layer_ids=[1, 9]), "target_layer_ids is [1, 9]", "below 9"),
    "layers not ascending": ({}, nested(target_layer_ids=[4, 1]), "target_layer_ids is [4, 1]", "ascending"),
    "sinks": ({}, nested(attention_sink_bias=True), "attention_sink_bias is True", "False"),
    "sink tensors": ({}, with_tensor("layers.0.self_attn.attention_sink_bias", 8), "sink_bias is a", "no exact"),
    "biases": ({}, setting(attention_bias=True), "attention_bias is True", "False"),
    "value scale": ({}, nested(attention_value_scale=0.5), "attention_value_scale is 0.5", "1.0"),
    "interleaved rotation": ({}, setting(is_neox_style=False), "is_neox_style is False", "True"),
    "domino": ({}, nested(projector_type="domino"), "projector_type is domino", "missing"),
    "anchor drafts": ({}, nested(sample_from_anchor=True), "sample_from_anchor is True", "must be False"),
    "anchor does not": (MARKOV, setting(sample_from_anchor=False), "sample_from_anchor is False", "must be True"),
    "not dflash2": ({}, setting(architectures=["DFlash2DraftModel"]), "conv_kernel_size is None", "must be given"),
    "no dflash2": (DFLASH2, setting(architectures=["DFlashDraftModel"]), "conv_kernel_size is 2", "missing"),
    "groups": (DFLASH2, nested(conv_group_size=48), "conv_group_size is 48", "must divide hidden_size"),
    "longer than a block": (DFLASH2, nested(conv_kernel_size=9), "conv_kernel_size is 9", "must not exceed"),
    "another selector": (DFLASH2, nested(selector_rank=5), "predecessor_codebook is of shape", "[4096, 5]"),
    "scaled embedding": (DFLASH2, nested(input_embedding_scale=2.0), "input_embedding_scale is 2.0", "1.0"),
    "gated": (MARKOV, setting(markov_head_type="gated"), "markov_head_type is gated", "vanilla"),
    "no rank": (MARKOV, without("markov_rank"), "markov_rank is None", "columns"),
    "other rank": (MARKOV, setting(markov_rank=4), "markov_w1.weight is of shape", "[4096, 4]"),
    "markov without a name": ({}, with_tensor("markov_head.markov_w1.weight", 4096, 8), "markov_rank is 0", "columns"),
    "confidence without its offset": (CONFIDENT, without("confidence_head.proj.bias"), "proj.bias is missing", "[1]"),
    "narrow confidence": (CONFIDENT, with_tensor("confidence_head.proj.weight", 1, 256), "proj.weight is of shape",
                          "[1, 264]"),
    "no head": (PRUNED, without("lm_head.weight"), "lm_head.weight is missing", "300 of 4096"),
    "no mapping": (PRUNED, without("d2t", "t2d"), "d2t is missing", "offsets"),
    "own head": ({}, with_tensor("lm_head.weight", 4096, 256), "lm_head.weight is not the target's", "builtin"),
    "one layer": ({}, setting(num_hidden_layers=1), "layers.1.", "no exact"),
    "no head dimension": ({}, without("head_dim"), "head_dim is missing", "must be given"),
    "no list of classes": ({}, setting(architectures=5, dflash_config={}), "architectures is 5", "must be a list"),
    "scaled rotation": ({}, setting(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope_scaling is", "default"),
    "other target": ({}, setting(hidden_size=128), "hidden_size is 128", "256"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_unsupported_heads_are_refused_by_key(head, target, tmp_path, case):
    options, change, says, right = BAD[case]
    with pytest.raises(CheckpointError) as error:
        import_head(head(change=change, **OWN, **options), target, tmp_path / "drafter")
    assert says in error.value.message and str(tmp_path / "head") in error.value.message
    assert right in (error.value.hint or "")
    assert not (tmp_path / "drafter").exists()


MASKS = {
    "other token": ({"mask_token_id": 8, "embedding": torch.ones(256)}, "mask_token_id is 8"),
    "other size": ({"mask_token_id": 9, "embedding": torch.ones(255)}, "embedding is of shape"),
    "one a slot": ({"mask_token_id": 9, "embedding": torch.ones(5, 256), "per_position": True}, "per_position is True"),
    "no embedding": ({"mask_token_id": 9}, "embedding is None"),
    "not finite": (torch.full((256,), torch.nan), "embedding is"),
}


@pytest.mark.parametrize("case", MASKS)
def test_invalid_mask_files_are_refused(head, target, tmp_path, case):
    place = head()
    content, says = MASKS[case]
    torch.save(content, place / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=says):
        import_head(place, target, tmp_path / "drafter")


def test_a_bare_tensor_is_accepted_as_a_mask(head, target, tmp_path):
    place = head()
    torch.save(torch.ones(1, 256), place / "mask_embedding.pt")
    import_head(place, target, tmp_path / "drafter")
    assert torch.equal(checkpoint.load(tmp_path / "drafter").tensors["mask_embedding"], torch.ones(256))


def test_speculators_heads_must_state_sample_from_anchor(head, target, tmp_path):
    """If the key is missing, the package assumes true for dspark and vLLM false."""
    place = head("speculators", without("sample_from_anchor"), **MARKOV)
    with pytest.raises(CheckpointError, match="sample_from_anchor is missing"):
        import_head(place, target, tmp_path / "drafter")


def test_speculators_heads_may_not_sample_from_the_anchor(head, make, target, tmp_path):
    drafter = make("dflash", sample_from_anchor=False, **MARKOV)
    import_head(head("speculators", sample_from_anchor=False, **MARKOV), target, tmp_path / "drafter")
    found, before = checkpoint.load(tmp_path / "drafter"), checkpoint.load(drafter)
    assert found.config["architecture"]["sample_from_anchor"] is False
    assert torch.equal(found.tensors["mask_embedding"], before.tensors["mask_embedding"])


def test_every_dflash_architecture_is_detected(head):
    """This includes architectures that are refused later, so that the error names them."""
    from specctl.formats import head_directory

    for name in ("DFlash2DraftModel", "DFlashLagunaForCausalLM", "Gemma4DSparkModel"):
        place = head(change=setting(architectures=[name]), **PRUNED)
        assert registry.detect(head_directory.read(place)) == "dflash"
        for file in place.iterdir():
            file.unlink()
