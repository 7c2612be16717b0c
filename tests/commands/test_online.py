"""`online` end to end on short streams: learning, counts and results, and texts that do not depend on learning."""

import dataclasses
import functools
import json

import pytest
import torch

from specctl import api
from specctl.commands.eval import evaluate
from specctl.commands.online import few_judges
from specctl.decoding.controllers import PLAIN
from specctl.drafters import checkpoint
from specctl.recipe import DataRecipe, EvalRecipe, OnlineRecipe
from specctl.recipe.online import BufferRecipe
from specctl.runs import Run
from tests.measuring.streams import (
    QUESTIONS,
    answers,
    free_hybrids,
    learnt,
    lines,
    play_graphs,
    recipe,
    timeless,
    watch_device_rounds,
    weights,
    write_copy,
    write_head,
    write_prompts,
)

CONTRACT = {"algo", "chunks", "per_chunk", "mat_first", "mat_last", "mat", "speedup", "speedup_with_training", "static"}
PER_CHUNK = {"mat", "accept_rate", "loss", "weights", "tokens_per_s"}


@pytest.fixture(scope="module")
def heads(tmp_path_factory, tiny):
    """`heads(family)`: a new head of the tiny target."""
    folder = tmp_path_factory.mktemp("heads")

    @functools.cache
    def make(family):
        return write_head(folder / family, tiny, family)

    return make


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path)


@pytest.fixture(scope="module")
def several(tmp_path_factory, tiny, copy):
    """A stream of two passes, with every algorithm."""
    place = tmp_path_factory.mktemp("several")
    made = recipe(
        write_prompts(place),
        copy,
        tiny,
        algo=["ogd", "ensemble", "optimistic", "momentum", "osd"],
        seeds=[0, 1],
        stream={"shuffle": True},
        save_outputs=True,
    )
    found, document = learnt(place / "run", made, tiny)
    return place / "run", made, found, document


@pytest.mark.parametrize(
    ("family", "algo"),
    [
        ("eagle3", ["ogd", "opt-ensemble", "osd"]),
        ("medusa", ["ogd", "opt-ensemble", "osd"]),
        *((family, ["ogd"]) for family in ("eagle", "peagle", "dflash", "mtp", "hydra")),
    ],
)
def test_every_family_learns_and_changes_no_text(tmp_path, prompts, tiny, heads, family, algo):
    made = recipe(prompts, heads(family), tiny, algo=algo, baselines=["vanilla"])
    found, _ = learnt(tmp_path / "run", made, tiny)
    assert found.lossless.sequences == len(algo) * len(QUESTIONS) and found.lossless.mismatches == 0
    assert {row["status"] for row in lines(tmp_path / "run")} == {"updated"}
    assert found.static is None and found.family == family
    start = checkpoint.load(heads(family)).tensors
    for name in made.algo:
        moved = weights(tmp_path / "run", name)
        assert moved.keys() == start.keys() and any(not torch.equal(moved[key], start[key]) for key in start)


@pytest.mark.parametrize("family", ["eagle3", "dflash", "hydra"])  # trees from a layer, a block or heads
def test_every_kind_of_head_drafts_together_with_retrieval(tmp_path, prompts, tiny, heads, family, monkeypatch):
    """An untrained head and a store of the stream's texts draft one tree, at costs near zero. No text changes."""
    free_hybrids(monkeypatch)
    options = {"beside": "retrieval", "baselines": ["vanilla", "static"], "batch": 2}
    found, document = learnt(tmp_path / "run", recipe(prompts, heads(family), tiny, algo=["ogd"], **options), tiny)
    assert found.lossless.sequences == 2 * len(QUESTIONS) and found.lossless.mismatches == 0
    assert document["beside"] == "retrieval" and found.static.mat >= 1


def test_the_result_document(several, copy):
    place, made, found, document = several
    assert document.keys() >= CONTRACT and json.loads((place / "result.json").read_text()) == json.loads(
        json.dumps(document)
    )
    assert found.chunks == 2 * 3 and found.prompts == 2 * len(QUESTIONS)
    of_pass = [(row["chunk"], row["algo"]) for row in document["per_chunk"]]
    assert of_pass == [(n, name) for n in range(3) for name in made.algo]
    assert all(row.keys() >= PER_CHUNK for row in document["per_chunk"])
    assert [row.algo for row in found.learners] == [*made.algo, "vanilla", "static", "lookup"]
    assert [row.kind for row in found.learners] == ["learner"] * 5 + ["baseline", "static", "untrained"]
    assert {(row.algo, row.seed) for row in found.per_seed} == {(name, seed) for name in made.algo for seed in (0, 1)}
    for row in found.learners[:5]:
        assert row.mat_interval[0] <= row.mat <= row.mat_interval[1]
        assert row.mat_over_static == pytest.approx(row.mat / found.static.mat)
        assert row.speedup_with_training < row.speedup
        assert row.over_static_with_training < row.over_static
        assert row.learn_s > 0
    vanilla, static, lookup = found.learners[-3:]
    assert lookup.over_lookup_with_training == 1 and lookup.learn_s == 0
    assert vanilla.over_lookup_with_training == pytest.approx(1 / lookup.speedup)
    assert document["over_lookup_with_training"] == found.learners[0].over_lookup_with_training
    assert vanilla.mat == 1 and vanilla.speedup == 1 == vanilla.speedup_with_training
    assert static.mat_over_static is None and static.learn_s == 0
    assert all(row["static_mat"] is not None for row in document["per_chunk"])
    assert all(row["untrained_mat"]["lookup"] >= 1 for row in document["per_chunk"])
    kept = [row for row in lines(place) if row["algo"] == "ensemble"]
    assert {len(row["weights"]) for row in kept} == {len(row["losses"]) for row in kept} == {3}
    assert all(sum(row["weights"]) == pytest.approx(1) for row in kept)
    assert len((place / "outputs.jsonl").read_text().splitlines()) == 8 * 2 * len(QUESTIONS)
    # A learned drafter is for the domains of its start and of the stream.
    info = json.loads((place / "drafters/ensemble/drafter.json").read_text())
    assert info["domain"] == ["sql"] and info["mat"] == {} and str(copy) in info["learnt"]
    assert document["drafters"] == {name: str(place / "drafters" / name) for name in made.algo}
    assert (place / "drafters/ogd-seed1").is_dir()


def test_no_text_depends_on_learning(several):
    _, _, found, _ = several
    assert found.lossless.sequences == 7 * 2 * len(QUESTIONS)
    assert found.lossless.mismatches == found.lossless.ties == 0


def test_results_agree_with_the_records(several):
    """The test computes mat, acceptance and speed again from the files of the run."""
    place, _, found, _ = several
    kept, chunks = answers(place), lines(place)

    def rate(rows, top, bottom):
        return sum(row[top] for row in rows) / sum(row[bottom] for row in rows)

    plain = rate([row for row in kept if row["drafter"] == "vanilla"], "tokens", "decode_s")
    for row in found.learners:
        mine = [one for one in kept if one["drafter"] == row.algo]
        assert row.mat == pytest.approx(rate(mine, "tokens", "target_passes"))
        assert row.tokens_per_s == pytest.approx(rate(mine, "tokens", "decode_s"))
        assert row.speedup == pytest.approx(row.tokens_per_s / plain)
        own = [chunk for chunk in chunks if chunk["algo"] == row.algo]
        spent = sum(chunk["learn_s"] + chunk["swap_s"] for chunk in own)
        seconds, tokens = (sum(one[key] for one in mine) for key in ("decode_s", "tokens"))
        assert row.learn_s == pytest.approx(spent)
        assert row.speedup_with_training == pytest.approx(tokens / (seconds + spent) / plain)
        for number, value in ((0, row.mat_first), (2, row.mat_last)):
            part = [one for one in mine if one["session"] == number]
            assert value == pytest.approx(rate(part, "tokens", "target_passes"))
        for chunk in own:
            part = [one for one in mine if (one["seed"], one["session"]) == (chunk["seed"], chunk["chunk"])]
            assert chunk["mat"] == pytest.approx(rate(part, "tokens", "target_passes"))
            assert chunk["tokens"] == sum(one["tokens"] for one in part)
    for row in found.per_domain:
        mine = [one for one in kept if (one["drafter"], one["domain"]) == (row.algo, row.domain)]
        assert row.prompts == len(mine) and row.mat == pytest.approx(rate(mine, "tokens", "target_passes"))
    for row in found.per_seed:
        mine = [one for one in kept if (one["drafter"], one["seed"]) == (row.algo, row.seed)]
        assert row.mat == pytest.approx(rate(mine, "tokens", "target_passes"))


def test_each_seed_has_its_own_order_of_prompts(several):
    place, _, _, _ = several
    orders = {
        seed: [row["id"] for row in answers(place) if (row["seed"], row["drafter"]) == (seed, "ogd")] for seed in (0, 1)
    }
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_the_static_drafter_drafts_as_in_eval(tmp_path, several, tiny, copy):
    place, made, _, _ = several
    again = EvalRecipe(target=made.target, data=made.data, sampling=made.sampling, drafters=[str(copy)])
    evaluate(again, Run.create("eval", again, tmp_path / "eval"), target=tiny)
    counts = ("output_ids", "target_passes", "accepted", "rejections", "drafted", "accepted_by_depth", "agreement")

    def of(rows, name):
        return {row["id"]: [row[key] for key in counts] for row in rows if row["drafter"] == name and row["seed"] == 0}

    assert of(answers(place), "static") == of(answers(tmp_path / "eval"), copy.name)
    assert max(row["accepted"] for row in answers(tmp_path / "eval")) > 0


def test_a_learner_improves_on_repeated_questions(tmp_path, tiny, copy):
    """The stream repeats two questions. The loss falls, and the learner ends with a higher mat than the static
    drafter."""
    options = dict(sampling={"max_new_tokens": 12}, learner={"lr": 3e-4, "epochs": 4}, baselines=["static"])
    found, _ = learnt(tmp_path / "run", recipe(write_prompts(tmp_path, QUESTIONS[:2] * 4), copy, tiny, **options), tiny)
    losses = [row.loss for row in found.per_chunk]
    assert losses[-1] < 0.8 * losses[0] and found.mat_last > found.static.mat_last


def test_a_learner_with_a_tiny_rate_drafts_as_the_static_drafter(tmp_path, prompts, tiny, copy):
    made = recipe(prompts, copy, tiny, algo=["ogd", "ensemble"], learner={"lr": 1e-12})
    learnt(tmp_path / "run", made, tiny)
    kept = timeless(answers(tmp_path / "run"))
    rows = {name: [row | {"drafter": ""} for row in kept if row["drafter"] == name] for name in (*made.algo, "static")}
    assert rows["ogd"] == rows["ensemble"] == rows["static"]


def test_sampled_texts_equal_plain_decoding(tmp_path, prompts, tiny, copy):
    """Two texts at a time. Drafts are drawn from the same uniform numbers as the tokens of plain decoding."""
    options = {"temperature": 1.0, "exact": True}
    made = recipe(prompts, copy, tiny, algo=["ogd", "ensemble"], sampling=options, batch=2, seeds=[0, 1])
    found, _ = learnt(tmp_path / "run", made, tiny)
    assert found.lossless.sequences == 4 * 2 * len(QUESTIONS)
    assert found.lossless.mismatches == found.lossless.ties == 0
    texts = {
        seed: [row["output_ids"] for row in answers(tmp_path / "run") if (row["drafter"], row["seed"]) == ("ogd", seed)]
        for seed in (0, 1)
    }
    assert texts[0] != texts[1]


def test_rerun_feedback_teaches_the_same_as_verdict_feedback(tmp_path, prompts, tiny, heads):
    """`rerun` runs the target again, and `verdict` uses the states of verification. The optimizer is SGD, because Adam
    turns a gradient of rounding errors into a full step."""
    for feedback in ("verdict", "rerun"):
        options = dict(buffer={"feedback": feedback}, learner={"optimizer": "sgd", "lr": 1e-4}, baselines=[])
        made = recipe(prompts, heads("eagle3"), tiny, algo=["ogd", "osd"], **options)
        learnt(tmp_path / feedback, made, tiny)
    ours, theirs = lines(tmp_path / "verdict"), lines(tmp_path / "rerun")
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-4)
    for name in ("ogd", "osd"):
        one, other = weights(tmp_path / "verdict", name), weights(tmp_path / "rerun", name)
        for key in one:
            torch.testing.assert_close(one[key], other[key], rtol=1e-4, atol=1e-5)


def test_replay_learns_from_older_texts_within_its_memory_limit(tmp_path, prompts, tiny, copy):
    plain = recipe(prompts, copy, tiny, baselines=[])
    learnt(tmp_path / "plain", plain, tiny)
    learnt(tmp_path / "all", plain.model_copy(update={"buffer": BufferRecipe(replay=1.0)}), tiny)
    fresh = [row["texts"] for row in lines(tmp_path / "plain")]
    assert fresh == [2, 2, 1]
    assert [row["texts"] for row in lines(tmp_path / "all")] == [2, 4, 2]
    learnt(tmp_path / "some", plain.model_copy(update={"buffer": BufferRecipe(replay=1.0, max_mb=0.001)}), tiny)
    kept = lines(tmp_path / "some")
    assert kept[-1]["dropped"] > 0 and all(row["texts"] < 4 for row in kept)
    assert json.loads((tmp_path / "some/result.json").read_text())["learners"][0]["dropped"] == kept[-1]["dropped"]


def test_osd_skips_texts_that_were_accepted_whole(tmp_path, prompts, tiny):
    """The target as its own drafter is never wrong. osd has nothing to learn from, and ogd learns from every text."""
    perfect = write_copy(tmp_path / "lm", tiny, tiny.name, 0.0)
    made = recipe(prompts, perfect, tiny, algo=["osd", "ogd"], baselines=["static"], drafting={"proposal": "sampled"})
    found, _ = learnt(tmp_path / "run", made, tiny)
    kept = lines(tmp_path / "run")
    assert {(row["texts"], row["status"]) for row in kept if row["algo"] == "osd"} == {(0, "empty")}
    assert {row["status"] for row in kept if row["algo"] == "ogd"} == {"updated"}
    assert found.mat == found.static.mat > 2 and found.lossless.sequences == 0
    start = checkpoint.load(perfect).tensors
    assert all(torch.equal(value, start[key]) for key, value in weights(tmp_path / "run", "osd").items())


def test_a_harmful_update_is_taken_back(tmp_path, tiny, capsys):
    """One update has a far too large learning rate. A warning appears, and the earlier weights return and learn on
    slowly."""
    good = write_copy(tmp_path / "lm", tiny, tiny.name, 0.01)
    options = {"lr": 1.0, "backoff": 1e-6, "tolerance": 0.1, "holdout": 0.0}
    sizes = {"stream": {"chunk": 8}, "sampling": {"max_new_tokens": 12}}  # four texts of six tokens prove nothing
    made = recipe(write_prompts(tmp_path, QUESTIONS[:4] * 4), good, tiny, learner=options, **sizes)
    found, _ = learnt(tmp_path / "run", made, tiny)
    assert [row.ruling for row in found.per_chunk] == ["keep", "rollback"]
    assert found.learners[0].rollbacks == 1 and found.lossless.mismatches == 0
    assert "taken back" in capsys.readouterr().err
    assert found.per_chunk[1].mat < found.per_chunk[0].mat and found.per_chunk[1].rates == [pytest.approx(1e-6)]
    start = checkpoint.load(good).tensors
    for key, value in weights(tmp_path / "run", "ogd").items():
        torch.testing.assert_close(value, start[key], rtol=0, atol=1e-4)


def test_text_drafters_can_be_baselines(tmp_path, prompts, tiny, copy):
    """Text drafters draft as in `eval`, and take turns with the other drafters."""
    made = recipe(prompts, copy, tiny, baselines=["lookup", "suffix"], sampling={"max_new_tokens": 24})
    found, _ = learnt(tmp_path / "run", made, tiny)
    assert [(row.algo, row.kind) for row in found.learners[1:]] == [("lookup", "untrained"), ("suffix", "untrained")]
    again = EvalRecipe(
        target=made.target,
        data=DataRecipe(prompts=made.data.prompts),
        sampling=made.sampling,
        drafters=["lookup", "suffix"],
        baselines=["vanilla"],
    )
    evaluate(again, Run.create("eval", again, tmp_path / "eval"), target=tiny)

    def rounds(place):
        kept = sorted(answers(place), key=lambda row: (row["drafter"], row["id"]))
        return [(row["id"], row["target_passes"], row["drafted"]) for row in kept if row["drafter"] in made.baselines]

    assert rounds(tmp_path / "run") == rounds(tmp_path / "eval") and len(rounds(tmp_path / "run")) == 2 * len(QUESTIONS)
    assert sum(drafted for _, _, drafted in rounds(tmp_path / "run")) > 0
    first = [row["drafter"] for row in answers(tmp_path / "run")][:: len(made.baselines) + 1]
    assert len({*first}) == 3, "everybody is the first at some prompt"


STEADY = {"stop_below": 0.0, "keep_above": 0.0}


@pytest.mark.parametrize("slower", [{}, {"drafting": {}}, {"draft_length": "auto"}])
def test_all_drafters_of_a_run_have_rounds_of_one_kind(tmp_path, prompts, tiny, heads, monkeypatch, slower):
    """If drafts end early or their length is chosen, a drafter needs rounds on the host. All drafters of the run then
    have rounds on the host: rounds that run ahead on a device would give a drafter an unfair advantage. A text drafter
    among the baselines does not force this. Plain decoding stays as fast as possible, because all speeds are measured
    against it."""
    rounds = watch_device_rounds(monkeypatch)
    baselines = ["vanilla", "static"] if slower else ["vanilla", "static", "lookup"]
    made = recipe(prompts, heads("eagle3"), tiny, **{"drafting": STEADY, "baselines": baselines} | slower)
    found, document = learnt(tmp_path / "run", made, tiny)
    assert ({*rounds} == {PLAIN}) == bool(slower)
    assert found.rounds_on == document["rounds_on"] == "host"  # "device" stands for replays of graphs


@pytest.mark.parametrize("drafted", [True, False])
def test_eval_lets_every_drafter_use_the_device(tmp_path, prompts, tiny, heads, monkeypatch, drafted):
    rounds, head = watch_device_rounds(monkeypatch), heads("eagle3")
    like = recipe(prompts, head, tiny)
    options = {"drafters": [str(head)], "baselines": []} if drafted else {"drafters": [], "baselines": ["vanilla"]}
    data = DataRecipe(prompts=like.data.prompts)
    made = EvalRecipe(target=like.target, data=data, sampling=like.sampling, drafting=STEADY, **options)
    evaluate(made, Run.create("eval", made, tmp_path / "eval"), target=tiny)
    assert rounds


def test_graphs_of_plain_decoding_do_not_count_as_rounds_of_drafters(tmp_path, prompts, tiny, heads, monkeypatch):
    """A run once reported rounds on the device although only plain decoding had them."""
    captured = play_graphs(monkeypatch)
    made = recipe(prompts, heads("eagle3"), tiny, drafting=STEADY, baselines=["vanilla"], draft_length="auto")
    found, _ = learnt(tmp_path / "run", made, tiny)
    assert captured and found.rounds_on == "host"


@pytest.mark.parametrize(
    ("family", "feedback"),
    [
        ("eagle3", "verdict"),
        ("dflash", "verdict"),
        pytest.param("eagle3", "rerun", marks=pytest.mark.slow),
        pytest.param("medusa", "verdict", marks=pytest.mark.slow),
    ],
)
def test_rounds_on_the_device_teach_the_same(tmp_path, prompts, tiny, heads, monkeypatch, family, feedback):
    """Here, replaying a graph runs its rounds again. The optimizer is Adam, because Muon turns rounding errors of small
    gradients into full steps. Weights move by up to 0.03."""
    options = {
        "learner": {"optimizer": "adam"},
        "drafting": STEADY,
        "baselines": ["vanilla", "static"],
        "buffer": {"feedback": feedback},
        "batch": 2,
    }
    made = recipe(prompts, heads(family), tiny, algo=["ogd"], **options)
    monkeypatch.setenv("SPECCTL_GRAPHS", "0")
    host, _ = learnt(tmp_path / "host", made, tiny)
    monkeypatch.delenv("SPECCTL_GRAPHS")
    play_graphs(monkeypatch)
    device, _ = learnt(tmp_path / "device", made, tiny)
    assert (host.rounds_on, device.rounds_on) == ("host", "device")
    assert device.lossless.mismatches == 0 and device.mat == host.mat
    assert {row["status"] for row in lines(tmp_path / "device")} == {"updated"}
    found, expected = (weights(tmp_path / name, "ogd") for name in ("device", "host"))
    start = checkpoint.load(heads(family)).tensors
    assert any(not torch.equal(found[key], start[key]) for key in start)
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=1e-4)


def test_a_huge_rate_spoils_no_text_and_no_saved_weight(tmp_path, prompts, tiny, copy, capsys):
    """Texts are right even with ruined weights. A learner never takes over or saves weights that are not finite."""
    names = ["ogd", "optimistic", "ensemble"]
    made = recipe(prompts, copy, tiny, algo=names, learner={"lr": 1e30}, baselines=["vanilla"])
    found, _ = learnt(tmp_path / "run", made, tiny)
    assert found.lossless.sequences == 3 * len(QUESTIONS) and found.lossless.mismatches == 0
    said = capsys.readouterr().err
    for name in names:
        assert f"{name}: the last update lowered acceptance" in said
        assert all(value.isfinite().all() for value in weights(tmp_path / "run", name).values())


def test_the_python_function(tmp_path, prompts, tiny, copy):
    found = api.online(recipe(prompts, copy, tiny, output_dir=tmp_path / "run", baselines=[]))
    document = json.loads((tmp_path / "run/result.json").read_text())
    assert document["command"] == "online" and document["mat"] == found.mat
    assert dataclasses.asdict(found)["speedup"] is None and found.lossless.sequences == 0


@pytest.mark.parametrize(
    ("fields", "judges"),
    [
        ({"stream": {"chunk": 20}}, 5),
        ({}, None),  # 10 of 40
        ({"stream": {"chunk": 20}, "learner": {"holdout": 0.5}}, None),
        ({"stream": {"chunk": 20}, "learner": {"holdout": 0}}, None),  # no update is judged
        ({"stream": {"chunk": 20}, "algo": ["static"], "baselines": []}, None),
    ],
)
def test_a_note_warns_of_too_few_judges(fields, judges):
    """Five held-out texts refused updates that ten texts accept, and no message said why nothing was learned."""
    note = few_judges(OnlineRecipe.model_validate({"algo": ["ogd"], **fields}))
    assert (note is None) == (judges is None)
    if note is not None:
        assert note.startswith(f"only {judges} of 20 prompts judge an update") and "40 prompts" in note


def test_trackers_show_every_chunk(tmp_path, prompts, tiny, copy):
    """A run must not accept `--log` and then show nothing."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = recipe(prompts, copy, tiny, algo=["ogd"], baselines=["vanilla"], log=["tensorboard"])
    learnt(tmp_path / "run", made, tiny)
    shown = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    mats = [row["mat"] for row in lines(tmp_path / "run")]
    assert [one.value for one in shown.Scalars("ogd/mat")] == pytest.approx(mats) and len(mats) == 3
    assert {"ogd/loss", "ogd/learn_s"} <= {*shown.Tags()["scalars"]}
