"""Publishing drafter versions to running engines, with a test of each version in the engine.

An engine's texts do not depend on its drafter, so only speed is at stake. A version is tested on the prompts of the
newest texts, which are requested before and after it is published. This compares the same texts with different drafts,
in pairs, so other changes of the traffic have no influence. If fewer tokens per round are accepted, the version before
it is put back at once.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specctl import progress
from specctl.adaptation.skewed_t_test import mean_gain_is_significant
from specctl.adaptation.traffic import ServedText
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.engines.client import Client
from specctl.engines.records import DraftCounters, EngineError, GenerationRequest, GenerationResult, LoadedDrafter
from specctl.recipe import PublicationRecipe

VERSIONS = "versions"
SILENT_HINT = (
    "start vLLM with --per-request-spec-decode-metrics summary, or trust the learner with publication.probes=0"
)


@dataclass(frozen=True)
class Publication:
    """The result of publishing a version. `mat_before` and `mat_after` are tokens per round of the test prompts (None
    without test prompts). "failed" means that an engine refused the version or was gone."""

    version: str
    verdict: Literal["published", "rolled back", "failed"]
    mat_before: float | None
    mat_after: float | None
    seconds: float  # export, exchange of weights and test


@dataclass
class Publisher:
    """The versions of one drafter in one or several engines of the same target.

    Attributes:
        write: exports a drafter (its directory, the directory of the version).
        place: directory of the versions, which the engines can read, too.
        version: the version that the engines draft with.
        restored: number of times it was published again because the engines drafted with something else.
    """

    engines: Client
    write: Callable[[Path, Path], None]
    place: Path
    options: PublicationRecipe
    version: str = ""
    restored: int = 0
    _reported: list[LoadedDrafter] = field(default_factory=list)  # the engines' report on the present version
    _number: int = 0
    _probes: list[GenerationRequest] = field(default_factory=list)
    _probe_counters: list[DraftCounters] = field(default_factory=list)  # with the present version

    def exchange(self, drafter: Path) -> None:
        """Publish a drafter, untested, as the next version. Raises EngineError if the engines refuse it."""
        self._number += 1
        version = f"v{self._number:06d}"
        self.write(drafter, self._directory(version))
        self._publish(version)

    def propose(self, drafter: Path, newest: Sequence[ServedText]) -> Publication:
        """Publish a drafter, and put back the version before it if that one was better. Raises EngineError."""
        began, previous = time.perf_counter(), self.version
        self._probes = [
            probe(text, self.options.tokens) for text in newest[max(0, len(newest) - self.options.probes) :]
        ]
        before = self._run_probes()
        if self.restore_if_replaced(suspected=False):  # the measurement was of another drafter
            before = self._run_probes()
        self.exchange(drafter)
        version = self.version
        try:
            after = self._run_probes()
        except BaseException:  # an untested version must not stay
            self._publish(previous)
            raise
        worse = accepts_less(before, after, self.options.level)
        if worse:
            self._publish(previous)
        self._probe_counters = before if worse else after
        self._delete_old_versions()
        mat_before, mat_after = DraftCounters.total(before).mat, DraftCounters.total(after).mat
        verdict: Literal["published", "rolled back"] = "rolled back" if worse else "published"
        return Publication(version, verdict, mat_before, mat_after, time.perf_counter() - began)

    def restore_if_replaced(self, suspected: bool) -> bool:
        """Publish the present version again if the engines draft with something else, and return whether they did. The
        engines' own report decides; on a suspicion, so do the counters of the probes' drafts."""
        replaced = self.engines.loaded() != self._reported
        if not replaced and suspected and self._probes:
            replaced = accepts_less(self._probe_counters, self._run_probes(), self.options.level)
        if replaced:
            progress.warn(f"the engines did not draft with {self.version}: it is published again")
            self._publish(self.version)
            self.restored += 1
        return replaced

    def _publish(self, version: str) -> None:
        self.engines.publish(self._directory(version), version)
        self.version, self._reported = version, self.engines.loaded()

    def _run_probes(self) -> list[DraftCounters]:
        """Request every probe; return the counters of its drafts. Raises EngineError if the engine reports none."""
        found: dict[int, DraftCounters] = {}
        for place, answer in self.engines.answers(self._probes):
            if not isinstance(answer, GenerationResult):
                continue  # refused before and after alike
            if answer.drafting is None:
                raise EngineError("the engine does not report the draft counts of a request", SILENT_HINT)
            found[place] = answer.drafting
        progress.interrupts.check()
        return [found.get(place, DraftCounters()) for place in range(len(self._probes))]

    def _directory(self, version: str) -> Path:
        return (self.place / version).absolute()

    def _delete_old_versions(self) -> None:
        """Delete versions beyond the number in the recipe, but never the present and the previous version."""
        versions = sorted(path for path in self.place.iterdir() if path.name.startswith("v") and path.is_dir())
        for path in versions[: -max(2, self.options.keep)]:
            if path.name != self.version:
                shutil.rmtree(path, ignore_errors=True)

    def state(self) -> dict[str, Any]:
        """JSON-able facts that `restore` needs."""
        probes, proof = ([asdict(one) for one in some] for some in (self._probes, self._probe_counters))
        return {"version": self.version, "number": self._number, "probes": probes, "proof": proof}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`, and publish its version again."""
        self._number = state["number"]
        self._probes = [GenerationRequest(**probe) for probe in state["probes"]]
        self._probe_counters = [DraftCounters(**drafting) for drafting in state["proof"]]
        self._publish(state["version"])


def probe(text: ServedText, tokens: int) -> GenerationRequest:
    """Greedy request that writes the beginning of a text again."""
    return GenerationRequest(text.prompt_ids, min(tokens, len(text.output_ids)))


def accepts_less(before: Sequence[DraftCounters], after: Sequence[DraftCounters], level: float) -> bool:
    """Whether the same texts now have fewer tokens per round (paired, one-sided test).

    `level`: probability of saying so although nothing has changed. The test needs at least two texts.
    """
    pairs = [(one.mat, other.mat) for one, other in zip(before, after, strict=True)]
    losses = [then - now for then, now in pairs if then is not None and now is not None]
    return len(losses) > 1 and bool(mean_gain_is_significant(np.array([losses]), level)[0])


def acceptance(texts: Sequence[ServedText], since: float = 0.0) -> Acceptance:
    """Acceptance of the texts that were begun at `since` (seconds since 1970) or later, as far as the engine reports
    it. Texts with an unknown start count, too."""
    drafting = [text.drafting for text in texts if text.drafting and (text.began >= since or not text.began)]
    return Acceptance.of((one.accepted, one.accepted + _rejections(one)) for one in drafting)


def _rejections(drafting: DraftCounters) -> int:
    """Number of rounds in which a draft token was rejected: all rounds except the fully accepted ones."""
    return drafting.rounds - (drafting.accepted_at[-1] if drafting.accepted_at else 0)
