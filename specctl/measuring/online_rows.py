"""Result rows of the contenders of `specctl online`, computed from their records and chunks.

Intervals are bootstraps over chunks, at 95 %, paired when two contenders are compared. The chunk is the unit because
all its answers are drafted with the same weights; an update from it shows in the next chunk. Chunks with the same
number in different seeds are drawn together: a file that is read in order gives every seed the same prompts, so further
seeds add no independent prompts.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specctl.decoding import metrics
from specctl.decoding.metrics import Floats, Interval, ratio
from specctl.families import STREAM_RETRIEVAL, TEXT_DRAFTERS
from specctl.measuring.contenders import VANILLA
from specctl.measuring.measured import Measured, columns, unusable
from specctl.measuring.online_contenders import ChunkRow, static_name
from specctl.measuring.records import Record
from specctl.recipe import OnlineRecipe

Unit = int
"""Number of a chunk; the chunks with this number in all seeds are one unit."""
LOOKUP = "lookup"
Amount = Literal["decoded_tokens", "target_passes", "decode_s"]


@dataclass(frozen=True)
class LearnerRow:
    """Results of one contender over the whole stream and all seeds.

    The `*_with_training` fields count the time spent on learning. A field is None if it was not measured, for example
    because the recipe leaves a baseline out.
    """

    algo: str
    kind: str  # learner, static, untrained (lookup, suffix, retrieval) or baseline
    family: str | None
    mat: float | None
    mat_interval: Interval | None
    mat_first: float | None  # over the first chunk of every seed
    mat_last: float | None  # over the last chunk number
    accept_rate: float | None
    tokens_per_s: float | None
    speedup: float | None  # over plain decoding
    speedup_interval: Interval | None
    speedup_with_training: float | None
    speedup_with_training_interval: Interval | None
    mat_over_static: float | None
    mat_over_static_interval: Interval | None
    over_static: float | None  # tokens per second
    over_static_interval: Interval | None
    over_static_with_training: float | None
    over_static_with_training_interval: Interval | None
    over_lookup_with_training: float | None  # tokens per second ÷ n-gram lookup's, the cheapest rival
    over_lookup_with_training_interval: Interval | None
    learn_s: float
    learn_share: float | None  # learning ÷ (decoding + learning), in seconds
    rollbacks: int
    refused: int  # chunks that were not learned from: a loss or gradient was not finite
    dropped: int  # texts that the replay buffer had no room for
    unusable: str | None  # why the speed-up cannot be used (`metrics.why_unusable`)


@dataclass(frozen=True)
class DomainRow:
    """Results of one contender in one domain of the stream."""

    algo: str
    domain: str
    prompts: int
    mat: float | None
    mat_interval: Interval | None
    mat_over_static: float | None
    mat_over_static_interval: Interval | None


@dataclass(frozen=True)
class SeedRow:
    """Results of one learner on one pass over the stream, that is for one seed."""

    algo: str
    seed: int
    mat: float | None
    mat_over_static: float | None
    mat_last: float | None
    over_static_with_training: float | None


class OnlineResults:
    """Answers of all contenders over all seeds, with the seconds that each of them spent on learning."""

    def __init__(self, recipe: OnlineRecipe, records: Sequence[Record], chunks: Sequence[ChunkRow]):
        self.recipe, self.chunks = recipe, chunks
        self.by_name: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.by_name[record.drafter].append(record)
        self.learn_s: dict[str, dict[Unit, float]] = defaultdict(lambda: defaultdict(float))
        for chunk in chunks:
            self.learn_s[chunk.algo][chunk.chunk] += chunk.learn_s + chunk.swap_s
            if chunk.algo == recipe.algo[0]:  # every learner's row repeats `store_s`
                self.learn_s[STREAM_RETRIEVAL][chunk.chunk] += chunk.store_s

    def row(self, name: str) -> LearnerRow:
        mine, kind = self.by_name[name], self._kind(name)
        chunks = [chunk for chunk in self.chunks if chunk.algo == name]
        family = self.recipe.family_of(name) if kind == "learner" and not self.recipe.pool else None
        static = self.static_of(name)
        decoded = [record.decoded for record in mine]
        decode_s, learn_s = sum(text.decode_s for text in decoded), sum(self.learn_s[name].values())
        gross, net = self._speed(name, VANILLA), self._speed(name, VANILLA, with_training=True)
        mat = self._mats(name)
        last = max((unit_of(record) for record in mine), default=0)
        return LearnerRow(
            algo=name,
            kind=kind,
            family=family,
            mat_first=metrics.mat([record.decoded for record in mine if record.session == 0]),
            mat_last=metrics.mat([record.decoded for record in mine if record.session == last]),
            accept_rate=metrics.accept_rate(decoded),
            tokens_per_s=metrics.tokens_per_s(decoded),
            learn_s=learn_s,
            learn_share=ratio(learn_s, decode_s + learn_s),
            rollbacks=sum(chunk.ruling == "rollback" for chunk in chunks),
            refused=sum(chunk.status == "refused" for chunk in chunks),
            dropped=sum(max((c.dropped for c in chunks if c.seed == seed), default=0) for seed in self.recipe.seeds),
            unusable=unusable(gross, mat) or unusable(net, mat),
            **columns(
                mat=mat,
                speedup=gross,
                speedup_with_training=net,
                mat_over_static=self._mats(name, static),
                over_static=self._speed(name, static),
                over_static_with_training=self._speed(name, static, with_training=True),
                over_lookup_with_training=self._speed(name, LOOKUP, with_training=True),
            ),
        )

    def domain_row(self, name: str, domain: str) -> DomainRow:
        mine = [record for record in self.by_name[name] if record.domain == domain]
        mat, over_static = self._mats(name, domain=domain), self._mats(name, self.static_of(name), domain)
        return DomainRow(name, domain, len(mine), **columns(mat=mat, mat_over_static=over_static))

    def seed_row(self, name: str, seed: int) -> SeedRow:
        alone = OnlineResults(
            self.recipe,
            [record for records in self.by_name.values() for record in records if record.seed == seed],
            [chunk for chunk in self.chunks if chunk.seed == seed],
        ).row(name)
        return SeedRow(name, seed, alone.mat, alone.mat_over_static, alone.mat_last, alone.over_static_with_training)

    def static_of(self, name: str) -> str:
        """Name of the contender with this learner's drafter, without learning; "" if `name` does not learn."""
        return static_name(self.recipe, name) if name in self.recipe.algo else ""

    def _kind(self, name: str) -> str:
        if name in self.recipe.algo:
            return "learner"
        return (
            "untrained" if name in (*TEXT_DRAFTERS, STREAM_RETRIEVAL) else "baseline" if name == VANILLA else "static"
        )

    def _mats(self, name: str, other: str | None = None, domain: str | None = None) -> Measured:
        """mat of a contender; with `other`, its ratio to the mat of that contender on the same prompts."""
        parts = [self._sums(name, "decoded_tokens", domain), self._sums(name, "target_passes", domain)]
        if other is not None:
            parts += [self._sums(other, "target_passes", domain), self._sums(other, "decoded_tokens", domain)]
        return _quotient(parts)

    def _speed(self, name: str, other: str, with_training: bool = False) -> Measured:
        """Tokens per second, relative to `other`. `with_training`: add the time of learning to the contender's
        seconds."""
        seconds, theirs = self._sums(name, "decode_s"), self._sums(other, "decode_s")
        if with_training:
            seconds = {unit: value + self.learn_s[name][unit] for unit, value in seconds.items()}
        return _quotient([self._sums(name, "decoded_tokens"), seconds, theirs, self._sums(other, "decoded_tokens")])

    def _sums(self, name: str, amount: Amount, domain: str | None = None) -> dict[Unit, float]:
        sums: dict[Unit, float] = defaultdict(float)
        for record in self.by_name.get(name, ()):
            if domain is None or record.domain == domain:
                sums[unit_of(record)] += getattr(record.decoded, amount)
        return sums


def unit_of(record: Record) -> Unit:
    assert record.session is not None
    return record.session


def _quotient(parts: Sequence[dict[Unit, float]]) -> Measured:
    """Σ a ÷ Σ b · Σ c ÷ Σ d …, and its bootstrap interval over units; empty if a part is missing or a divisor is 0."""
    units = sorted(set().union(*parts))
    values = np.array([[part.get(unit, 0.0) for unit in units] for part in parts])
    if not all(parts) or not values[1::2].sum(1).all():
        return Measured()

    def statistic(counts: Floats) -> Floats:
        sums = values @ counts.T  # [parts, resamples]
        ratios: Floats = sums[::2].prod(0) / sums[1::2].prod(0)
        return ratios

    return Measured(float(statistic(np.ones((1, len(units))))[0]), metrics.bootstrap(statistic, len(units)))
