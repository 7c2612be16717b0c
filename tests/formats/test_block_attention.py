"""Windows and causal layers of block-parallel heads: every format drafts what the engine computes."""

import json
from dataclasses import replace

import pytest
import torch

from specctl.drafters import checkpoint
from specctl.errors import CheckpointError
from specctl.formats import roundtrip
from specctl.formats.head import Head
from tests.formats import consumers
from tests.formats.conftest import export, import_head
from tests.formats.test_export import assert_same, drafted
from tests.formats.test_export import export as exported

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS = {"sliding_window": 64, "layer_types": (SLIDING, SLIDING)}
MIXED = {"sliding_window": 70, "layer_types": (SLIDING, FULL)}
MARKOV = {"rank": 8, "own_mask": False}
HEADS = {
    "windows": WINDOWS,
    "mixed": MIXED,
    "open windows": WINDOWS | {"is_causal": False},
    "causal": {"is_causal": True},
    "causal mixed": MIXED | {"is_causal": True},
    "dspark windows": WINDOWS | MARKOV,
    "dspark mixed": MIXED | MARKOV,
    "dspark open": MIXED | MARKOV | {"is_causal": False},
    "dflash2 windows": WINDOWS | {"conv_kernel_size": 2, "selector_rank": 4},
}
REFUSED = {("speculators", "mixed")}
FAST = {
    "vllm": ("mixed", "open windows", "causal mixed", "dspark windows"),
    "sglang": ("mixed", "causal mixed"),
    "speculators": ("windows", "mixed", "dspark open"),
}
CASES = [
    pytest.param(to, name, marks=() if name in FAST[to] else pytest.mark.slow, id=f"{to}-{name}")
    for to in FAST
    for name in HEADS
]


@pytest.mark.parametrize(("to", "name"), CASES)
def test_engines_draft_the_same_and_the_head_can_be_imported_again(make, ours, target, model, text, tmp_path, to, name):
    """Catches a key that the engine ignores, an off-by-one in the window, and a causal mask on the wrong layers."""
    drafter, place = make("dflash", **HEADS[name]), tmp_path / "out"
    if (to, name) in REFUSED:
        with pytest.raises(CheckpointError, match="only some layers of the head are causal"):
            exported(drafter, to, place)
        return
    result = exported(drafter, to, place)
    found = drafted(consumers.block, place, model, text, engine=to.replace("speculators", "vllm"), tokens=result.tokens)
    assert_same(found, ours(drafter))
    plain = {
        key: value for key, value in HEADS[name].items() if key not in ("sliding_window", "layer_types", "is_causal")
    }
    assert (found - ours(make("dflash", **plain))).abs().max() > 0.01, "the options change nothing"
    (place / "export.json").unlink()
    import_head(place, target, tmp_path / "back")
    assert_same(ours(tmp_path / "back"), ours(drafter))
    one, two = (checkpoint.load(path).config["architecture"] for path in (drafter, tmp_path / "back"))
    assert {key for key in one.keys() | two.keys() if one.get(key) != two.get(key)} <= {"max_position_embeddings"}


@pytest.mark.parametrize("name", ["windows", "mixed", "dflash2 windows"])
def test_the_vllm_command_selects_a_runner_that_supports_the_layers(make, tmp_path, name):
    """vLLM's V1 runner cannot mix windows with full attention."""
    (command, *_) = exported(make("dflash", **HEADS[name]), "vllm", tmp_path / "out").commands
    assert command.startswith("VLLM_USE_V2_MODEL_RUNNER=1") == (name != "windows")


def default_head(place, window, **outer):
    """Make an exported directory look like a DFlash head from `speculators train` 0.9, with keys of Qwen3Config."""
    config = json.loads((place / "config.json").read_text())
    layer = config["transformer_layer_config"]
    layer |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 28}
    layer |= {"layer_types": [SLIDING] * layer["num_hidden_layers"]}
    layer.pop("is_causal", None)
    config |= {"sliding_window_non_causal": False, **outer}
    (place / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("window", [64, 2048])
def test_a_default_speculators_head_drafts_as_in_vllm(make, ours, target, model, text, tmp_path, window):
    """All its layers are causal with a window of 2,048. The import used to refuse these heads."""
    place = export(make("dflash", own_mask=False), "speculators", tmp_path / "head")
    default_head(place, window)
    result = import_head(place, target, tmp_path / "drafter")
    found = drafted(consumers.block, place, model, text, engine="vllm", tokens=5)
    assert_same(ours(tmp_path / "drafter"), found)
    shape = checkpoint.load(tmp_path / "drafter").config["architecture"]
    assert (shape["sliding_window"], shape["layer_types"]) == (window, [SLIDING] * 2) and "is_causal" not in shape
    assert ["counts a window from each slot's own position" in note for note in result.notes] == [True]


def test_notes_name_differences_between_vllm_and_speculators(make, ours, target, model, text, tmp_path):
    """vLLM's dflash applies sliding_window_non_causal to all layers, and its dspark ignores it."""
    place = export(make("dflash", own_mask=False), "speculators", tmp_path / "one")
    change(place, sliding_window_non_causal=False)
    result = import_head(place, target, tmp_path / "causal")
    assert any("runs layers 0, 1 with a causal mask, but the package" in note for note in result.notes)
    assert_same(ours(tmp_path / "causal"), drafted(consumers.block, place, model, text, engine="vllm", tokens=5))
    place = export(make("dflash", **WINDOWS, **MARKOV), "speculators", tmp_path / "two")
    change(place, sliding_window_non_causal=True)
    result = import_head(place, target, tmp_path / "spark")
    assert any("layers 0, 1 with a causal mask, but the package" in note for note in result.notes)
    assert "is_causal" not in checkpoint.load(tmp_path / "spark").config["architecture"]


def change(place, **keys):
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | keys))


def nested(config, **keys):
    config["dflash_config"] = {
        key: value for key, value in (config["dflash_config"] | keys).items() if value is not None
    }


SPELLINGS = {
    "z-lab": (lambda c: (c.update(layer_types=[SLIDING, FULL]), nested(c, causal=None)), MIXED, 0),
    "nested causal": (lambda c: nested(c, causal=True), {"is_causal": True}, 1),
    "MiMo": (lambda c: nested(c, causal=None, use_swa=True, swa_window_size=70),
             {"sliding_window": 70, "layer_types": (SLIDING, SLIDING), "is_causal": False}, 1),
    "late windows": (lambda c: (c.pop("layer_types"), c.update(max_window_layers=1), nested(c, causal=None)),
                     {"sliding_window": 70, "layer_types": (FULL, SLIDING)}, 0),
    "is_causal wins": (lambda c: (c.update(is_causal=True), nested(c, causal=False)), {"is_causal": True}, 0),
    "more types than layers": (lambda c: c.update(layer_types=[FULL] * 8), {}, 0),
    "unused window": (lambda c: None, {}, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLINGS)
def test_spellings_of_windows_and_causality(make, target, tmp_path, case):
    """Catches a different precedence than vLLM's. A key that SGLang ignores gets a note."""
    spelling, expected, notes = SPELLINGS[case]

    def respell(config, tensors):
        config |= {"sliding_window": 70, "use_sliding_window": True}
        spelling(config)

    place = export(make("dflash"), "vllm", tmp_path / "head", respell)
    result = import_head(place, target, tmp_path / "drafter")
    shape = checkpoint.load(tmp_path / "drafter").config["architecture"]
    found = {key: shape[key] for key in ("sliding_window", "layer_types", "is_causal") if key in shape}
    assert found == {key: list(value) if isinstance(value, tuple) else value for key, value in expected.items()}
    assert [note for note in result.notes if "SGLang ignores" in note] == result.notes and len(result.notes) == notes
    if case not in ("late windows", "more types than layers"):
        config = json.loads((place / "config.json").read_text())
        kinds = expected.get("layer_types", (FULL, FULL))
        for layer, kind in enumerate(kinds):
            causal = expected.get("is_causal", kind == SLIDING)
            assert consumers.attention_in_vllm(config, layer) == (70 if kind == SLIDING else None, causal)


BAD = {
    "no size": ({"layer_types": [SLIDING, FULL], "use_sliding_window": True}, "sliding_window is None", "at least 64"),
    "too small": (WINDOWS | {"sliding_window": 63}, "sliding_window is 63", "at least 64"),
    "off": (WINDOWS | {"use_sliding_window": False}, "use_sliding_window is False", "must be true"),
    "other type": ({"layer_types": [FULL, "chunked_attention"]}, "layer_types is", "for each of the 2 layers"),
    "too few": ({"layer_types": [FULL]}, "layer_types is", "for each of the 2 layers"),
    "no flag": ({"is_causal": "yes"}, "is_causal is yes", "true or false"),
    "causal at the top": ({"causal": True}, "causal is True", "dflash_config"),
    "causal as a list": ({"causal": [True]}, "causal is [True]", "dflash_config"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_attention_keys_are_refused(make, target, tmp_path, case):
    """Otherwise a head would draft with another mask than in its engine, or a strange value would give a traceback."""
    keys, says, right = BAD[case]
    place = export(make("dflash"), "vllm", tmp_path / "head")
    change(place, **({"use_sliding_window": True} | keys))
    with pytest.raises(CheckpointError) as error:
        import_head(place, target, tmp_path / "drafter")
    assert says in error.value.message and right in (error.value.hint or "")


def test_a_speculators_head_must_state_its_causality(make, target, tmp_path):
    """Without the key, vLLM and the package disagree about a dflash head with windows."""
    place = export(make("dflash", **WINDOWS), "speculators", tmp_path / "head")
    config = json.loads((place / "config.json").read_text())
    del config["sliding_window_non_causal"]
    (place / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="sliding_window_non_causal is missing") as error:
        import_head(place, target, tmp_path / "drafter")
    assert "true in vLLM and false in the package" in error.value.hint


@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_the_export_check_notices_another_window(make, family):
    """A window is not among the weights, so it must compare the architecture too."""
    options = WINDOWS if family == "dflash" else {"sliding_window": 64, "draft_vocab": 64}
    found = checkpoint.load(make(family, **options))
    head = Head(family, found.config["architecture"], found.tensors)
    assert roundtrip.check(head, head) == 0
    with pytest.raises(CheckpointError, match="differs by inf"):
        roundtrip.check(head, replace(head, architecture=head.architecture | {"sliding_window": 128}))


def test_wrong_windows_change_the_engine_logits(make, ours, model, text, tmp_path):
    """Negative control of the engine arithmetic."""
    drafter = make("dflash", **WINDOWS)
    exported(drafter, "vllm", tmp_path / "out")
    for wrong in ({"sliding_window": 65}, {"is_causal": False}, {"layer_types": [SLIDING, FULL]}):
        before = (tmp_path / "out/config.json").read_text()
        change(tmp_path / "out", **wrong)
        found = drafted(consumers.block, tmp_path / "out", model, text, engine="vllm", tokens=5)
        assert (found - ours(drafter)).abs().max() > 1e-3, wrong
        (tmp_path / "out/config.json").write_text(before)


def test_the_text_is_longer_than_the_window(text):
    """Otherwise no test of this file could notice a window."""
    assert text[1] > 75 and torch.tensor(text[0]).dim() == 1
