"""Exported heads in llama.cpp: its texts equal the target's, and its rounds equal our own loop's."""

import os
import shlex
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from specctl.commands import export as exporting
from specctl.commands.eval_server import evaluate_server
from specctl.commands.import_ import import_head
from specctl.decoding.models.loading import builtin_path
from specctl.decoding.sampling import GREEDY
from specctl.distillation.prompts import read_prompts
from specctl.engines.client import Client
from specctl.engines.records import GenerationRequest
from specctl.recipe import (
    DataRecipe,
    EvalServerRecipe,
    ExportRecipe,
    ImportRecipe,
    SamplingRecipe,
    ServerRecipe,
    TargetRecipe,
)
from specctl.runs import Run
from tests.engines.test_vllm import MEASURED, distilled, loaded, trained
from tests.toys.decoding import decode
from tests.toys.gguf import write

PLACE = Path(os.environ.get("SPECCTL_LLAMACPP") or Path(__file__).parents[2] / ".venv-llamacpp")
PYTHON = PLACE / "bin/python"
SCRIPT = Path(__file__).with_name("llamacpp_served.py")
NEW, TOKENS = 40, 3
MIXED = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
NO_LLAMACPP = f"no xllamacpp in {PLACE}: `make engines`, or name an environment by SPECCTL_LLAMACPP"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.is_file(), reason=NO_LLAMACPP)]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The built-in target in fp32, so that rounding decides no tie between logits."""
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write(builtin_path(), path)
    return path


@pytest.fixture(scope="module")
def prompts(target):
    lines = read_prompts(DataRecipe(domain=["sql"], limit=6), "sql", split="test")
    return [target.render(prompt.messages) for prompt in lines]


@pytest.fixture(scope="module")
def responses(target, tmp_path_factory):
    return distilled(target, MEASURED, tmp_path_factory.mktemp("distilled"))


@contextmanager
def serving(log, *arguments):
    with open(log, "w") as file:
        command = [str(PYTHON), "-I", str(SCRIPT), *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file}
        with subprocess.Popen(command, text=True, **pipes) as process:
            assert process.stdout is not None and process.stdin is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http"), log.read_text()[-2000:]
            yield address
            process.stdin.close()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("eagle3", {"norm_before_fc": True, "norm_output": False, "vocab_size": 700}),
        ("eagle3", {"fc_norm": False, "norm_output": False, "norm_before_residual": True}),
        ("dflash", {"block_size": 5, "markov_rank": 0}),
        ("dflash", {"block_size": 4, "markov_rank": 8, "confidence": True}),
        ("dflash", {"block_size": 5, "markov_rank": 0, "sliding_window": 64}),
        ("dflash", {"block_size": 5, "markov_rank": 8, "is_causal": False, **MIXED}),
    ],
    ids=["eagle3 with a norm", "eagle3", "dflash", "dspark", "windows", "open windows"],
)
def test_llamacpps_texts_and_rounds_equal_our_own(
    family, options, target, file, prompts, responses, tmp_path, monkeypatch
):
    drafter = trained(family, responses, tmp_path / "drafter", **options)
    result = exporting.export(
        ExportRecipe(
            drafter=drafter,
            to="llama.cpp",
            output_dir=tmp_path / "out",
            target=TargetRecipe(name=str(file)),
            check=True,
        )
    )
    words = shlex.split(result.commands[0])
    asks = [GenerationRequest(ids, NEW) for ids in prompts]
    arguments = [words[words.index(name) + 1] for name in ("-m", "-md", "--spec-type", "--spec-draft-n-max")]
    with serving(tmp_path / "log", *arguments) as url, Client(ServerRecipe(urls=[url])) as client:
        client.check(target)
        answers = dict(client.answers(asks, timed=True))
        page = client.drafting()
    tokens = result.tokens
    # The exported matrices are in bf16, so the file is imported again.
    monkeypatch.setattr("specctl.drafters.dflash.drafter.CANDIDATES", 512)  # llama.cpp's are all 4,096: 6 GB here
    rounded = ImportRecipe(head=tmp_path / "out", output_dir=tmp_path / "back", probe={"enabled": False})
    import_head(rounded, target=target)
    back = loaded(tmp_path / "back", target, tokens)
    ours = decode(
        target, prompts, sampling=GREEDY, max_new_tokens=NEW, seeds=[0] * len(prompts), drafter=back, share_rows=False
    )
    plain = decode(target, prompts, sampling=GREEDY, max_new_tokens=NEW, seeds=[0] * len(prompts))
    assert [answers[place].output_ids for place in range(len(prompts))] == [one.output_ids for one in plain]
    said = [answers[place].drafting for place in range(len(prompts))]
    # llama.cpp rounds the inputs of bf16 matrices to bf16. In one head two draft tokens are only 0.002 apart, and it
    # chooses the other token. One text may therefore have another number of rounds.
    counts = [(one.rounds, one.drafted) for one in said]
    equal = [place for place, one in enumerate(ours) if counts[place] == (one.target_passes, one.drafted)]
    assert len(equal) >= len(prompts) - 1, (counts, [(one.target_passes, one.drafted) for one in ours])
    # llama.cpp does not count a drafted end token; our loop counts it as accepted.
    ends = [one.target_passes + 1 + one.accepted - len(one.output_ids) for one in ours]
    assert set(ends) <= {0, 1}
    assert [said[place].accepted for place in equal] == [ours[place].accepted - ends[place] for place in equal]
    assert page.accepted == sum(page.accepted_at) == sum(one.accepted for one in said)
    assert page.accepted > len(prompts), "the test needs a head with accepted drafts"
    without = sum(one.rounds for one in said) - page.rounds  # rounds for the last token of a text have no draft
    assert 0 <= without <= len(prompts)


def test_eval_server_measures_a_running_llama_server(file, tmp_path):
    (tmp_path / "run").mkdir()
    with serving(tmp_path / "log", file) as url:
        recipe = EvalServerRecipe(
            target=MEASURED,
            data=DataRecipe(domain=["sql"]),
            server=ServerRecipe(urls=[url]),
            sampling=SamplingRecipe(max_new_tokens=8),
            limit=2,
            concurrency=[1],
        )
        result = evaluate_server(recipe, Run(tmp_path / "run"))
    (row,) = result.servers
    assert row.engine.startswith("llama.cpp ") and row.requests == 2 and row.mat is None and row.failures == 0
