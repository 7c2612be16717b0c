"""Features from an engine equal our own where its states do, and train the same head.

A server with other states than the target's is refused after a few requests.
"""

import json
from functools import partial

import pytest
import torch
import transformers
from safetensors import safe_open

from specctl.decoding.plan import plan_rows
from specctl.decoding.target import load_target
from specctl.drafters import checkpoint as drafters
from specctl.engines.records import EngineError
from specctl.errors import CheckpointError, Interrupted, UsageError
from specctl.progress import interrupts
from specctl.recipe import FeatureRecipe, ServerRecipe, TrainRecipe
from specctl.runs import Run
from specctl.training import features, loop
from specctl.training.data import load_corpus
from specctl.training.features import FeatureStore
from tests.conftest import ARCHITECTURES
from tests.toys.capture import CapturingEngine, raw_states
from tests.training.small import recipe
from tests.training.test_features import same, shards

TAPS = (2, 5, 7)
LAST = 10


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(features, "SHARD_BYTES", 2**20)


@pytest.fixture
def engine(target, tmp_path):
    """A capture server of the target for `TAPS`."""
    files = tmp_path / "files"
    files.mkdir()
    states = partial(raw_states, target, layers=(*TAPS, LAST))
    with CapturingEngine(target.tokenizer, "vllm", files, states) as server:
        yield server


@pytest.fixture
def last_only(target, tmp_path):
    """An SGLang server of the target: last-layer states after the final norm."""
    with CapturingEngine(
        target.tokenizer, "sglang", tmp_path, partial(raw_states, target, layers=(LAST,), normed=True)
    ) as one:
        yield one


@pytest.fixture(scope="module")
def examples(distilled, target, tmp_path_factory):
    return load_corpus(recipe(distilled, tmp_path_factory.mktemp("corpus")), target).train[:16]


def asking(*engines, **options):
    return FeatureRecipe(server=ServerRecipe(urls=[engine.url for engine in engines], **options))


def served(target, examples, place, features_recipe, taps=TAPS):
    store = FeatureStore(target, taps)
    store.prepare(examples, features_recipe, place)
    return store


def train(distilled, place, features_recipe, **changes):
    """Return the losses of three steps, the weights, and the result."""
    place.mkdir(parents=True, exist_ok=True)
    kept = features_recipe.model_copy(update={"dir": place.parent / "features"})
    try:
        result = loop.train_drafter(recipe(distilled, place, max_steps=3, features=kept, **changes), Run(place))
    finally:
        interrupts.reset()
    lines = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line], drafters.load(place / "drafter").tensors, result


def test_served_features_equal_our_own_with_one_text_run_locally(target, examples, engine, tmp_path):
    store = served(target, examples, tmp_path / "features", asking(engine))
    assert store.target_tokens == max(len(example.tokens) for example in examples) - 1
    assert same(store.get(examples), FeatureStore(target, TAPS).get(examples))
    assert not list(engine.place.iterdir())
    with safe_open(shards(tmp_path / "features")[0], framework="pt") as file:
        assert file.metadata()["server"] == "vllm 0.32.0"
    (folder,) = (tmp_path / "features").iterdir()
    assert json.loads((folder / "manifest.json").read_text())["from"] == "server"


@pytest.mark.parametrize("taps", [(LAST,), ()], ids=["eagle", "lm"])
def test_heads_that_read_the_last_state_train_from_either_engine(target, examples, engine, last_only, tmp_path, taps):
    engine.states = partial(raw_states, target, layers=(LAST,))
    own = FeatureStore(target, taps).get(examples)
    for name, server in (("vllm", engine), ("sglang", last_only)):
        store = served(target, examples, tmp_path / name, asking(server), taps)
        assert same(store.get(examples), own)


@pytest.mark.slow
def test_served_features_train_the_same_head(distilled, target, engine, tmp_path, monkeypatch):
    """Bitwise. A run stopped while requesting resumes with the missing texts, from another server."""
    monkeypatch.setattr(loop, "load_target", lambda **_: target)
    monkeypatch.setattr(features, "SHARD_BYTES", 2**19)
    own = train(distilled, tmp_path / "own", FeatureRecipe(mode="memory"))
    count = len(load_corpus(recipe(distilled, tmp_path), target).train)

    def stop_in_the_middle(number):
        if number == count // 2:
            interrupts.handle(15)

    engine.faults = stop_in_the_middle
    with pytest.raises(Interrupted):
        train(distilled, tmp_path / "served", asking(engine, concurrency=2))
    kept = {path: path.stat().st_mtime_ns for path in shards(tmp_path / "features")}
    assert kept
    before = engine.asked.copy()
    with CapturingEngine(target.tokenizer, "vllm", engine.place, engine.states) as other:
        theirs = train(distilled, tmp_path / "served", asking(other, concurrency=2), resume=True)
        assert 2 < sum(other.asked.values()) - 2 < count, "what is there is not asked for again"
    assert (engine.asked - before).total() <= 1, "of two at a time one may have been on its way"
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in shards(tmp_path / "features")}.items()
    assert own[0] == theirs[0] and own[2].final_loss == theirs[2].final_loss
    assert all(torch.equal(theirs[1][name], tensor) for name, tensor in own[1].items())


def test_no_server_is_needed_for_complete_features(target, examples, engine, tmp_path, small_shards):
    first = served(target, examples, tmp_path / "features", asking(engine)).get(examples)
    engine.gone = True
    nobody = FeatureRecipe(server=ServerRecipe(urls=["http://127.0.0.1:9"]))
    store = served(target, examples, tmp_path / "features", nobody)
    assert same(store.get(examples), first) and not store.target_tokens
    shards(tmp_path / "features")[0].unlink()
    with pytest.raises(EngineError, match="no server responds") as error:
        served(target, examples, tmp_path / "features", nobody)
    assert "extract_hidden_states" in error.value.hint


def test_a_server_that_fails_midway_leaves_complete_shards(target, examples, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "SHARD_BYTES", 2**19)

    def fall(number):
        engine.gone = engine.gone or number > len(examples) // 2
        return "reset" if engine.gone else None

    engine.faults = fall
    with pytest.raises(EngineError, match="times in a row") as error:
        served(target, examples, tmp_path / "features", asking(engine, concurrency=2, retries=2))
    assert "--resume" in error.value.hint
    there = len(shards(tmp_path / "features"))
    engine.gone, engine.faults = False, lambda number: None
    engine.asked.clear()
    store = served(target, examples, tmp_path / "features", asking(engine))
    assert there > 0 and sum(engine.asked.values()) - 2 < len(examples)
    assert same(store.get(examples), FeatureStore(target, TAPS).get(examples))


@pytest.mark.parametrize("fault", ["a layer off", "no order", "other weights", "after the norm", "stale rows"])
def test_wrong_states_are_refused_at_once(target, examples, engine, tmp_path, fault):
    """They are finite and of the right shape; only a local forward pass can tell."""
    states, asked = engine.states, []

    def stale(ids):
        asked.append(ids)
        found = states(ids)
        return torch.cat((found[:2], found[:-2])) if len(asked) > 1 else found

    engine.states = {
        "a layer off": partial(raw_states, target, layers=(3, 6, 8, LAST)),
        "no order": lambda ids: states(ids)[:, [2, 1, 0, 3]],
        "other weights": lambda ids: states(ids)[:, :, torch.arange(target.hidden_size).flip(0)],
        "after the norm": partial(raw_states, target, layers=(*TAPS, LAST), normed=True),
        "stale rows": stale,
    }[fault]
    if fault == "after the norm":  # applied twice, the norm changes little except for its weight
        engine.states = lambda ids: target.model.normed(states(ids)) * 2
    with pytest.raises(CheckpointError, match="do not match target builtin") as error:
        served(target, examples, tmp_path / "features", asking(engine))
    assert '"eagle_aux_hidden_state_layer_ids": [2, 5, 7, 10]' in error.value.hint
    assert sum(engine.asked.values()) <= 2 and not shards(tmp_path / "features")


def test_rounded_states_are_accepted(target, examples, engine, tmp_path):
    """Rounding to bf16 and more, because an engine uses other kernels."""
    states = engine.states
    engine.states = lambda ids: (states(ids) * (1 + 0.05 * torch.rand(1))).bfloat16()
    served(target, examples[:4], tmp_path / "features", asking(engine))


def test_a_rejected_text_is_named(target, examples, engine, tmp_path):
    engine.faults = lambda number: "refused" if number == 5 else None
    with pytest.raises(EngineError, match=r"rejects the sequence of prompt .* maximum context length") as error:
        served(target, examples, tmp_path / "features", asking(engine, concurrency=1))
    assert "max_length" in error.value.hint


def test_own_and_served_features_are_stored_separately(target, examples, engine, tmp_path):
    served(target, examples, tmp_path, FeatureRecipe(mode="cached"))
    assert served(target, examples, tmp_path, asking(engine)).target_tokens
    assert len([folder for folder in tmp_path.iterdir() if (folder / "manifest.json").exists()]) == 2


def test_a_missing_server_address_prints_the_command_to_start_one(target, examples, tmp_path):
    with pytest.raises(UsageError, match="needs a server") as error:
        served(target, examples, tmp_path / "features", FeatureRecipe(mode="server"))
    assert "vllm serve" in error.value.hint and "[2, 5, 7, 10]" in error.value.hint


def test_processes_split_the_texts_and_the_requests(target, examples, engine, tmp_path, monkeypatch, small_shards):
    """Each process requests its own shards; the split into shards does not depend on the number of processes."""

    def over_ranks(values, device):
        """Every shard is missing, and the disk has room."""
        return [1] * (len(values) - 1) + [2**40]

    monkeypatch.setattr(features, "over_ranks", over_ranks)
    monkeypatch.setattr(features.FeatureFiles, "check_visible", lambda self, numbers: None)
    homes = [examples[::2], examples[1::2]]
    for rank in range(2):
        FeatureStore(target, TAPS).prepare(examples, asking(engine, concurrency=4), tmp_path / "features", homes, rank)
        assert engine.most <= 2
    assert max(count for ids, count in engine.asked.items()) <= 5  # the checks of two processes, and the text itself
    monkeypatch.undo()
    monkeypatch.setattr(features, "SHARD_BYTES", 2**20)
    engine.gone = True
    alone = served(target, examples, tmp_path / "features", asking(engine))
    assert same(alone.get(examples), FeatureStore(target, TAPS).get(examples))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "qwen3"])
def test_the_final_norm_is_the_model_norm(tiny_directory, kind):
    """Applied to the input of the norm module that `transformers` names, it gives the output of the forward pass."""
    target = load_target(tiny_directory(kind), device="cpu", dtype="fp32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_directory(kind), dtype=torch.float32)
    before = []
    norm = model.transformer.ln_f if kind == "gpt2" else model.model.norm
    norm.register_forward_pre_hook(lambda module, args: before.append(args[0]))
    tokens = torch.tensor([[5, 9, 200, 31, 77]])
    with torch.inference_mode():
        model(tokens)
        plan = plan_rows([0], 5, device=target.device, dtype=target.dtype)
        hidden, _ = target.model.forward(tokens, target.model.new_cache(1, 5), plan, ())
        assert not torch.allclose(before[0][0], hidden[0], atol=1e-2)
        torch.testing.assert_close(target.model.normed(before[0][0]), hidden[0], atol=1e-5, rtol=1e-5)
    assert kind in ARCHITECTURES


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"features": {"mode": "cached", "server": {"urls": ["http://a"]}}}, "uses no server"),
        ({"arch": "lm", "features": {"server": {"urls": ["http://a"]}}}, "needs no features"),
        ({"arch": "retrieval", "features": {"mode": "server"}}, "needs no features"),
    ],
)
def test_contradictory_recipes_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        TrainRecipe.model_validate(changes)
