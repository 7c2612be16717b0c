"""Distilled responses or general text as training examples, with held-out prompts and batches."""

import hashlib
import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from specctl import regular_files
from specctl.decoding.target_text import TargetText
from specctl.distillation import store
from specctl.distillation.line_streams import json_object
from specctl.errors import CheckpointError, DataError
from specctl.progress import log, warn
from specctl.recipe import TrainRecipe
from specctl.threads import counted
from specctl.training import balancing
from specctl.training.adapters import TARGET_ITSELF, digest_of
from specctl.training.example import Author, Example

SAMPLE = 16
"""Prompts kept per domain, from which its features are computed. The mean of 64 was no better at telling six domains
apart (SmolLM2: 0.77 of 120 prompts are nearest to their domain's mean; with 16 prompts 0.80), and takes minutes with a
larger target on a CPU."""
HELD_OUT_PROMPT = 32  # first tokens of a held-out document that serve as a prompt
NO_ADAPTERS: Mapping[Path, Author] = {}


class PromptIds(NamedTuple):
    """Token ids of a prompt, and the adapter of the target that answers it, as in `Example`."""

    ids: list[int]
    adapter: str | None = None


@dataclass(frozen=True)
class Corpus:
    """Training examples, held-out prompts, and a fingerprint of the data. Responses of held-out prompts are not trained
    on.

    Attributes:
        responses: usable responses of every held-out prompt.
        prompts: a sample of the training prompts by domain; empty for general text.
        counts: `trained` is the number of texts that are trained on. Of these, `cut` texts are cut at max_length and
            lose `cut_tokens` response tokens, and `in_pieces` texts are trained in pieces. Texts are left out if their
            response has fewer than two tokens (`too_short`), or fewer than two within max_length (`too_long`). Empty
            for general text.
    """

    train: list[Example]
    held_out: list[PromptIds]
    fingerprint: str
    domains: list[str]
    responses: list[list[Example]] = field(default_factory=list)
    prompts: dict[str, list[PromptIds]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def selection_prompts(self) -> list[PromptIds]:
        """Held-out prompts that choose a checkpoint. Its mat on them is biased: it is the best of several."""
        return self._half(0)

    @property
    def report_prompts(self) -> list[PromptIds]:
        """The other held-out prompts, on which the mat of the chosen checkpoint is measured."""
        return self._half(1)

    def _half(self, which: int) -> list[PromptIds]:
        """Every other held-out prompt. A prompt is in the same half for all adapters."""
        order = {ids: n for n, ids in enumerate(dict.fromkeys(tuple(prompt.ids) for prompt in self.held_out))}
        return [prompt for prompt in self.held_out if order[tuple(prompt.ids)] % 2 == which]


def load_corpus(recipe: TrainRecipe, target: TargetText, adapters: Mapping[Path, Author] = NO_ADAPTERS) -> Corpus:
    """Load the texts that a recipe trains on: `corpus`, or the distilled data of its domains. `adapters`: see
    `load_distilled`."""
    limits = min(recipe.max_length, target.context_length), recipe.eval.fraction, 2 * recipe.eval.prompts
    if recipe.corpus is not None:
        return load_text(recipe.corpus, target, *limits)
    return load_distilled(recipe.data_dirs, target, *limits, adapters)


def load_distilled(
    directories: list[Path],
    target: TargetText,
    max_length: int,
    held_out: float,
    prompts: int,
    adapters: Mapping[Path, Author] = NO_ADAPTERS,
) -> Corpus:
    """Read distilled directories, in order. `adapters` maps each directory that an adapter of the target wrote to
    this adapter.

    A prompt that the target can decode is held out if the hash of its id falls into the first `held_out` fraction, so
    adding data never changes the split. At most `prompts` prompts are held out, spread evenly over the directories; all
    others are trained on. A prompt that one directory holds out is not trained on in another: adapters may have
    answered the same prompts. Among very few prompts there may be none to hold out; acceptance is then not measured. If
    all prompts would be held out, all are trained on instead.

    Raises:
        DataError: no usable response.
        CheckpointError: the data was written by a target with another vocabulary.
    """
    examples: list[Example] = []
    aside: dict[tuple[str, Author], PromptIds] = {}  # by prompt id and adapter
    spared: dict[tuple[str, Author], list[Example]] = {}  # usable responses by held-out prompt
    held: set[str] = set()
    counts = dict.fromkeys(("trained", "cut", "cut_tokens", "too_short", "too_long"), 0)
    digest = hashlib.sha256()
    domains: dict[str, list[tuple[float, int, PromptIds]]] = {}  # domain → prompts with the largest hashes
    names = ", ".join(map(str, directories))
    for number, directory in enumerate(directories, 1):
        quota = prompts * number // len(directories)
        author = adapters.get(directory, TARGET_ITSELF)
        if author != TARGET_ITSELF:
            digest.update(f"adapter {digest_of(author)}\n".encode())
        trained = {example.prompt_id for example in examples}  # in other directories
        for record in store.read(directory):
            _check_vocabulary(record, directory, target)
            digest.update(f"{record['id']} {record['prompt_ids']} {record['response_ids']}\n".encode())
            sample = domains.setdefault(record["domain"], [])
            key = record["prompt_id"]
            share = _share(key)
            whole = record["prompt_ids"] + record["response_ids"]
            tokens = whole[:max_length]
            prompt = PromptIds(record["prompt_ids"], author.adapter)
            example = Example(len(examples), key, array("i", tokens), len(prompt.ids), **author._asdict())
            # A slot needs its next token and the target's distribution after that token: at least two response tokens.
            usable = example.response_length >= 2
            decodable = 0 < len(prompt.ids) < target.context_length
            if key in held or (decodable and share < held_out and len(aside) < quota and key not in trained):
                held.add(key)
                aside[key, author] = prompt
                spared.setdefault((key, author), []).extend([example] * usable)
            elif usable:
                examples.append(example)
                counts["cut"] += len(whole) > max_length
                counts["cut_tokens"] += len(whole) - len(tokens)
                if prompt.ids:
                    keep = heapq.heappush if len(sample) < SAMPLE else heapq.heappushpop
                    keep(sample, (share, len(examples), prompt))  # prompts of one share are not compared
            else:
                counts["too_long" if len(whole) > max_length else "too_short"] += 1
    if any(spared.values()) and not examples:
        warn(
            f"all {len(aside)} prompts of {names} would be held out: they are trained on instead, and mat is "
            "not measured"
        )
        return load_distilled(directories, target, max_length, 0.0, prompts, adapters)
    _report(counts, max_length)
    if examples and not aside and held_out > 0:
        warn(f"no prompt of {names} is held out: mat is not measured; distil more, or raise eval.fraction")
    if not examples:
        raise DataError(
            f"{names}: no response has two or more tokens within max_length {max_length}",
            "distil more prompts, or raise max_length",
        )
    counts["trained"] = len(examples)
    kinds = {domain: [prompt for *_, prompt in sample] for domain, sample in domains.items() if sample}
    asked, responses = list(aside.values()), list(spared.values())
    return Corpus(examples, asked, digest.hexdigest()[:16], list(domains), responses, kinds, counts)


def held_out_numbers(sources: Sequence[Iterable[str]], fraction: float, prompts: int) -> tuple[int, int]:
    """Numbers of `selection_prompts` and `report_prompts` that `load_distilled` holds out, from the prompt ids of each
    directory. Every response is taken as usable, and an adapter's answers to held-out prompts are not counted."""
    held: set[str] = set()
    trained: set[str] = set()
    for number, ids in enumerate(sources, 1):
        quota, earlier = prompts * number // len(sources), frozenset(trained)
        for key in ids:
            if key not in held and _share(key) < fraction and len(held) < quota and key not in earlier:
                held.add(key)
            elif key not in held:
                trained.add(key)
            if trained and len(held) == prompts:
                break
    return ((len(held) + 1) // 2, len(held) // 2) if trained else (0, 0)


def _report(counts: Mapping[str, int], max_length: int) -> None:
    """Log how many texts and tokens are not trained on."""
    if counts["too_short"]:
        log(f"{counted(counts['too_short'], 'response')} left out, with fewer than two tokens")
    if counts["too_long"]:
        warn(
            f"{counted(counts['too_long'], 'response')} left out, with fewer than two tokens within max_length "
            f"{max_length}; "
            "raise max_length, and set piece_length for texts longer than the memory of a step"
        )
    if counts["cut"]:
        lost = counted(counts["cut_tokens"], "response token")
        log(f"{counted(counts['cut'], 'text')} cut at max_length {max_length}, without {lost}")


def _check_vocabulary(record: Mapping[str, Any], directory: Path, target: TargetText) -> None:
    """Raise CheckpointError if a response has another vocabulary, DataError if it has ids that the target lacks."""
    if record["target"] != target.identity["vocab_hash"]:
        raise CheckpointError(
            f"{directory} was distilled by a target with a different vocabulary from {target.name}",
            f"run `specctl distill --target {target.name} --output-dir DIR`, then train on distilled=DIR",
        )
    if max(record["prompt_ids"] + record["response_ids"], default=0) >= target.vocab_size:
        raise DataError(
            f"{directory}: response {record['id']:.40} contains tokens that target {target.name} does not have",
            "distil again with --overwrite",
        )


def _share(key: str) -> float:
    """Position of a prompt in [0, 1), from the hash of its id."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) / 2**32


def load_text(path: Path, target: TargetText, max_length: int, held_out: float, prompts: int) -> Corpus:
    """Read general text as training examples: JSONL with `text`, or plain text with a blank line between documents.

    Documents are cut into pieces of `max_length` tokens. Some documents are held out, unless that would be all of them;
    their first tokens serve as prompts.

    Raises DataError: the file is unreadable, a line has no `text`, or no document has three tokens or more.
    """
    examples: list[Example] = []
    aside: list[PromptIds] = []
    digest = hashlib.sha256()
    for number, text in enumerate(_documents(path)):
        digest.update(text.encode())
        ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(aside) < prompts and number % max(1, round(1 / held_out)) == 0 and len(ids) > HELD_OUT_PROMPT:
            aside.append(PromptIds(ids[:HELD_OUT_PROMPT]))
            continue
        for start in range(0, len(ids), max_length):
            piece = ids[start : start + max_length]
            if len(piece) >= 3:
                examples.append(Example(len(examples), f"{path.name}:{number}", array("i", piece), 1))
    if aside and not examples:  # such as a single document
        warn(f"all documents of {path} would be held out: they are trained on instead, and mat is not measured")
        return load_text(path, target, max_length, held_out, prompts=0)
    if not examples:
        raise DataError(
            f"{path} contains no text of three or more tokens", 'give lines such as {"text": "…"}, or plain text'
        )
    return Corpus(examples, aside, digest.hexdigest()[:16], [path.stem])


def _documents(path: Path) -> Iterator[str]:
    try:
        content = regular_files.read_bytes(path)
        if path.suffix not in (".jsonl", ".json"):
            texts = content.decode("utf-8-sig").replace("\r\n", "\n").split("\n\n")
            yield from (text for text in texts if text.strip())
            return
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read text from {path}: {error}") from error
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                row = json_object(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: {error}", 'give lines such as {"text": "…"}') from error
            if not isinstance(row.get("text"), str):
                raise DataError(f"{path}:{number}: no `text`", 'give lines such as {"text": "…"}')
            yield row["text"]


def frequent_tokens(examples: list[Example], size: int, always: frozenset[int]) -> list[int]:
    """The draft vocabulary: `always` and the most frequent tokens of the responses, `size` ids in total, ascending."""
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.tokens[example.prompt_length :])
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = dict.fromkeys(chain(sorted(always), ranked, range(size)))  # the lowest ids fill up a small vocabulary
    return sorted(islice(chosen, size))


def batches(examples: list[Example], batch_tokens: int, *, seed: int, epoch: int) -> list[list[Example]]:
    """Batches of an epoch for a single process, about `batch_tokens` response tokens each: a function of the arguments
    alone."""
    rows = [[example] for example in examples]
    return [share for (share,) in balancing.batches(rows, batch_tokens, seed=seed, epoch=epoch)]
