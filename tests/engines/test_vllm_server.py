"""The whole path with a running vLLM: it generates the data, serves the trained head, and its counters equal our own
loop's; another head is trained on its hidden states."""

import json
import math
import os
import shlex
import signal
import socket
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specctl.commands import export as exporting
from specctl.commands.eval_server import evaluate_server
from specctl.decoding.models.loading import builtin_path
from specctl.decoding.sampling import GREEDY
from specctl.distillation import store
from specctl.distillation.generate import distill
from specctl.drafters import checkpoint
from specctl.engines import vllm
from specctl.recipe import (
    DataRecipe,
    DistillRecipe,
    DrafterRecipe,
    EvalServerRecipe,
    ExportRecipe,
    FeatureRecipe,
    HeldOutRecipe,
    SamplingRecipe,
    ServerRecipe,
    TrainRecipe,
)
from specctl.runs import Run
from specctl.training import loop
from specctl.training.data import load_corpus
from specctl.training.features import FeatureStore
from specctl.training.served_features import needed_states
from tests.engines.test_vllm import MEASURED, PLACE, PYTHON, loaded, trained
from tests.toys.decoding import decode

TOKENS = 3
NEW = 40
OPTIONS = "--dtype float32 --enforce-eager --no-enable-prefix-caching --max-model-len 1024 --max-num-seqs 16"
NO_VLLM = f"no vLLM in {PLACE}: `make engines`, or name one by SPECCTL_VLLM"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.is_file(), reason=NO_VLLM)]


@contextmanager
def serving(log, *options, **environ):
    """Yields the address of a vLLM server with the built-in target. It loads while the first request waits
    (`server.wait_s`)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(builtin_path())]
    command += ["--port", str(port), *OPTIONS.split(), *options]
    extra = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=os.environ | extra | environ, start_new_session=True, cwd=log.parent
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def run_in(place):
    place.mkdir()
    return Run(place)


def our_counts(directory, target, prompts, tokens=TOKENS):
    """Per text, (rounds, accepted tokens by position) of our own loop with the same chains."""
    drafter = loaded(directory, target, tokens)
    accepted = [[0] * tokens for _ in prompts]

    def see(state, draft, verdict):
        for row, path in zip(state.rows, verdict.paths, strict=True):
            for place in range(len(path)):
                accepted[row.index][place] += 1

    decoded = decode(
        target, prompts, sampling=GREEDY, max_new_tokens=NEW, seeds=[0] * len(prompts), drafter=drafter,
        share_rows=False, on_round=see, taps=drafter.taps,
    )  # fmt: skip
    return [(text.target_passes, places) for text, places in zip(decoded, accepted, strict=True)]


def test_a_head_trained_on_vllms_data_has_equal_counts_in_vllm(target, tmp_path):
    with serving(tmp_path / "plain.log") as plain:
        there = {"urls": [plain], "wait_s": 300}
        recipe = {"target": MEASURED, "data": {"domain": ["sql"], "limit": 120}, "sampling": {"max_new_tokens": NEW}}
        made = DistillRecipe.model_validate(recipe | {"server": there, "output_dir": tmp_path / "sql"})
        result = distill(made, run_in(tmp_path / "distilling"))
        assert (result.responses, result.rejected) == (120, 0)
        greedy = [row for row in store.read(tmp_path / "sql") if row["temperature"] == 0]
        prompts = [row["prompt_ids"] for row in greedy]
        ours = decode(target, prompts, sampling=GREEDY, max_new_tokens=NEW, seeds=[0] * len(prompts))
        assert [row["response_ids"] for row in greedy] == [one.output_ids for one in ours]

        head = trained("eagle3", tmp_path / "sql", tmp_path / "head")
        exporting.export(ExportRecipe(drafter=head, to="vllm", output_dir=tmp_path / "export"))
        drafting = {"method": "eagle3", "model": str(tmp_path / "export"), "num_speculative_tokens": TOKENS}
        metrics = ("--per-request-spec-decode-metrics", "summary")
        with serving(tmp_path / "head.log", "--speculative-config", json.dumps(drafting), *metrics) as drafted:
            measured = {
                **(recipe | {"data": {"domain": ["sql"]}, "limit": 12, "concurrency": [1, 4]}),
                **{"server": {"urls": [drafted], "wait_s": 300}, "baseline_server": there},
            }
            found = evaluate_server(EvalServerRecipe.model_validate(measured), run_in(tmp_path / "measuring"))
    for row in found.servers:
        print(json.dumps(row.__dict__))
    lines = [json.loads(line) for line in (tmp_path / "measuring" / "requests.jsonl").read_text().splitlines()]
    for many in (1, 4):
        server, baseline = (
            [line for line in lines if (line["server"], line["concurrency"]) == (name, many)]
            for name in ("server", "baseline")
        )
        assert [line["output_ids"] for line in server] == [line["output_ids"] for line in baseline]
        expected = our_counts(head, target, [line["prompt_ids"] for line in server])
        assert [line["drafting"]["rounds"] for line in server] == [rounds for rounds, _ in expected]
        # If the length limit ends a text, our last draft is cut to the missing tokens, vLLM's is not.
        ended = [place for place, line in enumerate(server) if line["stop"] == "eos"]
        assert [server[place]["drafting"]["accepted_at"] for place in ended] == [expected[place][1] for place in ended]
        assert len(ended) >= 4 and sum(sum(expected[place][1]) for place in ended) >= 20


def capturing(target, taps, storage):
    """The options that users are told, with a connector that needs no CUDA instead of vLLM's own."""
    states = needed_states(target.name, None, taps, target.num_layers, target.hidden_size)
    given = shlex.split(vllm.capture_command(states))[3:]
    connector = json.loads(given[-1]) | {"kv_connector": "HostCapture", "kv_connector_module_path": "vllm_capture"}
    connector["kv_connector_extra_config"]["shared_storage_path"] = str(storage)
    return [*given[:-1], json.dumps(connector)]


def test_features_from_vllm_equal_our_own_and_train_an_equal_head(target, tmp_path):
    """Up to fp32 rounding, for texts longer and shorter than a block of vLLM's cache."""
    written = DistillRecipe(
        target=MEASURED,
        data=DataRecipe(domain=["sql"], limit=120),
        sampling=SamplingRecipe(max_new_tokens=NEW),
        batch_size=120,
        output_dir=tmp_path / "sql",
    )
    distill(written, run_in(tmp_path / "distilling"), target=target)

    def recipe(name, features):
        return TrainRecipe(
            target=MEASURED,
            distilled=tmp_path / "sql",
            drafter=DrafterRecipe(vocab_size=1024),
            max_steps=60,
            eval=HeldOutRecipe(every=60, prompts=8, max_new_tokens=NEW, fraction=0.15),
            precision="fp32",
            features=features,
            output_dir=tmp_path / name,
        )

    own = recipe("own", FeatureRecipe(mode="memory"))
    ours = loop.train_drafter(own, run_in(tmp_path / "own.run"))
    taps = checkpoint.taps(tmp_path / "own")
    options = capturing(target, tuple(taps), tmp_path / "states")
    with serving(tmp_path / "capture.log", *options, PYTHONPATH=str(Path(__file__).parent)) as url:
        asked = FeatureRecipe(server=ServerRecipe(urls=[url], wait_s=300, concurrency=8))
        theirs = loop.train_drafter(recipe("served", asked), run_in(tmp_path / "served.run"))
        alone = asked.model_copy(update={"whole_target": False, "dir": tmp_path / "asked for again"})
        ends = loop.train_drafter(recipe("ends", alone), run_in(tmp_path / "ends.run"))
        examples = load_corpus(own, target).train
        long = replace(examples[0], index=len(examples), tokens=[token for e in examples for token in e.tokens][:900])
        store = FeatureStore(target, tuple(taps))
        store.prepare([*examples, long], asked, tmp_path / "features")
    found, expected = store.get([*examples, long]), FeatureStore(target, tuple(taps)).get([*examples, long])
    furthest = {
        name: max((getattr(a, name).float() - getattr(b, name).float()).abs().max().item() for a, b in pairs)
        for name in ("taps", "teacher")
        for pairs in [list(zip(found, expected, strict=True))]
    }
    best = [(a.best != b.best).sum().item() for a, b in zip(found, expected, strict=True)]
    largest = {name: max(getattr(one, name).abs().max().item() for one in expected) for name in furthest}
    print(len(found), "texts", furthest, "of", largest, sum(best), "best differ", ours.mat, theirs.mat)
    print("without the target's layers", ends.expected_mat, ends.choosing_expected_mat)
    assert all(furthest[name] < 1e-5 * largest[name] for name in furthest) and sum(best) <= 1
    assert theirs.mat == pytest.approx(ours.mat, abs=0.02) and ours.mat > 1.3
    learnt, again = (checkpoint.load(tmp_path / name).tensors for name in ("served", "ends"))
    assert all(torch.allclose(learnt[name].float(), again[name].float(), atol=1e-3) for name in learnt)
    assert ends.expected_mat > 1.3 and math.isnan(ends.mat)
