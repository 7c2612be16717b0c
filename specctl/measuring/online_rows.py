"""Results of the contenders of `specctl online`: rows for the table, out of their records and chunks.

Chunks are the unit of intervals: within one all answers are drafted with the same weights, and what was learnt from it
shows in the next. They are bootstraps over the chunks, at 95 %, paired where two contenders are compared. The chunks of
one number are drawn together: read in order, a file gives every seed the same prompts, which repeats make no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specctl.decoding import metrics
from specctl.decoding.metrics import Floats, Interval, ratio
from specctl.families import GROWING, UNTRAINED
from specctl.measuring.contenders import VANILLA
from specctl.measuring.measured import Measured, columns, unusable
from specctl.measuring.online_contenders import ChunkRow, static_name
from specctl.measuring.records import Record
from specctl.recipe import OnlineRecipe

Unit = int
"""The number of a chunk, of all seeds."""
LOOKUP = "lookup"
Amount = Literal["decoded_tokens", "target_passes", "decode_s"]


@dataclass(frozen=True)
class LearnerRow:
    """A contender on the whole stream, over all seeds. `_with_training`: the time spent on learning counts.

    None where something was not measured: `baselines` are left out of a run when asked.
    """

    algo: str
    kind: str  # learner, static, untrained (lookup, suffix, retrieval) or baseline
    family: str | None
    mat: float | None
    mat_interval: Interval | None
    mat_first: float | None  # of the first chunks of all seeds
    mat_last: float | None
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
    over_lookup_with_training: float | None  # tokens per second against the cheapest rival, which needs no training
    over_lookup_with_training_interval: Interval | None
    learn_s: float
    learn_share: float | None  # of learning in the time of decoding and learning
    rollbacks: int
    refused: int  # chunks of which nothing was learnt: not finite
    dropped: int  # texts that the buffer had no room for
    unusable: str | None  # why × plain says nothing (`metrics.unusable`)


@dataclass(frozen=True)
class DomainRow:
    """A contender in one domain of the stream."""

    algo: str
    domain: str
    prompts: int
    mat: float | None
    mat_interval: Interval | None
    mat_over_static: float | None
    mat_over_static_interval: Interval | None


@dataclass(frozen=True)
class SeedRow:
    """A learner on one pass over the stream."""

    algo: str
    seed: int
    mat: float | None
    mat_over_static: float | None
    mat_last: float | None
    over_static_with_training: float | None


class Passes:
    """Answers of all contenders, over all seeds, with what learning cost them."""

    def __init__(self, recipe: OnlineRecipe, records: Sequence[Record], chunks: Sequence[ChunkRow]):
        self.recipe, self.chunks = recipe, chunks
        self.by_name: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.by_name[record.drafter].append(record)
        self.learn_s: dict[str, dict[Unit, float]] = defaultdict(lambda: defaultdict(float))
        for chunk in chunks:
            self.learn_s[chunk.algo][chunk.chunk] += chunk.learn_s + chunk.swap_s
            if chunk.algo == recipe.algo[0]:  # every learner's row tells it
                self.learn_s[GROWING][chunk.chunk] += chunk.store_s

    def row(self, name: str) -> LearnerRow:
        """The row of a contender."""
        mine, kind = self.by_name[name], self._kind(name)
        chunks = [chunk for chunk in self.chunks if chunk.algo == name]
        family = self.recipe.family_of(name) if kind == "learner" and not self.recipe.pool else None
        static = self.static_of(name)
        decoded = [record.decoded for record in mine]
        decode_s, learn_s = sum(text.decode_s for text in decoded), sum(self.learn_s[name].values())
        gross, net = self._speed(name, VANILLA), self._speed(name, VANILLA, net=True)
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
                over_static_with_training=self._speed(name, static, net=True),
                over_lookup_with_training=self._speed(name, LOOKUP, net=True),
            ),
        )

    def domain_row(self, name: str, domain: str) -> DomainRow:
        """The row of a contender in a domain."""
        mine = [record for record in self.by_name[name] if record.domain == domain]
        mat, over_static = self._mats(name, domain=domain), self._mats(name, self.static_of(name), domain)
        return DomainRow(name, domain, len(mine), **columns(mat=mat, mat_over_static=over_static))

    def seed_row(self, name: str, seed: int) -> SeedRow:
        """The row of a learner on one pass."""
        alone = Passes(
            self.recipe,
            [record for records in self.by_name.values() for record in records if record.seed == seed],
            [chunk for chunk in self.chunks if chunk.seed == seed],
        ).row(name)
        return SeedRow(name, seed, alone.mat, alone.mat_over_static, alone.mat_last, alone.over_static_with_training)

    def static_of(self, name: str) -> str:
        """The contender that is this learner's drafter without learning; "" for one that is no learner."""
        return static_name(self.recipe, name) if name in self.recipe.algo else ""

    def _kind(self, name: str) -> str:
        if name in self.recipe.algo:
            return "learner"
        return "untrained" if name in (*UNTRAINED, GROWING) else "baseline" if name == VANILLA else "static"

    def _mats(self, name: str, other: str | None = None, domain: str | None = None) -> Measured:
        """mat of a contender, or its ratio to that of another one that has answered the same prompts."""
        parts = [self._sums(name, "decoded_tokens", domain), self._sums(name, "target_passes", domain)]
        if other is not None:
            parts += [self._sums(other, "target_passes", domain), self._sums(other, "decoded_tokens", domain)]
        return _quotient(parts)

    def _speed(self, name: str, other: str, net: bool = False) -> Measured:
        """Tokens per second against those of another contender; `net`: the time of learning counts."""
        seconds, theirs = self._sums(name, "decode_s"), self._sums(other, "decode_s")
        if net:
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
    """Σ a ÷ Σ b · Σ c ÷ Σ d …, and its interval over the units; None where a part is missing or sums up to 0."""
    units = sorted(set().union(*parts))
    values = np.array([[part.get(unit, 0.0) for unit in units] for part in parts])
    if not all(parts) or not values[1::2].sum(1).all():
        return Measured()

    def statistic(counts: Floats) -> Floats:
        sums = values @ counts.T  # [parts, resamples]
        ratios: Floats = sums[::2].prod(0) / sums[1::2].prod(0)
        return ratios

    return Measured(float(statistic(np.ones((1, len(units))))[0]), metrics.bootstrap(statistic, len(units)))
