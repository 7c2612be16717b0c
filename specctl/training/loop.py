"""Training loop of `specctl train-drafter`: one loop for all drafter families, on a DeepSpeed engine.

The metric that counts is `mat`, tokens per pass of the target. The decoding core measures it on held-out
prompts during training, because high training accuracy with low acceptance in service is the most frequent complaint in
this field. The drafter with the best mat is kept. It is measured once more on held-out prompts that had no part in the
choice. If the target's layers are not loaded, the expected length on held-out responses replaces mat
(`expected_length.py`).
"""

from __future__ import annotations

import math
import shutil
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain, count, islice
from pathlib import Path

import torch
import torch.distributed as dist

from specctl import lock, processes
from specctl.decoding.target import load_target
from specctl.drafters import checkpoint as drafter_directory
from specctl.drafters.checkpoint import PROMPTS
from specctl.drafters.pool import load_drafter
from specctl.errors import SpecctlError
from specctl.families import FAMILIES
from specctl.progress import Progress, interrupts, log, warn
from specctl.recipe import DraftingRecipe, TrainRecipe
from specctl.runs import Run, make_dir, remove_leftovers
from specctl.training import checkpoint, portable_state
from specctl.training.adapters import use_all, with_adapters
from specctl.training.balancing import Batch, balanced_rows, batches, drop_seen, rebalance, texts_by_rank
from specctl.training.checkpoint import RunState, check_same
from specctl.training.data import Corpus, load_corpus
from specctl.training.datastore import collect
from specctl.training.engine import ends_together, make_engine, set_learning_rate, start_processes, weights
from specctl.training.estimate import loads_layers_here
from specctl.training.example import Example
from specctl.training.expected_length import ExpectedLength, HeldOut
from specctl.training.logging import Trackers
from specctl.training.outcome import (
    TrainResult,
    drafter_info,
    held_out_acceptance,
    input_digests,
    kinds_of,
    mat_by_prompts,
    recipe_hash,
)
from specctl.training.pieces import Cut
from specctl.training.readers import unread
from specctl.training.schedule import Schedule, batch_tokens
from specctl.training.trainable import TrainableDrafter, make_trainable


def train_drafter(recipe: TrainRecipe, run: Run) -> TrainResult:
    """Train the drafter that `recipe` describes, or collect it if its family is not trained, and write it to
    `recipe.output`.

    Raises:
        DataError, CheckpointError: unusable data, a checkpoint of another run, a target that does not fit.
        UsageError: another process is training this drafter, or `resume` finds a checkpoint of another recipe.
        Interrupted: a signal arrived; a checkpoint was saved.
        SpecctlError: the loss or a gradient is not finite; the last checkpoint is from an earlier step.
    """
    new = make_dir(recipe.output.parent)
    with lock.hold(recipe.output.with_name(f".{recipe.output.name}{lock.NAME}"), recipe.output, new):
        remove_leftovers(recipe.output.parent, recipe.output.name)
        if FAMILIES[recipe.arch].trainable is None:
            return collect(recipe, run)
        trainer = make_trainer(recipe, run)
        try:
            trainer.start()
            trainer.train()
            result = trainer.result()
            processes.leave_at_exit()  # not after a failure: the others may be waiting in a collective
            return result
        finally:
            trainer.close()


def make_trainer(recipe: TrainRecipe, run: Run) -> Trainer:
    """Load target and data, join the process group, and build the drafter with its engine."""
    recipe, adapters = with_adapters(recipe)
    torch.manual_seed(recipe.data.seed)  # every rank starts from the same weights
    whole = loads_layers_here(recipe, recipe.target.name)
    if not whole:
        log(f"target {recipe.target.name} is loaded without its layers: mat is estimated, not measured")
    target = load_target(**recipe.target.loading, whole=whole)
    if adapters:
        use_all(target, recipe, adapters)
    corpus = load_corpus(recipe, target, adapters)
    rank, world = start_processes(target.device)
    trainable = make_trainable(recipe, target, corpus)
    if recipe.init is None and (reason := unread(recipe.arch, trainable.module, target.name, target.config)):
        warn(reason)
    cut = Cut.of(recipe, trainable.module)
    if cut is not None:
        corpus = cut.corpus(corpus)
    return Trainer(recipe, run, corpus, trainable, rank, world)


class Trainer:
    """State of one training run; `train` is the loop."""

    def __init__(
        self, recipe: TrainRecipe, run: Run, corpus: Corpus, trainable: TrainableDrafter, rank: int, world: int
    ):
        self.recipe, self.run, self.corpus, self.trainable = recipe, run, corpus, trainable
        self.target = target = trainable.target
        self.rank, self.world = rank, world
        self.work = trainable.work(corpus.train, world)
        self.batch_tokens = batch_tokens(recipe, target, sum(text.response_length for text in corpus.train))
        self.schedule = self._schedule(world)
        self.epoch: list[Batch] = []  # batches of the epoch under way
        self.params = sum(parameter.numel() for parameter in trainable.module.parameters())
        self.engine = make_engine(trainable.module, recipe, self.schedule.peak)
        self.checkpoints = checkpoint.directory(recipe.output)
        self.state = RunState(recipe=recipe_hash(recipe), made_of=input_digests(recipe, target, corpus), world=world)
        self.held_out = HeldOut(trainable, corpus) if recipe.features.is_served and not target.whole else None
        self.trackers = Trackers(recipe.log if rank == 0 else [], run, recipe)

    def start(self) -> None:
        """Resume from the newest checkpoint if the recipe asks for it, and compute the features that are kept."""
        newest = checkpoint.newest(self.checkpoints, RunState) if self.recipe.resume else None
        self._require_same_files(newest)
        if newest is not None:
            path, there = newest
            check_same(self.recipe, path, there, self.state)
            checkpoint.load(self.engine, path)
            self.state = replace(there, made_of=self.state.made_of, world=self.world)
            if there.world != self.world:
                self._redistribute_epoch(path, there)
            self.schedule = self.schedule.after(self.state.first, self.state.begun)
            self.run.resume_from(Path(self.state.run), self.state.metrics)
            log(f"resumed from step {self.state.step}")
        self.run.annotate(target=self.target.identity)
        store, recipe = self.trainable.store, self.recipe
        if store is not None and not self.schedule.ended(self.state.step, self.state.seconds):
            texts, features = self.corpus.train, recipe.features
            if features.mode == "stream":
                features = store.open_stream(texts, features, self._upcoming(), self.world).held_out_recipe()
            else:
                homes = texts_by_rank(balanced_rows(texts, self.world, self.work))
                store.prepare(texts, features, recipe.features_dir, homes, self.rank)
            if self.held_out is not None:
                self.held_out.prepare(recipe.model_copy(update={"features": features}), self.rank, self.world)
        if newest is None and self.rank == 0:  # only here: a start that fails above keeps the old checkpoints
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        dist.barrier()

    def _require_same_files(self, newest: tuple[Path, RunState] | None) -> None:
        """Raise SpecctlError in every process unless all have read the same data, target and checkpoint. Otherwise
        they would train on different texts and add up the gradients, or wait for each other forever."""
        own = zlib.crc32(repr((self.state.made_of, newest and newest[1].step)).encode())
        if self.max_over_ranks(own) != -self.max_over_ranks(-own):
            raise SpecctlError(
                "the processes see different data, target weights or checkpoints",
                f"put {self.recipe.output} and the data on a file system that all nodes share",
            )

    def close(self) -> None:
        """End trackers, and requests for features."""
        self.trackers.close()
        if self.trainable.store is not None and self.trainable.store.stream is not None:
            self.trainable.store.stream.close()

    def train(self) -> None:
        """Run steps until the schedule ends, with evaluation, checkpoints and interrupts between them."""
        recipe, at = self.recipe, self.state
        with Progress("train", total=self.schedule.steps, unit="steps") as bar:
            bar.skip(at.step)
            while not self.schedule.ended(at.step, at.seconds):
                self.step(bar)
                last = self.schedule.ended(at.step, at.seconds)
                if at.step % recipe.eval.every == 0 or last:
                    self._evaluate()
                stopping = bool(self.max_over_ranks(interrupts.requested()))
                if at.step % recipe.checkpoint.every == 0 or last or stopping:
                    self.save()
                if stopping:
                    interrupts.check()
                    raise SystemExit(75)  # another rank was signaled
        if at.step < self.schedule.steps:  # with max_steps, a time limit is only a safety net
            tell = warn if recipe.max_steps else log
            tell(
                f"max_minutes={recipe.max_minutes:g} ended the training after {at.step:,} of {self.schedule.steps:,} "
                "steps: a drafter trained for fewer steps has a lower mat"
            )

    def step(self, bar: Progress) -> None:
        """Run one optimizer step: learning rate, loss over all processes, update, metrics. SpecctlError if the loss or
        a gradient is not finite."""
        at, schedule = self.state, self.schedule
        started = time.perf_counter()
        if not self.epoch:
            self.epoch = self.batches(at.epoch)
        chosen = self.epoch[at.place]
        share = schedule.rate(at.step, at.seconds)
        set_learning_rate(self.engine, share)
        rate = share * schedule.peak
        total, weight, steps = self.forward(chosen)
        sums = torch.stack(
            [torch.stack([total.detach(), weight.float()]), *(torch.stack((a.float(), b.float())) for a, b in steps)]
        )
        dist.all_reduce(sums)
        losses = (sums[:, 0] / sums[:, 1].clamp_min(1)).tolist()
        if not math.isfinite(losses[0]):
            raise SpecctlError(
                f"the loss is {losses[0]} at step {at.step}", "lower optimizer.lr; the last checkpoint is intact"
            )
        # DeepSpeed averages gradients over ranks, but the loss is the sum over all ranks divided by their total weight.
        self.engine.backward(total * (self.world / sums[0, 1].clamp_min(1)))
        self._check_gradients()
        self.engine.step()
        self._check_norm()
        at.step += 1
        at.loss = losses[0]
        at.tokens += sum(example.trained_tokens for share in chosen for example in share)
        # One clock for all: the learning rate follows it, and a process that stops early would block the others.
        at.seconds = self.max_over_ranks(at.seconds + time.perf_counter() - started)
        streamed = self._streamed(chosen, time.perf_counter() - started)
        self.run.metrics(
            step=at.step, epoch=at.epoch, loss=losses[0], loss_by_step=losses[1:], lr=rate, tokens=at.tokens,
            tokens_per_s=at.tokens / at.seconds, **streamed,
        )  # fmt: skip
        self.trackers.log(at.step, loss=losses[0], lr=rate, tokens_per_s=at.tokens / at.seconds, **streamed)
        lengths = {"mat": at.best_mat, "expected_mat": at.best_expected}
        measured = {name: length for name, length in lengths.items() if length}  # 0 before the first check
        bar.update(1, loss=losses[0], **measured, tokens_per_s=round(at.tokens / at.seconds), **streamed)
        at.place += 1
        if at.place == len(self.epoch):  # each epoch is dealt anew and may have one batch more
            self._next_epoch()

    def _streamed(self, chosen: Batch, seconds: float) -> dict[str, float]:
        """Progress of a step with streamed features: texts per second over all processes, number of texts that have
        arrived for this process, and the share of the step in which it waits for texts."""
        stream = self.trainable.store and self.trainable.store.stream
        if not stream:
            return {}
        waited, stream.waited = stream.waited, 0.0
        return {"samples_per_s": sum(map(len, chosen)) / seconds, "queue": stream.ready, "idle": waited / seconds}

    def _upcoming(self) -> Iterator[Example]:
        """The texts that this process will run, in order, from the current step to the last."""
        at = self.state
        later = (self._batches_without(epoch, self.world) for epoch in count(at.epoch + 1))
        epochs = chain([self.batches(at.epoch)[at.place :]], later)
        for chosen in islice(chain.from_iterable(epochs), self.schedule.steps - at.step):
            yield from self._local_share(chosen)[1]

    def _next_epoch(self) -> None:
        self.state.epoch, self.state.place, self.state.taken, self.epoch = self.state.epoch + 1, 0, [], []

    def _redistribute_epoch(self, path: Path, there: RunState) -> None:
        """Continue with the texts of the epoch that the checkpoint's processes have not trained on yet. The steps have
        another size now, so the learning rate follows the share of the run that was done."""
        self.state.taken, self.state.place = [*there.taken, (there.world, there.place)], 0
        done = self._schedule(there.world).after(there.first, there.begun).done(there.step)
        self.state.first, self.state.begun = there.step, done
        warn(
            f"WORLD_SIZE was {there.world} when {path} was written and is {self.world} now: "
            "the rest of the epoch is distributed again"
        )
        if not self.batches(self.state.epoch):
            self._next_epoch()

    def forward(self, chosen: Batch) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Loss sums over this rank's share of a batch. A rank without a share runs one example with weight zero."""
        mine, texts = self._local_share(chosen)
        # Seeded by step and rank: a resumed run draws the same dropout and noise as an uninterrupted run.
        torch.manual_seed(self.recipe.data.seed + 2**16 * (self.state.step * self.world + self.rank))
        with ends_together(self.target.device):  # features from a disk or a server may fail
            batch = self.trainable.batch(texts, self.state.step)
            self._prefetch()
        total, weight, steps = self.trainable.loss(self.engine, batch)
        if not mine:
            total, weight, steps = total * 0, weight * 0, [(a * 0, b * 0) for a, b in steps]
        return total, weight, steps

    def _prefetch(self) -> None:
        """Start to read the features of the next batch, if this epoch has one and training goes on."""
        store, following = self.trainable.store, self.epoch[self.state.place + 1 : self.state.place + 2]
        if store is not None and following and not self.schedule.ended(self.state.step + 1, self.state.seconds):
            store.prefetch(self._local_share(following[0])[1])

    def _local_share(self, chosen: Batch) -> tuple[bool, list[Example]]:
        """Whether this rank has a share of a batch, and the texts that it runs: its share, or else a text of another
        rank."""
        store = self.trainable.store
        dealt = chosen if store is not None and store.is_sharded else rebalance(chosen, self.work)
        mine = dealt[self.rank]
        return bool(mine), mine or next(share for share in dealt if share)[:1]

    def batches(self, epoch: int) -> list[Batch]:
        """Batches of an epoch, the same in all processes and in every call. Texts that other numbers of processes have
        already trained on in this epoch are left out."""
        seen: set[int] = set()
        for world, trained in self.state.taken:
            had = self._batches_without(epoch, world, frozenset(seen))[:trained]
            seen |= {example.index for batch in had for share in batch for example in share}
        return self._batches_without(epoch, self.world, frozenset(seen))

    def _batches_without(self, epoch: int, world: int, seen: frozenset[int] = frozenset()) -> list[Batch]:
        """Batches of an epoch for `world` processes, without the texts in `seen`."""
        work = self.work if world == self.world else self.trainable.work(self.corpus.train, world)
        left = drop_seen(balanced_rows(self.corpus.train, world, work), seen)
        limits = self.batch_tokens, self.recipe.piece_length
        return batches(left, *limits, seed=self.recipe.data.seed, epoch=epoch) if left else []

    def _schedule(self, world: int) -> Schedule:
        """The schedule of a run that has `world` processes from its start."""
        return Schedule.of(self.recipe, self.target, len(self._batches_without(0, world)))

    def _check_gradients(self) -> None:
        """Check the gradients before the update if every process holds whole gradients."""
        if self.engine.zero_optimization_stage() == 0:
            gradients = [p.grad for p in self.trainable.module.parameters() if p.grad is not None]
            self._require_finite(torch.nn.utils.get_total_norm(gradients).item())

    def _check_norm(self) -> None:
        """Check DeepSpeed's gradient norm after the update if gradients are partitioned; −1 stands for a norm that is
        not finite."""
        if self.engine.zero_optimization_stage() > 0:
            norm = float(self.engine.get_global_grad_norm() or 0.0)
            self._require_finite(norm if norm >= 0 else math.nan)

    def _require_finite(self, norm: float) -> None:
        if not math.isfinite(norm):
            raise SpecctlError(
                f"a gradient is not finite at step {self.state.step}",
                "lower optimizer.lr; the last checkpoint is intact",
            )

    def max_over_ranks(self, value: float) -> float:
        """Maximum of `value` over all processes."""
        if self.world == 1:
            return value
        largest = torch.tensor(value, dtype=torch.float64, device=self.target.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def _evaluate(self) -> None:
        """Decode the held-out prompts with the current weights, and write the drafter if it is the best yet. Without
        the target's layers, use the expected length instead."""
        if not self.target.whole:
            self._evaluate_expected()
            return
        tensors = weights(self.engine)
        with ends_together(self.target.device, self.target.part.count):
            if self._decodes:
                self._keep_if_best(tensors)

    def _keep_if_best(self, tensors: dict[str, torch.Tensor]) -> None:
        """Measure mat with these weights on held-out prompts, and write the drafter if it is the best yet."""
        at = self.state
        if not self.corpus.selection_prompts:  # no prompts to choose by: keep the latest weights
            self._write(tensors)
            return
        drafter = self.trainable.drafter(tensors)
        mat, acceptance = held_out_acceptance(self.recipe, self.target, self.corpus.selection_prompts, drafter)
        self.run.metrics(step=at.step, mat=mat, acceptance_by_position=acceptance)
        self.trackers.log(at.step, mat=mat)
        if mat > at.best_mat:
            at.best_mat = mat
            self._write(tensors)

    @property
    def _decodes(self) -> bool:
        """Whether this process decodes held-out prompts: rank 0, or every process with a slice of the target."""
        return self.rank == 0 or self.target.part.count > 1

    def _evaluate_expected(self) -> None:
        """Write the drafter if its expected length is the best yet; without held-out responses, always."""
        at, choosing, reporting = self.state, ExpectedLength(), ExpectedLength()
        if self.held_out is not None:
            choosing, reporting = self.held_out.measure(self.engine, self.rank, self.world)
        tensors = weights(self.engine)
        with ends_together(self.target.device):
            if math.isnan(choosing.mat):
                self._write(tensors)
                return
            self.run.metrics(
                step=at.step, expected_mat=choosing.mat, expected_acceptance_by_position=choosing.acceptance
            )
            self.trackers.log(at.step, expected_mat=choosing.mat)
            if choosing.mat > at.best_expected:
                at.best_expected = choosing.mat
                at.reported_expected = 0.0 if math.isnan(reporting.mat) else reporting.mat
                self._write(tensors)

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the drafter with these weights (first process only)."""
        if self.rank:
            return
        at, recipe = self.state, self.recipe
        mat = mat_by_prompts(self.corpus, choosing=at.best_mat or math.nan)
        expected = mat_by_prompts(
            self.corpus, reported=at.reported_expected or math.nan, choosing=at.best_expected or math.nan
        )
        info = drafter_info(recipe, self.corpus, steps=at.step, tokens=at.tokens, mat=mat, expected=expected)
        kept = self.trainable.tensors(tensors)
        drafter_directory.save(recipe.output, config=self.trainable.config(), tensors=kept, info=info, overwrite=True)

    def save(self) -> None:
        """Write a checkpoint of weights, optimizer and progress; all processes call this."""
        self.state.run, self.state.metrics = str(self.run.dir.absolute()), self.run.metrics_size
        tensors, keep = portable_state.collect(self.engine), self.recipe.checkpoint.keep
        with ends_together(self.target.device):
            if self.rank == 0:
                checkpoint.save_tensors(self.checkpoints, self.state.step, asdict(self.state), tensors, keep=keep)

    def _measured(self) -> tuple[float, list[float]]:
        """Return mat and acceptance by position of the kept drafter on the prompts that did not choose it. Save the mat
        with the drafter's weights, together with the kinds of prompts it was trained on."""
        if not self._decodes or not self.target.whole:
            return math.nan, []
        kept = drafter_directory.load(self.recipe.output)
        drafter = load_drafter(str(self.recipe.output), self.target, DraftingRecipe())
        mat, acceptance = held_out_acceptance(self.recipe, self.target, self.corpus.report_prompts, drafter)
        if not math.isnan(mat):
            self.run.metrics(step=self.state.step, reported_mat=mat)
            self.trackers.log(self.state.step, reported_mat=mat)
        measured = mat_by_prompts(self.corpus, reported=mat, choosing=self.state.best_mat or math.nan)
        info = kept.info | {"mat": measured, PROMPTS: kinds_of(self.target, self.corpus, drafter)}
        if self.rank == 0:
            tensors = kept.tensors
            drafter_directory.save(self.recipe.output, config=kept.config, tensors=tensors, info=info, overwrite=True)
        return mat, acceptance

    def result(self) -> TrainResult:
        """Measure the kept drafter and return the result document."""
        at = self.state
        mat, acceptance = self._measured()
        return TrainResult(
            arch=self.recipe.arch,
            domain="+".join(self.corpus.domains),
            params=self.params,
            steps=at.step,
            train_tokens=at.tokens,
            tokens_per_s=at.tokens / at.seconds if at.seconds else 0.0,
            final_loss=at.loss,
            mat=mat,
            acceptance_by_position=acceptance,
            drafter=str(self.recipe.output),
            choosing_mat=at.best_mat or math.nan,
            expected_mat=at.reported_expected or math.nan,
            choosing_expected_mat=at.best_expected or math.nan,
        )
