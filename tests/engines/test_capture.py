"""Hidden states from engines: validation, repeated requests, and error messages."""

import json
import random
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from specctl.engines import sglang, vllm
from specctl.engines.client import Client
from specctl.engines.records import EngineError, HiddenStatesSpec, Refusal
from specctl.recipe import ServerRecipe
from tests.gateway.conftest import wait_for
from tests.toys.capture import CapturingEngine
from tests.toys.engine import FAULTS

WIDTH = 8
WANTED = {
    "vllm": HiddenStatesSpec("a/model", None, (1, 2, 3), WIDTH),
    "sglang": HiddenStatesSpec("a/model", None, (3,), WIDTH),
}


def states_of(ids, layers):
    """States that depend on all tokens up to their own, and on the layer."""
    sums = torch.tensor(ids).cumsum(0).float()
    return sums[:, None, None] + 1000.0 * torch.arange(layers)[None, :, None] + torch.arange(WIDTH) / WIDTH


@pytest.fixture(params=WANTED)
def engine(request, text, tmp_path):
    states = partial(states_of, layers=len(WANTED[request.param].ids))
    with CapturingEngine(text.tokenizer, request.param, tmp_path, states) as server:
        yield server


@pytest.fixture
def writing(text, tmp_path):
    """An engine that writes files."""
    with CapturingEngine(text.tokenizer, "vllm", tmp_path, partial(states_of, layers=3)) as server:
        yield server


def texts(count):
    draw = random.Random(0)
    return [[draw.randrange(5, 200) for _ in range(draw.randrange(2, 30))] for _ in range(count)]


def recipe(*engines, **options):
    return ServerRecipe(urls=[engine.url for engine in engines], **options)


def given(client, ids, wanted):
    found = dict(client.states(ids, wanted))
    assert sorted(found) == list(range(len(ids)))
    return [found[place] for place in range(len(ids))]


def test_states_are_matched_to_their_texts_despite_faults(engine, tmp_path):
    """A fifth of the requests fail in five ways. Files that were read are deleted; files of failed requests are left to
    the server."""
    engine.faults = lambda number: FAULTS[number // 5 % len(FAULTS)] if number % 5 == 0 else None
    engine.seconds, engine.delay_s = 0.005, 0.02
    wanted = WANTED[engine.engine]
    with Client(recipe(engine, concurrency=6, timeout_s=0.3)) as client:
        client.check_states(wanted)
        found = given(client, texts(50), wanted)
    assert all(torch.equal(one, engine.states(ids)) for one, ids in zip(found, texts(50), strict=True))
    assert 1 < engine.most <= 6 + len(FAULTS) and client.failures >= 8
    # The files of failed requests may come later.
    wait_for(lambda: len([*tmp_path.glob("*.safetensors")]) == (engine.written - 50) * (engine.engine == "vllm"))


def test_a_half_written_file_is_requested_again(writing):
    writing.spoiled = 2
    with Client(recipe(writing, concurrency=3)) as client:
        found = given(client, texts(6), WANTED["vllm"])
    assert client.failures == 2 and all(
        torch.equal(one, writing.states(ids)) for one, ids in zip(found, texts(6), strict=True)
    )


def test_a_slow_text_limits_how_far_others_run_ahead(engine):
    slow = texts(40)[0]
    states = engine.states

    def waiting(ids):
        if ids == slow:
            time.sleep(0.5)
        return states(ids)

    engine.states = waiting
    with Client(recipe(engine, concurrency=4)) as client:
        order = [place for place, _ in client.states(texts(40), WANTED[engine.engine])]
    assert sorted(order) == list(range(40)) and order.index(0) <= 4


@pytest.mark.parametrize(
    ("spoil", "says", "hint"),
    [
        (lambda all: all | {"hidden_states": all["hidden_states"][1:]}, "of 11 of 12 tokens", "UNCACHED"),
        (lambda all: all | {"hidden_states": all["hidden_states"][:, :, :-1]}, "returns", "START"),
        (
            lambda all: all | {"hidden_states": torch.cat((all["hidden_states"], all["hidden_states"]), 1)},
            "states of shape",
            "START",
        ),
        (lambda all: all | {"hidden_states": all["hidden_states"] * torch.nan}, "not finite", "--dtype bfloat16"),
    ],
    ids=["short by a row", "narrow", "other layers", "not a number"],
)
def test_unusable_states_give_the_command_to_start_the_server(engine, tmp_path, spoil, says, hint):
    engine.spoil = spoil
    wanted, dialect = WANTED[engine.engine], {"vllm": vllm, "sglang": sglang}[engine.engine]
    with Client(recipe(engine)) as client, pytest.raises(EngineError, match=says) as error:
        list(client.states([list(range(7, 19))], wanted))
    assert {"UNCACHED": dialect.NO_PREFIX_CACHE_FLAG, "START": dialect.capture_command(wanted)}.get(
        hint, hint
    ) in error.value.hint
    assert sum(engine.asked.values()) == 1, "unusable states are not requested again"


def test_a_file_with_other_tokens_is_refused_and_not_deleted(writing, tmp_path):
    """A server may name any file; only files with the text's own tokens are deleted."""
    writing.spoil = lambda all: all | {"token_ids": all["token_ids"].flip(0)}
    with (
        Client(recipe(writing)) as client,
        pytest.raises(EngineError, match="12 tokens that differ from the 12") as error,
    ):
        list(client.states([list(range(7, 19))], WANTED["vllm"]))
    assert "--no-enable-prefix-caching" in error.value.hint
    assert len(list(tmp_path.iterdir())) == 2


def test_a_server_without_hidden_states_is_refused(engine):
    engine.states = None
    wanted = WANTED[engine.engine]
    with Client(recipe(engine)) as client, pytest.raises(EngineError, match="returns no hidden states") as error:
        list(client.states(texts(1), wanted))
    assert {"vllm": vllm, "sglang": sglang}[engine.engine].capture_command(wanted) in error.value.hint


@pytest.mark.parametrize("place", ["nowhere/1.safetensors", "directory"])
def test_an_unreadable_path_is_refused(writing, tmp_path, place):
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory.lock").touch()
    writing.told = lambda path: str(tmp_path / place)
    with Client(recipe(writing)) as client, pytest.raises(EngineError, match="cannot be read here") as error:
        list(client.states(texts(1), WANTED["vllm"]))
    assert place in error.value.message and "shared_storage_path" in error.value.hint


def test_an_enabled_prefix_cache_is_detected(engine):
    page = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="%s"} 1.0\n'
    wanted = WANTED[engine.engine]
    with Client(recipe(engine)) as client:
        engine.scraped = lambda: page % "False"
        client.check_states(wanted)
        engine.scraped, engine.cached = lambda: page % "True", 7
        with pytest.raises(EngineError, match="prefix cache") as error:
            client.check_states(wanted)
            list(client.states([list(range(7, 19))], wanted))
    assert {"vllm": vllm, "sglang": sglang}[engine.engine].NO_PREFIX_CACHE_FLAG in error.value.hint


def test_several_layers_from_sglang_are_refused(text, tmp_path):
    with (
        CapturingEngine(text.tokenizer, "sglang", tmp_path, None) as engine,
        Client(recipe(engine)) as client,
        pytest.raises(EngineError, match="cannot return hidden states") as error,
    ):
        client.check_states(WANTED["vllm"])
    assert "vLLM" in error.value.hint


def test_different_engines_are_refused(text, tmp_path):
    """SGLang's last state is taken after the final norm, vLLM's before."""
    with (
        CapturingEngine(text.tokenizer, "sglang", tmp_path, None) as one,
        CapturingEngine(text.tokenizer, "vllm", tmp_path, None) as other,
        Client(recipe(one, other)) as client,
        pytest.raises(EngineError, match="different engines"),
    ):
        client.check_states(WANTED["sglang"])


def test_a_refused_text_does_not_stop_the_others(engine):
    engine.faults = lambda number: "refused" if number == 2 else None
    with Client(recipe(engine, concurrency=1)) as client:
        found = given(client, texts(3), WANTED[engine.engine])
    assert [isinstance(one, Refusal) for one in found] == [False, True, False]


def test_the_command_names_the_model_and_revision():
    wanted = HiddenStatesSpec("dir with/space", "abc", (1, 4), 8)
    assert vllm.capture_command(wanted).startswith(
        "vllm serve 'dir with/space' --revision abc --no-enable-prefix-caching"
    )
    assert '"eagle_aux_hidden_state_layer_ids": [1, 4]' in vllm.capture_command(wanted)
    adapters = (("law", "loras/law 1"), ("bank", None))
    shown = vllm.capture_command(HiddenStatesSpec("a/model", None, (1, 4), 8, adapters))
    assert " --enable-lora --lora-modules 'law=loras/law 1' bank=ADAPTER --speculative-config" in shown
    assert sglang.capture_command(wanted) is None


@pytest.mark.parametrize("name", ["1.safetensors", "1.safetensors.lock"])
def test_a_named_pipe_is_refused(writing, tmp_path, pipe, name):
    """Opening it would block all requests of the event loop forever."""
    (tmp_path / "pipes").mkdir()
    pipe(tmp_path / "pipes" / name)
    writing.told = lambda path: str(tmp_path / "pipes" / "1.safetensors")
    with Client(recipe(writing)) as client, pytest.raises(EngineError, match="a named pipe, not a regular file"):
        list(client.states(texts(1), WANTED["vllm"]))


def test_the_command_makes_a_new_private_directory():
    """Another user may own a fixed name in /dev/shm. The shell creates a new directory with mode 0700."""
    command = vllm.capture_command(WANTED["vllm"]).removeprefix("vllm serve")
    script = f"printf '%s\\n' {command}"
    places = []
    for _ in range(2):
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
        given = json.loads(done.stdout.splitlines()[-1])
        places.append(Path(given["kv_connector_extra_config"]["shared_storage_path"]))
        assert places[-1].parent == Path("/dev/shm") and places[-1].stat().st_mode & 0o777 == 0o700
        places[-1].rmdir()
    assert places[0] != places[1]
