"""Training without the target's layers gives the same head, chosen by the draft length expected on held-out responses.

Served states are checked as far as the vocabulary head allows.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from pydantic import ValidationError

from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.drafters import checkpoint as drafters
from specctl.drafters import pool
from specctl.errors import CheckpointError, UsageError
from specctl.families import FAMILIES
from specctl.progress import interrupts
from specctl.recipe import (
    DrafterRecipe,
    DraftingRecipe,
    FeatureRecipe,
    HeldOutRecipe,
    LoraRecipe,
    ServerRecipe,
    TrainRecipe,
)
from specctl.runs import Run
from specctl.training import estimate, loop
from specctl.training.data import load_corpus
from specctl.training.example import Example
from specctl.training.expected_length import ExpectedLength, HeldOut, HitRecorder
from specctl.training.features import FeatureStore, slot_batch
from tests.toys.capture import CapturingEngine, raw_logprobs, raw_states
from tests.toys.decoding import decode
from tests.training.small import metrics, recipe

LAST = 10
TAPS = {"eagle3": (2, 5, 7), "dflash": (3, 6, 9), "peagle": (2, 5, 7)}
HEADS = [name for name, family in FAMILIES.items() if family.trainable and not family.is_lm and name != "mtp"]
OFTEN = ("eagle3",)
EVAL = HeldOutRecipe(prompts=2, max_new_tokens=4, fraction=0.3, every=3)


@pytest.fixture(scope="module")
def ends():
    return load_target("builtin", device="cpu", dtype="fp32", whole=False)


@pytest.fixture
def engine(target, tmp_path):
    """A capture server of the target for `TAPS`, with the target's own log probabilities."""
    (tmp_path / "files").mkdir()
    states = partial(raw_states, target, layers=(2, 5, 7, LAST))
    with CapturingEngine(target.tokenizer, "vllm", tmp_path / "files", states) as server:
        server.logprobs = partial(raw_logprobs, target)
        yield server


def asking(engine, **options):
    return FeatureRecipe(server=ServerRecipe(urls=[engine.url]), **options)


def train(distilled, place, features, **changes):
    """Train, and return (metrics, saved drafter, result)."""
    place.mkdir(parents=True, exist_ok=True)
    kept = features.model_copy(update={"dir": place.parent / "features"})
    try:
        made = recipe(distilled, place, **{"max_steps": 3, "features": kept, "eval": EVAL, **changes})
        result = loop.train_drafter(made, Run(place))
    finally:
        interrupts.reset()
    lines = metrics(place)
    return lines, drafters.load(place / "drafter"), result


@pytest.mark.parametrize(
    "arch", [arch if arch in OFTEN else pytest.param(arch, marks=pytest.mark.slow) for arch in HEADS]
)
def test_a_head_trained_without_the_target_layers_is_identical(distilled, engine, target, tmp_path, arch):
    """Bitwise, for every family; the card reports an expected length, not a measured one."""
    engine.states = partial(raw_states, target, layers=(*TAPS.get(arch, ()), LAST))
    changes = {"arch": arch, "drafter": DrafterRecipe(vocab_size=256 if arch in ("eagle3", "peagle") else None)}
    whole = train(distilled, tmp_path / "whole", asking(engine, whole_target=True), **changes)
    ends = train(distilled, tmp_path / "ends", asking(engine, whole_target=False), **changes)
    assert [line.get("loss") for line in ends[0]] == [line.get("loss") for line in whole[0][: len(ends[0])]]
    assert all(torch.equal(whole[1].tensors[name], tensor) for name, tensor in ends[1].tensors.items())
    assert whole[2].mat >= 1 and math.isnan(whole[2].expected_mat) and "expected_mat" not in whole[1].info
    assert math.isnan(ends[2].mat) and ends[2].expected_mat >= 1 and not any("mat" in line for line in ends[0])
    facts, card = ends[1].info, (tmp_path / "ends" / "drafter" / "README.md").read_text()
    assert (
        facts["mat"] == {}
        and len(facts["expected_mat"]) == 2
        and "estimated from held-out responses and not measured" in card
    )


@pytest.mark.slow
def test_the_checkpoint_with_the_best_expected_length_is_kept(distilled, engine, tmp_path, monkeypatch):
    """The second of three checks is best; the reported value comes from the other half of the texts."""
    told = [ExpectedLength(1 + share, [share]) for share in (0.25, 0.5, 0.125)]
    halves = iter([(one, ExpectedLength(1.0625, [0.0625])) for one in told])
    monkeypatch.setattr(HeldOut, "measure", lambda *_: next(halves))
    options = {"eval": EVAL.model_copy(update={"every": 1})}
    lines, drafter, result = train(distilled, tmp_path / "ends", asking(engine, whole_target=False), **options)
    checks = [(line["step"], line["expected_mat"]) for line in lines if "expected_mat" in line]
    assert checks == [(1, 1.25), (2, 1.5), (3, 1.125)] and drafter.info["steps"] == 2
    assert (result.expected_mat, result.choosing_expected_mat) == (1.0625, 1.5)


@pytest.mark.parametrize("arch", ["eagle3", pytest.param("medusa", marks=pytest.mark.slow)])
def test_counted_hits_equal_those_of_the_drafter(distilled, target, tmp_path, arch):
    """The drafter, teacher-forced on greedy text of the target, is counted draft by draft.

    It was trained on these texts, so that a few steps give some hits.
    """
    made = recipe(distilled, tmp_path, arch=arch, drafter=DrafterRecipe(), max_steps=20, ttt_steps=3, batch_tokens=256)
    loop.train_drafter(made, Run(tmp_path))
    prompts = [[*one.tokens[: one.prompt_length]] for one in load_corpus(made, target).train[:6]]
    drafter = pool.load_drafter(str(tmp_path / "drafter"), target, DraftingRecipe())
    module = pool.load_module(pool.read_drafter(tmp_path / "drafter", target), target)
    module.steps = depths = 3
    module.squash = target.squash.of(module.draft_ids)
    hits = drafts = 0
    for prompt in prompts:
        first, seen = len(prompt) + 1, []

        def score(state, *_, first=first, seen=seen):
            ids = list(state.rows[0].ids)
            if state.rows[0].stop:  # of the whole text
                seen[:] = ids, drafter.score(state, [range(first, len(ids))], depths)[0]

        decode(
            target, [prompt], sampling=GREEDY, seeds=[0], max_new_tokens=24, taps=drafter.taps, on_round=score
        )  # fmt: skip
        ids, rows = seen
        drafted = rows.logits.argmax(-1).expand(depths, -1)
        drafted = drafted if rows.ids is None else rows.ids[drafted]
        counted = torch.zeros(depths, 2)
        for start in range(first, len(ids)):  # first token of the draft
            for depth in range(min(depths, len(ids) - start)):
                counted[depth, 1] += 1
                if drafted[depth, start + depth - first] != ids[start + depth]:
                    break
                counted[depth, 0] += 1
        example = Example(0, "0", ids, len(prompt))
        (features,) = FeatureStore(target, module.taps).get([example])
        batch = slot_batch([example], [features], depths, module.t2d)
        watching = module.watch = HitRecorder(module, features.best.long())
        with torch.no_grad():
            module(batch, target.model.embedding, target.head_weight[module.draft_ids])
        assert watching.counts(batch.valid_steps).tolist() == counted.tolist()
        hits, drafts = hits + counted[:, 0], drafts + counted[:, 1]
    assert hits[1] and drafts[1] > hits[1], "or it shows nothing"


def test_training_from_cached_features_needs_no_target_layers(distilled, tmp_path, monkeypatch):
    """No server is needed either. Missing features are refused before anything is written."""
    with pytest.raises(UsageError, match="shards of target features are missing in") as error:
        train(distilled, tmp_path / "none", FeatureRecipe(mode="cached", whole_target=False))
    assert "whole_target=true" in error.value.hint and not (tmp_path / "features").exists()
    assert not (tmp_path / "none" / "drafter").exists()
    whole = train(distilled, tmp_path / "whole", FeatureRecipe(mode="cached"), eval=HeldOutRecipe())
    ends = train(distilled, tmp_path / "ends", FeatureRecipe(mode="cached", whole_target=False), eval=HeldOutRecipe())
    assert all(torch.equal(whole[1].tensors[name], tensor) for name, tensor in ends[1].tensors.items())
    assert ends[1].info["mat"] == {} and "expected_mat" not in ends[1].info


@pytest.mark.slow
def test_an_adapter_is_trained_without_the_target_layers(distilled, engine, tmp_path):
    train(distilled, tmp_path / "first", asking(engine, whole_target=False))
    start = tmp_path / "first" / "drafter"
    changes = {"init": start, "drafter": DrafterRecipe(), "lora": LoraRecipe(enabled=True)}
    whole = train(distilled, tmp_path / "whole", asking(engine, whole_target=True), **changes)
    ends = train(distilled, tmp_path / "ends", asking(engine, whole_target=False), **changes)
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (whole[0], ends[0])]
    assert losses[0] == losses[1] and ends[2].expected_mat >= 1


def test_layers_are_loaded_by_the_recipe_or_if_they_fit(distilled, tmp_path, monkeypatch):
    """The size of the host memory decides unless the recipe sets `whole_target`."""
    server = FeatureRecipe(mode="server")
    made = recipe(distilled, tmp_path, features=server)
    assert estimate.loads_layers_here(made, "builtin")
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 30e6}))
    assert not estimate.loads_layers_here(made, "builtin")
    for chosen in (True, False):
        told = server.model_copy(update={"whole_target": chosen})
        assert estimate.loads_layers_here(recipe(distilled, tmp_path, features=told), "builtin") is chosen
    assert estimate.loads_layers_here(recipe(distilled, tmp_path), "builtin"), (
        "features of our own are made by the layers"
    )


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("a layer too early", "nats from the server's"),
        ("another head", "nats from the server's"),
        ("a row off", "nats from the server's"),
        ("stale rows", "they change when requested again"),
        ("other texts", "of the next tokens"),
    ],
)
def test_wrong_states_from_a_server_are_refused(distilled, ends, target, engine, tmp_path, fault, says):
    states, logprobs, asked = engine.states, engine.logprobs, []

    def stale(ids):
        asked.append(ids)
        found = states(ids)
        return torch.cat((found[:2], found[:-2])) if len(asked) > 2 else found

    engine.states = {
        "a layer too early": partial(raw_states, target, layers=(2, 5, 7, LAST - 1), normed=True),
        "a row off": lambda ids: states(ids).roll(1, 0),
        "stale rows": stale,
    }.get(fault, states)
    engine.logprobs = (lambda ids: [x - 0.2 for x in logprobs(ids)]) if fault == "another head" else logprobs
    corpus = load_corpus(recipe(distilled, tmp_path), target)
    examples = corpus.train[:8]
    if fault == "other texts":
        draw = torch.Generator().manual_seed(0)
        noise = [torch.randint(5, 4000, (len(one.tokens),), generator=draw).tolist() for one in examples]
        examples = [replace(one, tokens=ids) for one, ids in zip(examples, noise, strict=True)]
    with pytest.raises(CheckpointError, match=says) as error:
        FeatureStore(ends, TAPS["eagle3"]).prepare(examples, asking(engine), tmp_path / "features")
    assert '"eagle_aux_hidden_state_layer_ids": [2, 5, 7, 10]' in error.value.hint
    assert not list((tmp_path / "features").glob("*/*.safetensors"))


def test_states_without_log_probabilities_are_checked_against_the_texts(distilled, ends, target, engine, tmp_path):
    """Rounding is accepted. Swapped auxiliary layers pass too, because this check sees only the last layer."""
    engine.logprobs = lambda ids: None
    states = engine.states
    engine.states = lambda ids: (states(ids)[:, [1, 0, 2, 3]] * 1.001).bfloat16()
    examples = load_corpus(recipe(distilled, tmp_path), target).train[:4]
    FeatureStore(ends, TAPS["eagle3"]).prepare(examples, asking(engine), tmp_path / "features")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"arch": "lm", "objective": "kl", "features": {"mode": "cached", "whole_target": False}},
            "lm needs the target's",
        ),
        ({"arch": "retrieval", "features": {"mode": "cached", "whole_target": False}}, "retrieval needs the target's"),
        ({"features": {"whole_target": False}}, "mode auto runs the target's layers"),
        ({"features": {"mode": "online", "whole_target": False}}, "mode online runs the target's layers"),
    ],
)
def test_recipes_that_need_the_target_layers_are_refused(changes, says):
    with pytest.raises(ValidationError, match=says):
        TrainRecipe.model_validate(changes)
