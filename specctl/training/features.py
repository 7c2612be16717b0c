"""Target features of training sequences: tapped hidden states, and the final states that give the target's
distributions.

If features can be kept, in memory or on disk, the target runs once per sequence. Otherwise it runs again for every
batch. On a CPU the features are the same bits in every mode.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specctl.decoding.plan import plan_rows
from specctl.decoding.target import Target
from specctl.drafters.feature.head import SlotBatch
from specctl.drafters.feature.ttt_attention import Layout, ranges
from specctl.errors import SpecctlError, UsageError
from specctl.progress import Progress, interrupts
from specctl.recipe import FeatureRecipe
from specctl.training.engine import ends_together, over_ranks
from specctl.training.example import Author, Example
from specctl.training.feature_files import ON_DISK, FeatureFiles, Features, choose_mode, fp8_share, free_bytes
from specctl.training.prefetch import PinnedCopies, Prefetcher

if TYPE_CHECKING:
    from specctl.training.feature_stream import FeatureStream

# Most padded tokens in one forward of the target; a longer sequence runs alone. On a CPU every sequence runs alone.
# That is as fast, and padding would change the last bits of the features: they would depend on the batch and on the
# number of processes.
PASS_TOKENS = {"cpu": 1, "cuda": 16_384}
# Most tokens of a longer sequence in one forward, over the KV cache of the tokens before, and most entries of the
# attention mask of such a chunk.
CHUNK_TOKENS = {"cpu": 2048, "cuda": 8192}
CHUNK_MASK = {"cpu": 2**23, "cuda": 2**29}
SHARD_BYTES = 2**27
HEAD_ROWS = 512  # rows of logits computed at a time
# 1/φ (φ: golden ratio), 1/ρ² and 1/ρ (ρ: root of x³ = x + 1). The multiples of each, modulo 1, fill [0, 1) evenly.
SPREAD = (0.6180339887498949, 0.5698402909980532, 0.7548776662466927)


class FeatureStore:
    """Target features by example. `prepare` decides whether they are kept or computed for every batch."""

    def __init__(self, target: Target, taps: tuple[int, ...]):
        self.target, self.taps = target, taps
        self.is_sharded = False  # each example's features are in the memory of one process only
        self.kept: dict[int, Features] | FeatureFiles | FeatureStream = {}
        self.stream: FeatureStream | None = None
        self.reader: Prefetcher | None = None  # for features that are kept and have to be copied to a GPU
        self.target_tokens = 0  # tokens that the target has run over, padding excluded

    def estimate(self, examples: list[Example]) -> int:
        """Bytes of the features of `examples`."""
        width, size = self.target.hidden_size, self.target.dtype.itemsize
        slots = sum(len(e.tokens) - 2 for e in examples)
        asked = sum(e.response_length - 1 for e in examples)
        return slots * len(self.taps) * width * size + asked * (width * size + 4)

    def prepare(
        self,
        examples: list[Example],
        recipe: FeatureRecipe,
        place: Path,
        homes: list[list[Example]] | None = None,
        rank: int = 0,
    ) -> None:
        """Keep the features of `examples` as the recipe says (all ranks call this, and come to the same decision).

        Args:
            place: directory for features on disk, the same for all processes.
            homes: by rank, the examples with features that the rank holds if they are kept in memory. The default is a
                single process with all examples.

        Raises:
            SpecctlError: the features do not fit, or are not finite.
            UsageError: another process is writing them, or some are missing and the target's layers are not loaded.
            Interrupted: a signal arrived; shards that were written stay.
        """
        homes = homes or [examples]
        world = len(homes)
        shards = list(self._shards(list(self._groups(examples))))
        lengths = [
            {e.index: (len(e.tokens) - 2, e.response_length - 1) for group in shard for e in group} for shard in shards
        ]
        about = self._about(examples) | (self._origin(recipe) if recipe.mode == "server" else {})
        files = FeatureFiles(place, about, lengths, recipe.fp8)
        with self._ends_together():
            checked = [int(number % world == rank and _missing(files, number)) for number in range(len(shards))]
        *absent, free = over_ranks([*checked, free_bytes(files.dir) if rank == 0 else 0], self.target.device)
        missing = [number for number, count in enumerate(absent) if count]
        needed = sum(self.estimate(group) for number in missing for group in shards[number])
        size = self.estimate(examples) // world
        if recipe.fp8:
            share = fp8_share(self.target.hidden_size, self.target.dtype)
            needed, size = round(needed * share), round(size * share)
        mode = choose_mode(recipe, files.dir, size, needed, free, "adapters" in self.target.identity)
        if missing and mode == "cached" and not self.target.whole:
            raise UsageError(
                f"{len(missing)} of {len(shards)} shards of target features are missing in {files.dir}, and "
                f"the layers of target {self.target.name} that compute them are not loaded",
                "compute them here with features.whole_target=true, or on a server with --features-from "
                "http://host:8000",
            )
        together = self.target.part.count > 1  # each process has a slice of the target: all run all texts
        mine = missing if together else missing[rank::world]
        if mode == "memory":
            with Progress("target features", total=len(homes[rank]), unit="responses") as bar, self._ends_together():
                self.kept, self.is_sharded = self._run(list(self._groups(homes[rank])), bar), True
        elif mode in ON_DISK:
            texts = {number: [example for group in shards[number] for example in group] for number in mine}
            total = sum(map(len, texts.values()))
            with ExitStack() as stack:
                bar = stack.enter_context(Progress("target features", total=total, unit="responses"))
                computed: Iterator[tuple[int, dict[int, Features], dict[str, str]]]
                computed = ((number, self._run(shards[number], bar), {}) for number in mine)
                if mine and mode == "server":
                    from specctl.training.served_features import served_features  # HTTP client, needed only here

                    computed = served_features(self, texts, recipe.server, world, bar)
                with self._ends_together():  # write only while rank 0 holds the lock: until all have written
                    if missing and rank == 0:
                        stack.enter_context(files.writing())
                with self._ends_together():
                    for number, features, origin in computed:
                        if rank == 0 or not together:
                            files.write(number, features, origin)
            files.check_visible(missing)
            self.kept = files
        if mode != "online" and self.target.device.type == "cuda":
            self.reader = Prefetcher(lambda index: self.kept[index], PinnedCopies(self.target.device))

    def _ends_together(self) -> AbstractContextManager[None]:
        return ends_together(self.target.device, self.target.part.count)

    def open_stream(
        self, examples: list[Example], recipe: FeatureRecipe, upcoming: Iterator[Example], processes: int
    ) -> FeatureStream:
        """Let servers compute features just before `get` asks for them, which it must do in the order of `upcoming`.

        Raises the errors of `FeatureStream` and of its `start`; the caller closes the stream.
        """
        from specctl.training.feature_stream import FeatureStream  # HTTP client, needed only here

        self.kept = self.stream = stream = FeatureStream(self, recipe, examples, upcoming, processes)
        stream.start()
        if self.target.device.type == "cuda":
            copies = PinnedCopies(self.target.device)

            def read(index: int) -> Features:
                with torch.cuda.stream(copies.stream):
                    return stream[index]

            self.reader = Prefetcher(read, copies)
        return stream

    def prefetch(self, examples: list[Example]) -> None:
        """Start to read the features of a batch before `get` asks for them, if they have to be copied to a GPU."""
        if self.reader is not None:
            self.reader.start([example.index for example in examples if example.index in self.kept])

    def get(self, examples: list[Example]) -> list[Features]:
        """Features of `examples`, in order, on the target's device. CheckpointError if a features file is damaged."""
        unknown = [example for example in examples if example.index not in self.kept]
        started = time.perf_counter()
        here = {} if self.reader is None else self.reader.take([example.index for example in examples])
        if self.stream is not None:
            self.stream.waited += time.perf_counter() - started
        here |= {e.index: f for group in self._groups(unknown) for e, f in zip(group, self.compute(group), strict=True)}
        asked = (here[e.index] if e.index in here else self.kept[e.index] for e in examples)
        return [_moved(features, self.target.device) for features in asked]

    def _run(self, groups: list[list[Example]], bar: Progress) -> dict[int, Features]:
        """Compute the features of all groups into host memory."""
        kept: dict[int, Features] = {}
        for group in groups:
            interrupts.check()
            for example, features in zip(group, self.compute(group), strict=True):
                kept[example.index] = _moved(features, torch.device("cpu"))
            bar.update(len(group), tokens=self.target_tokens)
        return kept

    @property
    def _kind(self) -> str:
        return "cpu" if self.target.device.type == "cpu" else "cuda"

    @torch.inference_mode()
    def compute(self, examples: list[Example]) -> list[Features]:
        """Compute features of a group (`_groups`), in order. The target prefills all its texts. A long text, or pieces
        of one text, run in chunks. Features of several pieces are in host memory."""
        target = self.target
        target.use_adapter(examples[0].adapter)
        width = max(len(e.tokens) for e in examples) - 1  # the last token's state is not needed
        if examples[0].is_piece or width > max(CHUNK_TOKENS[self._kind], PASS_TOKENS[self._kind]):
            return self._in_chunks(examples)
        texts = [[*example.tokens[:-1]] for example in examples]
        _, hidden, tapped = target.prefill(texts, target.model.new_cache(len(texts), width), self.taps)
        self.target_tokens += sum(len(e.tokens) - 1 for e in examples)
        return [
            self.features(example, hidden[row], None if tapped is None else tapped[row])
            for row, example in enumerate(examples)
        ]

    def _in_chunks(self, examples: list[Example]) -> list[Features]:
        """Features of parts of one text. The target runs over chunks of the text with a KV cache. The states of a part
        are kept until the part is complete. The chunks depend on the text alone."""
        target, text = self.target, examples[0].text
        rows = max(1, min(CHUNK_TOKENS[self._kind], CHUNK_MASK[self._kind] // len(text)))
        end = max(example.stop for example in examples) - 1
        last = len(text) - 1
        cache = target.model.new_cache(1, min(last, -(-end // rows) * rows))
        states: dict[int, list[tuple[Tensor, Tensor]]] = {example.index: [] for example in examples}
        found: dict[int, Features] = {}
        for begin in range(0, end, rows):
            interrupts.check()
            stop = min(begin + rows, last)
            tokens = torch.tensor([[*text[begin:stop]]], device=target.device)
            plan = plan_rows([begin], stop - begin, device=target.device, dtype=target.dtype)
            hidden, tapped = target.model.forward(tokens, cache, plan, self.taps)
            self.target_tokens += stop - begin
            for example in examples:
                here = slice(max(0, example.start - begin), min(example.stop - 1, stop) - begin)
                if here.start >= here.stop:
                    continue
                part = hidden[0, here].clone()
                states[example.index].append((part, part[:, :0] if tapped is None else tapped[0, here].clone()))
                if example.stop - 1 <= stop:
                    made = self.features(example, *map(torch.cat, zip(*states.pop(example.index), strict=True)))
                    found[example.index] = _moved(made, torch.device("cpu")) if len(examples) > 1 else made
        return [found[example.index] for example in examples]

    @torch.inference_mode()
    def features(self, example: Example, hidden: Tensor, tapped: Tensor | None) -> Features:
        """Features of an example of S tokens. `hidden` [≥ S−1, H] are its states after the final norm, `tapped` [≥ S−2,
        F] its tapped states. SpecctlError if they are not finite."""
        length = len(example.tokens)
        teacher = hidden[example.prompt_length : length - 1].clone()
        taps = hidden.new_empty(length - 2, 0) if tapped is None else tapped[: length - 2].clone()
        # In parts: logits of a long response over a large vocabulary take gigabytes.
        parts = [self.target.model.logits(part).float().max(-1) for part in teacher.split(HEAD_ROWS)]
        # One pass per tensor: a sum is finite iff its terms are (short of fp32's range), and a maximum hides no NaN.
        sums = [x.sum(dtype=torch.float32) for x in (taps, teacher, *(part.values for part in parts))]
        if not torch.stack(sums).sum().isfinite():
            raise SpecctlError(
                f"target {self.target.name} computes hidden states that are not finite for prompt {example.prompt_id}",
                "fp16 overflows in many models: set target.dtype to bf16 or fp32; otherwise remove the prompt",
            )
        return Features(taps, teacher, torch.cat([part.indices for part in parts]).int())

    def _groups(self, examples: list[Example]) -> Iterator[list[Example]]:
        """Groups of examples of one author and of similar length that share a forward, or pieces of one text. Groups
        and padding depend on `examples` alone."""
        for _, group in groupby(sorted(examples, key=_author), key=_author):
            yield from self._groups_of_one(list(group))

    def _groups_of_one(self, examples: list[Example]) -> Iterator[list[Example]]:
        limit = PASS_TOKENS[self._kind]
        group: list[Example] = []
        alone: list[Example] = []
        texts: dict[int, list[Example]] = {}
        for example in examples:
            pieces = texts.setdefault(id(example.text), []) if example.is_piece else alone
            pieces.append(example)
        for pieces in texts.values():
            yield sorted(pieces, key=lambda piece: piece.start)
        for example in sorted(alone, key=lambda e: (len(e.tokens), e.index)):
            if group and len(example.tokens) * (len(group) + 1) > limit:
                yield group
                group = []
            group.append(example)
        if group:
            yield group

    def _shards(self, groups: list[list[Example]]) -> Iterator[list[list[Example]]]:
        """Shards of consecutive groups of one author, about SHARD_BYTES each."""
        shard: list[list[Example]] = []
        size = 0
        for group in groups:
            full = size + self.estimate(group) > SHARD_BYTES
            if shard and (full or _author(shard[0][0]) != _author(group[0])):
                yield shard
                shard, size = [], 0
            shard.append(group)
            size += self.estimate(group)
        if shard:
            yield shard

    def _about(self, examples: list[Example]) -> dict[str, Any]:
        """Description of everything that features depend on. Its fingerprint covers the sequences, and so the data, the
        held-out split and max_length."""
        digest = hashlib.sha256()
        for example in examples:
            place = f"at {example.start} " if example.is_piece else ""
            if example.adapter or example.model:
                place += f"with {Author(example.adapter, example.model)} "
            digest.update(f"{example.index} {place}{example.prompt_length} {list(example.tokens)}\n".encode())
            if example.is_piece and not example.done:
                digest.update(f"{list(example.text)}\n".encode())
        return {
            "target": self.target.identity,
            "path": self.target.path,
            "dtype": str(self.target.dtype),
            "taps": list(self.taps),
            "sequences": len(examples),
            "fingerprint": digest.hexdigest(),
        }

    def _origin(self, recipe: FeatureRecipe) -> dict[str, Any]:
        """Description of features from a server. A model that the recipe names may have an adapter; it is not in the
        target's identity if the recipe does not name that, too."""
        model = None if "adapter" in self.target.identity else recipe.server.model
        return {"from": "server", **({} if model is None else {"model": model})}


def _author(example: Example) -> tuple[str, str]:
    return example.adapter or "", example.model or ""


def _moved(features: Features, device: torch.device) -> Features:
    return Features(*(tensor.to(device) for tensor in vars(features).values()))


def _missing(files: FeatureFiles, number: int) -> bool:
    """Whether a shard has to be computed. The check reads the whole shard, so it looks for interrupts first."""
    interrupts.check()
    return not files.is_intact(number)


def slot_batch(
    examples: list[Example], features: list[Features], steps: int, inside: Tensor, stride: int = 1, phase: int = 0
) -> SlotBatch:
    """Pack examples for the training-time test of `steps` steps.

    Args:
        inside: [V] bool membership in the draft vocabulary. A slot is not valid if the teacher prefers a token outside
            the draft vocabulary.
        stride, phase: every `stride`-th response slot goes on to steps 1, 2, … . The choice depends on the text and
            `phase` alone, not on the batch, so several processes choose the same slots as one, and the pieces of a
            text choose the same slots as the whole text.
    """
    slots = [len(e.tokens) - 2 for e in examples]
    queries = [e.response_length - 1 for e in examples]
    slot_ranges, query_ranges = ranges(slots), ranges(queries)
    token_rows: list[int] = []
    query_rows: list[int] = []
    labels: list[int] = []
    left: list[int] = []
    at: list[int] = []
    for example, (first, end), count in zip(examples, slot_ranges, queries, strict=True):
        slots_of = end - first
        token_rows += example.tokens[1 : slots_of + 1]
        query_rows += range(end - count, end)
        labels += example.tokens[example.prompt_length + 1 :]
        left += [*range(count, example.idle, -1), *[0] * example.idle]
        at += range(slots_of - count, slots_of)
    later: list[list[int]] = []
    draws: list[float] = []
    for example, (first, _), count in zip(examples, query_ranges, queries, strict=True):
        number, done = example.draw
        # The last slot of a response has nothing to predict at step 1.
        going = [
            place for place in range(count - max(1, example.idle)) if (place + done + number + phase) % stride == 0
        ]
        later.append([first + place for place in going])
        draws += [((place + done) * SPREAD[0] + number * SPREAD[1] + phase * SPREAD[2]) % 1 for place in going]
    later_rows = [row for rows in later for row in rows]
    device = features[0].taps.device
    teacher = torch.cat([f.teacher for f in features])
    best = torch.cat([f.best for f in features]).long()
    tail = steps  # the last document's later steps read past the end; those slots are not valid
    return SlotBatch(
        features=torch.cat([f.taps for f in features]),
        key_tokens=torch.tensor(token_rows, device=device),
        key_positions=torch.cat(
            [torch.arange(e.start, e.start + count, device=device) for e, count in zip(examples, slots, strict=True)]
        ),
        query_rows=torch.tensor(query_rows, device=device),
        later_rows=torch.tensor(later_rows, dtype=torch.long, device=device),
        teacher=torch.cat((teacher, teacher.new_zeros(tail, teacher.shape[1]))),
        in_draft_vocab=torch.cat((inside[best], inside.new_zeros(tail))),
        labels=torch.tensor(labels + [0] * tail, device=device),
        valid_steps=torch.tensor(left, device=device),
        layout=Layout(slot_ranges, query_ranges, at, device),
        later_layout=Layout(
            slot_ranges, ranges([len(rows) for rows in later]), [at[row] for row in later_rows], device
        ),
        sample_draws=torch.tensor(draws),
    )
