"""The router: a classifier that reads the prompt and names the drafter of the answer (MetaSD T5, HedgeSpec §4.5).

It is the baseline that selection from feedback has to beat: it decides once, before the first token, and gets no
feedback on its choice. A router directory:

model.safetensors, config.json, tokenizer*   as `save_pretrained` of transformers writes; no other weights are read
router.json                                  arms, target, report; size and sha256 of the others, written last
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from specctl.decoding.models import supported
from specctl.decoding.models.loading import first_line, load_tokenizer, location, model_directory
from specctl.decoding.models.supported import quiet
from specctl.decoding.target import Target
from specctl.drafters import checkpoint
from specctl.errors import CheckpointError
from specctl.lab.train_router.recipe import HEAD_SIZE, RouterRecipe
from specctl.replaced_directories import MARKS, check_free
from specctl.runs import atomic_write, to_json

(RECORD,) = MARKS["router"]
REQUIRED = (checkpoint.CONFIG, checkpoint.WEIGHTS)
BATCH = 64  # prompts classified at once


@dataclass
class Router:
    """A classifier: `classes` names the model's N outputs, `arms` are the same names in the order of the pool."""

    classes: list[str]
    arms: list[str]
    model: nn.Module
    tokenizer: Any
    max_length: int

    @classmethod
    def new(cls, recipe: RouterRecipe, arms: list[str], target: Target) -> Router:
        """An untrained router, from torch's generator. Raises CheckpointError if `recipe.model` is unusable."""
        if recipe.model is None:
            tokenizer = deepcopy(target.tokenizer)  # truncation is a state of a tokenizer; the target's must have none
            tokenizer.chat_template = None
            return cls(arms, arms, _small(recipe, len(arms), tokenizer), tokenizer, recipe.max_length)
        # If the encoder has a head for another task, it is drawn anew.
        model = _pretrained(recipe.model, len(arms), new_head=True, revision=recipe.revision)
        tokenizer = load_tokenizer(recipe.model, revision=recipe.revision)
        limits = (recipe.max_length, tokenizer.model_max_length, model.config.max_position_embeddings)
        return cls(arms, arms, model, tokenizer, min(limits))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the beginning of each prompt, at most `max_length`. The first token is equal for all prompts: the
        classifier reads its state, and even an empty prompt has it."""
        if not texts:
            return []
        special = self.tokenizer
        ids = (special.cls_token_id, special.bos_token_id, special.eos_token_id, special.pad_token_id, 0)
        first = next(id for id in ids if id is not None)
        rows = special(list(texts), truncation=True, max_length=self.max_length)["input_ids"]
        return [(row if row[:1] == [first] else [first, *row])[: self.max_length] for row in rows]

    def logits(self, rows: Sequence[list[int]]) -> Tensor:
        """[n, N] of encoded prompts, in the order of `classes`."""
        device = next(self.model.parameters()).device
        padding = self.tokenizer.pad_token_id or 0
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        return self.model(input_ids=ids.to(device), attention_mask=mask.long().to(device)).logits

    @torch.inference_mode()
    def probabilities(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """[n, N] probability that each arm is the right one; computed once per query, before its first token."""
        self.model.eval()
        rows = self.encode(texts)
        parts = [self.logits(rows[at : at + BATCH]).double().softmax(-1).cpu() for at in range(0, len(rows), BATCH)]
        shares = torch.cat(parts).numpy() if parts else np.zeros((0, len(self.classes)))
        return shares[:, [self.classes.index(name) for name in self.arms]]

    def arm(self, text: str) -> int:
        """The arm to play for the whole answer to a prompt."""
        return int(self.probabilities([text])[0].argmax())

    def save(self, directory: str | Path, target: Target, *, report: dict[str, Any], overwrite: bool = False) -> Path:
        """Write a router directory, whole or not at all.

        Raises:
            UsageError: the place is taken; only a router is ever replaced, and only with `overwrite`.
            SpecctlError: the file system refused; existing files are untouched.
        """
        place = Path(directory).expanduser().absolute()
        check_free(place, overwrite, "router")
        with checkpoint.staged(place) as draft:
            self.model.save_pretrained(draft)  # type: ignore[operator]
            self.tokenizer.save_pretrained(draft)
            record = {
                "format": checkpoint.FORMAT,
                "arms": self.classes,
                "max_length": self.max_length,
                "target": target.identity,
                "report": report,
                "files": checkpoint.digests(draft),
            }
            atomic_write(draft / RECORD, to_json(record, indent=2) + "\n")
        return place

    @classmethod
    def load(cls, directory: str | Path, arms: Sequence[str], target: Target) -> Router:
        """Load the router in a directory, for a pool with arms of these names, in the pool's order.

        Raises CheckpointError: no such directory, a file missing or changed, not our format, another pool or target.
        """
        path = checkpoint.existing_directory(Path(directory).expanduser(), "router", "train-router")
        record = _record(path)
        known = record["arms"]
        checkpoint.check_target(record, target, str(path), "router")
        if sorted(known) != sorted(arms):
            unknown = [name for name in arms if name not in known]
            gone = [name for name in known if name not in arms]
            lines = [f"it lacks {', '.join(unknown)}"] * bool(unknown)
            lines += [f"the pool lacks {', '.join(gone)}"] * bool(gone)
            raise CheckpointError(
                f"router {path} was trained for a different pool: {'; '.join(lines)}",
                hint="train it again with specctl train-router",
            )
        where = str(path.absolute())
        model, most = _pretrained(where, len(known)), record["max_length"]
        if not 0 < most <= model.config.max_position_embeddings:
            limit = f"not in 1 … {model.config.max_position_embeddings}, as its model requires"
            raise CheckpointError(f"{path / RECORD}: max_length is {most!s:.20}, {limit}", checkpoint.RECOPY_HINT)
        return cls(known, list(arms), model.to(target.device), load_tokenizer(where), most)


def _record(path: Path) -> dict[str, Any]:
    """Contents of router.json, after verifying the listed files. Raises CheckpointError."""
    record = checkpoint.read_json(path / RECORD)
    fields = {"arms": list, "max_length": int, "target": dict, "files": dict}
    wrong = [name for name, kind in fields.items() if type(record.get(name)) is not kind]
    if record.get("format") != checkpoint.FORMAT or wrong or not all(isinstance(name, str) for name in record["arms"]):
        raise CheckpointError(
            f"{path / RECORD} does not have format {checkpoint.FORMAT}", hint="use the specctl version that wrote it"
        )
    checkpoint.check_files(path, record["files"], REQUIRED, RECORD)
    return record


def _small(recipe: RouterRecipe, classes: int, tokenizer: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    shape: dict[str, Any] = {
        "vocab_size": max(tokenizer.get_vocab().values()) + 1,  # the ids may have gaps
        "hidden_size": recipe.hidden_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.hidden_size // HEAD_SIZE,
        "intermediate_size": 2 * recipe.hidden_size,
        "max_position_embeddings": recipe.max_length,
        "initializer_range": recipe.hidden_size**-0.5,  # 0.02, as in wide encoders, learns nothing for the first epochs
        "pad_token_id": tokenizer.pad_token_id,
        "num_labels": classes,
    }
    return BertForSequenceClassification(BertConfig(**shape))


def _pretrained(name: str, classes: int, *, new_head: bool = False, revision: str | None = None) -> Any:
    """A sequence classifier of `transformers`, from safetensors only. With `new_head`, its files only need to hold the
    encoder. Raises CheckpointError if there is no such classifier, or if weights are missing."""
    from transformers import AutoModelForSequenceClassification

    what = f"classifier {name}"
    safely: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, "dtype": torch.float32}
    try:
        supported.check_adapter(what, model_directory(name, revision))
        with quiet():  # it would warn that the head is new, but training follows
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                location(name), num_labels=classes, revision=revision, **safely, **supported.REPORT
            )
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # files can make transformers raise anything
        raise CheckpointError(
            f"cannot load the classifier {name}: {first_line(error)}",
            hint="give a BERT-style encoder with safetensors weights, or leave out router.model to train one "
            "from scratch",
        ) from error
    model, info = loaded
    if new_head:  # the pooler is part of the head
        encoder = re.compile(rf"{re.escape(model.base_model_prefix)}\.(?!pooler\.)")
        info["missing_keys"] = {name for name in info["missing_keys"] if encoder.match(name)}
        info["mismatched_keys"] = {entry for entry in info["mismatched_keys"] if encoder.match(entry[0])}
    supported.check_loaded(what, model, info)
    return model
