"""A drafter that is exchanged in a running vLLM server, and a drafter that learns from the server's texts."""

import json
import os
import shlex
import threading
import time

import pytest

from specctl.commands import export as exporting
from specctl.commands.learn_from_server import learn_from_server
from specctl.drafters import checkpoint
from specctl.drafters.dflash.drafter import CANDIDATES
from specctl.engines import vllm
from specctl.engines.client import Client
from specctl.engines.records import EngineError, GenerationRequest
from specctl.errors import UsageError
from specctl.recipe import ExportRecipe, LearnFromServerRecipe, ServerRecipe
from specctl.runs import Run
from tests.engines.test_vllm import (  # noqa: F401 (fixtures)
    HEADS,
    INTERPRETED,
    MEASURED,
    PYTHON,
    ROOT,
    TRITON,
    prompts,
    responses,
    trained,
    with_one_key_norm,
)
from tests.engines.test_vllm_server import NEW, NO_VLLM, TOKENS, our_counts, serving
from tests.toys.engine import versions

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.is_file(), reason=NO_VLLM)]


def exported(head, place):
    exporting.export(ExportRecipe(drafter=head, to="vllm", output_dir=place))
    return place


def noisy(head, place):
    """The head with noise on its weights, so that its drafts and acceptance differ."""
    kept = checkpoint.load(head)
    tensors = {
        name: value + 0.3 * value.std() * value.clone().normal_() if value.is_floating_point() else value
        for name, value in kept.tensors.items()
    }
    return checkpoint.save(place, config=kept.config, tensors=tensors, info={})


@pytest.fixture(scope="module")
def heads(responses, tmp_path_factory):  # noqa: F811
    place = tmp_path_factory.mktemp("heads")
    first = trained("eagle3", responses, place / "first")
    second = noisy(first, place / "second")
    return [(head, exported(head, place / f"{head.name}-vllm")) for head in (first, second)]


@pytest.fixture(scope="module")
def engine(heads, tmp_path_factory):
    drafting = {"method": "eagle3", "model": str(heads[0][1]), "num_speculative_tokens": TOKENS}
    options = ["--speculative-config", json.dumps(drafting), "--per-request-spec-decode-metrics", "summary"]
    options += ["--worker-extension-cls", vllm.EXTENSION]
    log = tmp_path_factory.mktemp("log") / "engine.log"
    with serving(log, *options, VLLM_SERVER_DEV_MODE="1", PYTHONPATH=str(ROOT)) as url:
        yield ServerRecipe(urls=[url], wait_s=300)


def answered(client, prompts, new=NEW):  # noqa: F811
    found = dict(client.answers([GenerationRequest(ids, new) for ids in prompts]))
    return [found[place] for place in range(len(prompts))]


def test_exchanging_the_drafter_changes_drafts_but_no_text(target, engine, heads, prompts):  # noqa: F811
    counts, texts = {}, {}
    with Client(engine) as client:
        for name, (head, place) in (("v1", heads[1]), ("v2", heads[0]), ("v3", heads[1])):
            client.publish(place, name)
            assert versions(client) == [name]
            answers = answered(client, prompts)
            texts[name] = [answer.output_ids for answer in answers]
            counts[name] = [(answer.drafting.rounds, answer.drafting.accepted_at) for answer in answers]
            expected = our_counts(head, target, prompts)
            assert [rounds for rounds, _ in counts[name]] == [rounds for rounds, _ in expected]
            ended = [place for place, answer in enumerate(answers) if answer.stop == "eos"]
            assert [counts[name][place][1] for place in ended] == [expected[place][1] for place in ended]
    assert texts["v1"] == texts["v2"] == texts["v3"]
    assert counts["v1"] == counts["v3"] != counts["v2"]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_block_drafters_are_exchanged_completely(kind, target, responses, prompts, tmp_path, capsys):  # noqa: F811
    """The stacked key weights, which read the context, and the mask embedding come from the new head, too."""
    first = trained("dflash", responses, tmp_path / "first", **HEADS[kind])
    heads = [with_one_key_norm(head) for head in (first, noisy(first, tmp_path / "second"))]
    places = [exported(head, tmp_path / f"{head.name}-vllm") for head in heads]
    command = exporting.export(ExportRecipe(drafter=first, to="vllm", output_dir=tmp_path / "again")).commands[0]
    drafting = json.loads(shlex.split(command)[-1]) | {"model": str(places[0])}
    if kind == "dspark":
        drafting["dspark_draft_topk"] = CANDIDATES
    paths, environment = [str(ROOT)], {"VLLM_SERVER_DEV_MODE": "1"}
    if command.startswith("VLLM_USE_V2_MODEL_RUNNER=1 "):
        if not TRITON.is_dir():
            pytest.skip(f"no Triton in {TRITON}, which vLLM's V2 runner needs: `make engines`")
        paths, environment = [*paths, INTERPRETED, str(TRITON)], environment | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    options = ["--speculative-config", json.dumps(drafting), "--per-request-spec-decode-metrics", "summary"]
    options += ["--worker-extension-cls", vllm.EXTENSION]
    tokens = drafting["num_speculative_tokens"]
    expected = [our_counts(head, target, prompts, tokens) for head in heads]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    texts = []
    with (
        serving(tmp_path / "engine.log", *options, **environment) as url,
        Client(ServerRecipe(urls=[url], wait_s=300)) as client,
    ):
        for name, which in (("v1", 1), ("v2", 0), ("v3", 1)):
            client.publish(places[which], name)
            answers = answered(client, prompts)
            texts.append([answer.output_ids for answer in answers])
            rounds = [answer.drafting.rounds for answer in answers]
            with capsys.disabled():
                print(f"\n{kind} {name}: rounds {sum(rounds)}; here {sum(one for one, _ in expected[which])}")
            assert rounds == [one for one, _ in expected[which]]
    assert texts[0] == texts[1] == texts[2] and expected[0] != expected[1]


def test_running_requests_continue_after_an_exchange(engine, heads, prompts):  # noqa: F811
    seconds = []
    with Client(engine) as client, Client(engine) as publisher:
        alone = [answer.output_ids for answer in answered(client, prompts * 3, 160)]
        over = threading.Event()

        def exchange():
            while not over.is_set():
                for number, (_, place) in enumerate(heads):
                    began = time.perf_counter()
                    publisher.publish(place, f"r{number}")
                    seconds.append(time.perf_counter() - began)

        thread = threading.Thread(target=exchange)
        thread.start()
        together = [answer.output_ids for answer in answered(client, prompts * 3, 160)]
        over.set()
        thread.join()
        assert client.failures == 0
    print(len(seconds), "exchanges,", sorted(seconds)[len(seconds) // 2], "s each, with requests in flight")
    assert together == alone and len(seconds) >= 4


def test_an_unfit_drafter_changes_nothing(engine, heads, tmp_path, prompts):  # noqa: F811
    (tmp_path / "other").mkdir()
    for path in heads[0][1].iterdir():
        (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    with Client(engine) as client:
        client.publish(heads[0][1], "fits")
        before = [answer.drafting for answer in answered(client, prompts)]
        with pytest.raises(EngineError, match="differs in form: hidden_size is 128"):
            client.publish(tmp_path / "other", "no")
        with pytest.raises(UsageError, match="cannot be read"):
            client.publish(tmp_path / "nowhere", "no")
        assert versions(client) == ["fits"]
        assert [answer.drafting for answer in answered(client, prompts)] == before


def test_learning_from_a_running_server_raises_acceptance(target, engine, heads, tmp_path):
    """The chunks are of another domain than the head's training data. The server ends with the last published
    version."""
    recipe = LearnFromServerRecipe.model_validate(
        {
            "target": MEASURED,
            "data": {"domain": ["math"], "limit": 80},
            "sampling": {"max_new_tokens": 64},
            "stream": {"chunk": 20, "split": "train"},
            "arch": "eagle3",
            "init": heads[0][0],
            "server": engine,
            "output_dir": tmp_path / "run",
        }
    )
    result = learn_from_server(recipe, Run.create("learn-from-server", recipe, tmp_path / "run"), target=target)
    for row in result.per_chunk:
        print(json.dumps(row))
    with Client(engine) as client:
        assert versions(client) == [result.version]
    assert result.published >= 1 and result.mat_last > result.mat_first
