"""Training one drafter for several adapters of a target: features of a text come from the adapter that wrote it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.decoding.models.identity import adapter_digest
from specctl.decoding.target import load_target
from specctl.decoding.target_text import load_target_text
from specctl.distillation.generate import distill
from specctl.drafters import checkpoint
from specctl.errors import CheckpointError, UsageError
from specctl.progress import track
from specctl.recipe import (
    DataRecipe,
    DistillRecipe,
    DrafterRecipe,
    FeatureRecipe,
    HeldOutRecipe,
    SamplingRecipe,
    TargetRecipe,
    TrainRecipe,
)
from specctl.recipe.server import ServerRecipe
from specctl.runs import Run
from specctl.training import features as feature_store
from specctl.training import loop
from specctl.training.adapters import use_all, with_adapters
from specctl.training.data import load_corpus
from specctl.training.datastore import collect
from specctl.training.example import Example
from specctl.training.features import FeatureStore
from tests.decoding.test_target_adapter import write_adapter
from tests.training.small import metrics, recipe, train

FP32 = {"dtype": "fp32", "device": "cpu"}
TAPS = (1, 5)


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """A folder with adapters a and b, and answers of a, b and the bare target to the same prompts."""
    place = tmp_path_factory.mktemp("answered")
    prompts = [json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(30)]
    (place / "prompts.jsonl").write_text("".join(prompts))
    write_adapter("builtin", place / "a")
    write_adapter("builtin", place / "b", target_modules=["q_proj", "gate_proj"])
    for name in ("a", "b", "plain"):
        made = DistillRecipe(
            target=TargetRecipe(**FP32, adapter=None if name == "plain" else str(place / name)),
            data=DataRecipe(domain=["count"], prompts=str(place / "prompts.jsonl")),
            sampling=SamplingRecipe(max_new_tokens=10),
            batch_size=30,
            output_dir=place / "distilled" / name,
        )
        distill(made, Run.create("distill", made, place / f"{name}.run"))
    return place


@pytest.fixture
def here(answered, tmp_path, monkeypatch):
    """Change into a copy of `answered` that a test may modify."""
    for name in ("a", "b", "distilled"):
        shutil.copytree(answered / name, tmp_path / name)
    for name in ("a", "b"):
        meta = tmp_path / "distilled" / name / "meta.json"
        meta.write_text(meta.read_text().replace(str(answered / name), name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(place, *domains, **changes):
    """Return the recipe of a small training on these domains."""
    held_out = HeldOutRecipe(prompts=4, max_new_tokens=4, fraction=0.3)
    values = dict(distilled=None, data=DataRecipe(domain=[*domains]), eval=held_out)
    return TrainRecipe(**{**vars(recipe(None, place)), **values, **changes})


def adapters_in(place):
    return [one["adapter"] for one in checkpoint.read_json(place / "drafter" / checkpoint.CONFIG)["target"]["adapters"]]


def test_features_come_from_the_adapter_that_wrote_the_text(here, monkeypatch):
    """Features are bitwise equal in memory and on disk, and each adapter is loaded once."""
    monkeypatch.setattr(feature_store, "SHARD_BYTES", 2**15)
    made, adapters = with_adapters(asked(here, "a", "plain", "b"))
    target = load_target(**made.target.loading)
    use_all(target, made, adapters)
    corpus = load_corpus(made, target, adapters)
    assert {example.adapter for example in corpus.train} == {"a", None, "b"}
    own = {one: FeatureStore(load_target("builtin", **FP32, adapter=one), TAPS) for one in ("a", None, "b")}
    for mode in ("memory", "cached"):
        read = []
        again = load_target(**made.target.loading)
        again.identity, actual = target.identity, again.read_again
        again.read_again = lambda adapter, read=read, actual=actual: read.append(adapter) or actual(adapter)
        store = FeatureStore(again, TAPS)
        store.prepare(corpus.train, FeatureRecipe(mode=mode), here / "kept")
        assert read == ["a", "b"]
        for example in corpus.train:
            (mine,), (wanted,) = store.get([example]), own[example.adapter].compute([as_loaded(example)])
            assert all(torch.equal(x, y) for x, y in zip(vars(mine).values(), vars(wanted).values(), strict=True))
        assert len(read) == 2


def as_loaded(example):
    return Example(example.index, example.prompt_id, example.tokens, example.prompt_length)


def test_one_drafter_trains_on_several_adapters_and_names_them(here):
    """A second run reuses the cached features of the first and reaches the same losses and weights."""
    made = asked(here, "a", "b", "plain", features=FeatureRecipe(mode="cached"), max_steps=4)
    result = train(made, here)
    assert adapters_in(here) == ["a", "b", None] and result.mat > 0 and result.domain == "count"
    read = (here / "drafter" / "README.md").read_text()
    assert "with `builtin` and its adapter `a` or its adapter `b` or no adapter." in read
    files = sorted(here.glob("distilled/a+b+plain.features/*/*.safetensors"))
    changed = [path.stat().st_mtime_ns for path in files]
    again = here / "again"
    again.mkdir()
    train(made.model_copy(update={"output_dir": again / "drafter"}), again)
    assert len(files) == 3 and [path.stat().st_mtime_ns for path in files] == changed
    assert [line.get("loss") for line in metrics(again)] == [line.get("loss") for line in metrics(here)]
    ours, theirs = (checkpoint.load(place / "drafter").tensors for place in (here, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_resuming_needs_the_same_adapters_and_is_exact(here, monkeypatch):
    made = asked(here, "a", "b", max_steps=4)
    train(made, here)
    stopped = here / "stopped"
    stopped.mkdir()
    made = made.model_copy(update={"output_dir": stopped / "drafter"})
    trainer = loop.make_trainer(made, Run.create("train-drafter", made, stopped))
    trainer.start()
    with track("train", total=4, unit="steps") as bar:
        trainer.step(bar)
        trainer.step(bar)
    trainer.save()
    trainer.close()
    shutil.copytree("a", "other")
    edit("a")
    with pytest.raises(
        CheckpointError, match="data in distilled/a was written with adapter a, which has changed since"
    ):
        train(made.model_copy(update={"resume": True}), stopped)
    shutil.rmtree("a")
    shutil.move("other", "a")
    train(made.model_copy(update={"resume": True}), stopped)
    ours, theirs = (checkpoint.load(place / "drafter").tensors for place in (here, stopped))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def edit(adapter):
    """Change the weights of an adapter in place."""
    path = f"{adapter}/adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path)


def test_the_target_adapter_follows_from_the_data_or_the_recipe(here):
    """Data of one adapter trains for that adapter, also in a pool. An adapter named in the recipe wins."""
    made, several = with_adapters(asked(here, "a"))
    assert made.target.adapter == "a" and not several
    pool = asked(here, "a", "b", "plain", each=True).per_domain()
    assert [with_adapters(one)[0].target.adapter for one in pool] == ["a", "b", None]
    named = asked(here, "a", "b", target=TargetRecipe(**FP32, adapter="b"))
    assert with_adapters(named) == (named, {})
    shutil.copytree("a", "same")
    shutil.copytree("distilled/a", "distilled/same")
    meta = here / "distilled/same/meta.json"
    meta.write_text(meta.read_text().replace('"adapter": "a"', '"adapter": "same"'))
    assert with_adapters(asked(here, "a", "same"))[0].target.adapter == "a"  # a copy counts as the same adapter


def test_a_prompt_is_held_out_for_all_adapters_in_one_half(here):
    """Otherwise a checkpoint would be measured on the prompts that selected it."""
    made, adapters = with_adapters(asked(here, "a", "b"))
    corpus = load_corpus(made, load_target_text(), adapters)
    halves = [{tuple(prompt.ids) for prompt in half} for half in (corpus.selection_prompts, corpus.report_prompts)]
    assert all(halves) and not halves[0] & halves[1]
    held = [tuple(prompt.ids) for prompt in corpus.held_out]
    assert len(held) == 2 * len(set(held)) and [prompt.adapter for prompt in corpus.held_out].count("b") == len(
        set(held)
    )
    assert not {tuple(example.tokens[: example.prompt_length]) for example in corpus.train} & {*held}
    swapped = dict(zip(adapters, reversed(adapters.values()), strict=True))
    assert load_corpus(made, load_target_text(), swapped).fingerprint != corpus.fingerprint


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"features": FeatureRecipe(mode="online")}, "features.mode=online cannot switch the target's adapter"),
        (
            {"features": FeatureRecipe(server=ServerRecipe(urls=["http://127.0.0.1:9"]))},
            "features.mode=server cannot switch .* different ones .distilled/a with a, distilled/b with b.",
        ),
        (
            {"target": TargetRecipe(**FP32, tensor_parallel=2), "features": FeatureRecipe(mode="cached")},
            "target.tensor_parallel cannot switch",
        ),
    ],
)
def test_feature_sources_that_cannot_switch_adapters_are_refused(here, changes, says):
    with pytest.raises(UsageError, match=says):
        with_adapters(asked(here, "a", "b", "plain", **changes))
    if "online" not in says:  # a single adapter needs no switch
        with pytest.raises(UsageError, match=r"uses no adapter of the target, .* \(distilled/a with a\)"):
            with_adapters(asked(here, "a", **changes))


def test_a_missing_changed_or_unsuitable_adapter_is_named(here, tiny_directory):
    outer = write_adapter("builtin", here / "outer", modules_to_save=["lm_head"])
    shutil.move("b", "elsewhere")
    with pytest.raises(CheckpointError, match=r"data in distilled/b was written with adapter b: .*b does not exist"):
        with_adapters(asked(here, "a", "b"))
    shutil.copytree(outer, "b")
    with pytest.raises(CheckpointError, match="data in distilled/b was written with adapter b, which has changed"):
        with_adapters(asked(here, "a", "b"))
    record(here / "distilled/b", "b")
    with pytest.raises(CheckpointError, match="adapter b changes lm_head of target builtin, and a drafter for several"):
        with_adapters(asked(here, "a", "b"))
    made = asked(here, "a", "b", arch="retrieval", objective="auto", drafter=DrafterRecipe())
    store = collect(made, Run(here))  # retrieval has no vocabulary head
    assert adapters_in(here) == ["a", "b"] and store.mat > 1
    shutil.rmtree("b")
    write_adapter(tiny_directory("llama"), here / "b")
    record(here / "distilled/b", "b")
    with pytest.raises(CheckpointError, match="adapter b does not fit target builtin"):
        loop.make_trainer(asked(here, "a", "b"), Run(here))


def test_an_adapter_that_changes_during_the_run_is_refused(here):
    made, adapters = with_adapters(asked(here, "a", "b"))
    target = load_target(**made.target.loading)
    use_all(target, made, adapters)
    target.use_adapter("a")
    edit("b")
    with pytest.raises(CheckpointError, match="adapter b has changed since the run began"):
        target.use_adapter("b")
    assert target.adapter == "a" and target.model is not None


def record(source, adapter):
    """Record in the data of `source` that the current files of the adapter wrote it."""
    meta = json.loads((source / "meta.json").read_text())
    meta["target"]["adapter_weights"] = adapter_digest(adapter)
    (source / "meta.json").write_text(json.dumps(meta))
