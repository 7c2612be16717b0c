"""Timing of idle drafters: the seconds of catching up and of scoring, measured in texts that are decoded plainly."""

import time
from collections.abc import Iterable, Sequence

import numpy as np

from specctl.decoding.controllers import NoDraft
from specctl.decoding.engine import Engine
from specctl.decoding.offline import decode
from specctl.decoding.protocols import Controller
from specctl.decoding.records import Request, RoundResult
from specctl.decoding.sampling import Sampling
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.timing import synchronise
from specctl.lab.recorded.trace import Overheads
from specctl.selection.arms import Arm, taps_of
from specctl.selection.feedback import Scorer

SPANS = (4, 24)  # tokens between two scorings, in turn
ENOUGH = 5  # samples of the longer span; fewer if the texts are over before
Sample = tuple[int, float]  # tokens, seconds


class OverheadTimer(Controller):
    """Controller that drafts nothing, and times how long every arm takes to catch up and to score, now and then."""

    def __init__(self, target: Target, arms: Sequence[Arm], reach: Sequence[int]):
        self.arms, self.taps = arms, taps_of(arms)
        self.scorers = [
            [Scorer(target, [arm.drafter], depth) for depth in (1, longest)]
            for arm, longest in zip(arms, reach, strict=True)
        ]
        self.read: list[list[Sample]] = [[] for _ in arms]
        self.scored: list[tuple[list[Sample], list[Sample]]] = [([], []) for _ in arms]

    def choose(self, state: DecodeState) -> NoDraft:
        if len(state.rows[0].ids) == state.rows[0].prompt_length + 1:
            self._turn = 0
            self._read_up(state, state.rows[0].prompt_length)
        return NoDraft()

    def observe(self, state: DecodeState, result: RoundResult) -> None:
        assert result.verdict is not None
        for scorers in self.scorers:
            for scorer in scorers:
                scorer.keep(state, result.verdict, range(state.batch))
        span = SPANS[self._turn % len(SPANS)]
        if state.rows[0].stop is not None or self.scorers[0][0].pending(state) != [span]:
            return
        self._turn += 1
        self._read_up(state, span)
        for scorers, samples in zip(self.scorers, self.scored, strict=True):
            for scorer, kept in zip(scorers, samples, strict=True):
                synchronise(state.device)
                began = time.perf_counter()
                scorer.score(state, [span])
                synchronise(state.device)
                kept.append((span, time.perf_counter() - began))

    def _read_up(self, state: DecodeState, tokens: int) -> None:
        for arm, kept in zip(self.arms, self.read, strict=True):
            kept.append((tokens, arm.catch_up(state)))

    @property
    def done(self) -> bool:
        return sum(tokens == SPANS[-1] for tokens, _ in self.scored[0][0]) >= ENOUGH


def overheads(
    target: Target,
    arms: Sequence[Arm],
    reach: Sequence[int],
    prompts: Iterable[tuple[list[int], int, int]],
    sampling: Sampling,
) -> Overheads | None:
    """Time idle drafters on as many prompts (ids, room for new tokens, seed) as needed, or None for too short texts."""
    probe = OverheadTimer(target, arms, reach)
    for ids, room, seed in prompts:
        if probe.done:
            break
        decode(Engine(target, probe), [Request(ids, sampling, room, seed)])
    if not probe.scored[0][0]:
        return None
    read = np.array([line(samples) for samples in probe.read])
    score = np.array([[line(samples) for samples in depths] for depths in probe.scored])
    return Overheads(read, score, np.array(reach))


def line(samples: Sequence[Sample]) -> tuple[float, float]:
    """a and b ≥ 0 of seconds ≈ a + b·tokens: least squares through the medians of each number of tokens."""
    kinds = sorted({tokens for tokens, _ in samples})
    medians = [float(np.median([seconds for tokens, seconds in samples if tokens == kind])) for kind in kinds]
    if len(kinds) == 1:
        return medians[0], 0.0
    slope = max(float(np.polyfit(kinds, medians, 1)[0]), 0.0)
    return max(float(np.mean(medians)) - slope * float(np.mean(kinds)), 0.0), slope
