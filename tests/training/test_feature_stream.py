"""A training on streamed features learns the same bits as a training on stored features, through every failure of a
server. Few files exist at a time, and none after the training."""

import functools
import re
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from specctl.decoding.target import load_target
from specctl.drafters import checkpoint as drafters
from specctl.engines.records import EngineError
from specctl.errors import Interrupted, UsageError
from specctl.progress import interrupts
from specctl.recipe import FeatureRecipe, HeldOutRecipe, ServerRecipe, TrainRecipe
from specctl.runs import Run
from specctl.training import feature_stream, loop
from specctl.training.data import load_corpus
from specctl.training.features import FeatureStore
from tests.toys.capture import CapturingEngine, raw_logprobs, raw_states
from tests.training.small import metrics, recipe
from tests.training.test_features import same
from tests.training.test_loop import launch, make

TAPS = (2, 5, 7)
LAST = 10
STEPS = 20


def remembered(function):
    """A function of ids that computes each text once: a training asks for it in every epoch."""
    cached = functools.cache(lambda ids: function(list(ids)))
    return lambda ids: cached(tuple(ids))


@pytest.fixture(scope="module")
def states(target):
    """Ids → the target's hidden states of `TAPS` and of the last layer."""
    return remembered(partial(raw_states, target, layers=(*TAPS, LAST)))


@pytest.fixture
def serve(target, states, tmp_path, monkeypatch):
    """`serve(port)`: a capture server of the target for `TAPS`. All servers write below `tmp_path / "files"`."""
    monkeypatch.setattr("specctl.engines.client.FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr("specctl.engines.client.LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr(feature_stream, "FOLLOW_S", 0.05)
    (tmp_path / "files").mkdir()
    servers = []

    def start(port=0, states=states):
        place = tmp_path / "files" / str(len(servers))
        place.mkdir()
        server = CapturingEngine(target.tokenizer, "vllm", place, states, port=port)
        servers.append(server)
        return server.__enter__()

    yield start
    for server in servers:
        if server.server.fileno() >= 0:
            server.__exit__()


@pytest.fixture(scope="module")
def examples(distilled, target, tmp_path_factory):
    return load_corpus(recipe(distilled, tmp_path_factory.mktemp("corpus")), target).train[:16]


@pytest.fixture(scope="module")
def computed(target, examples):
    """The features of the examples, computed in this process."""
    return FeatureStore(target, TAPS).get(examples)


def files(place):
    return list(place.rglob("*.safetensors"))


def streaming(*servers, ahead=4, **options):
    return FeatureRecipe(mode="stream", ahead=ahead, server=ServerRecipe(urls=[one.url for one in servers], **options))


@contextmanager
def stream(target, examples, features, processes=1):
    """A store that asks for `examples` in order."""
    store = FeatureStore(target, TAPS)
    try:
        store.open_stream(examples, features, iter(examples), processes)
        yield store
    finally:
        if store.stream is not None:
            store.stream.close()


def train(distilled, place, features, **changes):
    """The lines of metrics.jsonl with a loss, and the weights."""
    place.mkdir(parents=True, exist_ok=True)
    try:
        loop.train_drafter(
            recipe(distilled, place, **{"max_steps": STEPS, "features": features, **changes}), Run(place)
        )
    finally:
        interrupts.reset()
    return [line for line in metrics(place) if "loss" in line], drafters.load(place / "drafter").tensors


def equal(own, theirs):
    (lines, weights), (others, tensors) = own, theirs
    assert [line["loss"] for line in lines] == [line["loss"] for line in others]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in weights.items())


@pytest.fixture(scope="module")
def own(distilled, target, tmp_path_factory):
    """Loss lines and weights of a training on features on disk, in more than two epochs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "load_target", lambda **_: target)
        place = tmp_path_factory.mktemp("own")
        lines, weights = train(distilled, place, FeatureRecipe(mode="cached", dir=place / "features"))
    assert max(line["epoch"] for line in lines) == 2
    return lines, weights


@pytest.fixture
def known_target(target, monkeypatch):
    monkeypatch.setattr(loop, "load_target", lambda **_: target)


@contextmanager
def largest(place):
    """A list with the largest number of bytes of hidden states at one time under `place`: files, and deleted files that
    this process still maps."""
    found, done = [0], threading.Event()
    mapped = re.compile(rb"^(\w+)-(\w+) .*%s.*\(deleted\)$" % re.escape(str(place)).encode(), re.MULTILINE)

    def watch():
        while not done.wait(0.002):
            sizes = []
            for path in files(place):
                with suppress(FileNotFoundError):
                    sizes.append(path.stat().st_size)
            for first, last in mapped.findall(Path("/proc/self/maps").read_bytes()):
                sizes.append(int(last, 16) - int(first, 16))
            found[0] = max(found[0], sum(sizes))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def test_a_head_learns_the_same_from_texts_that_are_asked_for_in_every_epoch(
    distilled, known_target, serve, own, tmp_path
):
    """No file is left, and the metrics show the progress of the stream."""
    server = serve()
    theirs = train(distilled, tmp_path / "streamed", streaming(server))
    equal(own, theirs)
    assert server.asked.total() > 2 * len(server.asked), "each epoch asks again"
    assert not [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    for line in theirs[0]:
        assert line["samples_per_s"] > 0 and 0 <= line["queue"] <= 4 and 0 <= line["idle"] <= 1
    assert not any("idle" in line for line in own[0])


def test_a_server_that_is_killed_again_and_again_loses_nothing(distilled, known_target, serve, own, tmp_path, target):
    """Every time, its requests in flight break off, and it comes back at its address with an empty directory."""
    servers, over = [serve()], threading.Event()
    servers[0].seconds = 0.2
    trash = make(tmp_path / "trash")

    def kill():
        while not over.wait(1.0):
            old = servers[-1]
            place, old.place = old.place, trash  # for files that its threads still write
            old.gone, old.faults = True, lambda number: "reset"
            old.__exit__()
            time.sleep(0.05)
            for path in files(place):
                path.unlink(missing_ok=True)
            servers.append(serve(port=old.server.server_port))
            servers[-1].seconds = 0.2

    longest = max(len(one.tokens) for one in load_corpus(recipe(distilled, tmp_path), target).train)
    one = longest * (len(TAPS) + 1) * target.hidden_size * 4
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with largest(tmp_path / "files") as most:
            theirs = train(distilled, tmp_path / "streamed", streaming(servers[0], ahead=6, retries=30, wait_s=10))
    finally:
        over.set()
        killer.join()
    equal(own, theirs)
    assert len(servers) > 3, "it was not killed often enough"
    assert one / 2 < most[0] <= 2 * 6 * one


def test_servers_join_and_leave(distilled, known_target, serve, own, tmp_path, target, capsys):
    """The second server joins, and the first leaves. A server that gives other layers, or does not respond, never takes
    part."""
    first, second = serve(), serve()
    wrong = serve(states=partial(raw_states, target, layers=(3, 6, 8, LAST)))
    listed = tmp_path / "servers"
    listed.write_text(f"# engines\n\n{first.url}\n")

    def change(number):
        time.sleep(0.02)
        if number == 10:
            listed.write_text(f"{first.url}\n{second.url}/v1\n{wrong.url}\nhttp://127.0.0.1:9\n")
            until(lambda: second.asked and "no server responds at http://127.0.0.1:9" in said())
        elif number == 20:
            listed.write_text("half a line")
            until(lambda: "'half a line' is not an address" in said())
            listed.write_text(f"{first.url}\nhttp://\u2603.example:80\n")
            until(lambda: "Invalid IDNA hostname" in said())
            listed.write_text(f"{second.url}\n{wrong.url}\n")
            until(lambda: f"{first.url} left" in said())
            left.append(first.asked.total())

    told, left = [], []

    def said():
        told.append(capsys.readouterr().err)
        return "".join(told)

    first.faults = change
    theirs = train(distilled, tmp_path / "streamed", FeatureRecipe(servers=listed, ahead=4))
    equal(own, theirs)
    assert first.asked.total() <= left[0] + 4 < second.asked.total()
    assert max(wrong.asked.values()) == wrong.asked.total(), "only the probe was asked"
    words = said()
    assert f"{second.url} joined: 2 servers" in words and f"{first.url} left" in words
    assert f"a server is not used: {wrong.url} gives other hidden states" in words
    assert "a server is not used: no server responds at http://127.0.0.1:9" in words
    assert "'half a line' is not an address" in words
    assert "http://\u2603.example:80 is not an address: Invalid IDNA hostname" in words


@pytest.mark.parametrize("layers", [True, False], ids=["whole target", "ends"])
def test_a_stopped_run_goes_on_at_its_text(distilled, target, serve, own, tmp_path, monkeypatch, layers):
    """The resumed run learns the bits of a run without a stop. It also does without the target's layers, where it
    estimates mat."""
    ends = target if layers else load_target("builtin", device="cpu", dtype="fp32", whole=False)
    monkeypatch.setattr(loop, "load_target", lambda **_: ends)
    server = serve()
    server.logprobs = remembered(partial(raw_logprobs, target))
    held_out = HeldOutRecipe(prompts=2, max_new_tokens=4, fraction=0.02 if layers else 0.3, every=4)
    options = dict(features=streaming(server, ahead=3, concurrency=2), eval=held_out)
    options["features"].dir = tmp_path / "features"
    whole = own if layers else train(distilled, tmp_path / "whole", **options)

    before = server.number

    def stop(number):
        if number == before + (30 if layers else 60):
            interrupts.handle(15)

    server.faults = stop
    with pytest.raises(Interrupted):
        train(distilled, tmp_path / "streamed", **options)
    assert not files(tmp_path / "files"), "requests in flight have ended before the process did"
    done = [line for line in metrics(tmp_path / "streamed") if "loss" in line]
    assert 0 < len(done) < STEPS
    server.faults = lambda number: None
    order = []
    server.states = lambda ids, states=server.states: (order.append(tuple(ids)), states(ids))[1]
    theirs = train(distilled, tmp_path / "streamed", resume=True, **options)
    equal(whole, theirs)
    left = expected_texts(distilled, tmp_path, ends, len(done), held_out)
    asked = [ids for ids in order if ids in set(left)]
    assert len(left) <= len(asked)
    if layers:
        assert sorted(asked[-len(left) :]) == sorted(left), "a text before the checkpoint was asked for"
    else:
        assert any("expected_mat" in line for line in metrics(tmp_path / "streamed"))


def expected_texts(distilled, place, target, step, held_out):
    """Texts of a run from `step` on, in the form of a request."""
    made = recipe(distilled, place, max_steps=STEPS, features=FeatureRecipe(mode="online"), eval=held_out)
    trainer = loop.make_trainer(made, Run(place))
    trainer.state.step, at = 0, trainer.state
    while at.step < step:
        at.step, at.place = at.step + 1, at.place + 1
        if at.place == len(trainer.batches(at.epoch)):
            trainer._next_epoch()
    return [tuple(example.tokens[:-1]) for example in trainer._upcoming()]


SPOILS = {
    "short": lambda tensors: {**tensors, "hidden_states": tensors["hidden_states"][:-3]},
    "of other tokens": lambda tensors: {**tensors, "token_ids": tensors["token_ids"].flip(0)},
    "of other layers": lambda tensors: {**tensors, "hidden_states": tensors["hidden_states"][:, 1:]},
    "not finite": lambda tensors: {**tensors, "hidden_states": tensors["hidden_states"] / 0},
    "of nothing": lambda tensors: {"rows": tensors["hidden_states"]},
}


@pytest.mark.parametrize("kind", SPOILS)
def test_unusable_states_are_asked_for_again_and_then_named(target, examples, computed, serve, capsys, kind):
    server = serve()
    text, left = list(examples[5].tokens[:-1]), [2]

    def spoil(tensors):
        if tensors["token_ids"].tolist() == text and left[0]:
            left[0] -= 1
            return SPOILS[kind](tensors)
        return tensors

    server.spoil = spoil
    with stream(target, examples, streaming(server)) as store:
        assert same(store.get(examples), computed)
    assert capsys.readouterr().err.count(f"the sequence of prompt {examples[5].prompt_id}") == 2

    left[0] = 10**6
    with (
        stream(target, examples, streaming(server)) as store,
        pytest.raises(EngineError, match=f"sequence of prompt {examples[5].prompt_id}: {server.url}"),
    ):
        store.get(examples)


def test_files_that_are_half_written_are_asked_for_again(target, examples, computed, serve):
    server = serve()
    with stream(target, examples, streaming(server)) as store:
        server.spoiled = server.written + 5
        assert same(store.get(examples), computed)


def test_servers_wait_for_the_training(target, examples, serve, tmp_path):
    """The bound holds for all processes together: each of two processes gets half of the bound and half of the
    concurrent requests."""
    server = serve()
    with stream(target, examples, streaming(server, ahead=6, concurrency=4), processes=2) as store:
        asked = server.asked.total()
        until(lambda: store.stream.ready == 3)
        time.sleep(0.1)
        begun = server.asked.total()
        assert begun <= asked + 3 and not files(tmp_path / "files")
        server.most = 0
        for number, example in enumerate(examples, 1):
            store.get([example])
            time.sleep(0.01)
            assert server.asked.total() <= begun + number
        assert server.most <= 2


def test_a_server_that_comes_back_with_other_weights_gives_no_states(
    target, examples, computed, serve, monkeypatch, capsys
):
    """A text is asked for again, and each try notices the weights. One request at a time: a restart breaks off every
    request in flight, and this one only the next."""
    monkeypatch.setattr(feature_stream, "FOLLOW_S", 60.0)
    server = serve()
    with stream(target, examples, streaming(server, concurrency=1)) as store:
        before = server.states

        def restart(number):
            server.shift, server.states, server.faults = 0.5, lambda ids: 2 * before(ids), lambda number: None
            return "reset"

        until(lambda: store.stream.ready == 4)  # no request is in flight: its answer would have the other weights
        server.faults = restart
        with pytest.raises(EngineError, match="restarted with different weights"):
            for example, features in zip(examples, computed, strict=True):
                assert same(store.get([example]), [features])
    assert "different weights during this run; they are asked for again" in capsys.readouterr().err


def test_a_text_that_is_refused_is_named(target, examples, serve):
    server = serve()
    with stream(target, examples, streaming(server)) as store, pytest.raises(EngineError, match="rejects the sequence"):
        server.faults = lambda number: "refused"
        store.get(examples)


def test_a_signal_ends_a_wait_without_servers(target, examples, serve, monkeypatch):
    server = serve()
    monkeypatch.setattr(feature_stream, "STOP_S", 0.3)
    monkeypatch.setattr(feature_stream, "DRAIN_S", 0.3)
    try:
        with stream(target, examples, streaming(server, retries=1000)) as store, pytest.raises(Interrupted):
            server.gone = True
            threading.Timer(0.2, interrupts.handle, (15,)).start()
            store.get(examples)
    finally:
        interrupts.reset()


def test_without_a_server_the_training_ends(target, examples, serve):
    server = serve()
    with stream(target, examples, streaming(server, retries=1)) as store:
        server.gone = True
        with pytest.raises(EngineError, match="2 times in a row") as error:
            store.get(examples)
    assert "--resume" in error.value.hint


def test_the_first_server_is_waited_for(target, examples, computed, serve, tmp_path):
    listed = tmp_path / "servers"
    features = FeatureRecipe(servers=listed, server=ServerRecipe(wait_s=20))
    threading.Timer(0.3, lambda: listed.write_text(f"http://127.0.0.1:9\n{serve().url}\n")).start()
    with stream(target, examples, features) as store:
        assert same(store.get(examples), computed)


def test_without_an_address_the_command_is_told(target, examples, tmp_path):
    for features, says in (
        (FeatureRecipe(mode="stream"), "features.mode=stream needs a server"),
        (FeatureRecipe(mode="stream", server=ServerRecipe(urls=["http://127.0.0.1:9"])), "no server responds"),
    ):
        with pytest.raises((UsageError, EngineError), match=says) as error, stream(target, examples, features):
            pass
        assert "vllm serve" in error.value.hint and "[2, 5, 7, 10]" in error.value.hint


@pytest.mark.slow
def test_processes_ask_for_their_own_texts(distilled, serve, tmp_path):
    """Two processes learn the same as on features on disk; one of them asks for each text of a step."""
    server = serve()
    losses = {}
    for mode in ("cached", "stream"):
        flags = ["features.mode=cached", f"features.dir={tmp_path / 'features'}"]
        if mode == "stream":
            flags = ["features.mode=stream", "--features-from", server.url, "features.ahead=8"]
        losses[mode] = launch(distilled, make(tmp_path / mode), 2, 0, *flags, "features.whole_target=true")
    assert losses["stream"] == losses["cached"]
    checks = 2 * 2 + 2  # both processes compare their longest text twice, and ask for the probe
    texts = len(server.asked)
    assert server.asked.total() - checks == 4 * (texts - 1), "4 steps over all texts, and the probe"
    assert not files(tmp_path / "files")


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ({"mode": "stream", "servers": "f", "server": {"urls": ["http://a"]}}, "both name engines"),
        ({"mode": "cached", "servers": "f"}, "servers is for mode stream"),
        ({"mode": "memory", "ahead": 5}, "ahead is for mode stream"),
        ({"mode": "stream", "ahead": 0}, "greater than 0"),
        ({"mode": "stream", "fp8": True}, "fp8 is for features on disk"),
    ],
)
def test_recipes_that_contradict_themselves(features, says):
    with pytest.raises(ValidationError, match=says):
        TrainRecipe.model_validate({"features": features})
