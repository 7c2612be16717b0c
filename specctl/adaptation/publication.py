"""Versions of a drafter in running engines: published one after the other, each proven in the engine.

Texts are the engine's own whatever it drafts with, so nothing but speed is at stake. A version has to prove itself on
the prompts of the newest texts, which are asked for before and after it is published: the same texts with other drafts,
paired, whatever else has changed in the traffic. Where fewer tokens a round are accepted, the version before it is put
back at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from specctl import progress
from specctl.adaptation.student import gained
from specctl.adaptation.traffic import ServedText
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.engines.records import Answer, Ask, Drafting, EngineError, Loaded, Refusal
from specctl.recipe import PublicationRecipe
from specctl.training.checkpoint import discard

VERSIONS = "versions"
SILENT_HINT = "start vLLM with --per-request-spec-decode-metrics summary; publication.probes=0 trusts the learner alone"


class Engines(Protocol):
    """The part of `engines.client.Client` that publishing needs."""

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer | Refusal]]: ...

    def publish(self, directory: Path, version: str) -> None: ...

    def loaded(self) -> list[Loaded]: ...


@dataclass(frozen=True)
class Publication:
    """A version on its way. The mats are of the prompts that were asked for before and after; None without such.
    "failed": an engine did not take it, or was gone."""

    version: str
    verdict: Literal["published", "rolled back", "failed"]
    mat_before: float | None
    mat_after: float | None
    seconds: float  # export, exchange of weights and proof


@dataclass
class Publisher:
    """The versions of one drafter in one or several engines of the same target.

    Attributes:
        write: exports a drafter (its directory, that of the version).
        place: directory of the versions, which the engines can read, too.
        version: that which the engines draft with.
        restored: how often it had to be published again, as they drafted with something else.
    """

    engines: Engines
    write: Callable[[Path, Path], None]
    place: Path
    options: PublicationRecipe
    version: str = ""
    restored: int = 0
    _told: list[Loaded] = field(default_factory=list)  # by the engines, of the present version
    _number: int = 0
    _probes: list[Ask] = field(default_factory=list)
    _proof: list[Drafting] = field(default_factory=list)  # of the probes, with the present version

    def begin(self, drafter: Path) -> None:
        """Publish the drafter that learning goes on from. Raises EngineError where the engines do not take it."""
        self._exchange(drafter)

    def propose(self, drafter: Path, newest: Sequence[ServedText]) -> Publication:
        """Publish a drafter, and put back the version before it where that was better. Raises EngineError."""
        began, previous = time.perf_counter(), self.version
        self._probes = [
            probe(text, self.options.tokens) for text in newest[max(0, len(newest) - self.options.probes) :]
        ]
        before = self._asked()
        if self.restore_if_replaced(suspected=False):  # what was measured is somebody else's
            before = self._asked()
        self._exchange(drafter)
        version = self.version
        try:
            after = self._asked()
        except BaseException:  # nothing stays that is not proven
            self._publish(previous)
            raise
        verdict: Literal["published", "rolled back"] = "published"
        if worse(before, after, self.options.level):
            verdict = "rolled back"
            self._publish(previous)
        self._proof = after if verdict == "published" else before
        self._forget()
        mat_before, mat_after = Drafting.total(before).mat, Drafting.total(after).mat
        return Publication(version, verdict, mat_before, mat_after, time.perf_counter() - began)

    def restore_if_replaced(self, suspected: bool) -> bool:
        """Publish the present version again where the engines draft with something else: by what they say, or, on a
        suspicion, by what became of the probes' drafts. Whether that was so."""
        replaced = self.engines.loaded() != self._told
        if not replaced and suspected and self._probes:
            replaced = worse(self._proof, self._asked(), self.options.level)
        if replaced:
            progress.warn(f"the engines drafted with something else than {self.version}: it is published again")
            self._publish(self.version)
            self.restored += 1
        return replaced

    def _exchange(self, drafter: Path) -> None:
        self._number += 1
        version = f"v{self._number:06d}"
        self.write(drafter, self._directory(version))
        self._publish(version)

    def _publish(self, version: str) -> None:
        self.engines.publish(self._directory(version), version)
        self.version, self._told = version, self.engines.loaded()

    def _asked(self) -> list[Drafting]:
        """Counters of every probe's drafts. EngineError where the engine does not say."""
        found: dict[int, Drafting] = {}
        for place, answer in self.engines.answers(self._probes):
            if not isinstance(answer, Answer):
                continue  # on both sides alike
            if answer.drafting is None:
                raise EngineError("the engine says nothing about the drafts of a request", SILENT_HINT)
            found[place] = answer.drafting
        progress.interrupts.check()
        return [found.get(place, Drafting()) for place in range(len(self._probes))]

    def _directory(self, version: str) -> Path:
        return (self.place / version).absolute()

    def _forget(self) -> None:
        """Keep no more versions than the recipe says; never less than the present one and the one before it."""
        versions = sorted(path for path in self.place.iterdir() if path.name.startswith("v") and path.is_dir())
        for path in versions[: -max(2, self.options.keep)]:
            if path.name != self.version:
                discard(path)

    def state(self) -> dict[str, Any]:
        """All that `restore` needs; JSON-able."""
        probes, proof = ([asdict(one) for one in some] for some in (self._probes, self._proof))
        return {"version": self.version, "number": self._number, "probes": probes, "proof": proof}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`, and publish its version again."""
        self._number = state["number"]
        self._probes = [Ask(**probe) for probe in state["probes"]]
        self._proof = [Drafting(**drafting) for drafting in state["proof"]]
        self._publish(state["version"])


def probe(text: ServedText, tokens: int) -> Ask:
    """The request of a text's beginning anew, greedy."""
    return Ask(text.prompt_ids, min(tokens, len(text.output_ids)))


def worse(before: Sequence[Drafting], after: Sequence[Drafting], level: float) -> bool:
    """Whether fewer tokens a round are accepted now, of the same texts (paired, one-sided).

    `level`: how often this may be said where nothing has changed. Two texts or more are needed.
    """
    pairs = [(one.mat, other.mat) for one, other in zip(before, after, strict=True)]
    losses = [then - now for then, now in pairs if then is not None and now is not None]
    return len(losses) > 1 and bool(gained(np.array([losses]), level)[0])


def acceptance(texts: Sequence[ServedText], since: float = 0.0) -> Acceptance:
    """Acceptance of the texts that were begun `since` then (seconds since 1970), as far as the engine tells of it."""
    told = [text.drafting for text in texts if text.drafting and (text.began >= since or not text.began)]
    return Acceptance.of((one.accepted, one.accepted + _rejections(one)) for one in told)


def _rejections(drafting: Drafting) -> int:
    """Rounds in which a draft token was rejected: all but those whose drafts were accepted to the last place."""
    return drafting.rounds - (drafting.accepted_at[-1] if drafting.accepted_at else 0)
