"""Exchange of the drafter in running servers: all of them or none, and in words why not."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.engines import vllm, vllm_worker
from specctl.engines.client import Client
from specctl.engines.records import EngineError
from specctl.recipe import ServerRecipe
from tests.toys.live import LiveEngine

SESSION = ["pause_generation", "begin_weight_update", "update", "end_weight_update", "continue_generation"]


def drafter(place, value, rows=3, **config):
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4, **config}))
    save_file({"fc.weight": torch.full((rows, 4), float(value))}, place / "model.safetensors")
    return place


@pytest.fixture
def heads(tmp_path):
    return [drafter(tmp_path / name, value) for value, name in enumerate("abc")]


@pytest.fixture(params=["vllm", "sglang"])
def engine(request, heads):
    with LiveEngine(None, heads[0], request.param) as engine:
        yield engine


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr("specctl.engines.client.FIRST_PAUSE_S", 0.01)


def client(*engines):
    return Client(ServerRecipe(urls=[engine.url for engine in engines], retries=2))


def version(servers):
    """As they tell it, without fingerprints."""
    return [told and told.split()[0] for told in servers.published()]


def values(engine):
    """What is in the engine, one number per publication."""
    tensors = [load_file(f"{what}/model.safetensors") if engine.engine == "vllm" else what for _, what in engine.log]
    return [one["fc.weight"].unique().item() for one in tensors]


def test_a_drafter_takes_the_place_of_another(engine, heads):
    with client(engine) as servers:
        assert version(servers) == [None]
        servers.publish(heads[1], "v1")
        assert version(servers) == ["v1"]
        servers.publish(heads[2], "v2")
        assert version(servers) == ["v2"] and values(engine) == [1.0, 2.0]
    if engine.engine == "sglang":
        assert [name for name, _ in engine.steps] == SESSION * 2
        assert engine.steps[2][1] == {"selector": "draft", "flush_cache": False, "weight_version": "v1"}
        assert engine.steps[0][1] == {"mode": "in_place"}


def test_a_refusal_comes_in_the_engines_words(engine, heads):
    with client(engine) as servers:
        servers.publish(heads[1], "v1")
        engine.broken = "no room for it"
        with pytest.raises(EngineError, match=f"{engine.url} does not take c: .*no room for it"):
            servers.publish(heads[2], "v2")
        assert version(servers) == ["v1"] and values(engine) == [1.0]
    if engine.engine == "sglang":  # requests go on, whatever happened
        assert [name for name, _ in engine.steps][-2:] == SESSION[-2:]


def test_where_one_of_several_refuses_all_go_back(engine, heads):
    with LiveEngine(None, heads[0], engine.engine) as other, client(engine, other) as servers:
        servers.publish(heads[1], "v1")
        other.broken = "no room for it"
        with pytest.raises(EngineError, match=other.url):
            servers.publish(heads[2], "v2")
        assert values(engine) == [1.0, 2.0, 1.0] and version(servers) == ["v1", "v1"]


def test_nothing_to_go_back_to(engine, heads):
    with LiveEngine(None, heads[0], engine.engine) as other, client(engine, other) as servers:
        other.broken = "no room for it"
        with pytest.raises(EngineError, match="no room for it"):
            servers.publish(heads[1], "v1")


def test_a_server_that_cannot_is_told_how_to_be_started(engine, heads):
    engine.posts = {}
    engine.pages = {}
    with client(engine) as servers, pytest.raises(EngineError) as error:
        servers.publish(heads[1], "v1")
    if engine.engine == "vllm":
        assert "VLLM_SERVER_DEV_MODE=1" in error.value.hint and vllm.EXTENSION in error.value.hint
    else:
        assert "/pause_generation" in error.value.message


def test_a_worker_without_the_extension_is_told_the_same(heads):
    with LiveEngine(None, heads[0]) as engine:
        engine.posts = {"/collective_rpc": lambda body: (500, {"error": {"message": "no attribute 'publish_drafter'"}})}
        with client(engine) as servers:
            for ask in (lambda: servers.publish(heads[1], "v1"), servers.published):
                with pytest.raises(EngineError) as error:
                    ask()
                assert "--worker-extension-cls" in error.value.hint


def test_ranks_that_disagree_are_believed_nothing(heads):
    with LiveEngine(None, heads[0]) as engine:
        ranks = [{"version": "v1", "fingerprint": name} for name in "ab"]
        engine.posts = {"/collective_rpc": lambda body: (200, {"results": ranks})}
        with client(engine) as servers, pytest.raises(EngineError, match="ranks say different things"):
            servers.publish(heads[1], "v1")


def test_a_server_that_is_gone(engine, heads):
    with client(engine) as servers:
        servers.publish(heads[1], "v1")
        engine.gone = True
        with pytest.raises(EngineError, match="gone"):
            servers.publish(heads[2], "v2")


def test_the_extension_names_what_does_not_fit(tmp_path, heads):
    outline = vllm_worker.outline(heads[0])
    assert vllm_worker.difference(outline, vllm_worker.outline(heads[1])) is None
    wide = drafter(tmp_path / "wide", 1, rows=5)
    assert "fc.weight has the shape [5, 4], in the engine [3, 4]" in vllm_worker.difference(
        outline, vllm_worker.outline(wide)
    )
    other = drafter(tmp_path / "other", 1, eagle_aux_hidden_state_layer_ids=[1, 2])
    assert "eagle_aux_hidden_state_layer_ids" in vllm_worker.difference(outline, vllm_worker.outline(other))
    same = drafter(tmp_path / "same", 1, torch_dtype="bfloat16", transformers_version="9")
    assert vllm_worker.difference(outline, vllm_worker.outline(same)) is None


class Worker(vllm_worker.DrafterSwap):
    """The part of vLLM's worker that the extension uses; loading is `load` below."""

    def __init__(self, started, model="a draft model"):
        self.started, self.model = started, model

    def get_draft_model(self):
        return self.model


@pytest.fixture
def loaded(monkeypatch):
    """Directories that were loaded; one called `bad` breaks in the middle."""
    done = []

    def load(worker, model, directory):
        done.append(directory.name)
        if directory.name == "bad":
            raise RuntimeError("half of it is there")

    monkeypatch.setattr(vllm_worker, "load", load)
    monkeypatch.setattr(vllm_worker, "first", lambda worker: worker.started)
    return done


def test_the_extension_tells_what_it_has_loaded(heads, loaded):
    worker = Worker(heads[0])
    assert worker.published_drafter()["version"] is None
    told = worker.publish_drafter(str(heads[1]), "v1")
    assert told["version"] == "v1" and told["seconds"] >= 0 and json.dumps(told)
    assert worker.published_drafter()["fingerprint"] == vllm_worker.fingerprint(heads[1]) and loaded == ["b"]


def test_the_extension_puts_back_what_was_there(tmp_path, heads, loaded):
    worker = Worker(heads[0])
    worker.publish_drafter(str(heads[1]), "v1")
    bad = shutil.copytree(heads[2], tmp_path / "bad")
    assert "half of it is there" in worker.publish_drafter(str(bad), "v2")["error"]
    assert loaded == ["b", "bad", "b"] and worker.published_drafter()["version"] == "v1"


def test_the_extension_refuses_before_it_loads(tmp_path, heads, loaded):
    worker = Worker(heads[0])
    wide = drafter(tmp_path / "wide", 1, rows=5)
    assert "does not fit" in worker.publish_drafter(str(wide), "v1")["error"]
    assert "has to be where the engine is" in worker.publish_drafter(str(tmp_path / "none"), "v1")["error"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "no safetensors" in worker.publish_drafter(str(tmp_path / "empty"), "v1")["error"]
    assert "--speculative-config" in Worker(heads[0], None).publish_drafter(str(heads[1]), "v1")["error"]
    (wide / "config.json").write_text("half a fi")
    assert "JSONDecodeError" in worker.publish_drafter(str(wide), "v1")["error"]
    assert loaded == []


def test_the_extension_needs_nothing_of_its_neighbours():
    """vLLM's environment has none of our dependencies."""
    import subprocess
    import sys

    code = (
        "import sys, specctl.engines.vllm_worker\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'pydantic', 'rich', 'httpx')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_other_weights_under_the_same_version_are_told_apart(heads):
    with LiveEngine(None, heads[0]) as engine, client(engine) as servers:
        servers.publish(heads[1], "v1")
        told = servers.published()
        engine.take("v1", str(heads[2]))
        assert servers.published() != told
