"""`select` end to end on a few prompts of a small target."""

import dataclasses
import hashlib
import json
import signal

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from specctl import progress
from specctl.commands.select import select
from specctl.decoding.controllers import PLAIN
from specctl.decoding.models.loading import builtin_path
from specctl.decoding.prompt_features import cluster_of, features_at
from specctl.decoding.records import Decoded, Label
from specctl.decoding.target import load_target
from specctl.distillation.prompts import Prompt
from specctl.distillation.rejections import Rejections
from specctl.drafters import checkpoint
from specctl.drafters import pool as drafters
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from specctl.drafters.retrieval.datastore import Datastore
from specctl.drafters.retrieval.drafter import FAMILY as retrieval
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.errors import CheckpointError, DataError, Interrupted, UsageError
from specctl.lab.record.recipe import RecordRecipe
from specctl.lab.record.run import record_pool
from specctl.lab.recorded.hindsight import Hindsight, round_starts
from specctl.lab.recorded.table_file import read_table
from specctl.lab.recorded.trace import of_arms
from specctl.lab.replay.recipe import ReplayRecipe
from specctl.lab.replay.run import play_table, replay_table
from specctl.lab.train_router.recipe import TrainRouterRecipe
from specctl.lab.train_router.run import examples as router_examples
from specctl.lab.train_router.run import train_and_play
from specctl.measuring import select_contenders
from specctl.measuring.contenders import Case, measure
from specctl.measuring.policy_rows import Grouping, StreamAnswers
from specctl.measuring.select_contenders import (
    DrafterPool,
    SelectContenders,
    make_sessions,
    prompt_batches,
)
from specctl.recipe import DataRecipe, DraftingRecipe, GameRecipe, SelectRecipe, TargetRecipe
from specctl.recipe.resolve import resolve
from specctl.runs import Run
from specctl.selection.arms import PLAIN as PLAIN_ARM
from specctl.selection.arms import Arm
from specctl.selection.assembly import Decoding, make_selector
from specctl.selection.certificate import of_stream
from tests.lossless.drafters import own_weights
from tests.measuring.streams import (
    contents,
    free_hybrids,
    play_graphs,
    watch_device_rounds,
    write_copy,
    write_head,
    write_prompts,
)
from tests.selection.tables import specialists

QUESTIONS = ["Name a colour.", "What is 3 + 4?", "Count to nine.", "Table: singer\nColumns: name\n\nQuestion: Who?"]
CONTRACT = {
    *("algo", "arms", "queries", "rounds", "mat", "tokens_per_s", "oracle_mat", "regret", "best_arm_ratio", "pulls"),
    *("decide_us_p50", "score_ms_p50", "per_domain"),
}


@pytest.fixture(scope="module")
def target(shallow):
    return shallow


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path, QUESTIONS)


@pytest.fixture(scope="module")
def pool(target):
    return {
        "good": LMDrafter(own_weights(target, 0.0), target, ChainShape(4, 0.0, False)),
        "lookup": Lookup(4),
        "suffix": Suffix(depth=4, nodes=8, children=2),
    }


COMMANDS = {
    SelectRecipe: select,
    RecordRecipe: record_pool,
    ReplayRecipe: play_table,
    TrainRouterRecipe: train_and_play,
}


def recipe(prompts, **fields):
    """A game for mat: tokens per second change from run to run. Drafters draft alone. `record`, `replay` and the keys
    of a router choose the command, which gets only its own keys."""
    model = SelectRecipe
    for key, command in (("replay", ReplayRecipe), ("record", RecordRecipe)):
        model = command if key in fields else model
    model = TrainRouterRecipe if {"router", "router_dir"} & fields.keys() else model
    fields = {
        "beside": "none",
        "algo": ["hedgespec"],
        "game": {"loss": "length", "depth": 2, "warmup_rounds": 2},
        "data": DataRecipe(domain=["sql"], prompts=str(prompts)),
        "target": TargetRecipe(dtype="fp32", device="cpu"),
        "session": 2,
        **fields,
    }
    sampling = {"max_new_tokens": 16, **fields.pop("sampling", {})}
    if model is ReplayRecipe:
        sampling = {"seed": sampling.get("seed", 0)}
    return model(sampling=sampling, **{key: value for key, value in fields.items() if key in model.model_fields})


def selected(tmp_path, made, target, pool):
    """The result of a run, its document, and its rounds (empty for replays and recordings)."""
    run = Run.create("select", made, tmp_path / "run")
    options = {} if isinstance(made, ReplayRecipe) else {"target": target, "drafters": pool}
    found = COMMANDS[type(made)](made, run, **options)
    log = run.dir / "rounds.jsonl"
    rounds = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return found, run.result(dataclasses.asdict(found)), rounds


@pytest.mark.parametrize(("reset", "batch"), [("query", 1), ("session", 2)])
def test_policies_side_by_side(tmp_path, prompts, target, pool, batch, reset):
    made = recipe(
        prompts,
        algo=["hedgespec", "metasd-ucb", "random"],
        baselines=["vanilla", "fixed", "draft-all"],
        batch=batch,
        reset=reset,
    )
    found, document, rounds = selected(tmp_path, made, target, pool)
    assert document.keys() >= CONTRACT
    assert found.lossless.sequences == 4 * 7 and found.lossless.mismatches == 0
    rows = {row.algo: row for row in found.policies}
    assert [row.kind for row in found.policies] == ["policy"] * 3 + ["baseline", "arm", "arm", "arm", "baseline"]
    assert rows["good"].mat > rows["lookup"].mat
    # No arm is better than the oracle, and drafting with every arm is at least as good as the oracle.
    assert found.oracle_mat >= rows["good"].mat - 1e-9
    assert rows["draft-all"].mat >= found.oracle_mat - 1e-9
    for name in made.algo:
        row, mine = rows[name], [line for line in rounds if line["algo"] == name]
        assert len(mine) == row.rounds == sum(row.pulls.values())
        assert row.mat == pytest.approx(row.share_of_best * found.oracle_mat)
        assert row.regret == round(row.rounds * (1 - row.share_of_best))
        assert 0 <= row.best_arm_ratio <= 1
    assert rows["hedgespec"].score_share > 0 and rows["random"].score_ms_p50 is None
    assert rows["vanilla"].mat == 1
    # The bootstrap draws whole sessions.
    records = pq.read_table(tmp_path / "run/records.parquet").to_pylist()
    assert {row["agreement"] for row in records} == {None, "equal"}
    assert len({(row["id"], row["session"]) for row in records}) == 4
    for name in made.algo:
        order = [0, 0, 1, 1] if batch == 1 else [0, 1, 0, 1]
        assert [row["session"] for row in records if row["drafter"] == name] == order


def test_speeds_are_against_the_fastest_plain_decoding(tmp_path, prompts, target, pool, monkeypatch):
    """A policy observes its rounds, so its rounds and the rounds of its arms run on the host. Plain decoding needs no
    drafter, and its rounds run ahead on the device."""
    rounds = watch_device_rounds(monkeypatch)
    made = recipe(prompts, algo=["metasd-ucb"], baselines=["vanilla", "fixed"])
    found, _, _ = selected(tmp_path, made, target, {"lookup": pool["lookup"], "suffix": pool["suffix"]})
    assert {*rounds} == {PLAIN} and found.rounds_on == "host"


def test_graphs_are_captured_before_anything_is_timed(tmp_path, tiny_directory, monkeypatch):
    """The graphs of all arms of every policy. Otherwise a policy would capture them during its first texts, and an arm
    alone would not. The graphs also fit the texts to come."""
    target = load_target(tiny_directory("qwen3"), device="cpu", dtype="fp32")
    options, captured, began = DraftingRecipe(stop_below=0.0, keep_above=0.0), play_graphs(monkeypatch), []
    heads = {
        name: drafters.load_drafter(str(write_head(tmp_path / name, target, name)), target, options)
        for name in ("eagle3", "medusa")
    }

    def measured(*args, **named):
        began.append(len(captured))
        return measure(*args, **named)

    monkeypatch.setattr("specctl.measuring.contenders.WARMUP_TOKENS", 16)
    monkeypatch.setattr(select_contenders, "measure", measured)
    prompts = write_prompts(tmp_path, [f"Name {n}." for n in range(2)])
    game = {"reward": "be", "depth": 2}
    made = recipe(prompts, algo=["random", "hedgespec"], baselines=["vanilla", "fixed"], game=game)
    found, _, _ = selected(tmp_path, made, target, heads)
    assert found.rounds_on == "device" and found.lossless.mismatches == 0
    arms = 1 + len(heads)  # with plain decoding, which is no arm of `random`
    assert began == [len(captured)] == [1 + arms + len(heads) + arms]


@pytest.mark.parametrize("plain", [None, True, False])
def test_plain_decoding_is_an_arm_of_policies_that_play_for_seconds(tmp_path, prompts, target, plain):
    """For other policies, it is a loss in every round."""
    pool = {"lookup": Lookup(4), "suffix": Suffix(depth=4, nodes=8, children=2)}
    options = dict(algo=["cgp-ucb", "hedgespec", "metasd-ucb"], game={}, baselines=[], limit=2)
    made = recipe(prompts, arms={"plain": plain}, sampling={"max_new_tokens": 12}, **options)
    found, _, rounds = selected(tmp_path, made, target, pool)
    assert found.arms == [*([] if plain is False else [PLAIN_ARM]), "lookup", "suffix"]
    plainly = {line["algo"] for line in rounds if line["arm"] == PLAIN_ARM}
    weights = {line["algo"]: len(line["weights"]) for line in rounds}
    having = {None: {"cgp-ucb", "hedgespec"}, True: {*made.algo}, False: set()}[plain]
    assert weights == {name: 2 + (name in having) for name in made.algo}
    assert plainly <= having and ("cgp-ucb" in plainly) == ("cgp-ucb" in having)
    assert all(row.pulls.keys() <= {*found.arms} for row in found.policies)


def test_a_router_and_plain_decoding_exclude_each_other(tmp_path, prompts):
    with pytest.raises(ValidationError, match=r"arms\.plain: a router knows only drafters"):
        recipe(prompts, arms={"plain": True}, algo=["router"], router_dir=tmp_path)


def test_policies_that_skip_beside_those_that_recompute(tmp_path, prompts, target, pool):
    """`random` learns nothing, so it makes the same choices. A narrow window means fewer tokens to read and worse
    drafts."""
    made = recipe(
        prompts,
        algo=["random", "hedgespec"],
        baselines=["recompute"],
        catch_up={"name": "streaming", "sink": 1, "window": 2},
    )
    found, _, _ = selected(tmp_path, made, target, {**pool, "again": pool["good"]})
    rows = {row.algo: row for row in found.policies}
    assert list(rows) == ["random", "hedgespec", "random recompute", "hedgespec recompute"]
    assert {row.kind for row in found.policies} == {"policy"} and found.lossless.mismatches == 0
    narrow, whole = rows["random"], rows["random recompute"]
    assert narrow.caught_up / narrow.switches < whole.caught_up / whole.switches
    assert narrow.mat < whole.mat and narrow.switch_ms > 0
    with pytest.raises(ValidationError, match="catch_up=streaming"):
        recipe(prompts, baselines=["recompute"])


def test_rounds_of_the_warm_up_are_not_counted(tmp_path, prompts, target, pool):
    found, _, rounds = selected(tmp_path, recipe(prompts, algo=["ucbspec"], limit=2), target, pool)
    assert {line["round"] for line in rounds if line["query"] == rounds[0]["query"]} == set(
        range(1, 1 + sum(line["query"] == rounds[0]["query"] for line in rounds))
    )
    assert len({line["query"] for line in rounds}) == 2 == found.queries


@pytest.mark.parametrize("reset", ["query", "stream"])
def test_dropped_rounds_of_every_game_are_counted(tmp_path, prompts, target, reset, monkeypatch):
    """Games that go on after the last text count too: for a stream, which is one game, the count was 0."""
    monkeypatch.setattr("specctl.selection.controller.overlap", lambda *_: np.array([np.nan]))
    made = recipe(prompts, algo=["metasd-ucb"], reset=reset, baselines=[], sampling={"max_new_tokens": 6})
    found, _, rounds = selected(tmp_path, made, target, {"lookup": Lookup(4), "suffix": Suffix(4, 8, 2)})
    assert found.policies[0].dropped == sum(line["learnt"] == 0 for line in rounds) > 4


def test_sampled_text_does_not_depend_on_the_choice(tmp_path, prompts, target, pool):
    made = recipe(
        prompts, algo=["random"], sampling={"temperature": 1.0, "exact": True, "max_new_tokens": 8}, seeds=[0, 1]
    )
    found, _, _ = selected(tmp_path, made, target, pool)
    assert found.lossless.sequences == 8 and found.lossless.mismatches == found.lossless.ties == 0


def test_repeats_are_other_draws_of_the_policy(tmp_path, prompts, target, pool):
    """Greedy texts are the same for every seed. With the same choices too, --seeds would only repeat one number."""
    made = recipe(prompts, algo=["random"], seeds=[0, 1], sampling={"seed": 3})
    _, _, rounds = selected(tmp_path, made, target, pool)
    arms = {seed: [line["arm"] for line in rounds if line["seed"] == seed] for seed in (0, 1)}
    assert arms[0] != arms[1] and all(arms.values())
    _, _, rounds = selected(tmp_path / "b", made.model_copy(update={"seeds": [1]}), target, pool)
    assert [line["arm"] for line in rounds] == arms[1]


@pytest.mark.parametrize("reset", ["query", "session"])
def test_a_prompt_may_be_of_two_domains(tmp_path, target, reset):
    """Both answers in a batch belonged to one game, which is refused, and to the session of the last domain."""
    for domain in ("sql", "math"):
        write_prompts(tmp_path, ["Hello."], f"{domain}.jsonl")
    made = recipe(
        tmp_path / "{domain}.jsonl", algo=["random"], reset=reset, batch=2, baselines=[], sampling={"max_new_tokens": 4}
    )
    made = made.model_copy(update={"data": made.data.model_copy(update={"domain": ["sql", "math"]})})
    found, _, _ = selected(tmp_path, made, target, {"lookup": Lookup(4), "suffix": Suffix(4)})
    assert (found.queries, found.sessions) == (2, 2)
    records = pq.read_table(tmp_path / "run/records.parquet").to_pylist()
    assert {(row["domain"], row["session"]) for row in records} == {("sql", 0), ("math", 1)}


class Sometimes(Lookup):
    """Drafts only after prompts of odd length, or only after prompts of even length."""

    def __init__(self, odd):
        super().__init__(4)
        self.odd = odd

    def propose(self, state, budget):
        return super().propose(state, budget if state.rows[0].prompt_length % 2 == self.odd else 0)


@pytest.mark.parametrize("reset", ["query", "stream"])
def test_the_best_arm_is_that_of_a_game_live_and_in_a_replay(tmp_path, prompts, target, reset):
    """Each arm is best at some of the prompts, so the mat of the best arm depends on the length of a game."""
    pool = {"even": Sometimes(0), "odd": Sometimes(1)}
    options = dict(algo=["random"], reset=reset, sampling={"max_new_tokens": 32})
    selected(tmp_path / "a", recipe(prompts, record=tmp_path / "t.parquet", **options), target, pool)
    live, _, _ = selected(tmp_path, recipe(prompts, baselines=["fixed"], **options), target, pool)
    again, _, _ = selected(tmp_path / "b", recipe(prompts, replay=tmp_path / "t.parquet", **options), target, pool)
    assert (live.oracle_mat, live.regret, live.best_arm_ratio) == pytest.approx(
        (again.oracle_mat, again.regret, again.best_arm_ratio)
    )
    mine, theirs = live.policies[0], again.policies[0]
    assert mine.share_of_best == pytest.approx(theirs.share_of_best) != 1


class Broken(Lookup):
    def propose(self, state, budget):
        raise RuntimeError("no such row")


def test_failures_of_every_contender_are_counted(tmp_path, prompts, target):
    """After a failure, an arm alone and draft-all go on as the policy does; warm-up rounds are not counted."""
    made = recipe(prompts, algo=["random"], baselines=["vanilla", "fixed", "draft-all"], sampling={"max_new_tokens": 6})
    found, _, rounds = selected(tmp_path, made, target, {"good": Lookup(4), "broken": Broken(4)})
    rows = {row.algo: row for row in found.policies}
    assert rows["broken"].failures == rows["broken"].rounds == rows["vanilla"].rounds
    assert rows["draft-all"].failures == rows["draft-all"].rounds
    assert rows["random"].failures == sum(line["arm"] == "broken" for line in rounds)
    assert rows["good"].failures == rows["vanilla"].failures == found.lossless.mismatches == 0


def test_failures_of_a_recording_are_counted(tmp_path, prompts, target):
    made = recipe(prompts, record=tmp_path / "t.parquet", sampling={"max_new_tokens": 6})
    for resume in (False, True):  # rounds of the earlier recording are counted, too
        again = made.model_copy(update={"resume": resume})
        found, _, _ = selected(tmp_path / f"{resume}", again, target, {"good": Lookup(4), "broken": Broken(4)})
        rows = {row.algo: row for row in found.policies}
        assert rows["good"].failures == 0 and rows["broken"].mat == 1
        assert rows["broken"].failures == rows["broken"].rounds, "a round at every token"


def test_regret_needs_equal_texts(tmp_path, prompts, target, pool):
    """With sampled proposals, every arm has a text of its own, and passes of different texts make no regret."""
    made = recipe(
        prompts,
        algo=["random"],
        baselines=["fixed"],
        sampling={"temperature": 1.0, "max_new_tokens": 6},
        drafting={"proposal": "sampled"},
    )
    found, _, _ = selected(tmp_path, made, target, {"a": pool["lookup"], "b": pool["good"]})
    assert found.regret is None and found.curves == {}
    assert found.policies[0].share_of_best is not None


def test_draft_sizes_are_arms(tmp_path, prompts, target, pool):
    made = recipe(
        prompts, algo=["ucbspec"], arms={"draft_nodes": [0, 2]}, game={"reward": "throughput"}, reset="stream"
    )
    found, _, rounds = selected(tmp_path, made, target, pool)
    assert found.arms == ["no draft", "good ×2", "lookup ×2", "suffix ×2"]
    assert max(line["drafted"] for line in rounds) == 2
    assert all(line["drafted"] == 0 for line in rounds if line["arm"] == "no draft")


class Interrupting(Lookup):
    """Handles a SIGTERM when it drafts for the `when`-th time."""

    def __init__(self, when):
        super().__init__(4)
        self.when = when

    def propose(self, state, budget):
        self.when -= 1
        if not self.when:
            progress.interrupts.handle(signal.SIGTERM)
        return super().propose(state, budget)


def test_the_hint_of_a_stopped_run_names_a_way_that_works(tmp_path, prompts, target):
    """Live selection cannot be resumed (`--resume` is refused without `record`): the hint must not name `--resume`."""
    made = recipe(prompts, algo=["random"], sampling={"max_new_tokens": 6})
    try:
        with pytest.raises(Interrupted) as caught:
            selected(tmp_path, made, target, {"a": Interrupting(12)})
    finally:
        progress.interrupts.reset()
    assert "of 4 prompts" in caught.value.message
    assert "resume" not in caught.value.hint and "records.parquet" in caught.value.hint
    assert pq.read_table(tmp_path / "run/records.parquet").num_rows % 2 == 0


def test_contenders_have_names_of_their_own(tmp_path, prompts, target, pool):
    with pytest.raises(UsageError, match="two contenders are called 'lookup'"):
        selected(tmp_path, recipe(prompts, rivals=["lookup"]), target, pool)


def test_a_start_that_is_refused_leaves_the_earlier_run(tmp_path, prompts, target, pool):
    """Contenders and prompts are checked after the target is loaded. With --overwrite, the run was deleted by then."""
    made = recipe(prompts, algo=["ucbspec"], baselines=[], overwrite=True, output_dir=tmp_path / "run")
    selected(tmp_path, made, target, pool)
    (tmp_path / "run/rejected.jsonl").write_text("{}\n")
    before = contents(tmp_path / "run")
    with pytest.raises(UsageError, match="two contenders"):
        selected(tmp_path, made.model_copy(update={"rivals": ["lookup"]}), target, pool)
    table = tmp_path / "table.parquet"
    table.write_bytes(b"PAR1")
    taken = recipe(prompts, record=table, output_dir=tmp_path / "run")
    with pytest.raises(UsageError, match=r"table\.parquet already exists") as there:
        selected(tmp_path, taken, target, pool)
    assert f"specctl replay {table}" in there.value.hint
    with pytest.raises(CheckpointError, match=r"table\.parquet"):
        selected(tmp_path, taken.model_copy(update={"resume": True}), target, pool)
    prompts.write_text("{\n")
    with pytest.raises(DataError, match="1 of 1 prompts rejected"):
        selected(tmp_path, made, target, pool)
    assert contents(tmp_path / "run") == before


def case(domain, number):
    return Case(Prompt(f"{domain}{number}", [], domain, ""), [1], 1)


def test_sessions_are_runs_of_one_domain(prompts):
    made = recipe(prompts, session=3, order="mixed")
    made = made.model_copy(update={"data": DataRecipe(domain=["sql", "math"])})
    cases = [case(domain, n) for domain in ("sql", "math") for n in range(7)]
    found = make_sessions(cases, made)
    assert sorted(len(session) for session in found) == [1, 1, 3, 3, 3, 3]
    assert all(len({one.prompt.domain for one in session}) == 1 for session in found)
    assert found == make_sessions(cases, made)
    blocks = make_sessions(cases, made.model_copy(update={"order": "blocks"}))
    assert [one for session in blocks for one in session] == cases != [one for session in found for one in session]


def test_a_batch_never_holds_two_prompts_of_a_session():
    stream = [[case("a", n) for n in range(3)], [case("b", n) for n in range(2)], [case("c", 0)]]
    found = prompt_batches(stream, 2)
    assert [[one.prompt.id for one in turn] for turn in found] == [["a0", "b0"], ["a1", "b1"], ["a2"], ["c0"]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, target, pool):
    """The prompts' file, a table of the pool on all questions, and the result of its recording."""
    folder = tmp_path_factory.mktemp("table")
    path = write_prompts(folder, QUESTIONS)
    made = recipe(path, record=folder / "table.parquet")
    found, _, _ = selected(folder, made, target, pool)
    return path, made.record, found


@pytest.mark.parametrize(("algo", "reset"), [("hedgespec", "query"), ("metasd-ucb", "session")])
def test_a_replay_is_what_live_decoding_does(tmp_path, target, pool, recorded, algo, reset):
    """A replay has exactly the arms and the tokens of live rounds: it plays the same game on the same feedback."""
    prompts, table, _ = recorded
    options = dict(algo=[algo], reset=reset, baselines=["fixed"], sampling={"seed": 3})
    live, _, rounds = selected(tmp_path, recipe(prompts, **options), target, pool)
    again, _, _ = selected(tmp_path / "replay", recipe(prompts, replay=table, **options), target, pool)
    mine, theirs = live.policies[0], again.policies[0]
    assert (mine.rounds, mine.pulls) == (theirs.rounds, theirs.pulls)
    assert (live.mat, live.oracle_mat, live.regret) == pytest.approx((again.mat, again.oracle_mat, again.regret))
    assert len({line["arm"] for line in rounds}) > 1


@pytest.mark.parametrize(("reset", "taps"), [("query", (2,)), pytest.param("session", (), marks=pytest.mark.slow)])
def test_a_replay_reads_prompts_as_live_decoding_does(tmp_path, target, pool, monkeypatch, taps, reset):
    """Tables have the features of the prompts, with arms that read states of the target and with arms that do not."""
    monkeypatch.setattr(Lookup, "taps", taps)
    questions = [f"Count from {n} to {n + 9}." for n in range(5)] + [f"Name the colour of {n}." for n in range(5)]
    path = write_prompts(tmp_path, questions)
    table = tmp_path / "t.parquet"
    selected(tmp_path / "a", recipe(path, record=table), target, pool)
    assert all(trace.context is not None for trace in read_table(table).traces)
    options = dict(algo=["cgp-ucb"], game={"reward": "tokens"}, baselines=["vanilla"], reset=reset)
    live, _, lines = selected(tmp_path / "b", recipe(path, **options), target, pool)
    again, _, _ = selected(tmp_path / "c", recipe(path, replay=table, **options), target, pool)
    assert (live.rounds, live.pulls) == (again.rounds, again.pulls) and live.lossless.mismatches == 0
    assert live.policies[0].score_share is None, "nobody is scored"
    first = [line["arm"] for line in lines if line["round"] == 1]
    assert first[0] == "good" and len(first) == 10


def numbers_after_stories(tmp_path, target, count):
    """A pool of two datastores, `a` of stories and `b` of numbers, and a file with `count` prompts about numbers."""
    numbers = [f"Count from {n} to {n + 9}." for n in range(6 + count)]
    stories = [f"Write a long story about a {what} in the wood." for what in ("cat", "dog", "tree", "house", "bear")]
    place = tmp_path / "pool"
    for name, asked in (("a", stories), ("b", numbers[:6])):
        store = Datastore.of([target.tokenizer(text)["input_ids"] for text in asked])
        prompts = [prompt_ids(target, text) for text in asked]
        mean, error = cluster_of(features_at(target, prompts, (target.num_layers,)))
        told = {"taps": [target.num_layers], "kinds": {"sql": {"mean": mean.tolist(), "error": error}}}
        made = {"config": retrieval.checkpoint_config(store, target.identity), "tensors": retrieval.tensors(store)}
        checkpoint.save(place / name, **made, info={"domain": ["sql"], "prompts": told})
    return place, write_prompts(tmp_path, numbers[6:])


def prompt_ids(target, text):
    return target.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )


def test_a_pool_is_chosen_from_by_what_its_drafters_were_trained_on(tmp_path, target):
    """This holds from the first text on, and in a replay too. It does not hold for layers that the target lacks."""
    place, path = numbers_after_stories(tmp_path, target, 6)
    sized = {"drafting": {"nodes": 7}}  # tables hold drafts of one size
    options = dict(
        algo=["cgp-ucb"], game={"reward": "tokens"}, baselines=["vanilla"], reset="query", pool=place, **sized
    )
    live, _, lines = selected(tmp_path / "live", recipe(path, **options), target, None)
    assert lines[0]["arm"] == "b" and live.lossless.mismatches == 0
    table = tmp_path / "t.parquet"
    selected(tmp_path / "a", recipe(path, record=table, pool=place, **sized), target, None)
    again, _, _ = selected(tmp_path / "c", recipe(path, **options | {"pool": None}, replay=table), target, None)
    assert (live.rounds, live.pulls) == (again.rounds, again.pulls)
    for one in ("a", "b"):
        info = place / one / "drafter.json"
        kept = checkpoint.load(place / one)
        told = {"domain": ["sql"], "prompts": {**json.loads(info.read_text())["prompts"], "taps": [99]}}
        checkpoint.save(place / one, config=kept.config, tensors=kept.tensors, info=told, overwrite=True)
    _, _, lines = selected(tmp_path / "d", recipe(path, **options), target, None)
    assert lines[0]["arm"] == "a", "of unknown layers: every arm once"


@pytest.mark.parametrize("taps", [[1], [1, -1]])
def test_a_drafter_of_other_layers_does_not_hide_the_training_prompts_of_the_pool(tmp_path, target, monkeypatch, taps):
    """Such as a head beside datastores, which know kinds of prompts by the last layer. The layers of most drafters tell
    kinds of prompts, and are kept beside the layers that drafters read."""
    monkeypatch.setattr(Lookup, "taps", tuple(tap % (target.num_layers + 1) for tap in taps))
    place, path = numbers_after_stories(tmp_path, target, 2)
    options = dict(algo=["cgp-ucb"], game={"reward": "tokens"}, baselines=["vanilla"], pool=place, drafters=["lookup"])
    options["drafting"] = {"nodes": 7}  # tables hold drafts of one size
    live, _, lines = selected(tmp_path / "live", recipe(path, **options), target, None)
    assert lines[0]["arm"] == "b" and live.lossless.mismatches == 0
    table = tmp_path / "t.parquet"
    selected(tmp_path / "a", recipe(path, record=table, **options), target, None)
    replayed = {**options, "pool": None, "drafters": []}
    again, _, _ = selected(tmp_path / "c", recipe(path, **replayed, replay=table), target, None)
    assert (live.rounds, live.pulls) == (again.rounds, again.pulls)


def test_repeats_know_nothing_of_each_other(tmp_path, target, pool):
    """A prompt that comes again with another seed must not be treated as a known prompt."""
    path = write_prompts(tmp_path, QUESTIONS)
    made = recipe(
        path, beside="retrieval", baselines=["vanilla", "beside"], algo=["cgp-ucb"], seeds=[0, 1],
        game={"reward": "tokens"},
    )  # fmt: skip
    found, _, _ = selected(tmp_path, made, target, pool)
    records = pq.read_table(tmp_path / "run" / "records.parquet").to_pylist()
    for name in ("retrieval", "cgp-ucb"):
        passes = [
            [row["target_passes"] for row in records if row["drafter"] == name and row["seed"] == seed]
            for seed in (0, 1)
        ]
        assert passes[0] == passes[1], name
    assert found.store_s > 0


def test_lengths_are_chosen_for_a_batch(tmp_path, prompts, target):
    """In a batch too, every arm drafts its length, alone and when it is chosen."""
    made = recipe(
        prompts,
        algo=["ucbspec", "exp3spec"],
        drafters=["lookup"],
        arms={"names": ["lookup"], "draft_nodes": [0, 1, 6]},
        game={"reward": "throughput"},
        choice="batch",
        batch=4,
        reset="stream",
        session=1,
        baselines=["vanilla", "fixed"],
    )
    found, _, lines = selected(tmp_path, made, target, None)
    rows = {row.algo: row for row in found.policies}
    assert found.lossless.mismatches == 0 and {*rows} == {
        *("ucbspec", "exp3spec", "vanilla", "no draft", "lookup ×1", "lookup ×6")
    }
    assert rows["lookup ×6"].mat > rows["lookup ×1"].mat > 1 == rows["no draft"].mat
    assert set(rows["ucbspec"].pulls) == {"no draft", "lookup ×1", "lookup ×6"}
    assert {line["query"] for line in lines} >= {"4 texts"} and {line["algo"] for line in lines} == {*made.algo}
    assert sum(line["committed"] for line in lines if line["algo"] == "ucbspec") == rows["vanilla"].rounds


@pytest.mark.slow
def test_heads_draft_beside_a_text_drafter(tmp_path, prompts, target, monkeypatch):
    """Every head, arm or rival, drafts in one tree with `lookup`; the policy compares heads, and `lookup` also plays
    alone."""
    free_hybrids(monkeypatch)
    for name, noise in (("good", 0.0), ("bad", 3.0)):
        write_copy(tmp_path / "pool" / name, target, builtin_path(), noise)
    write_copy(tmp_path / "rival", target, builtin_path(), 0.0)
    mats = {}
    for beside in ("none", "lookup"):
        made = recipe(
            prompts,
            pool=tmp_path / "pool",
            rivals=[str(tmp_path / "rival")],
            beside=beside,
            baselines=["vanilla", "beside", "fixed"],
            drafting={"depth": 4},
        )
        found, document, _ = selected(tmp_path / beside, made, target, None)
        assert found.lossless.mismatches == 0 and document["beside"] == (None if beside == "none" else beside)
        mats[beside] = {row.algo: row.mat for row in found.policies}
        kinds = {row.algo: row.kind for row in found.policies}
    assert kinds == {
        "hedgespec": "policy",
        "vanilla": "baseline",
        "good": "arm",
        "bad": "arm",
        "lookup": "arm",
        "rival": "rival",
    }
    assert "lookup" not in mats["none"]
    for name in ("good", "bad", "rival"):
        assert mats["lookup"][name] >= max(mats["none"][name], mats["lookup"]["lookup"] - 1e-9)
    assert mats["lookup"]["hedgespec"] > 0.8 * mats["lookup"]["good"]


def test_a_hybrid_is_judged_by_its_head(target, pool, monkeypatch):
    """A head that seldom drafts costs little: by seconds, the worst head would be the best."""
    head, game = pool["good"], GameRecipe()
    arms = [Arm(name, Lookup(4), scored=head) for name in "ab"]

    def built(arms, game):
        options = dict(step=lambda: 1.0, seed=0, within_query=True, on_round=lambda line: None)
        return make_selector(target, arms, "hedgespec", game, lambda *_: None, Decoding(**options))

    assert built(arms, game).scorer.drafters == [head]
    rules = []
    monkeypatch.setattr("specctl.selection.assembly.Game", lambda policy, given, *_: rules.append(given))
    for made in (arms, [Arm("a", head)]):
        built(made, game).new_game(Label("q"))
    built(arms, GameRecipe(loss="throughput")).new_game(Label("q"))
    assert [rule.loss for rule in rules] == ["length", "throughput", "throughput"]


@pytest.mark.parametrize(("temperature", "estimator"), [(0.0, "realised"), (1.0, "product")])
def test_greedy_texts_are_judged_by_their_hits(prompts, target, pool, monkeypatch, temperature, estimator):
    """Products of γ, a softmax at temperature 1, would promise far too few tokens for the seconds of a head."""
    monkeypatch.setattr("specctl.selection.assembly.step_seconds", lambda target, rows, batch: [1.0])
    made = recipe(prompts, game={}, sampling={"temperature": temperature}, baselines=[])
    game = SelectContenders(made, target, [], DrafterPool(pool)).selectors["hedgespec"].new_game(Label("q"))
    assert game.rules.loss == "throughput" and game.rules.estimator == estimator


def test_options_that_exclude_a_companion_are_refused(prompts):
    with pytest.raises(ValidationError, match="leave out draft_nodes and shapes"):
        recipe(prompts, beside="lookup", arms={"draft_nodes": [2]})
    assert recipe(prompts, beside="auto").companion == "retrieval"
    assert recipe(prompts, beside="auto", arms={"draft_nodes": [2]}).companion is None
    assert recipe(prompts, beside="auto", drafting={"proposal": "sampled"}).companion is None


def test_a_replay_of_sessions_of_two_domains_is_live_decoding(tmp_path, target, pool):
    """With order=shift, games of one domain would forget in the middle of every session."""
    for domain, texts in (("sql", QUESTIONS[:2]), ("math", QUESTIONS[2:])):
        write_prompts(tmp_path, texts, f"{domain}.jsonl")
    options = dict(reset="session", order="shift", session=2, baselines=["vanilla"], algo=["hedgespec"])
    cheap = {name: pool[name] for name in ("lookup", "suffix")}

    def made(**more):
        prompts = str(tmp_path / "{domain}.jsonl")
        return recipe(prompts, data=DataRecipe(domain=["sql", "math"], prompts=prompts), **options, **more)

    table = tmp_path / "t.parquet"
    selected(tmp_path / "a", made(record=table), target, cheap)
    live, _, _ = selected(tmp_path, made(), target, cheap)
    again, _, _ = selected(tmp_path / "b", made(replay=table), target, cheap)
    assert (live.rounds, live.pulls, live.sessions) == (
        again.rounds,
        again.pulls,
        again.sessions,
    ) and live.sessions == 2


def test_recording_says_what_every_arm_does(recorded, target, pool):
    _, _, found = recorded
    assert found.mode == "record" and found.queries == 4
    rows = {row.algo: row.mat for row in found.policies}
    assert rows["good"] > 2 and rows["draft-all"] >= rows["good"] - 1e-9
    assert rows["oracle"] == found.oracle_mat


def test_pools_of_several_sizes(tmp_path, recorded, target, pool):
    prompts, table, _ = recorded
    made = recipe(prompts, replay=table, algo=["hedgespec", "random"], pool_sizes=[1, 2])
    found, _, _ = selected(tmp_path, made, target, pool)
    sizes = {(one.arms, one.algo): one for one in found.pool_size}
    assert sizes.keys() == {(n, name) for n in (1, 2) for name in ("hedgespec", "random", "oracle")}
    assert sizes[1, "random"].share_of_best == pytest.approx(1)
    assert sizes[2, "oracle"].mat >= sizes[2, "hedgespec"].mat
    with pytest.raises(UsageError, match="pool_sizes names 9 arms, but the table has 3"):
        selected(tmp_path, made.model_copy(update={"pool_sizes": [9]}), target, pool)


def test_an_option_that_a_policys_own_game_overrules_is_told(tmp_path, recorded, target, pool, capsys):
    """An option that is set to its default counts as left out, but there is a message."""
    prompts, table, _ = recorded
    made = recipe(prompts, replay=table, algo=["normalhedge"], game={"drift": 5.0, "warmup_rounds": 3})
    selected(tmp_path, made, target, pool)
    said = capsys.readouterr().err
    assert "normalhedge uses its own game settings: game.drift=None;" in said and "warmup" not in said


def test_a_replay_of_some_arms(tmp_path, recorded, target, pool):
    prompts, table, _ = recorded
    made = recipe(prompts, replay=table, arms={"names": ["suffix", "good"]})
    found, _, _ = selected(tmp_path, made, target, pool)
    assert found.arms == ["suffix", "good"]
    with pytest.raises(UsageError, match=r"the pool has no gold.*"):
        made = recipe(prompts, replay=table, arms={"names": ["gold"]})
        selected(tmp_path / "b", made, target, pool)


def test_a_replay_plays_every_seed(tmp_path, target, pool, recorded):
    """Live decoding does too. A replay ignored the seeds, and three seeds had the numbers of one seed."""
    prompts, table, _ = recorded
    options = dict(algo=["random"], reset="session", sampling={"seed": 3})
    seeds = {"seeds": [0, 2]}
    live, _, _ = selected(tmp_path, recipe(prompts, baselines=["fixed"], **seeds, **options), target, pool)
    found, document, _ = selected(tmp_path / "b", recipe(prompts, replay=table, **seeds, **options), target, pool)
    for one, other in zip(live.policies, found.policies, strict=False):
        assert (one.algo, one.rounds, one.regret) == (other.algo, other.rounds, other.regret)
    assert (live.pulls, live.queries, live.oracle_mat) == (found.pulls, found.queries, pytest.approx(found.oracle_mat))
    alone = [replay_table(recipe(prompts, replay=table, seeds=[seed], **options)).rounds for seed in seeds["seeds"]]
    assert found.rounds == sum(alone) and alone[0] != alone[1]
    named = {"seeds": 2, "reset": "session", "intervals_over": "2 seeds × 2 sessions", "yardstick": "mat"}
    digest = hashlib.sha256(table.read_bytes()).hexdigest()
    assert document.items() >= (named | {"table": str(table), "table_sha256": digest}).items()
    assert "scoring" in document["speeds"] and live.speeds == "measured"


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("hedgespec", {"depth": None, "warmup_rounds": 6, "batch_growth": 1.0, "score_ends": True, "drift": None}),
        ("metasd", {"reward": "bd"}),
        ("banditspec", {"reward": "tokens"}),
    ],
)
def test_recipes_with_the_constants_of_the_papers(recorded, name, constants):
    """Each recipe sets the constants of its paper, independent of our defaults, and plays."""
    _, table, _ = recorded
    assert resolve("select", f"replicate/{name}").beside == "none"
    made = resolve("replay", f"replicate/{name}", [f"replay={table}", "seeds=[0]"])
    assert made.game.model_dump().items() >= constants.items() and made.reset == "query"
    rows = {row.algo: row for row in replay_table(made).policies if row.kind == "policy"}
    assert list(rows) == made.algo and all(row.mat >= 1 for row in rows.values())


def test_drafts_of_metasd_are_of_one_length():
    """Its block divergence covers N_max positions; heads would end drafts where they are unsure."""
    drafting = resolve("select", "replicate/metasd", []).drafting
    assert (drafting.stop_below, drafting.keep_above) == (0, 0)


def test_modelled_speeds_pay_for_scoring(tmp_path, prompts, target, recorded):
    """Full information scores all arms, which takes time, in a replay as in live decoding."""
    _, table, _ = recorded
    made = recipe(prompts, replay=table, algo=["hedgespec", "random"], reset="session")
    rows = {row.algo: row for row in replay_table(made).policies}
    assert rows["hedgespec"].score_share > 0 and rows["hedgespec"].scorings > 0
    assert rows["random"].score_share is None and rows["random"].scorings == 0


@pytest.mark.parametrize(("by", "best", "share"), [("mat", "long", 1.0), ("throughput", "short", 0.4)])
def test_the_best_arm_is_the_fastest_in_a_game_for_speed(by, best, share):
    """The longest draft has the most tokens per pass, but in a game for tokens per second it is not the oracle."""

    def answer(passes, seconds):
        return Decoded([1], [2] * 41, "length", passes, 40 - passes, 0, 0, [], [], 0.0, seconds)

    answers = {"long": [answer(10, 5.0)] * 2, "short": [answer(20, 2.0)] * 2}
    stream = StreamAnswers(answers, Grouping([0, 1], ["a", "b"]), ["long", "short"], None, True, by)
    assert stream.best_arm_of == {"a": best, "b": best} and stream.oracle_mat == (4 if by == "mat" else 2)
    assert stream.share_of_best("long").value == pytest.approx(share)
    assert GameRecipe(loss="throughput" if best == "short" else "length").yardstick == by
    assert stream.has_regret == (by == "mat"), "passes beyond those of the fastest arm are no regret"


def test_certificates_count_texts_and_not_their_repeats():
    """Repeats of a text add no evidence, and would make the bounds too tight."""

    def answers(*seconds):
        return [Decoded([1], [2] * 41, "length", 10, 30, 0, 0, [], [], 0.0, s) for s in seconds]

    own = {"policy": answers(*[1.0] * 40), "plain": answers(*[2.0] * 40), "arm": answers(*[0.5] * 20, *[2.0] * 20)}

    def stream(texts, arms=("arm",), plain="plain"):
        return StreamAnswers(own, Grouping(range(40), ["g"] * 40, texts), arms, plain, True)

    once, repeated = stream(range(40)), stream([*range(20), *range(20)])
    assert once.relative_seconds("policy", "plain") == [0.5] * 40
    assert repeated.relative_seconds("policy", "arm") == [1.25] * 20
    assert 0.9 < repeated.certificates("policy").speedup_at_least < once.certificates("policy").speedup_at_least < 2
    assert once.certificates("policy").over_best_arm_at_least < 0.8
    assert stream((), (), None).certificates("policy") == (None, None, None)


def test_a_replay_certifies_its_policies(monkeypatch):
    """Bounds over plain decoding and over every arm, from the seconds of the table's cost model."""
    table = specialists(60, 45, seed=3, N=3)
    monkeypatch.setattr("specctl.lab.replay.run.read_table", lambda path: table)
    done = replay_table(ReplayRecipe(replay="t", algo=["fixed", "cgp-ucb"], seeds=[0, 1], game={"loss": "length"}))
    rows = {row.algo: row for row in done.policies}
    hindsight = Hindsight(table)
    seconds = hindsight.rounds[:, 0] * hindsight.cost[0]
    plain = of_stream(seconds / (hindsight.tokens * table.step_s[0]))
    assert rows["fixed"].speedup_at_least == pytest.approx(plain.at_least)
    assert 1 < rows["fixed"].speedup_at_least < rows["fixed"].speedup and rows["fixed"].slow_texts == 0
    assert all(0.5 < rows[name].over_best_arm_at_least < 1 for name in ("fixed", "cgp-ucb"))
    assert rows["arm0"].speedup_at_least is rows["oracle"].speedup_at_least is None


def test_repeats_make_no_interval_narrower():
    """Intervals of shares are over sessions, as in the rest of a row; repeats of the stream add no sessions."""

    def answers(*passes):
        return [Decoded([1], [2] * 41, "length", n, 40 - n, 0, 0, [], [], 0.0, 1.0) for n in passes]

    once = {"policy": answers(12, 20, 13, 30), "arm": answers(10, 18, 12, 20)}
    found = [
        StreamAnswers(
            {name: times * own for name, own in once.items()},
            Grouping(times * [0, 0, 1, 2], [f"{repeat} {n}" for repeat in range(times) for n in range(4)]),
            ["arm"],
            None,
            True,
        ).share_of_best("policy")
        for times in (1, 9)
    ]
    (share, interval), (again, same) = [(one.value, one.interval) for one in found]
    assert share == again == pytest.approx(60 / 75) and interval == pytest.approx(same)


def test_k_is_that_of_the_arms_that_play(tmp_path, prompts, target, pool):
    """Rewards are shares of K: with the K of an arm that is left out, a replay would play another game than live."""
    deep = {**pool, "suffix": Suffix(depth=9, nodes=9, children=1)}
    table = tmp_path / "t.parquet"
    selected(tmp_path / "a", recipe(prompts, record=table), target, deep)
    some = {"names": ["lookup", "good"]}
    options = dict(algo=["ucbspec"], arms=some, reset="session")
    live, _, _ = selected(tmp_path, recipe(prompts, **options), target, {n: pool[n] for n in some["names"]})
    again = replay_table(recipe(prompts, replay=table, **options))
    assert read_table(table).depth == 9 and of_arms(read_table(table), some["names"]).depth == 4
    assert (live.rounds, live.pulls) == (again.rounds, again.pulls)


@pytest.mark.parametrize("order", [["suffix", "good"], ["good", "lookup", "suffix"]])
def test_a_router_is_taught_the_arms_of_the_pool(tmp_path, recorded, order):
    """Hindsight's labels are the arms that needed the fewest rounds, by name."""
    prompts, table, _ = recorded
    made = recipe(prompts, replay=table, router={"labels": "hindsight", "prompts": str(prompts)})
    paths = dict.fromkeys(order, "lookup")
    examples = router_examples(made, paths, Rejections(tmp_path / "rejected.jsonl", 0.0))
    assert len(examples) == len(QUESTIONS)
    whole = read_table(table)
    best = {order[example.arm] for example in examples}
    alone = {arm: [int(round_starts(t.accepted)[whole.arms.index(arm)].sum()) for t in whole.traces] for arm in order}
    assert best == {min(order, key=lambda arm: alone[arm][n]) for n in range(len(QUESTIONS))}
    with pytest.raises(CheckpointError, match="no arm gold"):
        router_examples(made, {**paths, "gold": "gold"}, Rejections(tmp_path / "rejected.jsonl", 0.0))


class Oracle:
    """A router that always gives the arm `right` most of the probability."""

    def __init__(self, arms, right):
        self.arms, self.right = arms, right

    def probabilities(self, texts):
        return np.array([[0.9 if arm == self.right else 0.1 for arm in self.arms] for _ in texts])


def test_the_router_plays_what_it_says(tmp_path, prompts, target, pool):
    made = recipe(prompts, algo=["router", "hedgespec"], router_dir=tmp_path, baselines=["fixed"])
    cases = [[Case(Prompt("ab" * 16, [{"role": "user", "content": "Hi"}], "sql", ""), [1, 5], 8)]]
    stage = SelectContenders(made, target, cases, DrafterPool(pool), Oracle([*pool], "lookup"))
    with open(tmp_path / "log", "w") as log:
        stage.play(log, lambda records: tmp_path)
    assert {arm for _, arm, _ in stage.plays["router"]} == {"lookup"}


def test_half_sessions_of_two_domains(prompts):
    made = recipe(prompts, session=4, order="shift")
    made = made.model_copy(update={"data": DataRecipe(domain=["sql", "math"])})
    found = make_sessions([case(domain, n) for domain in ("sql", "math") for n in range(4)], made)
    assert [len(session) for session in found] == [4, 4]
    for session in found:
        domains = [one.prompt.domain for one in session]
        assert domains[0] == domains[1] != domains[2] == domains[3]
