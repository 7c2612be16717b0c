"""Two running vLLM servers with a specialist each: requests go to the server of their domain, by vLLM's draft
counters."""

import json
import random

import httpx
import pytest

from specctl.commands import export as exporting
from specctl.commands.serve_engines import REQUESTS
from specctl.distillation.generate import distill
from specctl.distillation.prompts import read_prompts
from specctl.recipe import DataRecipe, DistillRecipe, ExportRecipe, SamplingRecipe, TrainRecipe
from specctl.runs import Run
from specctl.training import loop
from tests.commands.test_serve_engines import recipe, routing
from tests.engines.test_vllm import MEASURED, PYTHON, ROOT
from tests.engines.test_vllm_server import NO_VLLM, serving
from tests.formats.test_corpus import option

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.is_file(), reason=NO_VLLM)]
DOMAINS, RESPONSES, ASKED, FIRST = ("sql", "math"), 80, 40, 20


@pytest.fixture(scope="module")
def stores(target, tmp_path_factory):
    """A datastore of short responses per domain: specialists without training."""
    place, made = tmp_path_factory.mktemp("stores"), {}
    for domain in DOMAINS:
        job = DistillRecipe(
            target=MEASURED,
            data=DataRecipe(domain=[domain], limit=RESPONSES),
            sampling=SamplingRecipe(max_new_tokens=64),
            batch_size=RESPONSES,
            output_dir=place / domain,
        )
        distill(job, Run.create("distill", job, place / f"{domain}.run"), target=target)
        made[domain] = place / f"{domain}-retrieval"
        collect = TrainRecipe(target=MEASURED, arch="retrieval", distilled=place / domain, output_dir=made[domain])
        loop.train_drafter(collect, Run.create("train-drafter", collect, place / f"{domain}-retrieval.run"))
    return made


@pytest.fixture(scope="module")
def urls(stores, tmp_path_factory):
    """Addresses by domain; the servers are started with the commands of `export`."""
    log = tmp_path_factory.mktemp("log")
    started = {}
    for domain, place in stores.items():
        (command,) = exporting.export(ExportRecipe(drafter=place, to="vllm")).commands
        options = [
            name for part in ("--additional-config", "--speculative-config") for name in (part, option(command, part))
        ]
        options += ["--per-request-spec-decode-metrics", "summary"]
        started[domain] = serving(log / f"{domain}.log", *options, PYTHONPATH=str(ROOT))
    with started["sql"] as sql, started["math"] as math:
        yield {"sql": sql, "math": math}


def test_requests_go_to_the_specialist_of_their_domain(urls, tmp_path, capsys):
    prompts = [
        (domain, line.messages)
        for domain in DOMAINS
        for line in read_prompts(DataRecipe(domain=[domain], limit=ASKED), domain, split="test")
    ]
    random.Random(0).shuffle(prompts)
    made = recipe(tmp_path / "run", *urls.values())
    made = made.model_copy(update={"server": made.server.model_copy(update={"wait_s": 300})})
    with routing(made, capsys) as (address, found), httpx.Client(timeout=300) as http:
        model = http.get(f"{address}/v1/models").json()["data"][0]["id"]
        for number, (_, messages) in enumerate(prompts):
            body = {"model": model, "messages": messages, "max_tokens": 64, "temperature": 0, "stream": number % 2 == 0}
            assert http.post(f"{address}/v1/chat/completions", json=body).status_code == 200
    result = found[0]
    lines = [json.loads(line) for line in (tmp_path / "run" / REQUESTS).read_text().splitlines()]
    own = [line["url"] == urls[domain] for line, (domain, _) in zip(lines, prompts, strict=True)]
    with capsys.disabled():
        print(f"\n{sum(own[FIRST:])} of {len(own[FIRST:])} after the first {FIRST}, mat {result.mat:.2f}")
        print(f"{result.decide_us_p50 / 1000:.2f} ms per choice", *result.drafters, sep="\n")
    # By chance 30 of 60 requests would go to their domain's server, and 42 with a probability of one in a thousand.
    assert sum(own[FIRST:]) >= 0.7 * len(own[FIRST:]) and result.requests == len(prompts)
