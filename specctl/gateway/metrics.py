"""Counters of the gateway, as a page of metrics. They have vLLM's names where vLLM has them."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specctl.selection.certificate import LEVEL, Certificate

if TYPE_CHECKING:
    from specctl.decoding.prefix_cache import PrefixCache

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
FIRST_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)

disable_created_metrics()  # one sample per counter that nothing reads


@dataclass
class DrafterCounts:
    """Sums over the rounds of one drafter.

    Attributes:
        texts: texts of which it drafted most rounds.
        drafted: sum of the depths of its drafts.
        accepted_at: number of rounds that accepted the token at each depth.
    """

    texts: int = 0
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def add(self, committed: int, accepted: int, depth: int) -> None:
        """Count one round of one text."""
        self.add_rounds(1, committed, depth, accepted, [1] * accepted)

    def add_rounds(self, rounds: int, tokens: int, drafted: int, accepted: int, accepted_at: list[int]) -> None:
        """Count several rounds by their sums."""
        self.rounds += rounds
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at += [0] * (len(accepted_at) - len(self.accepted_at))
        for place, count in enumerate(accepted_at):
            self.accepted_at[place] += count

    @property
    def mat(self) -> float | None:
        """Mean tokens per pass of the target, or None before the first round."""
        return self.tokens / self.rounds if self.rounds else None


@dataclass
class LearningCounts:
    """Counts of a drafter that learns from served texts.

    Attributes:
        on: whether it learns; False after a failure.
        version: number of the weights that draft now; 0 = the weights of the start.
        lessons: number of lessons by their result, a status of `UpdateOutcome`.
        rollbacks: number of updates that were taken back.
        texts: texts that were learned from.
        dropped: texts that were left out: too long, or no room in the buffer.
        learn_s: seconds of lessons.
        serve_s: seconds in which texts were decoded.
        mat: mean tokens per pass of the target with the "first", the "last" and the "present" weights.
    """

    on: bool = False
    version: int = 0
    lessons: Counts[str] = field(default_factory=Counts)
    rollbacks: int = 0
    texts: int = 0
    dropped: int = 0
    learn_s: float = 0.0
    serve_s: float = 0.0
    mat: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GatewayWork:
    """Work of a gateway from its start to its end.

    Attributes:
        drafters: counts by name of the drafter, or by address of the server.
        certificate: lower bound of the speed, or None if no policy chose.
        engines: name of every engine, with its version where that is known, by address; empty without engines.
        failures: requests that an engine did not answer; another engine answered them if there was one.
        broken: streams that an engine broke off after their first event.
        decide_us_p50: median microseconds to choose a server, or None if no server was chosen.
    """

    drafters: dict[str, DrafterCounts]
    certificate: Certificate | None = None
    engines: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    broken: Mapping[str, int] = field(default_factory=dict)
    decide_us_p50: float | None = None


class Meter(Collector):
    """Everything that the gateway counts. One thread writes each counter; any thread may read them.

    Attributes:
        drafters: counts by name of the drafter, or by address of the server.
        learning: counts by name of the drafter that learns; the name is empty if there is only one drafter.
        certificate: lower bound of the speed relative to plain decoding, or None if no policy chooses.
        prefix_cache: cache of the beginnings of prompts, if there is one.
    """

    certificate: Certificate | None = None
    prefix_cache: PrefixCache | None = None

    def __init__(self, model: str):
        self.model = model
        self.drafters: dict[str, DrafterCounts] = {}
        self.learning: dict[str, LearningCounts] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)
        label = ("model_name",)
        self._finished = self._counter("vllm:request_success", "Finished texts.", "finished_reason")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens.").labels(model)
        self.tokens = self._counter("vllm:generation_tokens", "Generated tokens.").labels(model)
        self.first_s = self._histogram("vllm:time_to_first_token_seconds", "To the first token.", FIRST_SECONDS)
        self.between_s = self._histogram("vllm:inter_token_latency_seconds", "Between two parts.", TOKEN_SECONDS)
        self.whole_s = self._histogram("vllm:e2e_request_latency_seconds", "To the end of a text.", WHOLE_SECONDS)
        self._running = Gauge("vllm:num_requests_running", "Texts being decoded.", label, registry=self.registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "Texts that wait.", label, registry=self.registry)
        self._answers = Counter(
            "specctl:http_responses", "Responses by status.", ("path", "status"), registry=self.registry
        )
        self._refused = Counter("specctl:refused", "Requests refused by a limit.", ("limit",), registry=self.registry)
        self.in_flight = Gauge("specctl:http_requests_in_flight", "Requests in flight.", registry=self.registry)
        self.connections = Gauge("specctl:connections", "Open connections.", registry=self.registry)
        self.faults = Counter("specctl:faults", "Errors of the gateway's own parts.", ("part",), registry=self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, help, ("model_name",), buckets=buckets, registry=self.registry)
        return made.labels(self.model)

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Show the numbers of texts in the batch and of waiting texts, which are read whenever /metrics is answered."""
        self._running.labels(self.model).set_function(running)
        self._waiting.labels(self.model).set_function(waiting)

    def drafter(self, name: str) -> DrafterCounts:
        """The counts of a drafter."""
        if name not in self.drafters:
            self.drafters[name] = DrafterCounts()
        return self.drafters[name]

    def certify(self, relative: float) -> None:
        """Count the time of a text that a policy chose for, as a multiple of plain decoding's."""
        assert self.certificate is not None
        self.certificate = self.certificate.after(relative)

    def finished(self, reason: str) -> None:
        """Count a text that ended."""
        self._finished.labels(self.model, reason).inc()

    def answered(self, path: str, status: int) -> None:
        """Count a response."""
        self._answers.labels(path, str(status)).inc()

    def refused(self, limit: str) -> None:
        """Count a request that a limit refused."""
        self._refused.labels(limit).inc()

    def fault(self, part: str) -> None:
        """Count an error of a part of the gateway."""
        self.faults.labels(part).inc()

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics that are made when the page is read."""
        yield from self._drafts()
        yield from self._lessons()
        yield from self._bound()
        yield from self._prefixes()

    def _drafts(self) -> Iterator[Metric]:
        """Metrics of `drafters`."""
        counts, model = dict(self.drafters), self.model
        total = DrafterCounts()
        for one in counts.values():
            total.add_rounds(one.rounds, one.tokens, one.drafted, one.accepted, one.accepted_at)
        sums = {
            "drafts": (total.rounds, "Verified drafts."),
            "draft_tokens": (total.drafted, "Depths of drafts."),
            "accepted_tokens": (total.accepted, "Accepted draft tokens."),
        }
        for name, (value, help) in sums.items():
            made = CounterMetricFamily(f"vllm:spec_decode_num_{name}", help, labels=("model_name",))
            made.add_metric((model,), value)
            yield made
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "By position.", labels=("model_name", "position")
        )
        for place, value in enumerate(total.accepted_at):
            places.add_metric((model, str(place)), value)
        yield places
        for name, help in (
            ("texts", "Texts that a drafter drafted, or a server wrote."),
            ("rounds", "Passes of the target by drafter or server."),
            ("tokens", "Committed tokens by drafter or server."),
            ("accepted", "Accepted draft tokens by drafter or server."),
        ):
            made = CounterMetricFamily(f"specctl:drafter_{name}", help, labels=("drafter",))
            for drafter, one in counts.items():
                made.add_metric((drafter,), getattr(one, name))
            yield made

    def _prefixes(self) -> Iterator[Metric]:
        """Metrics of `prefix_cache`."""
        if self.prefix_cache is not None:
            help = "Prompt tokens that were not in the prefix cache."
            made = CounterMetricFamily("specctl:prompt_tokens_read", help, labels=("model_name",))
            made.add_metric((self.model,), self.prefix_cache.read)
            yield made

    def _bound(self) -> Iterator[Metric]:
        """Metrics of `certificate`: without samples while there is no bound."""
        made = self.certificate
        bound = GaugeMetricFamily(
            "specctl:speed_at_least", f"Speed over plain decoding: at least, with {LEVEL:.0%} confidence at any time."
        )
        texts = CounterMetricFamily("specctl:speed_texts", "Texts that the bound of the speed is from.")
        if made is not None:
            texts.add_metric((), made.texts)
            if (least := made.at_least) is not None:
                bound.add_metric((), least)
        yield from (bound, texts)

    def _lessons(self) -> Iterator[Metric]:
        """Metrics of `learning`: without samples if no drafter learns. They have the label `drafter` where a policy
        chooses among several."""
        counts = dict(self.learning)
        labels = ("drafter",) if any(counts) else ()
        on = GaugeMetricFamily("specctl:learning", "Whether the drafter learns; 0 after a failure.", labels=labels)
        version = GaugeMetricFamily("specctl:learning_version", "Number of the weights that draft now.", labels=labels)
        mat = GaugeMetricFamily("specctl:learning_mat", "Tokens per pass of the target.", labels=(*labels, "weights"))
        lessons = CounterMetricFamily("specctl:learning_lessons", "Lessons by result.", labels=(*labels, "status"))
        sums = {
            "rollbacks": "Updates that were taken back.",
            "texts": "Texts that were learned from.",
            "dropped": "Texts that were left out: too long, or no room.",
            "learn_s": "Seconds of lessons.",
            "serve_s": "Seconds in which texts were decoded.",
        }
        totals = {
            name: CounterMetricFamily(f"specctl:learning_{name}", help, labels=labels) for name, help in sums.items()
        }
        for drafter, one in counts.items():
            label = (drafter,) if labels else ()
            on.add_metric(label, one.on)
            version.add_metric(label, one.version)
            for weights, value in dict(one.mat).items():
                mat.add_metric((*label, weights), value)
            for status, count in dict(one.lessons).items():
                lessons.add_metric((*label, status), count)
            for name, total in totals.items():
                total.add_metric(label, getattr(one, name))
        yield from (on, version, mat, lessons, *totals.values())
