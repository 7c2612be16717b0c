"""Online learning from the texts of inference engines: the learner, and the drafter versions in the engines."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specctl import progress
from specctl.adaptation.buffer import BufferedText
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.publication import Publication, Publisher, acceptance
from specctl.adaptation.stream_learner import Lesson
from specctl.adaptation.traffic import ServedText
from specctl.adaptation.updates.ensemble import UpdateOutcome
from specctl.adaptation.updates.watchdog import Acceptance, fell
from specctl.drafters import checkpoint
from specctl.engines.records import DraftCounters, EngineError
from specctl.errors import SpecctlError, redacted
from specctl.recipe import LearnFromServerRecipe
from specctl.training.example import Example

GIVE_UP = 5  # chunks in a row with an update that did harm, here or in the engine
ENDED = Lesson("keep", UpdateOutcome("rested"), 0, 0, 0, (), 0.0)


@dataclass(frozen=True)
class ServedChunk:
    """A line of `chunks.jsonl`: the texts of a chunk that engines wrote, and the results of the learning.

    Attributes:
        version: drafter version in the engines. Some texts may have been begun with the version before.
        mat: tokens per round, bonus token included, or None if the engines do not report it.
        baseline_mat: tokens per round for the same prompts on the server that keeps its drafter.
        ruling: the learner's ruling on the update before this one.
        status, loss, steps, texts, learn_s: results of the update on this chunk.
        publication: the version made from this chunk, or None if there were no new weights.
        restored: whether the engines drafted with something other than `version`, which was published again.
    """

    chunk: int
    version: str
    prompts: int
    tokens: int
    mat: float | None
    baseline_mat: float | None
    passed_over: int
    ruling: str
    status: str
    loss: float | None
    steps: int
    texts: int
    learn_s: float
    restored: bool
    publication: Publication | None


class ServedLearner:
    """Learns chunk by chunk from the texts that engines write, and publishes its drafter to these engines."""

    def __init__(self, recipe: LearnFromServerRecipe, online_drafter: OnlineDrafter, publisher: Publisher, place: Path):
        """`place`: directory that the learned drafter is saved in."""
        self.recipe, self.online_drafter, self.publisher, self.place = recipe, online_drafter, publisher, place
        self._before = Acceptance()  # acceptance in the chunk before
        self._since = 0.0  # time at which the present version was published, in seconds since 1970
        self._count = 0  # number of texts seen: the index of the next one
        self._failures_in_a_row = 0  # chunks in a row with a harmful update
        self.ended = False  # because updates kept doing harm; requests are still forwarded

    @property
    def publishes(self) -> bool:
        """Whether the learned drafter is published to the engines."""
        return self.recipe.publication.enabled

    def begin(self, start: Path) -> None:
        """Publish the drafter to start from, unless an earlier version was restored."""
        if self.publishes and not self.publisher.version:
            self.publisher.exchange(start)
        self._since = time.time()

    def learn(self, chunk: Sequence[ServedText], number: int, passed_over: int) -> ServedChunk:
        """Learn from a chunk, and publish the result.

        Raises SpecctlError if updates did harm in `GIVE_UP` chunks in a row. In a proxy, learning ends instead and the
        proxy goes on.
        """
        version, restored = self.publisher.version, self.publisher.restored
        accepted = acceptance(chunk, self._since)
        if self._replaced(fell(self._before, accepted, self.recipe.learner.tolerance)):
            accepted = Acceptance()  # measured with another drafter: it says nothing about the learner
        first = self._count
        for text in chunk:
            example = Example(self._count, text.id, [*text.prompt_ids, *text.output_ids], len(text.prompt_ids))
            self.online_drafter.buffer.add(BufferedText(example, []), None)
            self._count += 1
        before, played = self.online_drafter.state(), self.online_drafter.played()
        lesson = ENDED if self.ended else self.online_drafter.learn(accepted)
        self._before = accepted
        publication = None
        if self.publishes and not torch.equal(played, self.online_drafter.played()):
            judges = [chunk[index - first] for index in self.online_drafter.held_out if index >= first]
            publication = self._proposed(judges or chunk)
            self._since = time.time()
            self._before = Acceptance()  # the next chunk has another version
            if publication.verdict != "published":
                self.online_drafter.restore(*before)
            if publication.verdict == "rolled back":
                self.online_drafter.learner.slow(self.recipe.learner.backoff)
        self._watch(lesson, publication)
        return ServedChunk(
            chunk=number,
            version=version,
            prompts=len(chunk),
            tokens=sum(len(text.output_ids) for text in chunk),
            mat=_mat([text.drafting for text in chunk]),
            baseline_mat=_mat([text.baseline for text in chunk]),
            passed_over=passed_over,
            ruling=lesson.ruling,
            status=lesson.outcome.status,
            loss=lesson.outcome.loss,
            steps=lesson.outcome.steps,
            texts=lesson.texts,
            learn_s=lesson.learn_s,
            restored=self.publisher.restored > restored,
            publication=publication,
        )

    def _proposed(self, newest: Sequence[ServedText]) -> Publication:
        """Publish the weights that are played now. In a proxy, the error of an engine is only reported, because clients
        must be served."""
        began = time.perf_counter()
        try:
            return self.publisher.propose(self.online_drafter.save(self.place, {"mat": {}}), newest)
        except EngineError as error:
            if self.recipe.traffic.listen is None:
                raise
            progress.warn(f"the drafter is not published: {error.message}")
            return Publication(self.publisher.version, "failed", None, None, time.perf_counter() - began)

    def _replaced(self, suspected: bool) -> bool:
        """Whether the engines drafted with other weights, and were given the present version again."""
        try:
            return self.publishes and self.publisher.restore_if_replaced(suspected)
        except EngineError as error:
            if self.recipe.traffic.listen is None:
                raise
            progress.warn(f"the engines do not report their drafter: {error.message}")
            return False

    def _watch(self, lesson: Lesson, publication: Publication | None) -> None:
        """Report an update that went wrong; give up after `GIVE_UP` in a row."""
        back = publication is not None and publication.verdict == "rolled back"
        if back and publication is not None:
            progress.warn(
                f"{publication.version} had {publication.mat_after:.2f} tokens per round, but {self.publisher.version} "
                f"had {publication.mat_before:.2f}: rolled back"
            )
        failed = publication is not None and publication.verdict != "published"
        self._failures_in_a_row = self._failures_in_a_row + 1 if failed or lesson.outcome.status == "refused" else 0
        if self._failures_in_a_row == GIVE_UP:
            problem = (
                f"nothing was learned from {GIVE_UP} chunks in a row: updates are harmful, not finite or not accepted"
            )
            hint = "lower learner.lr, or set learner.clip"
            if self.recipe.traffic.listen is None:
                raise SpecctlError(problem, hint=hint)
            self.ended = True
            progress.warn(f"{problem} ({hint}): learning ends, but requests are still forwarded")

    def save(self, start: Path) -> Path:
        """Write the learned drafter as a drafter directory."""
        learnt = f"{self.recipe.algo[0]} from texts of {', '.join(redacted(self.recipe.server.urls))}, from {start}"
        return self.online_drafter.save(self.place, {**checkpoint.read_info(start), "learnt": learnt, "mat": {}})

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(JSON-able facts, tensors) that `restore` needs, between two chunks."""
        facts, tensors = self.online_drafter.state()
        return {"pupil": facts, "publisher": self.publisher.state(), "texts": self._count}, tensors

    def restore(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Restore a `state`, and publish its version again."""
        self.online_drafter.restore(facts["pupil"], tensors)
        self._count = facts["texts"]
        if self.publishes:
            self.publisher.restore(facts["publisher"])


def _mat(parts: Sequence[DraftCounters | None]) -> float | None:
    return DraftCounters.total([part for part in parts if part is not None]).mat
