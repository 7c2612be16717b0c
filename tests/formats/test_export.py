"""An engine's arithmetic on an exported directory gives the same logits as the drafter here."""

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import rich.console
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specctl import api
from specctl.cli.export import show
from specctl.commands import export as exporting
from specctl.decoding.models.loading import ORIGINAL
from specctl.drafters import checkpoint
from specctl.drafters.dflash.drafter import FAMILY as dflash
from specctl.drafters.lm.config import stored
from specctl.errors import CheckpointError, DataError, UsageError
from specctl.formats import hf, registry, roundtrip, serving_commands
from specctl.formats.eagle3 import check_taps
from specctl.formats.head import Deployment, Head, TargetFacts
from specctl.formats.head_directory import HeadDirectory
from specctl.recipe import EvalServerRecipe, ExportRecipe
from tests.drafters.variants import NORMS, VARIANTS
from tests.formats import consumers
from tests.formats.conftest import CUSTOM, DEFAULT, STEPS
from tests.toys.engine import FakeEngine


def export(drafter, to, place, **options):
    return exporting.export(ExportRecipe(drafter=drafter, to=to, output_dir=place, check=True, **options))


def drafted(consumer, directory, model, text, **options):
    ids, committed = text
    return consumer(directory, model, ids[:committed], ids[committed : committed + STEPS - 1], **options)


def assert_same(found, expected):
    assert torch.equal(found.isfinite(), expected.isfinite()), "other tokens can be drafted"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("draft_vocab", [None, 700], ids=["full", "pruned"])
@pytest.mark.parametrize("taps", [DEFAULT, CUSTOM], ids=["default", "custom"])
@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators"])
def test_engines_compute_the_logits_of_an_eagle3_head(make, ours, model, text, tmp_path, to, taps, draft_vocab):
    """Wrong layers, a shift by one token, an absolute d2t, a missing norm or theta: each of these faults moves the
    logits."""
    drafter = make("eagle3", taps=taps, draft_vocab=draft_vocab)
    result = export(drafter, to, tmp_path / "out")
    layers = consumers.sglang_layers if to == "sglang" else consumers.vllm_layers
    assert_same(drafted(consumers.eagle3, tmp_path / "out", model, text, layers_of=layers), ours(drafter))
    assert result.max_difference < 1e-4
    names = load_file(tmp_path / "out/model.safetensors").keys()
    assert ({"d2t", "t2d"} <= names) == (draft_vocab is not None)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators"])
def test_engines_compute_the_logits_of_an_eagle31_head(make, ours, model, text, tmp_path, to, variant):
    """Every option alone, the pair of the paper, and the options that `speculators` trains. The export refuses an
    option by name if the engine ignores it."""
    options = {"taps": CUSTOM, "draft_vocab": 300}
    drafter = make("eagle3", **options, **VARIANTS[variant])
    unread = [key for key in ("norm_before_residual", "sliding_window") if key in VARIANTS[variant]]
    if to == "sglang" and unread:
        with pytest.raises(CheckpointError, match=f"has {' and '.join(unread)}, which SGLang 0.5.23 ignores"):
            export(drafter, to, tmp_path / "out")
        return
    result = export(drafter, to, tmp_path / "out")
    assert result.max_difference < 1e-4
    layers = consumers.sglang_layers if to == "sglang" else consumers.vllm_layers
    found = drafted(consumers.eagle3, tmp_path / "out", model, text, layers_of=layers)
    assert_same(found, ours(drafter))
    plain = ours(make("eagle3", **options))
    assert (found - plain).nan_to_num().abs().amax(-1).max() > 0.01, "the option changes nothing"


def test_both_engines_read_one_directory_of_several_layers(make, ours, model, text, tmp_path):
    """vLLM and SGLang read the norm of the second layer under different names. SGLang's directory has both names. The
    package `speculators` would refuse SGLang's name."""
    drafter, found = make("eagle3", draft_vocab=300, num_layers=2), {}
    for to in ("vllm", "sglang", "speculators"):
        export(drafter, to, tmp_path / to)
        found[to] = load_file(tmp_path / to / "model.safetensors").keys()
    assert found["vllm"] == found["speculators"] == found["sglang"] - {"layers.1.hidden_norm.weight"}
    assert "layers.0.hidden_norm.weight" in found["vllm"] and not any("midlayer" in name for name in found["sglang"])
    assert_same(drafted(consumers.eagle3, tmp_path / "sglang", model, text), ours(drafter))


PEAGLE = {
    "plain": {"draft_vocab": 300},
    "whole vocabulary": {"taps": CUSTOM, "layers": 1},
    "norms": {"draft_vocab": 300, "norm_before_fc": True, "norm_before_residual": True, "layers": 3},
    "fc_norm": {"draft_vocab": 300, "fc_norm": True},
    "window": {"draft_vocab": 300, "sliding_window": 64},
    "embedding": {"draft_vocab": 300, "own_embedding": True},
}


@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize("options", PEAGLE.values(), ids=PEAGLE)
def test_vllm_computes_the_logits_of_a_peagle_head(make, ours, model, text, tmp_path, to, options):
    """All depths in one pass, with the stand-in for tapped states. The result has no command if vLLM would miss a
    norm."""
    drafter = make("peagle", **options)
    result = export(drafter, to, tmp_path / "out", tokens=STEPS)
    assert result.max_difference < 1e-4
    if to == "speculators" and "fc_norm" in options:
        assert (result.commands, "ignores fc_norm" in result.notes[0]) == ([], True)
        return
    found = drafted(consumers.peagle, tmp_path / "out", model, text)
    assert_same(found, ours(drafter))
    assert (found[0] - found[1]).nan_to_num().abs().max() > 0.01, "negative control: depths differ"
    (command, *_) = result.commands
    spec = json.loads(command.split("--speculative-config ")[1].strip("'"))
    assert (spec["method"], spec["parallel_drafting"], spec["num_speculative_tokens"]) == ("eagle3", True, STEPS)


def test_peagle_drafts_no_deeper_than_it_was_trained(make, tmp_path):
    result = export(make("peagle", draft_vocab=300), "vllm", tmp_path / "out", tokens=STEPS + 5)
    assert f'"num_speculative_tokens": {STEPS + 1}' in result.commands[0]
    with pytest.raises(UsageError, match="sglang"):
        export(make("peagle", draft_vocab=300), "sglang", tmp_path / "two")


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_are_refused_for_the_reference_code(make, tmp_path, variant):
    drafter = make("eagle3", draft_vocab=64, **VARIANTS[variant])
    with pytest.raises(CheckpointError, match="which the reference code ignores") as error:
        export(drafter, "eagle", tmp_path / "out")
    assert all(key in error.value.message for key in VARIANTS[variant])
    assert "--to vllm" in error.value.hint and not (tmp_path / "out").exists()


def test_a_head_without_options_gets_no_option_keys(make, tmp_path):
    """vLLM's configuration has no key of EAGLE-3.1. The configuration for `speculators` sets each of these keys to
    False."""
    export(make("eagle3", draft_vocab=64), "vllm", tmp_path / "out")
    keys = {*NORMS, "sliding_window", "use_sliding_window", "layer_types"}
    assert not keys & json.loads((tmp_path / "out/config.json").read_text()).keys()
    export(make("eagle3", draft_vocab=64), "speculators", tmp_path / "two")
    found = json.loads((tmp_path / "two/config.json").read_text())
    assert [found[key] for key in NORMS] == [False] * 4
    assert not keys & found["transformer_layer_config"].keys()


def test_the_comparison_sees_wrong_layers(make, ours, model, text, tmp_path):
    """Negative control: SGLang would read other layers from a file that has only vLLM's key."""
    drafter = make("eagle3", taps=CUSTOM, draft_vocab=700)
    export(drafter, "vllm", tmp_path / "out")
    wrong = drafted(
        consumers.eagle3, tmp_path / "out", model, text, layers_of=lambda config, n: [i - 1 for i in CUSTOM]
    )
    assert (wrong - ours(drafter)).nan_to_num().abs().max() > 0.01


@pytest.mark.parametrize("to", ["vllm", "sglang", "eagle"])
def test_engines_compute_the_logits_of_an_eagle1_head(make, ours, model, text, tmp_path, to):
    drafter = make("eagle")
    export(drafter, to, tmp_path / "out")
    assert_same(drafted(consumers.eagle1, tmp_path / "out", model, text, engine=to), ours(drafter))


DFLASH2 = {"conv_kernel_size": 2, "selector_rank": 4}
BLOCKS = [
    *(("vllm", rank, vocab, own) for rank in (0, 8) for vocab in (None, 700) for own in (True, False)),
    *(("speculators", rank, vocab, own) for rank in (0, 8) for vocab, own in ((None, False), (700, True))),
    *(("sglang", *rest) for rest in ((0, None, True), (0, None, False), (8, None, False))),
]


@pytest.mark.parametrize(("to", "rank", "draft_vocab", "own_mask"), BLOCKS)
def test_engines_compute_the_logits_of_a_block(make, ours, model, text, tmp_path, to, rank, draft_vocab, own_mask):
    """A shift by one layer or by one slot, the target's row in the masks, a missing q-norm: each of these faults moves
    the logits."""
    drafter = make("dflash", rank=rank, draft_vocab=draft_vocab, own_mask=own_mask)
    result = export(drafter, to, tmp_path / "out")
    assert result.tokens == (6 if rank else 5) and result.max_difference < 1e-4
    engine = "sglang" if to == "sglang" else "vllm"
    found = drafted(consumers.block, tmp_path / "out", model, text, engine=engine, tokens=result.tokens)
    assert_same(found, ours(drafter))
    shipped = "mask_embedding.pt" in result.files
    assert shipped == (own_mask and not rank)


@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators"])
def test_engines_compute_the_logits_of_a_dflash2_block(make, ours, model, text, tmp_path, to):
    """The convolutions stay inside a block. The selector reads the states after the final norm."""
    drafter = make("dflash", **DFLASH2)
    result = export(drafter, to, tmp_path / "out")
    assert result.tokens == 5 and result.max_difference < 1e-4
    engine = "sglang" if to == "sglang" else "vllm"
    found = drafted(consumers.block, tmp_path / "out", model, text, engine=engine, tokens=5)
    assert_same(found, ours(drafter))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    said = config if to == "speculators" else config["dflash_config"]
    assert said | DFLASH2 | {"conv_group_size": 16, "selector_top_k": 16} == said
    assert to == "speculators" or '"dflash"' in result.commands[0] or "DFLASH " in result.commands[0]


@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators"])
def test_engines_compute_the_confidence_of_a_block(make, target, tmp_path, to):
    """Both engines have σ(proj [h ; W₁[y]]) as DSparkConfidenceHead. Each engine finds the keys in its own place."""
    drafter = make("dflash", rank=8, own_mask=False, confidence=True)
    export(drafter, to, tmp_path / "out")
    config, tensors = consumers.config_and_tensors(tmp_path / "out")
    if to == "speculators":
        config = consumers.speculators_block_in_vllm(config)
    assert config["enable_confidence_head"] is True and config["confidence_head_with_markov"] is True
    found = checkpoint.load(drafter)
    head = dflash.restore(found.config, found.tensors)
    hidden, before = torch.randn(5, target.hidden_size), torch.arange(5)
    inputs = torch.cat((hidden, tensors["markov_head.markov_w1.weight"][before].float()), -1)
    theirs = inputs @ tensors["confidence_head.proj.weight"].float().T + tensors["confidence_head.proj.bias"].float()
    ours = head.confidence_head(hidden, head.markov_head.markov_w1(before))
    torch.testing.assert_close(theirs[:, 0].sigmoid(), ours.sigmoid(), atol=1e-5, rtol=1e-5)


def test_the_comparison_sees_wrong_blocks(make, ours, model, text, tmp_path):
    """Negative controls: other layers, a block with one mask less, the target's row of the mask."""
    drafter = make("dflash")
    export(drafter, "vllm", tmp_path / "out")

    def differs(tokens=5):
        found = drafted(consumers.block, tmp_path / "out", model, text, engine="vllm", tokens=tokens)
        return (found - ours(drafter)).abs().max()

    assert differs() < 1e-4
    assert differs(tokens=4) > 0.01
    config = json.loads((tmp_path / "out/config.json").read_text())
    wrong = {"dflash_config": config["dflash_config"] | {"target_layer_ids": list(DEFAULT)}}
    (tmp_path / "out/config.json").write_text(json.dumps(config | wrong))
    assert differs() > 0.01
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    (tmp_path / "out/mask_embedding.pt").unlink()
    assert differs() > 0.01


@pytest.mark.parametrize(
    ("to", "options", "says"),
    [
        ("sglang", {"draft_vocab": 64}, "draft vocabulary of 64"),
        ("sglang", {"rank": 8}, "a learned mask embedding"),
        ("vllm", {"sample_from_anchor": True}, "no Markov head"),
        ("vllm", {"rank": 8, "sample_from_anchor": False}, "a Markov head"),
        ("speculators", {"sample_from_anchor": True}, "no Markov head"),
        ("vllm", {"taps": (2, 10)}, r"hidden_states \[2, 10\]"),
        ("vllm", {"rank": 8, "conv_kernel_size": 2}, "convolutions but no candidate selector"),
        ("speculators", {"selector_rank": 4}, "a candidate selector but no convolutions"),
        ("sglang", {"draft_vocab": 64, "conv_kernel_size": 2, "selector_rank": 4}, "draft vocabulary of 64"),
    ],
)
def test_blocks_that_an_engine_would_draft_differently_are_refused(make, tmp_path, to, options, says):
    with pytest.raises(CheckpointError, match=says):
        export(make("dflash", **options), to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_markov_head_for_scaled_logits_is_refused(make, target, tmp_path):
    """Engines add the head's output before they scale the logits. Our drafter adds it to the target's scaled logits."""
    found = checkpoint.load(make("dflash", rank=8))
    head = Head("dflash", found.config["architecture"], found.tensors)
    text = target.config.to_dict() | {"logits_scaling": 8.0}
    facts = replace(TargetFacts.of_target(target), text_config=AutoConfig.for_model(**text))
    with pytest.raises(CheckpointError, match="scales its logits"):
        registry.writer("dflash", "vllm").write(head, facts, 6, "vllm")


def test_a_block_is_served_whole(make, tmp_path):
    """`tokens` sets the draft length of other heads. A block of another length would compute other logits."""
    result = export(make("dflash"), "vllm", tmp_path / "one", tokens=3)
    spec = json.loads(result.commands[0].split("--speculative-config ")[1].strip("'"))
    assert (spec["method"], spec["num_speculative_tokens"], result.notes) == ("dflash", 5, [])
    result = export(make("dflash", rank=8), "vllm", tmp_path / "two", tokens=3)
    assert result.commands[0].startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve") and '"dspark"' in result.commands[0]
    assert "V2" in result.notes[0]
    result = export(make("dflash"), "sglang", tmp_path / "three")
    assert result.commands[0].endswith("three --speculative-dflash-block-size 6") and "token 9" in result.notes[0]
    result = export(make("dflash", rank=8, own_mask=False), "sglang", tmp_path / "four")
    assert "DSPARK" in result.commands[0] and result.commands[0].endswith("--speculative-dspark-block-size 6")


def test_transformers_reads_the_config_of_a_block(make, tmp_path):
    export(make("dflash"), "vllm", tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert config.layer_types == ["full_attention"] * 2 and config.sliding_window is None
    assert (config.head_dim, config.block_size, config.dflash_config["target_layer_ids"]) == (16, 6, [1, 4, 6])


def test_hydra_heads_of_a_target_with_a_shorter_context_are_exported(make, tmp_path):
    """We decode with LongRoPE targets up to their original context, which is shorter than the one in their config."""
    found = checkpoint.load(make("hydra"))
    architecture = found.config["architecture"]
    for key, value in (("max_position_embeddings", 64), ("rms_norm_eps", 0.5)):
        config = found.config | {"architecture": architecture | {key: value}}
        place = checkpoint.save(tmp_path / key, config=config, tensors=found.tensors, info={})
        if key == "max_position_embeddings":
            assert export(place, "hydra", tmp_path / "out").max_difference < 1e-4
        else:
            with pytest.raises(CheckpointError, match=f"the prefix layer has {key} {value}, but the target's"):
                export(place, "hydra", tmp_path / "two")


@pytest.mark.parametrize("family", ["medusa", "hydra"])
def test_the_original_repositories_compute_the_logits_of_heads(make, ours, model, text, tmp_path, family):
    drafter = make(family)
    result = export(drafter, family, tmp_path / "out")
    assert_same(drafted(getattr(consumers, family), tmp_path / "out", model, text), ours(drafter))
    assert "neither vLLM" in result.notes[0] and ("--to vllm" in result.notes[0]) == (family == "medusa")


@pytest.mark.parametrize(("family", "to"), [("medusa", "medusa"), ("hydra", "hydra"), ("eagle3", "speculators")])
def test_files_for_a_gguf_target_leave_its_original_to_the_user(make, target, tmp_path, family, to):
    """They named the GGUF file as the base model, which their loaders cannot read."""
    found = checkpoint.load(make(family))
    facts = replace(TargetFacts.of_target(target), name="/home/me/model.gguf")
    head, form = Head(family, found.config["architecture"], found.tensors), registry.writer(family, to)
    assert "/home/me" not in str(form.write(head, facts, STEPS, to).config)
    told = form.serving(head, to, Deployment(tmp_path, facts, STEPS))
    assert ORIGINAL in str(told)


def test_vllm_computes_the_logits_of_medusa_heads(make, ours, model, text, tmp_path):
    drafter = make("medusa")
    result = export(drafter, "vllm", tmp_path / "out", tokens=7)
    assert_same(drafted(consumers.medusa_in_vllm, tmp_path / "out", model, text), ours(drafter))
    assert result.max_difference < 1e-4 and "0.32" in result.notes[0]
    (command,) = result.commands
    spec = json.loads(command.split("--speculative-config ")[1].strip("'"))
    assert spec == {"method": "medusa", "model": str(tmp_path / "out"), "num_speculative_tokens": STEPS}, "one a head"


@pytest.mark.parametrize("key", ["name", "hidden_size", "num_layers", "vocab_size"])
@pytest.mark.parametrize("value", [None, [256]])
def test_an_error_names_the_wrong_key_of_a_target(target, key, value):
    with pytest.raises(CheckpointError, match=rf"target\.{key} is "):
        TargetFacts.of_identity({**target.identity, key: value})


def test_medusa_heads_with_a_draft_vocabulary_are_refused_for_vllm(target, tmp_path):
    """vLLM's `token_map` belongs to one head for all depths. With one head per depth, its loader stops at the number of
    rows."""
    shape = {"hidden_size": 256, "vocab_size": 4096, "draft_vocab_size": 64, "taps": [10], "draft_heads": 1}
    head = Head("medusa", {**shape, "num_layers": 1}, {})
    with pytest.raises(CheckpointError, match="draft vocabulary of 64"):
        registry.writer("medusa", "vllm").write(head, TargetFacts.of_target(target), 3, "vllm")


@pytest.mark.parametrize(
    ("to", "family", "architecture", "refused"),
    [
        *(("vllm", "eagle3", name, False) for name in ("LlamaForCausalLM", "MistralForCausalLM", "Olmo2ForCausalLM")),
        *(("vllm", "eagle3", name, True) for name in ("Gemma3ForCausalLM", "FalconForCausalLM", "OPTForCausalLM")),
        ("speculators", "eagle3", "Gemma2ForCausalLM", True),
        ("vllm", "eagle", "Gemma2ForCausalLM", False),
        ("vllm", "medusa", "Gemma2ForCausalLM", False),
        ("sglang", "eagle3", "Gemma3ForCausalLM", False),
        ("sglang", "eagle3", "Olmo2ForCausalLM", True),
        ("sglang", "eagle", "OPTForCausalLM", False),
        ("sglang", "eagle", "GPT2LMHeadModel", True),
        ("hf", "lm", "Gemma2ForCausalLM", False),
        ("vllm", "dflash", "Gemma2ForCausalLM", True),
        ("speculators", "dflash", "Gemma2ForCausalLM", True),
        ("vllm", "dflash", "Qwen3ForCausalLM", False),
        ("sglang", "dflash", "Qwen2ForCausalLM", True),
        ("sglang", "dflash", "Qwen3ForCausalLM", False),
        ("eagle", "eagle3", "Gemma2ForCausalLM", False),
    ],
)
def test_a_target_that_an_engine_refuses_gets_a_note_and_no_command(target, to, family, architecture, refused):
    """`vllm serve google/gemma-3-4b-it …` was once printed although vLLM refuses this target."""
    facts = replace(TargetFacts.of_target(target), architectures=[architecture])
    head = Head(family, {"markov_rank": 0, "own_mask": False, "num_layers": 1}, {})
    serving = registry.writer(family, to).serving(head, to, Deployment(Path("/out"), facts, 3))
    assert any(architecture in note for note in serving.notes) == refused
    assert bool(serving.commands) != refused


def test_an_export_for_a_refused_target_has_no_command(make, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting.TargetFacts, "of_identity", of_gemma(TargetFacts.of_identity))
    result = export(make("eagle3", draft_vocab=64), "vllm", tmp_path / "out")
    assert result.commands == [] and "does not serve EAGLE-3 heads for Gemma2ForCausalLM" in result.notes[0]
    assert (tmp_path / "out/model.safetensors").is_file()


def of_gemma(original):
    return lambda *args, **options: replace(original(*args, **options), architectures=["Gemma2ForCausalLM"])


@pytest.mark.parametrize("to", ["vllm", "sglang", "hf"])
def test_lm_loads_with_transformers(make, ours, target, text, tmp_path, to):
    drafter = make("lm")
    export(drafter, to, tmp_path / "out")
    ids, committed = text
    logits = consumers.causal_lm(tmp_path / "out", ids[:committed], ids[committed : committed + STEPS - 1])
    assert_same(logits, ours(drafter))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == target.tokenizer.get_vocab()


@pytest.mark.parametrize("to", ["vllm", "sglang", "eagle"])
def test_transformers_reads_the_config_of_a_head(make, target, tmp_path, to):
    """Engines read the configuration through AutoConfig, which rewrites RoPE keys. The trained theta must survive."""
    export(make("eagle3", draft_vocab=700), to, tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert (config.draft_vocab_size, config.vocab_size) == (700, target.vocab_size)
    assert config.max_position_embeddings == target.context_length, "a shorter one would cut the target's context"
    assert config.tie_word_embeddings is False
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert not any("eagle" in key for key in raw), "default layers need no key"


def test_commands_name_the_directory_and_the_target(make, tmp_path, target):
    place = str(tmp_path / "out")
    result = export(make("eagle3", draft_vocab=700), "vllm", tmp_path / "out", tokens=5)
    (command,) = result.commands
    assert command.startswith("vllm serve /")
    spec = json.loads(command.split("--speculative-config ")[1].strip("'"))
    assert spec == {"method": "eagle3", "model": place, "num_speculative_tokens": 5}
    (command,) = export(make("eagle"), "sglang", tmp_path / "two").commands
    assert f"--speculative-algorithm EAGLE --speculative-draft-model-path {tmp_path / 'two'} " in command
    assert "--speculative-num-draft-tokens 4" in command


@pytest.mark.parametrize(
    ("taps", "to", "says"),
    [
        ((2, 5, 10), "vllm", "taps"),
        ((0, 5, 7), "sglang", "taps"),
        ((5, 2, 7), "vllm", "taps"),
        ((2, 5), "vllm", "taps"),
        ((2, 5, 10), "speculators", "taps"),
        (CUSTOM, "eagle", "always"),
    ],
)
def test_taps_that_an_engine_cannot_provide_are_refused(make, tmp_path, taps, to, says):
    with pytest.raises(CheckpointError, match=says):
        export(make("eagle3", taps=taps, draft_vocab=64), to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_with_too_few_layers_is_not_asked_for_more(target):
    """The hint was to train with 3 layers in 1 … 2."""
    head = Head("eagle3", {"taps": [1, 2, 3]}, {})
    for layers, count, says in (
        (3, 3, "it has 3 layers"),
        (4, 3, "3 ascending layers in 1 … 3"),
        (1, None, "1 layers"),
    ):
        facts = replace(TargetFacts.of_target(target), num_layers=layers)
        with pytest.raises(CheckpointError) as refused:
            check_taps(replace(head, architecture={"taps": [0, 1, 2]}), facts, count)
        assert says in refused.value.hint


def test_speculators_take_any_number_of_taps(make, tmp_path):
    assert export(make("eagle3", taps=(2, 5), draft_vocab=64), "speculators", tmp_path / "out").max_difference < 1e-4


def test_a_format_refuses_a_family_that_it_cannot_hold(make, tmp_path):
    with pytest.raises(UsageError, match="cannot be written for hydra") as error:
        export(make("eagle3", draft_vocab=64), "hydra", tmp_path / "out")
    assert "vllm" in error.value.hint


def test_only_an_export_is_overwritten(make, tmp_path):
    drafter, place = make("eagle3", draft_vocab=64), tmp_path / "out"
    export(drafter, "vllm", place)
    with pytest.raises(UsageError, match="already contains"):
        export(drafter, "sglang", place)
    export(drafter, "sglang", place, overwrite=True)
    assert json.loads((place / "export.json").read_text())["to"] == "sglang"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("")
    with pytest.raises(UsageError, match="not a converted drafter"):
        export(drafter, "vllm", tmp_path / "mine", overwrite=True)


def test_a_failed_check_leaves_no_directory(make, tmp_path, monkeypatch):
    """The contract sets exit code 4. A directory that stayed could be served by mistake."""
    write = exporting._write

    def spoil(files, *rest):
        files.tensors["norm.weight"] = files.tensors["norm.weight"] * 1.01
        write(files, *rest)

    monkeypatch.setattr(exporting, "_write", spoil)
    with pytest.raises(CheckpointError, match="differs by") as error:
        export(make("eagle3", draft_vocab=64), "vllm", tmp_path / "out")
    assert error.value.exit_code == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("more", [64, -64])
def test_an_lm_gets_as_many_tokens_as_its_target(target, tmp_path, more, tied):
    """vLLM stops at start if the sizes of the vocabularies differ, also by padding alone."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    sizes |= {"vocab_size": target.vocab_size - more, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    found = Head("lm", stored(model.config), model.state_dict())
    facts = TargetFacts.of_target(target)
    files = hf.write(found, facts, 3, "vllm")
    assert files.config["vocab_size"] == target.vocab_size
    assert {len(files.tensors[name]) for name in ("model.embed_tokens.weight", "lm_head.weight")} == {target.vocab_size}
    back = hf.read(HeadDirectory(files.config, files.tensors, tmp_path / "model.safetensors"), facts)
    assert roundtrip.check(files.held, back) == 0
    ids = torch.arange(5, 20)[None]
    fitted = LlamaForCausalLM(LlamaConfig(**sizes | {"vocab_size": target.vocab_size}))
    fitted.load_state_dict(files.tensors)
    with torch.no_grad():
        before, after = model(ids).logits, fitted(ids).logits
    common = min(before.shape[-1], after.shape[-1])
    torch.testing.assert_close(before[..., :common], after[..., :common])
    assert (after.amax(-1) <= after[..., :common].amax(-1)).all(), "padding is never drafted"


@pytest.mark.parametrize(("family", "options"), [("eagle3", {"draft_vocab": 64}), ("dflash", DFLASH2), ("lm", {})])
def test_the_check_sees_every_tensor(make, family, options):
    """A check that missed a changed weight would be useless."""
    found = checkpoint.load(make(family, **options))
    head = Head(family, found.config["architecture"], found.tensors)
    assert roundtrip.check(head, head) == 0
    for name, tensor in found.tensors.items():
        changed = Head(family, head.architecture, {**found.tensors, name: tensor.float() + 0.1})
        assert roundtrip.difference(head, changed) > roundtrip.TOLERANCE, name
        without = {other: tensor for other, tensor in found.tensors.items() if other != name}
        assert roundtrip.difference(head, Head(family, head.architecture, without)) == float("inf"), name


def test_the_python_function_refuses_another_target(make, tmp_path, monkeypatch, tiny_directory):
    monkeypatch.chdir(tmp_path)
    drafter = make("eagle3", draft_vocab=64)
    result = api.export(drafter=str(drafter), to="vllm", tokens=2)
    assert result.output == "exported/eagle3-vllm"
    with pytest.raises(CheckpointError, match="hidden_size"):
        api.export(drafter=str(drafter), target__name=tiny_directory("llama"), output_dir="two")


def sweep(tmp_path, costs, shares=(0.8, 0.4, 0.1)):
    """The run directory of a sweep. A round that drafts k tokens for each of b texts takes costs[0] + costs[1] k b
    ms."""
    step, token = costs
    rows = []
    for load in (1, 8, 32):
        for server, mat, drafted in (("server", 1 + sum(shares), len(shares)), ("baseline", 1, 0)):
            token_s = (step + token * drafted * load) / mat / 1000
            rows.append(
                {
                    **{"server": server, "domain": "sql", "concurrency": load, "tokens": 1000, "token_s": token_s},
                    **{"request_tokens_per_s": 1 / token_s, "seconds": 1000 * token_s / load},
                    **{"mat": mat if drafted else None, "acceptance_by_position": list(shares) if drafted else []},
                }
            )
    (tmp_path / "result.json").write_text(json.dumps({"servers": rows}))
    return tmp_path


def argument(line, option):
    words = shlex.split(line)
    return words[words.index(option) + 1]


def test_vllm_gets_draft_lengths_by_load(make, tmp_path):
    """Two tokens pay over one while 2.2 / (10 + 2 b) > 1.8 / (10 + b), so b < 2.86. One token pays over none while 1.8
    / (10 + b) > 1 / 10, so b < 8. Three tokens never pay: 2.3 / (10 + 3 b) > 2.2 / (10 + 2 b) needs b < 0.5."""
    result = export(make("eagle3", draft_vocab=64), "vllm", tmp_path / "out", tune=sweep(tmp_path, (10, 1)))
    config = json.loads(argument(result.commands[0], "--speculative-config"))
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 2, 2], [3, 7, 1], [8, 32, 0]]
    assert config["num_speculative_tokens"] == result.tokens == 2, "the longest of them has to be provided for"
    assert any("piecewise" in note for note in result.notes) and any("above 32" in note for note in result.notes)
    assert [one.speedup[0] for one in result.tuning.ranges] == pytest.approx([2.2 / 1.2, 1.8 / 1.3, 1])
    assert not (tmp_path / "out" / serving_commands.ADAPTIVE).exists()


def test_sglang_gets_draft_lengths_by_load(make, tmp_path):
    result = export(make("eagle"), "sglang", tmp_path / "out", tune=sweep(tmp_path, (10, 1)))
    line = result.commands[0]
    file = Path(argument(line, "--speculative-adaptive-config"))
    assert "--speculative-adaptive " in line and argument(line, "--speculative-eagle-topk") == "1"
    assert file == tmp_path / "out" / serving_commands.ADAPTIVE and serving_commands.ADAPTIVE in result.files
    config = json.loads(file.read_text())
    assert list(config) == ["1", "3", "8"], "SGLang takes the last range that begins at or below a batch"
    best = {one.first: one.tokens for one in result.tuning.ranges}
    for first, entry in config.items():
        assert best[int(first)] in entry["candidate_steps"]
        assert entry.keys() == {"candidate_steps", "up_hysteresis", "down_hysteresis", "ceiling_coeff"}
    steps = int(argument(line, "--speculative-num-steps"))
    assert any(steps in entry["candidate_steps"] for entry in config.values()), "SGLang stops at start otherwise"
    assert int(argument(line, "--speculative-num-draft-tokens")) == steps + 1


def test_a_block_with_free_verification_is_drafted_whole_or_not_at_all(make, tmp_path):
    """In this sweep another text adds no time to a plain step, so a shorter draft saves nothing."""
    drafter = make("dflash", block_size=4)
    result = export(drafter, "vllm", tmp_path / "out", tune=sweep(tmp_path, (10, 0.2)))
    config = json.loads(argument(result.commands[0], "--speculative-config"))
    assert {tokens for *_, tokens in config["num_speculative_tokens_per_batch_size"]} == {0, result.tokens}


@pytest.mark.parametrize(("to", "family"), [("vllm", "eagle3"), ("sglang", "eagle")])
def test_notes_give_draft_lengths_by_context(make, tmp_path, to, family):
    """Both engines choose a draft length by load alone. The command has the lengths for all prompts, and the notes have
    the lengths for each range."""
    place = sweep(tmp_path, (10, 1))
    document = json.loads((place / "result.json").read_text())
    document["lengths"] = [
        row | {"over": over, "up_to": 2 * over, "requests": 9} for row in document["servers"] for over in (1024, 8192)
    ]
    for row in document["lengths"]:  # these rounds take as long, but accept fewer tokens
        if row["over"] == 8192 and row["server"] == "server":
            row |= {"token_s": row["token_s"] * row["mat"] / 1.05, "mat": 1.05, "acceptance_by_position": [0.05, 0, 0]}
    (place / "result.json").write_text(json.dumps(document))
    result = export(make(family), to, tmp_path / "out", tune=place)
    assert [one.up_to for one in result.tuning.contexts] == [2048, 16384]
    (refused,) = (note for note in result.notes if "cannot choose a draft length by context length" in note)
    assert "start one server per range of prompt lengths" in refused
    short, long = result.notes[result.notes.index(refused) + 1 :][:2]
    key = (
        '"num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 7, 1], [8, 32, 0]]' if to == "vllm" else "candidate_"
    )
    assert short.startswith("prompts of 1025 to 2048 tokens: ") and key in short
    assert long == "prompts of 8193 to 16384 tokens: serve them without a drafter"
    console = rich.console.Console(width=150)
    with console.capture() as shown:
        console.print(show(asdict(result)))
    assert "8193–16384" in shown.get() and "prompt tokens" in shown.get()


def test_a_sweep_in_which_drafts_never_pay(make, tmp_path):
    """vLLM refuses a schedule with drafts of no tokens."""
    tune = sweep(tmp_path, (10, 10), shares=(0.1,))
    result = export(make("eagle3", draft_vocab=64), "vllm", tmp_path / "out", tune=tune)
    config = json.loads(argument(result.commands[0], "--speculative-config"))
    assert "num_speculative_tokens_per_batch_size" not in config and config["num_speculative_tokens"] == 3
    assert exporting.NEVER_FASTER in result.notes


@pytest.mark.parametrize(
    ("family", "to", "error", "says"),
    [
        ("eagle3", "eagle", UsageError, "depend on the load need an engine"),
        ("lm", "sglang", UsageError, "only of EAGLE and EAGLE-3, and this drafter is lm"),
        ("dflash", "vllm", DataError, "drafts of 3 tokens"),
    ],
)
def test_schedules_that_no_engine_reads_are_refused(make, tmp_path, family, to, error, says):
    with pytest.raises(error, match=says):
        export(make(family), to, tmp_path / "out", tune=sweep(tmp_path, (10, 1)))
    assert not (tmp_path / "out").exists()


def test_a_schedule_and_tokens_exclude_each_other():
    with pytest.raises(ValueError, match="leave tokens out"):
        ExportRecipe(drafter="x", tune="y", tokens=3)


def test_a_result_of_eval_server_becomes_a_schedule(make, target, tmp_path):
    """`export` reads the document that `eval-server` writes, and shows the tables."""
    with FakeEngine(target.tokenizer, seconds=0.05) as engine, FakeEngine(target.tokenizer, seconds=0.05) as plain:
        engine.histogram = [1, 2, 1]
        sizes = {"limit": 6, "concurrency": [1, 6], "output_dir": tmp_path / "run"}
        servers = {"server": {"urls": [engine.url]}, "baseline_server": {"urls": [plain.url]}}
        api.execute("eval-server", EvalServerRecipe.model_validate(sizes | servers))
    result = export(make("eagle3", draft_vocab=64), "vllm", tmp_path / "out", tune=tmp_path / "run")
    assert result.tuning.acceptance == pytest.approx([0.75, 1 / 3]) and result.tuning.drafted == 2
    assert [fit.concurrency for fit in result.tuning.fits] == [1, 6]
    console = rich.console.Console(width=150)
    with console.capture() as shown:
        console.print(show(asdict(result)))
    assert "texts at once" in shown.get() and "0.75, 0.33" in shown.get()
