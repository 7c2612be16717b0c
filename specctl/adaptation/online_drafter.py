"""A drafter that learns: its module, what verification has said about its drafts, its learner, the weights in use."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, cast

import torch

from specctl.adaptation.account import Account
from specctl.adaptation.buffer import ReplayBuffer
from specctl.adaptation.ranks import ALONE, Group
from specctl.adaptation.stream_learner import Lesson, StreamLearner, new_buffer
from specctl.adaptation.updates import formulas, holdout
from specctl.adaptation.updates.objective import Objective, seed_of, with_distributions
from specctl.adaptation.updates.registry import feedback, make_learner
from specctl.adaptation.updates.watchdog import Acceptance, Watchdog
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Label
from specctl.decoding.target import Target
from specctl.decoding.timing import synchronise
from specctl.drafters import checkpoint
from specctl.drafters.feature.drafter import FeatureDrafter
from specctl.drafters.feature.mixture import Mixture
from specctl.families import FAMILIES, GROWING
from specctl.recipe import LearnerRecipe, OnlineRecipe, TrainRecipe
from specctl.training.checkpoint import prefixed, under
from specctl.training.data import Corpus, batches
from specctl.training.engine import autocast
from specctl.training.example import Example
from specctl.training.schedule import batch_tokens
from specctl.training.trainees import FeatureTrainee, make_trainee

NOTHING = Corpus([], [], "", [])


class OnlineDrafter(StreamLearner):
    """One drafter along one stream.

    Attributes:
        drafter: what to decode the next chunk with.
        buffer: its `observe` is the decoding loop's `on_commit`.
        rule: the update rule, with the constants of the family.
        judges: indices of the texts that have judged the last update, and that nothing was learnt from yet.
    """

    def __init__(
        self,
        recipe: OnlineRecipe,
        algo: str,
        target: Target,
        seed: int,
        start: Path | None = None,
        group: Group = ALONE,
    ):
        """
        Args:
            algo: one of the recipe's.
            target: writes the texts to learn from.
            start: the drafter's directory; None = the recipe's.
            group: processes whose pupils are given the same texts, and learn the same.

        Raises CheckpointError where that is not a drafter of this family for this target.
        """
        self.start = start or recipe.start_of(recipe.family_of(algo))
        family = recipe.family_of(algo) if start is None else checkpoint.family(start)
        self.rule: LearnerRecipe = recipe.rule_of(algo).resolved(family, target.hidden_size)
        self.recipe, self.target, self.seed, self._group = recipe, target, seed, group
        self.training = TrainRecipe(
            target=recipe.target,
            arch=family,
            init=self.start,
            objective="soft_ce",  # free: the target's distributions are in the verdicts
            dropout=self.rule.dropout or 0.0,
            precision="bf16" if target.dtype == torch.bfloat16 else "fp32",
        )
        self.trainee = make_trainee(self.training, target, NOTHING)
        autocast(self.trainee.module, self.training)
        self.objective = Objective(self.trainee.module, self.trainee.loss, seed, self._prepare, group)
        self.trainee.store = self.buffer = self._new_buffer()
        self.learner = make_learner(self.objective, self.rule, self.objective.start(), seed)
        self.watchdog = Watchdog(self.rule)
        self.account = Account(self.rule.budget)
        self.chunks = 0
        self.drafter = self.play()

    def _prepare(self, batch: Any) -> Any:
        """The target's distributions are made once a batch, for all members and draft depths."""
        if batch is None or not isinstance(self.trainee, FeatureTrainee):
            return batch
        return with_distributions(batch, self.trainee.target_head, self.trainee.module.squash)

    def _new_buffer(self) -> ReplayBuffer:
        return new_buffer(self.recipe, self.target, getattr(self.trainee.module, "taps", ()))

    def retarget(self, target: Target) -> None:
        """Draft for, and learn from, another target from now on: a later checkpoint of the same model.

        What was learnt stays; texts of the old target are forgotten. CheckpointError where the drafter does not fit it.
        """
        checkpoint.check_target(self.trainee.config(), target)
        self.target = target
        self.trainee.retarget(target)
        self.trainee.store = self.buffer = self._new_buffer()
        self._seen, self.judges = 0, []  # it numbers its texts anew
        self.drafter = self.play()

    def play(self) -> Drafter:
        """A drafter of what the learner plays."""
        play = self.learner.play()
        heads = [self.drafter_of(w) for w in play.vectors]
        return heads[0] if len(heads) == 1 else Mixture(cast(list[FeatureDrafter], heads), play.weights)

    def played(self) -> torch.Tensor:
        """[P] the weights that the learner plays; of a mixture their mean."""
        play = self.learner.play()
        return formulas.mean_of(torch.tensor(play.weights), list(play.vectors))

    def drafter_of(self, w: torch.Tensor) -> Drafter:
        """A drafter of the weights w [P]."""
        return self.trainee.drafter(self.objective.state(w), self.recipe.drafting)

    def drafting(self, labels: list[Label]) -> dict[str, Any]:
        """Options of `decode` for texts of these labels."""
        return {"drafter": self.drafter, "labels": labels} | self.buffer.listening

    def sit(self, acceptance: Acceptance, decode_s: float) -> Lesson:
        """Learn from the chunk that was just answered in so many seconds, if there is time for it, and play the new
        weights from now on."""
        began = time.perf_counter()
        self.account.earn(decode_s)
        if self.rule.budget is not None and self.account.price is None:
            self.account.price = self._foreseen()
        fallen = self.watchdog.fallen(acceptance)
        if fallen:
            self.account.vain = 0
        # A datastore that grows beside the head repairs a fall sooner than a lesson does.
        lent = fallen and self.recipe.companion != GROWING and self.account.lends
        lesson = self.learn(acceptance, short=not (self.account.affords or lent))
        lesson = replace(lesson, learn_s=time.perf_counter() - began)
        self.account.spend(lesson.learn_s)
        if lesson.outcome.status in ("static", "rested") and lesson.ruling != "rollback":
            return lesson
        if lesson.outcome.status != "rested":
            self.account.taken(lesson.learn_s, vain=lesson.outcome.vain)
        # Even an update that moved no member may play other weights: by a lower η, or another draw among them.
        began = time.perf_counter()
        self.drafter = self.play()
        synchronise(self.target.device)
        return replace(lesson, swap_s=time.perf_counter() - began)

    def _foreseen(self) -> float | None:
        """Seconds that a lesson of the texts of the buffer would take, by one step on one of them; None without any."""
        texts, learners = self.buffer.examples(feedback(self.rule.algo)), len(self.learner.rates)
        if not learners:
            return 0.0
        if not texts:
            return None
        one = min(texts, key=lambda example: example.response_length)
        vectors = [self.played()] * learners
        for _ in range(2):  # the first time it is slower
            began = time.perf_counter()
            for batch in map(self.objective.prepare, self.batches([one])):
                self.objective.gradients(vectors, batch, 0)
            synchronise(self.target.device)
            seconds = time.perf_counter() - began
        tokens = sum(example.response_length for example in texts) / max(one.response_length, 1)
        return seconds * tokens * (self.rule.epochs or 1)

    def learn(self, acceptance: Acceptance, *, short: bool = False) -> Lesson:
        """Learn from what `buffer` has taken in since the last time; `drafter` stays as it is. `short` of time, only
        take back an update that did harm."""
        began = time.perf_counter()
        self._unroll(acceptance)
        fresh, older = self._texts()
        now, judges = holdout.split(fresh, self.rule.holdout)
        learnt = [*older, *now]
        if self.watchdog.rests(acceptance, short=short):
            learnt, judges = [], []
        held = [text for judge in judges for text in self.batches([judge])]
        ruling, outcome = self.watchdog.learn(
            self.learner, self.objective, self.batches(learnt), acceptance, held, short=short
        )
        if outcome.status in ("rested", "static"):
            learnt, judges = [], []
        self.judges = [judge.index for judge in judges]
        if not self.recipe.buffer.replay:
            self.buffer.keep(self.judges)
        self.chunks += 1
        synchronise(self.target.device)
        return Lesson(
            ruling,
            outcome,
            len(learnt),
            sum(example.response_length for example in learnt),
            self.buffer.dropped,
            self.learner.rates,
            time.perf_counter() - began,
        )

    def _unroll(self, acceptance: Acceptance) -> None:
        """Train as many draft depths as rounds reach, and one more, where the family unrolls them."""
        if FAMILIES[self.training.arch].unrolls:
            wanted = self.rule.ttt_steps or min(math.ceil(acceptance.length) + 1, self.training.ttt_steps)
            self.trainee.module.steps = wanted

    def _texts(self) -> tuple[list[Example], list[Example]]:
        """The chunk's own, and those of earlier ones to learn from: the judges of the chunk before, which nothing was
        learnt from yet, and some that the recipe replays."""
        texts = self.buffer.examples(feedback(self.rule.algo))
        fresh = [example for example in texts if example.index >= self._seen]
        judges = [example for example in texts if example.index in self.judges]
        rest = [example for example in texts if example.index < self._seen and example.index not in self.judges]
        self._seen = 1 + max((example.index for example in texts), default=self._seen - 1)
        count = min(len(rest), round(self.recipe.buffer.replay * len(fresh)))
        return fresh, judges + random.Random(seed_of(self.seed, self.chunks)).sample(rest, count)

    _seen = 0  # index of the first text that has not been in a lesson
    judges: Sequence[int] = ()  # texts that have judged the last update: the next one is of them, too

    def batches(self, examples: Sequence[Example]) -> list[Any]:
        """This process' share of the texts as the module's input: made once for all epochs and members."""
        if not examples:
            return []
        tokens = batch_tokens(self.training, self.target)
        parts = batches(list(examples), tokens, seed=self.seed, epoch=self.chunks)
        shares = [self._group.share(part) for part in parts]
        return [self._batch(share, self.chunks + n) if share else None for n, share in enumerate(shares)]

    def _batch(self, examples: list[Example], step: int) -> Any:
        batch = self.trainee.batch(examples, step)
        return self.buffer.only_rejected(batch, examples) if feedback(self.rule.algo) == "rejected" else batch

    def save(self, directory: Path, info: dict[str, Any]) -> Path:
        """Write what is played as a drafter directory; of a mixture the mean of its weights."""
        tensors = self.trainee.tensors(self.objective.state(self.played()))
        return checkpoint.save(directory, config=self.trainee.config(), tensors=tensors, info=info, overwrite=True)

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(what JSON can say, tensors): all that `restore` needs, between two chunks."""
        facts, tensors = self.buffer.state()
        tensors = prefixed("buffer.", tensors) | prefixed("learner.", self.learner.state())
        tensors |= prefixed("watchdog.", self.watchdog.state())
        account = [self.account.balance, self.account.price, self.account.vain]
        position = {"chunks": self.chunks, "seen": self._seen, "judges": [*self.judges], "account": account}
        return {"buffer": facts, **position}, tensors

    def restore(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from what `state` has told. CheckpointError where it is that of another learner."""
        self.buffer.restore(facts["buffer"], under("buffer.", tensors))
        self.learner.restore(under("learner.", tensors))
        self.watchdog.restore(under("watchdog.", tensors))
        self.chunks, self._seen = index(facts["chunks"]), index(facts["seen"])
        self.judges = [index(judge) for judge in facts["judges"]]
        self.account.balance, self.account.price, self.account.vain = facts["account"]
        self.drafter = self.play()
