"""Online drafter: a draft model with its replay buffer, learner, watchdog and time budget."""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specctl.adaptation.stream_learner import Lesson, StreamLearner
from specctl.adaptation.time_budget import TimeBudget
from specctl.adaptation.updates import holdout
from specctl.adaptation.updates.objective import Objective, seed_of, with_distributions
from specctl.adaptation.updates.registry import feedback, make_learner
from specctl.adaptation.updates.watchdog import Acceptance, Watchdog
from specctl.decoding.controllers import Fixed
from specctl.decoding.models.linear import Linear
from specctl.decoding.protocols import Controller, Drafter
from specctl.decoding.rope import Rope
from specctl.decoding.target import Target
from specctl.decoding.timing import synchronise
from specctl.drafters import checkpoint
from specctl.families import FAMILIES, STREAM_RETRIEVAL
from specctl.recipe import DrafterStreamRecipe, LearnerRecipe, TrainRecipe
from specctl.training.checkpoint import add_prefix, strip_prefix
from specctl.training.data import Corpus, batches
from specctl.training.engine import autocast
from specctl.training.example import Example
from specctl.training.optimizers import is_embedding_like
from specctl.training.schedule import batch_tokens
from specctl.training.trainable import TrainableHead, make_trainable

MUON_TOKENS = 768  # response tokens of a step: smaller steps learn more from a chunk, but less in a second
NO_CORPUS = Corpus([], [], "", [])


class OnlineDrafter(StreamLearner):
    """One drafter that learns along one stream.

    Attributes:
        drafter: decodes the next chunk.
        rule: update rule, with the constants of the drafter family.
        held_out: indices of the held-out texts that judged the last update. The next update learns from these texts.
    """

    def __init__(self, recipe: DrafterStreamRecipe, algo: str, target: Target, seed: int, start: Path | None = None):
        """
        Args:
            algo: one of the names in `recipe.algo`.
            target: the model that writes the texts.
            start: directory of the drafter to start from (None = the recipe's).

        Raises CheckpointError if `start` is no drafter of this family for this target.
        """
        self.start = start or recipe.initial_drafter(recipe.family_of(algo))
        family = recipe.family_of(algo) if start is None else checkpoint.family(start)
        self.rule: LearnerRecipe = recipe.learner_of(algo).resolved(family, target.hidden_size)
        self.recipe, self.target, self.seed = recipe, target, seed
        self.training = TrainRecipe(
            target=recipe.target,
            arch=family,
            init=self.start,
            objective="soft_ce",  # costs nothing: the verdicts hold the target's distributions
            dropout=self.rule.dropout or 0.0,
            precision="auto" if target.dtype == torch.bfloat16 else "fp32",
        )
        self.trainable = make_trainable(self.training, target, NO_CORPUS)
        autocast(self.trainable.module, self.training)
        if self.rule.optimizer == "muon":
            self._freeze_vocabulary()
        self.read_taps = self.trainable.module.taps if isinstance(self.trainable, TrainableHead) else ()
        self.objective = Objective(self.trainable.module, self.trainable.loss, seed, self._prepare)
        self.trainable.store = self.buffer = self._new_buffer()
        self.learner = make_learner(self.objective, self.rule, self.objective.start())
        self.watchdog = Watchdog(self.rule)
        self.account = TimeBudget(self.rule.budget)
        self.chunks = 0
        self.drafter = self.play()

    def _freeze_vocabulary(self) -> None:
        """Exclude matrices with a row per token from learning: they are three quarters of the weights of an eagle3
        head of SmolLM2-135M, and cost more time than they gain."""
        for name, parameter in self.trainable.module.named_parameters():
            if is_embedding_like(name):
                parameter.requires_grad_(False)

    def _prepare(self, batch: Any) -> Any:
        """Add the target's distributions to a batch, once for all members and draft depths."""
        if not isinstance(self.trainable, TrainableHead):
            return batch
        module = self.trainable.module
        return with_distributions(batch, self.trainable.target_head, module.squash, module.sampled_softmax)

    def retarget(self, target: Target) -> None:
        checkpoint.check_target(self.trainable.config(), target)
        self.target = target
        self.trainable.retarget(target)
        self.trainable.store = self.buffer = self._new_buffer()
        self._seen, self.held_out = 0, []  # the new buffer numbers its texts from 0
        self.drafter = self.play()

    def play(self) -> Drafter:
        """Build a drafter from the weights that the learner plays."""
        return self.drafter_of(self.played())

    def played(self) -> torch.Tensor:
        """[P] the weights that the learner plays."""
        return self.learner.play()

    def drafter_of(self, w: torch.Tensor) -> Drafter:
        """Build a drafter with the weights w [P]."""
        return self.trainable.drafter(self.objective.state(w), self.recipe.drafting)

    @property
    def controller(self) -> Controller:
        return Fixed.of(self.drafter)

    def learn_chunk(self, acceptance: Acceptance, decode_s: float) -> Lesson:
        """Learn from the chunk that was just answered in `decode_s` seconds, if the time budget allows it, and draft
        with the new weights from now on."""
        lesson = self.learn_within_budget(acceptance, decode_s)
        if lesson.outcome.status in ("static", "rested") and lesson.ruling != "rollback":
            return lesson
        # Even if no member moved, the played weights may change: Hedge weighs the members anew.
        return replace(lesson, swap_s=self._swap())

    def _swap(self) -> float:
        """Draft with the played weights from now on; return the seconds this took."""
        began = time.perf_counter()
        drafter = self.play()
        if not take_weights(self.drafter, drafter):
            self.drafter = drafter
        synchronise(self.target.device)
        return time.perf_counter() - began

    def learn_within_budget(self, acceptance: Acceptance, decode_s: float) -> Lesson:
        """Learn from the chunk that was just answered in `decode_s` seconds, if the time budget allows it; `drafter`
        keeps its weights."""
        began = time.perf_counter()
        self.account.earn(decode_s)
        if self.rule.budget is not None and self.account.price is None:
            self.account.price = self._estimated_update_s()
        fallen = self.watchdog.acceptance_fell(acceptance)
        if fallen:
            self.account.doublings = 0
        # In a hybrid, a growing datastore repairs a fall of acceptance sooner than an update does.
        lent = fallen and self.recipe.companion != STREAM_RETRIEVAL and self.account.may_borrow
        lesson = self.learn(acceptance, no_time=not (self.account.can_pay or lent))
        lesson = replace(lesson, learn_s=time.perf_counter() - began)
        self.account.spend(lesson.learn_s)
        if lesson.outcome.status not in ("static", "rested"):
            vain, judged = lesson.outcome.no_improvement, bool(lesson.outcome.scales)
            self.account.record_update(lesson.learn_s, vain=vain, helped=judged and not vain)
        return lesson

    def _estimated_update_s(self) -> float | None:
        """Estimate the seconds of an update from the gradient of its first batch; without texts, return None."""
        texts, learners = self.buffer.examples(feedback(self.rule.algo)), len(self.learner.rates)
        if not learners:
            return 0.0
        if not texts:
            return None
        weights, seconds = self.played(), 0.0
        steps = self.batches(texts)
        for batch in (*self.batches(texts[:1]), steps[0]):  # the first pass is slower, the second one counts
            began = time.perf_counter()
            prepared = self.objective.prepare(batch, 0)
            for _ in range(learners):
                self.objective.gradient(weights, prepared, 0)
            synchronise(self.target.device)
            seconds = time.perf_counter() - began
        return seconds * len(steps) * (self.rule.epochs or 1)

    def learn(self, acceptance: Acceptance, *, no_time: bool = False) -> Lesson:
        """Learn from the texts that `buffer` has taken in since the last call; `drafter` keeps its weights. With
        `no_time`, learn nothing and only take back an update that did harm."""
        began = time.perf_counter()
        self._unroll(acceptance)
        fresh, older = self._texts()
        now, judges = holdout.split(fresh, self.rule.holdout)
        learnt = [*older, *now]
        if self.watchdog.rests(acceptance, short=no_time):
            learnt, judges = [], []
        held = [text for judge in judges for text in self.batches([judge])]
        ruling, outcome = self.watchdog.learn(
            self.learner, self.objective, self.batches(learnt), acceptance, held, no_time=no_time
        )
        if outcome.status in ("rested", "static"):
            learnt, judges = [], []
        self.held_out = [judge.index for judge in judges]
        if not self.recipe.buffer.replay:
            self.buffer.keep(self.held_out)
        self.chunks += 1
        synchronise(self.target.device)
        return Lesson(
            ruling,
            outcome,
            texts=len(learnt),
            tokens=sum(example.response_length for example in learnt),
            dropped=self.buffer.dropped,
            rates=self.learner.rates,
            learn_s=time.perf_counter() - began,
        )

    def _unroll(self, acceptance: Acceptance) -> None:
        """Set the number of draft depths to train, for families that unroll them: as many as a round has tokens, at
        least two, and at most as many as offline training has."""
        if FAMILIES[self.training.arch].unrolls_steps:
            wanted = self.rule.ttt_steps or min(max(math.floor(acceptance.length), 2), self.training.ttt_steps)
            self.trainable.module.steps = wanted

    def _texts(self) -> tuple[list[Example], list[Example]]:
        """(Texts of the newest chunk, texts of earlier chunks to learn from). The earlier texts are the judges of the
        last update, which nothing was learned from yet, and a random sample for replay."""
        texts = self.buffer.examples(feedback(self.rule.algo))
        fresh = [example for example in texts if example.index >= self._seen]
        judges = [example for example in texts if example.index in self.held_out]
        rest = [example for example in texts if example.index < self._seen and example.index not in self.held_out]
        self._seen = 1 + max((example.index for example in texts), default=self._seen - 1)
        count = min(len(rest), round(self.recipe.buffer.replay * len(fresh)))
        return fresh, judges + random.Random(seed_of(self.seed, self.chunks)).sample(rest, count)

    _seen = 0  # index of the first text that no update has seen
    held_out: Sequence[int] = ()  # held-out texts that judged the last update; the next one learns from them

    def batches(self, examples: Sequence[Example]) -> list[Any]:
        """Input batches of the module, built once for all epochs and members."""
        if not examples:
            return []
        # A chunk has a few thousand tokens: the largest steps of a GPU would make one step of it.
        tokens = MUON_TOKENS if self.rule.optimizer == "muon" else batch_tokens(self.training, self.target, tokens=0)
        parts = batches(list(examples), tokens, seed=self.seed, epoch=self.chunks)
        return [self._batch(part, self.chunks + n) for n, part in enumerate(parts)]

    def _batch(self, examples: list[Example], step: int) -> Any:
        batch = self.trainable.batch(examples, step)
        return self.buffer.only_rejected(batch, examples) if feedback(self.rule.algo) == "rejected" else batch

    def save(self, directory: Path, info: dict[str, Any]) -> Path:
        """Write the played weights as a drafter directory."""
        tensors = self.trainable.tensors(self.objective.state(self.played()))
        return checkpoint.save(directory, config=self.trainable.config(), tensors=tensors, info=info, overwrite=True)

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(JSON-able facts, tensors) that `restore` needs, between two chunks."""
        facts, tensors = self.buffer.state()
        tensors = add_prefix("buffer.", tensors) | add_prefix("learner.", self.learner.state())
        tensors |= add_prefix("watchdog.", self.watchdog.state())
        account = [self.account.balance, self.account.price, self.account.doublings, self.account.raises]
        position = {"chunks": self.chunks, "seen": self._seen, "judges": [*self.held_out], "account": account}
        return {"buffer": facts, **position}, tensors

    def restore(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Restore a `state`. Raises CheckpointError if it belongs to another learner."""
        self.buffer.restore(facts["buffer"], strip_prefix("buffer.", tensors))
        self.learner.restore(strip_prefix("learner.", tensors))
        self.watchdog.restore(strip_prefix("watchdog.", tensors))
        self.chunks, self._seen = index(facts["chunks"]), index(facts["seen"])
        self.held_out = [index(judge) for judge in facts["judges"]]
        account = self.account
        account.balance, account.price, account.doublings, account.raises = facts["account"]
        self.drafter = self.play()


def take_weights(drafter: Drafter, source: Drafter) -> bool:
    """Copy the weights of `source` into `drafter`, a drafter of the same family and sizes, in place: CUDA graphs hold
    the addresses of its weights. Returns False, and changes nothing, if they differ in more than the values of their
    tensors, or if a CPU's packed products hold the weights."""
    pairs = list(zip_longest(weights_of(drafter), weights_of(source)))
    if any(isinstance(one, Linear) for pair in pairs for one in pair):
        return False
    if any(old is None or new is None or _form(old) != _form(new) for old, new in pairs):
        return False
    for old, new in pairs:
        if old.data_ptr() != new.data_ptr():
            _stored(old).copy_(_stored(new))
    return True


def _stored(tensor: Tensor) -> Tensor:
    """Cut the expanded dimensions of a tensor to one item."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def weights_of(owner: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Tensors of an object of this package, and its products with packed weights. The target's tensors, which drafters
    share, and rotary tables are left out."""
    seen = set() if seen is None else seen
    if id(owner) in seen or isinstance(owner, Target | Rope):
        return
    seen.add(id(owner))
    parts: Any = ()
    if isinstance(owner, Tensor) or (isinstance(owner, Linear) and owner.packed):
        yield owner
    elif isinstance(owner, nn.Module):
        parts = owner.state_dict().values()
    elif isinstance(owner, list | tuple):
        parts = owner
    elif isinstance(owner, dict):
        parts = owner.values()
    elif type(owner).__module__.startswith("specctl."):
        parts = getattr(owner, "__dict__", {}).values()
    for part in parts:
        yield from weights_of(part, seen)
