"""Training one drafter for several adapters of a target: features of a text come from the adapter that wrote it."""

import copy
import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.decoding.target import load_target
from specctl.decoding.target_text import adapter_digest, load_target_text
from specctl.distillation.generate import distill
from specctl.drafters import checkpoint
from specctl.errors import CheckpointError, UsageError
from specctl.progress import Progress
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
from tests.toys.capture import CapturingEngine, raw_states
from tests.training.small import metrics, recipe, train

FP32 = {"dtype": "fp32", "device": "cpu"}
TAPS, LAST = (1, 3), 4

pytestmark = pytest.mark.usefixtures("four_layers")


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """A folder with adapters a and b, and answers of a, b and the bare target to the same prompts."""
    place = tmp_path_factory.mktemp("answered")
    prompts = [json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(14)]
    (place / "prompts.jsonl").write_text("".join(prompts))
    write_adapter("builtin", place / "a")
    write_adapter("builtin", place / "b", target_modules=["q_proj", "gate_proj"])
    for name in ("a", "b", "plain"):
        made = DistillRecipe(
            target=TargetRecipe(**FP32, adapter=None if name == "plain" else str(place / name)),
            data=DataRecipe(domain=["count"], prompts=str(place / "prompts.jsonl")),
            sampling=SamplingRecipe(max_new_tokens=10),
            temperatures=[0.0],  # sampled tokens of random adapters could not be predicted
            batch_size=14,
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
    some = corpus.train[::4]
    assert {example.adapter for example in some} == {"a", None, "b"}
    expected = [own[example.adapter].compute([as_loaded(example)]) for example in some]
    for mode in ("memory", "cached"):
        read = []
        again = load_target(**made.target.loading)
        again.identity, actual = target.identity, again.read_again
        again.read_again = lambda adapter, read=read, actual=actual: read.append(adapter) or actual(adapter)
        store = FeatureStore(again, TAPS)
        store.prepare(corpus.train, FeatureRecipe(mode=mode), here / "kept")
        assert read == ["a", "b"]
        for example, (wanted,) in zip(some, expected, strict=True):
            (mine,) = store.get([example])
            assert all(torch.equal(x, y) for x, y in zip(vars(mine).values(), vars(wanted).values(), strict=True))
        assert len(read) == 2


def as_loaded(example, model=None):
    return Example(example.index, example.prompt_id, example.tokens, example.prompt_length, model=model)


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


@pytest.mark.slow
def test_resuming_needs_the_same_adapters_and_is_exact(here, monkeypatch):
    made = asked(here, "a", "b", max_steps=4)
    train(made, here)
    stopped = here / "stopped"
    stopped.mkdir()
    made = made.model_copy(update={"output_dir": stopped / "drafter"})
    trainer = loop.make_trainer(made, Run.create("train-drafter", made, stopped))
    trainer.start()
    with Progress("train", total=4, unit="steps") as bar:
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


def served(*engines, mode="server", **changes):
    """Features of texts that a wrote come from the engine's model law, features of b's texts from its model bank."""
    urls = [one.url for one in engines] or ["http://127.0.0.1:9"]
    changes = {"adapters": {"law": "a", "bank": "b"}, **changes}
    return FeatureRecipe(mode=mode, server=ServerRecipe(urls=urls), **changes)


@pytest.fixture(scope="module")
def targets(answered):
    """The built-in target with adapter a, with b, and without one."""
    places = {"a": str(answered / "a"), "b": str(answered / "b"), None: None}
    return {name: load_target("builtin", **FP32, adapter=place) for name, place in places.items()}


@pytest.fixture
def engine(targets, tmp_path):
    """A server of the target with the models law (adapter a) and bank (adapter b)."""
    (tmp_path / "states").mkdir()
    own, law, bank = (partial(raw_states, targets[one], layers=(*TAPS, LAST)) for one in (None, "a", "b"))
    with CapturingEngine(targets[None].tokenizer, "vllm", tmp_path / "states", own) as server:
        server.adapters, server.by_model = ["law", "bank"], {"law": law, "bank": bank}
        yield server


def opened(made, target, place, adapters=None):
    """A store and texts of a recipe, with features from its engine."""
    made, adapters = with_adapters(made)
    target = copy.copy(target)
    target.identity = {**target.identity}
    use_all(target, made, adapters)
    texts = load_corpus(made, target, adapters).train
    store = FeatureStore(target, TAPS)
    if made.features.mode == "stream":
        store.open_stream(texts, made.features, iter(texts), 1)
    else:
        store.prepare(texts, made.features, place / "kept")
    return store, texts


@pytest.mark.parametrize("mode", ["server", "stream"])
def test_a_text_is_sent_to_the_engines_model_that_wrote_it(here, targets, engine, mode):
    """Bitwise equal to the features with the adapter, and the target's own texts go to the engine's first model."""
    store, texts = opened(asked(here, "a", "plain", "b", features=served(engine, mode=mode)), targets[None], here)
    assert [text.model for text in texts] == [{"a": "law", "b": "bank", None: None}[text.adapter] for text in texts]
    assert {text.adapter for text in texts[::4]} == {"a", "b", None}
    for place, text in enumerate(texts):
        (mine,) = store.get([text])
        if place % 4:
            continue
        (wanted,) = FeatureStore(targets[text.adapter], TAPS).compute([as_loaded(text)])
        assert all(torch.equal(x, y) for x, y in zip(vars(mine).values(), vars(wanted).values(), strict=True))
    if store.stream is not None:
        store.stream.close()


def name_only(source, model):
    """Record that an engine's model wrote the data of `source`, with an adapter that this machine does not have."""
    meta = json.loads((source / "meta.json").read_text())
    meta["target"] = {key: value for key, value in meta["target"].items() if "adapter" not in key}
    (source / "meta.json").write_text(json.dumps(meta | {"model": model}))


def test_data_of_an_engines_model_needs_no_adapter_here(here, targets, engine):
    """The data records the name of the model. The target's layers are not loaded, since they lack the adapter."""
    name_only(here / "distilled/a", "law")
    name_only(here / "distilled/b", "bank-1")
    shutil.rmtree("a")
    engine.logprobs = lambda ids: None
    recipe_of_both = asked(here, "a", "b", features=served(engine, adapters={"bank": "bank-1"}))
    made, adapters = with_adapters(recipe_of_both)
    assert made.features.whole_target is False and not loop.loads_layers_here(made, made.target.name)
    assert [author.model for author in adapters.values()] == ["law", "bank"]
    assert with_adapters(made) == (made, adapters)
    store, texts = opened(recipe_of_both, load_target("builtin", **FP32, whole=False), here)
    assert [one["adapter"] for one in store.target.identity["adapters"]] == ["law", "bank"]
    for text in (texts[0], texts[-1]):
        (mine,) = store.get([text])
        (wanted,) = FeatureStore(targets[{"law": "a", "bank": "b"}[text.model]], TAPS).compute([text])
        assert torch.equal(mine.taps, wanted.taps) and torch.equal(mine.teacher, wanted.teacher)
    alone = asked(here, "a", features=served(engine, adapters={}))
    assert [*with_adapters(alone)[1].values()] == [(None, "law")]
    other = FeatureRecipe(server=ServerRecipe(urls=[engine.url], model="bank"))
    assert [*with_adapters(asked(here, "a", features=other))[1].values()] == [(None, "bank")]
    with pytest.raises(UsageError, match=r"whole_target=true needs the adapters .* \(distilled/a with the engine's"):
        with_adapters(asked(here, "a", features=served(engine, adapters={}, whole_target=True)))


def test_features_of_two_adapters_are_stored_separately(here, targets, engine):
    """Otherwise a training would read the states of another adapter."""
    source = here / "distilled/plain"
    for model in ("law", "bank", None):
        named = FeatureRecipe(mode="server", server=ServerRecipe(urls=[engine.url], model=model))
        if model == "bank":
            name_only(source, "bank")
            named = served(engine, adapters={})
        made, adapters = with_adapters(asked(here, "plain", features=named))
        store, texts = FeatureStore(targets[{"law": "a", "bank": "b"}.get(model)], TAPS), None
        texts = load_corpus(made, store.target, adapters).train
        store.prepare([as_loaded(text, text.model) for text in texts], named, here / "kept")
        name_only(source, None)
    assert len(list((here / "kept").iterdir())) == 3


def test_models_that_a_server_lacks_or_swaps_are_refused_before_the_run(here, targets, engine):
    engine.adapters = ["law"]
    for mode in ("server", "stream"):
        made = asked(here, "a", "b", features=served(engine, mode=mode))
        with pytest.raises(UsageError, match=f"{engine.url} does not serve model 'bank'") as error:
            opened(made, targets[None], here)
        assert "it serves toy, law; start one: vllm serve" in error.value.hint
        assert "--enable-lora --lora-modules law=a bank=b --speculative-config" in error.value.hint
    engine.adapters = ["law", "bank"]
    engine.by_model = {"law": engine.by_model["bank"], "bank": engine.by_model["law"]}
    with pytest.raises(CheckpointError, match="do not match target builtin: they differ from its own states by"):
        opened(made, targets[None], here)
    assert engine.asked.total() <= 2


def test_adapters_without_the_name_of_a_model_are_refused(here):
    for domains in (["a", "b", "plain"], ["a", "b"]):
        with pytest.raises(UsageError, match=r"needs the names .* \(distilled/a with a, distilled/b with b\)") as error:
            with_adapters(asked(here, *domains, features=served(adapters={})))
        assert error.value.hint == "features.adapters.a=a features.adapters.b=b"
    made, several = with_adapters(asked(here, "a", features=served()))
    assert (made.target.adapter, made.features.server.model, several) == ("a", "law", {})


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
    assert adapters_in(here) == ["a", "b"] and store.mat >= 1
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
