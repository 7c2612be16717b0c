"""Publishing a drafter to running servers: all of them take it or none, and errors say what to do."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from specctl.decoding.target_text import load_target_text
from specctl.engines import sglang, vllm_worker
from specctl.engines.client import Client
from specctl.engines.records import EngineError
from specctl.errors import CheckpointError, SpecctlError, UsageError
from specctl.recipe import ServerRecipe
from tests.toys.engine import FakeEngine, Session, Workers, versions

ENGINES = ["vllm", "sglang"]
SIZE, DRAFTED, VOCAB = 8, 16, 64


@pytest.fixture(scope="module")
def tokenizer():
    return load_target_text("builtin").tokenizer


@pytest.fixture(autouse=True)
def loads(monkeypatch):
    """The tensors that the workers of fake vLLM servers load."""
    seen = []

    def load(worker, tensors):
        seen.append({name: tensor.clone() for name, tensor in tensors.items()})

    monkeypatch.setattr(vllm_worker, "_load", load)
    return seen


def written(place, seed=0, *, size=SIZE, tokens=None, without=(), **config):
    """A directory as `specctl export` writes it: an EAGLE-3 head without most of its layers."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"fc.weight": (size, 3 * size), "lm_head.weight": (DRAFTED, size), "norm.weight": (size,)}
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items() if name not in without}
    tensors["d2t"] = torch.arange(DRAFTED) * 2 if tokens is None else tokens
    place.mkdir()
    save_file(tensors, place / "model.safetensors")
    shape = {"hidden_size": size, "draft_vocab_size": DRAFTED, "torch_dtype": f"seed {seed}", "rope_theta": 1e4}
    (place / "config.json").write_text(json.dumps(shape | config))
    return place


@pytest.fixture
def heads(tmp_path):
    """Three heads with equal layouts; servers are started with the first."""
    return [written(tmp_path / f"head-{seed}", seed) for seed in range(3)]


class Served:
    """A fake engine that drafts, and its current draft weights."""

    def __init__(self, tokenizer, engine, head, **options):
        self.engine = FakeEngine(tokenizer, engine)
        self.engine.admin = (Workers if engine == "vllm" else Session)(head, **options)
        self.head = head

    def restart(self):
        self.engine.admin = type(self.engine.admin)(self.head)

    @property
    def drafts_with(self):
        """The fc.weight of every rank (a fake SGLang has one)."""
        admin = self.engine.admin
        if isinstance(admin, Session):
            return [admin.weights["fc.weight"]] if admin.weights else [fc(self.head)]
        found = [rank.drafter_loaded()["directory"] for rank in admin.ranks]
        return [fc(place) for place in found]


def fc(place):
    from safetensors.torch import load_file

    return load_file(f"{place}/model.safetensors")["fc.weight"]


@pytest.fixture(params=ENGINES)
def kind(request):
    return request.param


@pytest.fixture
def server(tokenizer, kind, heads):
    served = Served(tokenizer, kind, heads[0])
    with served.engine:
        yield served


def recipe(*servers):
    return ServerRecipe(urls=[server.engine.url for server in servers], timeout_s=60)


def same(server, head):
    return all(torch.equal(one, fc(head)) for one in server.drafts_with)


def refusal(client, *arguments, kind=SpecctlError):
    with pytest.raises(kind) as caught:
        client.publish(*arguments)
    return f"{caught.value.message} | {caught.value.hint}"


def test_drafters_are_published_one_after_another(server, heads, capsys):
    with Client(recipe(server)) as client:
        assert versions(client) == [None]
        for version, head in (("1", heads[1]), ("2", heads[2]), ("3", heads[0])):
            client.publish(head, version)
            assert versions(client) == [version]
            assert same(server, head)
        assert not same(server, heads[1])  # negative control
    assert "drafts with 3; its requests were paused for 0." in capsys.readouterr().err


def test_every_rank_gets_the_new_drafter(tokenizer, kind, heads, loads):
    served = Served(tokenizer, kind, heads[0], ranks=2)
    with served.engine, Client(recipe(served)) as client:
        client.publish(heads[1], "1")
        assert versions(client) == ["1"] and same(served, heads[1])
    assert kind == "sglang" or len(loads) == 2


def test_ranks_without_a_drafter_are_ignored(tokenizer, heads):
    served = Served(tokenizer, "vllm", heads[0], ranks=2)
    served.engine.admin.ranks[0].get_draft_model = lambda: None
    with served.engine, Client(recipe(served)) as client:
        client.publish(heads[1], "1")
        assert versions(client) == ["1"]


def test_a_restarted_server_has_its_first_drafter(server, heads):
    with Client(recipe(server)) as client:
        client.publish(heads[1], "1")
        server.restart()
        assert versions(client) == [None]
        client.publish(heads[2], "2")
        assert versions(client) == ["2"] and same(server, heads[2])


OTHER_FORMS = {
    "config": (dict(rope_theta=5e5), "rope_theta is 500000.0 in its config.json, but 10000.0 in"),
    "size": (dict(size=6), "hidden_size is 6 in its config.json, but 8"),
    "shape": (dict(size=6, hidden_size=SIZE), "fc.weight has shape [6, 18], but [8, 24] in the running drafter"),
    "missing": (dict(without=("norm.weight",)), "the tensor norm.weight is only in the running drafter"),
}


@pytest.mark.parametrize("other", OTHER_FORMS)
def test_another_layout_is_refused_before_anything_changes(server, heads, tmp_path, other):
    options, words = OTHER_FORMS[other]
    with Client(recipe(server)) as client:
        client.publish(heads[1], "1")
        asked = len(server.engine.posted)
        said = refusal(client, written(tmp_path / "other", 3, **options), "2")
        assert words in said and server.engine.url in said
        assert versions(client) == ["1"] and same(server, heads[1])
        changing = {"drafter_swap", "/pause_generation", "/begin_weight_update"}
        assert not changing & set(server.engine.posted[asked:])


def test_weights_with_nan_are_refused(server, heads, tmp_path):
    place = written(tmp_path / "other", 3)
    tensors = {"fc.weight": fc(place) * torch.nan, "lm_head.weight": torch.zeros(DRAFTED, SIZE)}
    tensors |= {"norm.weight": torch.ones(SIZE), "d2t": torch.arange(DRAFTED) * 2}
    save_file(tensors, place / "model.safetensors")
    with Client(recipe(server)) as client:
        assert "fc.weight contains values that are not finite" in refusal(client, place, "1")
        assert versions(client) == [None] and same(server, heads[0])


def test_draft_tokens_beyond_the_vocabulary_are_refused(tokenizer, heads, tmp_path):
    served = Served(tokenizer, "vllm", heads[0])
    with served.engine, Client(recipe(served)) as client:
        other = written(tmp_path / "other", 3, tokens=torch.arange(DRAFTED) * 4)
        assert "d2t contains tokens outside the target's vocabulary of 64" in refusal(client, other, "1")
        assert same(served, heads[0])


def test_directories_that_are_not_exports_are_refused(server, tmp_path, heads):
    with Client(recipe(server)) as client:
        (tmp_path / "empty").mkdir()
        assert "cannot be read: No such file" in refusal(client, tmp_path / "empty", "1", kind=UsageError)
        (heads[1] / "model.safetensors").write_bytes(b"\xff" * 40)
        said = refusal(client, heads[1], "1", kind=UsageError)
        assert "is not an exported drafter" in said and "specctl export" in said
        assert "'' is not a version name" in refusal(client, heads[2], "", kind=UsageError)
    assert "drafter_swap" not in server.engine.posted and same(server, heads[0])


def test_if_the_second_server_fails_the_first_is_switched_back(tokenizer, kind, heads):
    first, second = Served(tokenizer, kind, heads[0]), Served(tokenizer, kind, heads[0])
    with first.engine, second.engine, Client(recipe(first, second)) as client:
        client.publish(heads[1], "1")
        swap = "drafter_swap" if kind == "vllm" else "/update_weights_from_tensor"
        once = iter(["error"])
        second.engine.breaks = lambda name: next(once, None) if name == swap else None
        said = refusal(client, heads[2], "2", kind=EngineError)
        assert said.startswith(second.engine.url) and "500" in said
        assert f"{first.engine.url} drafts with 1 again" in said
        assert versions(client) == ["1", "1"]
        assert same(first, heads[1]) and same(second, heads[1])
        client.publish(heads[2], "2")
        assert versions(client) == ["2", "2"]


def test_a_server_is_switched_back_to_its_first_drafter(tokenizer, kind, heads):
    first, second = Served(tokenizer, kind, heads[0]), Served(tokenizer, kind, heads[0])
    with first.engine, second.engine, Client(recipe(first, second)) as client:
        second.engine.breaks = lambda name: "error" if name in ("drafter_swap", "/begin_weight_update") else None
        said = refusal(client, heads[1], "1", kind=EngineError)
        assert f"{first.engine.url} drafts with the drafter that it was started with again" in said
        assert versions(client) == [None, None] and same(first, heads[0])


def test_a_server_that_stops_during_a_swap_is_named(tokenizer, kind, heads):
    first, second = Served(tokenizer, kind, heads[0]), Served(tokenizer, kind, heads[0])
    with first.engine, second.engine, Client(recipe(first, second)) as client:
        swap = "drafter_swap" if kind == "vllm" else "/update_weights_from_tensor"
        gone = []

        def breaks(name):
            gone.append(name) if name == swap else None
            return "reset" if gone else None

        second.engine.breaks = breaks
        said = refusal(client, heads[1], "1", kind=EngineError)
        assert (
            said.startswith(f"{second.engine.url}: the server does not respond")
            and f"{first.engine.url} drafts with" in said
        )
        assert f"{second.engine.url} could not be switched back to the drafter that it was started with" in said
        second.engine.breaks = lambda name: None
        second.restart()
        assert versions(client) == [None, None]


def test_a_swap_with_a_lost_answer_is_reverted(server, heads):
    lost = iter(["gone"])
    swap = "drafter_swap" if isinstance(server.engine.admin, Workers) else "/update_weights_from_tensor"
    server.engine.breaks = lambda name: next(lost, None) if name == swap else None
    with Client(recipe(server)) as client:
        assert "drafts with the drafter that it was started with again" in refusal(client, heads[1], "1")
        assert versions(client) == [None] and same(server, heads[0])


def test_a_deleted_previous_drafter_cannot_be_restored(tokenizer, kind, heads):
    first, second = Served(tokenizer, kind, heads[0]), Served(tokenizer, kind, heads[0])
    with first.engine, second.engine, Client(recipe(first, second)) as client:
        client.publish(heads[1], "1")
        shutil.rmtree(heads[1])
        second.engine.breaks = lambda name: "error" if name in ("drafter_swap", "/begin_weight_update") else None
        said = refusal(client, heads[2], "2", kind=EngineError)
        assert f"{first.engine.url} could not be switched back to 1" in said
        assert versions(client)[0] == "2"  # by the server's own report


def test_a_damaged_previous_drafter_cannot_be_restored(tokenizer, kind, heads):
    """The error about its file once ended the whole restore, and hid which server had failed."""
    first, second = Served(tokenizer, kind, heads[0]), Served(tokenizer, kind, heads[0])
    with first.engine, second.engine, Client(recipe(first, second)) as client:
        client.publish(heads[1], "1")
        weights = heads[1] / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-5])
        second.engine.breaks = lambda name: "error" if name in ("drafter_swap", "/begin_weight_update") else None
        said = refusal(client, heads[2], "2", kind=EngineError)
        assert said.startswith(second.engine.url) and f"{first.engine.url} could not be switched back to 1" in said


def test_a_damaged_first_drafter_of_sglang_is_named(tokenizer, heads):
    """SGLang accepts only weights with the layout of its first drafter. If that is damaged, the error names the server,
    too."""
    served = Served(tokenizer, "sglang", heads[0])
    with served.engine, Client(recipe(served)) as client:
        weights = heads[0] / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-5])
        said = refusal(client, heads[1], "1", kind=EngineError)
        assert said.startswith(served.engine.url)
        assert f"{heads[0]}, which SGLang was started with, cannot be read" in said


def test_a_failure_of_one_rank_reverts_all_ranks(tokenizer, heads, monkeypatch):
    served = Served(tokenizer, "vllm", heads[0], ranks=2)
    with served.engine, Client(recipe(served)) as client:
        faults = iter([None, RuntimeError("no memory")])

        def load(worker, tensors):
            fault = next(faults, None)
            if fault:
                raise fault

        monkeypatch.setattr(vllm_worker, "_load", load)
        said = refusal(client, heads[1], "1")
        assert "vLLM failed to load" in said and "no memory" in said and "that it was started with again" in said
        assert versions(client) == [None] and same(served, heads[0])


STEPS = ["/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]


@pytest.mark.parametrize("fault", ["error", "gone"])
@pytest.mark.parametrize("path", STEPS)
def test_requests_continue_after_a_failure_at_any_step(tokenizer, heads, path, fault):
    served = Served(tokenizer, "sglang", heads[0])
    once = iter([fault])
    served.engine.breaks = lambda name: next(once, None) if name == path else None
    with served.engine, Client(recipe(served)) as client:
        refusal(client, heads[1], "1", kind=EngineError)
    assert not served.engine.admin.paused
    assert served.engine.admin.open == ((path, fault) == ("/end_weight_update", "error"))  # the update stays open


def test_an_update_by_another_client_is_not_ended(tokenizer, heads):
    served = Served(tokenizer, "sglang", heads[0])
    served.engine.admin.open = True
    with served.engine, Client(recipe(served)) as client:
        said = refusal(client, heads[1], "1")
        assert "in progress" in said and "/end_weight_update" in said
    assert served.engine.admin.open and "/end_weight_update" not in served.engine.posted


def test_sglang_is_not_sent_weights_shared_with_the_target(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sglang, "MOST_BYTES", 600)  # several requests
    place = written(tmp_path / "one", 1)
    tensors = {"fc.weight": fc(place), "embed_tokens.weight": torch.zeros(VOCAB, SIZE)}
    save_file(tensors | {"lm_head.weight": torch.ones(DRAFTED, SIZE)}, place / "model.safetensors")
    for algorithm, sent in (("EAGLE3", {"fc.weight", "lm_head.weight"}), ("EAGLE", {"fc.weight"})):
        served = Served(tokenizer, "sglang", place, algorithm=algorithm)
        with served.engine, Client(recipe(served)) as client:
            client.publish(place, "1")
        assert set(served.engine.admin.weights) == sent
        assert served.engine.posted.count("/update_weights_from_tensor") == len(sent)


def test_sglang_refuses_another_draft_vocabulary(tokenizer, heads, tmp_path):
    served = Served(tokenizer, "sglang", heads[0])
    with served.engine, Client(recipe(served)) as client:
        said = refusal(client, written(tmp_path / "other", 3, tokens=torch.arange(DRAFTED) * 3), "1")
        assert "different draft vocabulary" in said and "d2t" in said
        heads[0].rename(tmp_path / "elsewhere")
        assert "which SGLang was started with, cannot be read here" in refusal(client, heads[1], "1")
    assert served.engine.posted == []


UNABLE = {
    "vllm": [
        (None, "not have /collective_rpc | start vLLM with VLLM_SERVER_DEV_MODE=1"),
        (dict(extension=False), "--worker-extension-cls specctl.engines.vllm_worker.DrafterSwap"),
        (dict(method="mtp"), "drafts by 'mtp'; only heads of eagle3, eagle, medusa, dflash, dspark"),
    ],
    "sglang": [(dict(algorithm="DFLASH"), "drafts by DFLASH; only heads of EAGLE, EAGLE3")],
}


@pytest.mark.parametrize(("kind", "options", "words"), [(k, *case) for k in UNABLE for case in UNABLE[k]])
def test_missing_server_options_are_named(tokenizer, heads, kind, options, words):
    served = Served(tokenizer, kind, heads[0], **(options or {}))
    if options is None:
        served.engine.admin = None
    with served.engine, Client(recipe(served)) as client:
        for ask in (client.loaded, lambda: client.publish(heads[1], "1")):
            with pytest.raises(EngineError) as caught:
                ask()
            said = f"{caught.value.message} | {caught.value.hint}"
            assert words in said and served.engine.url in said


def test_an_older_sglang_is_refused(tokenizer, heads):
    served = Served(tokenizer, "sglang", heads[0])
    served.engine.admin.begin_weight_update = None
    with served.engine, Client(recipe(served)) as client:
        assert "not have /begin_weight_update | SGLang 0.5.23" in refusal(client, heads[1], "1")
    assert not served.engine.admin.paused


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_without_a_drafter_is_refused(tokenizer, heads, kind):
    served = Served(tokenizer, kind, None, **({"algorithm": None} if kind == "sglang" else {}))
    with served.engine, Client(recipe(served)) as client:
        assert "does not draft: it was started without --speculative" in refusal(client, heads[1], "1")


def test_a_directory_that_the_server_cannot_read_is_refused(tokenizer, heads):
    served = Served(tokenizer, "vllm", heads[0])
    words = {"refused": "/far/head cannot be read: No such file or directory"}
    served.engine.breaks = lambda name: {"results": [words]} if name == "drafter_fits" else None
    with served.engine, Client(recipe(served)) as client:
        said = refusal(client, heads[1], "1")
        assert "cannot be read" in said and "the server needs to see the directory" in said


def test_a_directory_with_other_files_on_the_server_is_refused(tokenizer, heads, monkeypatch):
    served = Served(tokenizer, "vllm", heads[0])
    with served.engine, Client(recipe(served)) as client:
        other = vllm_worker.contents(heads[2])
        monkeypatch.setattr(vllm_worker, "contents", lambda place: other)
        assert "differs from the published files" in refusal(client, heads[1], "1")


def test_malformed_answers_are_engine_errors(server, heads):
    with Client(recipe(server)) as client:
        odd_rank = {"version": [], "directory": None, "fingerprint": "", "drafts": True}
        odd = {"results": [odd_rank]}, {"results": [{"refused": 5}]}, {"results": "?"}, {"results": [{}]}
        for strange in (*odd, {"results": []}, {"a": 1}, {"success": "no"}):
            server.engine.breaks = lambda name, strange=strange: strange
            refusal(client, heads[1], "1", kind=EngineError)


def test_api_keys_are_sent_but_never_printed(server, heads, monkeypatch, capsys):
    monkeypatch.setenv("SPECCTL_API_KEY", "hush-hush-hush")
    with Client(recipe(server)) as client:
        client.publish(heads[1], "1")
        assert set(server.engine.keys) == {"Bearer hush-hush-hush"}
        server.engine.breaks = lambda name: "denied"
        said = refusal(client, heads[2], "2")
        assert "rejects the API key (status 401)" in said and "SPECCTL_API_KEY=…" in said
        server.engine.breaks = lambda name: {"error": "Bearer hush-hush-hush is wrong"}
        said += refusal(client, heads[2], "2")
    assert "hush" not in said + "".join(capsys.readouterr())


def test_a_damaged_head_is_not_sent(tokenizer, heads):
    served = Served(tokenizer, "sglang", heads[0])
    data = (heads[1] / "model.safetensors").read_bytes()
    (heads[1] / "model.safetensors").write_bytes(data[:-5])
    with served.engine, Client(recipe(served)) as client:
        refusal(client, heads[1], "1", kind=CheckpointError)
    assert served.engine.posted == []
