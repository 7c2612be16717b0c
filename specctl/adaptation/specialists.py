"""Learning while selecting: a policy chooses among specialists, and each one learns from the texts it has won.

The pool changes while it is chosen from. So the policy forgets its knowledge of the drafters with every query or chunk,
before it can be about weights that no longer exist.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.stream_learner import Lesson, StreamLearner
from specctl.adaptation.updates.ensemble import UpdateOutcome
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.decoding.protocols import Controller, Drafter
from specctl.decoding.records import Label, RoundResult
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters import checkpoint, pool
from specctl.drafters.feature.layer import select_taps
from specctl.drafters.names import labels, place_of
from specctl.families import online_families
from specctl.recipe import OnlineRecipe
from specctl.selection.arms import PLAIN, Arm, plain_arm, taps_of
from specctl.selection.assembly import Decoding, make_selector, plain_step, plays_for_seconds
from specctl.selection.controller import RoundLine, Selector
from specctl.selection.game.rules import log_overridden_options
from specctl.selection.policies import registry
from specctl.training.checkpoint import add_prefix, strip_prefix


class Specialists(StreamLearner):
    """The learning specialists of a pool under one selection policy. Drafters that cannot learn are arms, too.

    A specialist wins a text if its rounds committed more of the tokens than any other drafter's. A policy that plays
    for seconds has plain decoding as one more arm.

    Attributes:
        online_drafters: online drafters, by name.
        learns: False for a pool that does not change.
        lessons: lessons of the last chunk, for the specialists that had won a text.
    """

    recipe: OnlineRecipe

    def __init__(self, recipe: OnlineRecipe, algo: str, target: Target, seed: int):
        """Raises CheckpointError if a drafter of the pool is not for this target."""
        assert recipe.pool is not None
        self._paths = {name: path for path, name in labels([str(path) for path in pool.find_pool(recipe.pool)]).items()}
        self.recipe, self.target, self.seed = recipe, target, seed
        self.online_drafters: dict[str, OnlineDrafter] = {}
        self.fixed: dict[str, Drafter] = {}
        for name, path in self._paths.items():
            if checkpoint.family(Path(path)) in online_families():
                self.online_drafters[name] = OnlineDrafter(recipe, algo, target, seed, Path(path))
            else:
                self.fixed[name] = pool.load_drafter(path, target, recipe.drafting)
        self.read_taps = taps_of(self._drafters().values())
        self.buffer = self._new_buffer()
        self.learns = recipe.learner_of(algo).algo != "static"
        self.chunks = 0
        self.lessons: dict[str, Lesson] = {}
        self.rounds: Counter[str] = Counter()  # rounds of the chunk, by arm
        self._asked: Counter[str] = Counter()  # texts of the chunk, by prompt
        self._won: dict[str, Counter[str]] = defaultdict(Counter)  # committed tokens, by query and arm
        self._accepted: dict[str, Counter[str]] = defaultdict(Counter)  # accepted draft tokens, by arm and query
        self._verified: dict[str, Counter[str]] = defaultdict(Counter)  # verified positions, by arm and query
        log_overridden_options([recipe.policy.name], recipe.game)
        self._selector = self._select()

    def retarget(self, target: Target) -> None:
        self.target = target
        vars(self).pop("_step", None)
        for online_drafter in self.online_drafters.values():
            online_drafter.retarget(target)
        self.fixed = {name: pool.load_drafter(self._paths[name], target, self.recipe.drafting) for name in self.fixed}
        self.buffer = self._new_buffer()
        self._selector = self._select()

    def _drafters(self) -> dict[str, Drafter]:
        return {name: online_drafter.drafter for name, online_drafter in self.online_drafters.items()} | self.fixed

    @cached_property
    def _step(self) -> float:
        return plain_step(self.target, self.recipe.batch)

    def _select(self) -> Selector:
        """Build a selector among the drafters with their present weights."""
        policy = self.recipe.policy
        arms = [Arm(name, drafter) for name, drafter in self._drafters().items()]
        if plays_for_seconds(arms, policy.name, self.recipe.game):  # a pool that loses on this stream is left alone
            arms = [plain_arm(), *arms]
        return make_selector(
            self.target,
            arms,
            policy.name,
            self.recipe.game,
            lambda arms, text: registry.build(policy.name, arms, policy.options),
            Decoding(
                lambda: self._step,
                self.recipe.sampling.seed + self.seed,
                self._note,
                within_query=policy.reset == "query",
                greedy=self.recipe.sampling.temperature == 0,
            ),
        )

    def _note(self, entry: RoundLine) -> None:
        self.rounds[entry.arm] += 1
        if entry.arm == PLAIN:  # plain rounds teach no specialist
            return
        self._won[entry.query][entry.arm] += entry.committed
        self._accepted[entry.arm][entry.query] += entry.accepted
        self._verified[entry.arm][entry.query] += min(entry.accepted + 1, entry.drafted)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Context in which answers leave no trace. To be entered between two chunks, while nothing is counted yet."""
        try:
            with super().warming_up():
                yield
        finally:
            self._begin_chunk()

    def _begin_chunk(self) -> None:
        for counts in (self.rounds, self._asked, self._won, self._accepted, self._verified):
            counts.clear()
        self._selector = self._select()

    @property
    def controller(self) -> Controller:
        return self._selector

    @property
    def keeps_hidden(self) -> bool:
        return self.learns and super().keeps_hidden

    def observe(self, state: DecodeState, result: RoundResult) -> None:
        """Take in the tokens that a round has committed, if the pool learns."""
        if self.learns:
            super().observe(state, result)

    def labels(self, labels: list[Label]) -> list[Label]:
        """Labels of the texts of one batch. Unless the policy is reset with every query, the texts that share a slot
        within a chunk share one game. A prompt that comes again in the chunk has another name as query, because the
        rounds of each text are counted apart."""
        named = []
        for slot, label in enumerate(labels):
            again = self._asked[label.query]
            self._asked[label.query] += 1
            query = f"{label.query} {again}" if again else label.query
            named.append(replace(label, query=query, key=None if self.recipe.policy.reset == "query" else f"{slot}"))
        return named

    def learn_chunk(self, acceptance: Acceptance, decode_s: float) -> Lesson:
        """Let every specialist learn from the texts of the chunk it has won. The rounds of a specialist judge its
        update, and its share of all rounds is its share of the seconds."""
        total = max(1, self.rounds.total())
        winners = set()
        for index, text in self.buffer.texts.items():
            played = self._won[text.example.prompt_id]
            winner = max(played, key=lambda arm: played[arm]) if played else ""
            if winner in self.online_drafters:
                winners.add(winner)
                buffer = self.online_drafters[winner].buffer
                features = self.buffer.kept.get(index)
                if features is not None:  # of the states that the pool retains, a specialist reads its own
                    features = replace(features, taps=select_taps(features.taps, self.buffer.taps, buffer.taps))
                buffer.add(text, features)
        self.buffer.clear()
        self.lessons = {
            name: online_drafter.learn_chunk(self._acceptance(name), decode_s * self.rounds[name] / total)
            for name, online_drafter in self.online_drafters.items()
            if name in winners
        }
        lesson = self._combined()
        self.chunks += 1
        began = time.perf_counter()
        self._begin_chunk()
        return replace(lesson, swap_s=lesson.swap_s + time.perf_counter() - began)

    def _acceptance(self, arm: str) -> Acceptance:
        """Acceptance in the rounds that an arm drafted, by query."""
        return Acceptance.of((self._accepted[arm][query], count) for query, count in self._verified[arm].items())

    def _combined(self) -> Lesson:
        """Combine the lessons of all specialists into one: sums, the mean loss per token, and the arms' shares of the
        rounds in place of members' weights."""
        lessons = list(self.lessons.values())
        total = max(1, self.rounds.total())
        shares = tuple(self.rounds[name] / total for name in self._drafters())
        known = [(lesson.outcome.loss, lesson.tokens) for lesson in lessons if lesson.outcome.loss is not None]
        tokens = sum(count for _, count in known)
        statuses = {lesson.outcome.status for lesson in lessons}
        order = ("updated", "refused", "rested", "empty", "static")
        outcome = UpdateOutcome(
            status=next((status for status in order if status in statuses), "empty"),
            loss=sum(loss * count for loss, count in known) / tokens if tokens else None,
            weights=shares,
            steps=sum(lesson.outcome.steps for lesson in lessons),
        )
        return Lesson(
            "rollback" if any(lesson.ruling == "rollback" for lesson in lessons) else "keep",
            outcome,
            texts=sum(lesson.texts for lesson in lessons),
            tokens=sum(lesson.tokens for lesson in lessons),
            dropped=self.buffer.dropped + sum(learner.buffer.dropped for learner in self.online_drafters.values()),
            rates=tuple(rate for learner in self.online_drafters.values() for rate in learner.learner.rates),
            learn_s=sum(lesson.learn_s for lesson in lessons),
            swap_s=sum(lesson.swap_s for lesson in lessons),
        )

    def save(self, directory: Path, info: dict[str, Any]) -> Path:
        """Write every specialist as a drafter directory below `directory`, which is a pool again."""
        for name, online_drafter in self.online_drafters.items():
            start = checkpoint.read_info(online_drafter.start)
            online_drafter.save(directory / place_of(name), {**info, "domain": start.get("domain", []), "mat": {}})
        return directory

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(JSON-able facts, tensors) that `restore` needs, between two chunks."""
        facts: dict[str, Any] = {"chunks": self.chunks, "buffer": self.buffer.state()[0], "pupils": {}}
        tensors: dict[str, Tensor] = {}
        for name, online_drafter in self.online_drafters.items():
            facts["pupils"][name], found = online_drafter.state()
            tensors |= add_prefix(f"{name}/", found)
        return facts, tensors

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.chunks = facts["chunks"]
        self.buffer.restore(facts["buffer"], {})  # no texts, but their numbering goes on
        for name, online_drafter in self.online_drafters.items():
            online_drafter.restore(facts["pupils"][name], strip_prefix(f"{name}/", tensors))
        self._selector = self._select()
