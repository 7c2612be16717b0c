"""The metrics endpoint, the dashboard and the front page use the same metric names."""

import json
import re
from pathlib import Path

from specctl.decoding.controllers import Fixed
from specctl.gateway.app import front_page
from specctl.gateway.metrics import DrafterCounts, Meter
from specctl.selection.certificate import of_stream
from tests.gateway.conftest import chat

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"(?:vllm|specctl):\w+")


def known(page):
    """Return the names of all metrics on a page."""
    return {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")} | set(NAME.findall(page))


def test_the_dashboard_and_the_front_page_use_existing_metrics(make_gateway):
    gateway = make_gateway()
    gateway.ask("/v1/chat/completions", chat())
    names = known(gateway.meter.page().decode())
    dashboard = json.loads((ROOT / "recipes/grafana/serve.json").read_text())
    asked = {name for panel in dashboard["panels"] for one in panel["targets"] for name in NAME.findall(one["expr"])}
    assert len(asked) > 12 and asked <= names
    shown = set(NAME.findall(front_page()))
    assert len(shown) > 8 and shown <= names


def test_the_front_page_loads_nothing_external():
    page = front_page()
    assert not re.findall(r"https?://|src=|<link|@import|url\(", page)


def test_metrics_equal_the_counts_in_the_answers(make_gateway, lookup):
    gateway = make_gateway(Fixed.of(lookup), "lookup")
    answers = [
        one.json() for one in gateway.ask("/v1/chat/completions", *[chat(n=2, temperature=0, max_tokens=96)] * 3)
    ]
    model = {"model_name": "toy"}
    assert gateway.metric("vllm:generation_tokens_total", **model) == sum(
        one["usage"]["completion_tokens"] for one in answers
    )
    assert gateway.metric("vllm:prompt_tokens_total", **model) == sum(one["usage"]["prompt_tokens"] for one in answers)
    told = [one["metrics"]["speculative_decoding"] for one in answers]
    rounds = sum(sum(one["acceptance_histogram"]) for one in told)
    accepted = sum(place * count for one in told for place, count in enumerate(one["acceptance_histogram"]))
    assert 0 < accepted < sum(one["num_draft_tokens"] for one in told)
    assert gateway.metric("vllm:spec_decode_num_drafts_total", **model) == rounds
    assert gateway.metric("vllm:spec_decode_num_accepted_tokens_total", **model) == accepted
    assert gateway.metric("vllm:time_to_first_token_seconds_count", **model) == 6
    assert gateway.metric("specctl:drafter_texts_total", drafter="lookup") == 6


def test_a_speed_bound_is_exported_only_if_there_is_one():
    """A gauge of 0 would look like a loss."""
    meter = Meter("x")
    for texts, shown in ((0, False), (1, False), (40, True)):
        meter.certificate = of_stream([0.5] * texts) if texts else None
        value = meter.registry.get_sample_value("specctl:speed_at_least")
        assert (value is not None) == shown and meter.registry.get_sample_value("specctl:speed_texts_total") == (
            texts or None
        )
    assert 1.2 < value < 2
    meter.certify(2.0)
    assert meter.certificate.texts == 41 and meter.registry.get_sample_value("specctl:speed_at_least") < value


def test_counts_by_round_and_by_text_agree():
    by_round, by_text = DrafterCounts(), DrafterCounts()
    for committed, accepted, depth in ((3, 2, 4), (1, 0, 4), (5, 4, 4)):
        by_round.add(committed, accepted, depth)
    by_text.add_rounds(3, 9, 12, 6, [2, 2, 1, 1])
    assert by_round == by_text and by_round.mat == 3.0 and Meter("x").page()
