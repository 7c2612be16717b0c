"""Records that connect our drafters with other repositories' files, and the target's facts that both must fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.decoding.models import gguf_target
from specctl.decoding.models.loading import builtin_path, is_gguf, load_config, load_errors
from specctl.decoding.models.weight_files import EMBEDDINGS, WeightFiles
from specctl.decoding.target import Target
from specctl.errors import CheckpointError


@dataclass(frozen=True)
class Head:
    """A drafter as our own directory stores it: `architecture` and `tensors` follow its family.

    `notes`: assumptions and changes that a reader made, for the user.
    """

    family: str
    architecture: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: tuple[str, ...] = ()

    def draft_length(self, wanted: int) -> int:
        """Number of tokens drafted per round if `wanted` are requested.

        A family drafts at most one token per head or depth. A block has a fixed length.
        """
        shape = self.architecture
        if "block_size" in shape:
            return int(shape["block_size"]) - (not shape["sample_from_anchor"])
        return min(wanted, int(shape.get("draft_heads", shape.get("depths", wanted))))


@dataclass(frozen=True)
class Files:
    """A directory to be written: config.json, one file of weights, an optional tokenizer, and further files by name.

    If `weights` is a GGUF file, `config` is its metadata and there is no config.json. With `base`, the directory is a
    copy of that model's directory. Then `tensors` replace its tensors of the same names, and `config` replaces some
    keys. `held` is the head with the values in the files, if they differ.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = "model.safetensors"
    tokenizer: bool = False
    pickles: dict[str, dict[str, Any]] = field(default_factory=dict)
    base: Path | None = None
    held: Head | None = None


@dataclass(frozen=True)
class Serving:
    """Commands that use a written directory, for a shell or for Python, and notes to read before."""

    commands: list[str]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LengthRange:
    """Draft lengths of an engine while it decodes `first` to `last` texts at once.

    Attributes:
        tokens: draft length; 0 = no drafts.
        near: lengths that are about as fast, including `tokens`.
    """

    first: int
    last: int
    tokens: int
    near: tuple[int, ...]


@dataclass(frozen=True)
class Deployment:
    """Use of an exported head by an engine.

    Attributes:
        place: directory of the head's files.
        tokens: tokens drafted per round.
        schedule: draft lengths by load, for engines that can change the length while they run.
    """

    place: Path
    facts: TargetFacts
    tokens: int
    schedule: Sequence[LengthRange] = ()


@dataclass(frozen=True)
class TargetFacts:
    """Facts of a target that a head has to fit.

    Attributes:
        name, revision: hub id or directory under which the engine finds the target.
        num_tokens: number of ids that the tokenizer uses; further rows of the vocabulary are padding.
        embedding: [V, H] of a loaded target, to compare a shipped copy with.
        text_config: the target's configuration. Heads that store no shapes take them from here.
    """

    name: str
    revision: str | None
    architectures: Sequence[str]
    hidden_size: int
    num_layers: int
    vocab_size: int
    context_length: int
    text_config: Any
    num_tokens: int | None = None
    embedding: Tensor | None = field(default=None, repr=False)
    head_weight: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of_target(cls, target: Target) -> TargetFacts:
        """All facts, from a loaded target."""
        return cls(
            name=served_name(target.name),
            revision=target.identity["revision"],
            architectures=target.config.architectures or [],
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            vocab_size=target.vocab_size,
            context_length=target.context_length,
            text_config=target.config,
            num_tokens=max(target.tokenizer.get_vocab().values()) + 1,
            embedding=target.model.embedding,
            head_weight=target.head_weight,
        )

    @classmethod
    def of_identity(cls, identity: dict[str, Any], name: str | None = None, **options: Any) -> TargetFacts:
        """Facts of the target that a drafter was made for, found under `name` today.

        Reads its configuration, no weights. Raises CheckpointError if there is no such target, it is another model, or
        `identity` is incomplete.
        """
        for key, kind in (("name", str), ("hidden_size", int), ("num_layers", int), ("vocab_size", int)):
            if not isinstance(declared := identity.get(key), kind):
                raise CheckpointError(
                    f"config.json of the drafter: target.{key} is {declared!r:.60}", "copy the file again"
                )
        name = name or str(identity["name"])
        options = {"revision": identity.get("revision"), **options}
        config = load_config(name, **options)
        text = config.get_text_config()
        for key, found in (("hidden_size", text.hidden_size), ("num_layers", text.num_hidden_layers)):
            if identity[key] != found:
                raise CheckpointError(
                    f"the drafter was made for a target with {key} {identity[key]}, but {name} has {found}",
                    hint="name the target that it was made for with --target",
                )
        return cls.of_config(served_name(name), config, identity["vocab_size"], revision=options["revision"])

    @classmethod
    def of_config(cls, name: str, config: Any, vocab_size: int, **more: Any) -> TargetFacts:
        """Facts of the target `name` with this configuration. `more`: facts that a configuration lacks."""
        text = config.get_text_config()
        return cls(
            name=name,
            architectures=config.architectures or [],
            hidden_size=text.hidden_size,
            num_layers=text.num_hidden_layers,
            vocab_size=vocab_size,
            context_length=int(getattr(text, "max_position_embeddings", 0) or 0),
            text_config=text,
            **more,
        )

    def token_embedding(self) -> Tensor:
        """[V, H] embedding of the target, read from its files if it is not loaded.

        Raises CheckpointError if they lack it.
        """
        if self.embedding is not None:
            return self.embedding
        if is_gguf(self.name):
            return gguf_target.weights(self.name, torch.float32)["model.embed_tokens.weight"][:]
        with load_errors(self.name):
            files = WeightFiles(self.name, self.revision)
            name = files.find(EMBEDDINGS, (self.vocab_size, self.hidden_size))
            if name is not None:
                return files.tensor(name)
        raise CheckpointError(
            f"target {self.name} has no {EMBEDDINGS[0]} in its safetensors files, and the head's files need a copy",
            hint="name a copy of the target that has it with --target",
        )

    @property
    def config(self) -> Any:
        """`text_config` under the attribute name of a `Target`: families take shapes from either class."""
        return self.text_config

    @property
    def default_taps(self) -> tuple[int, ...]:
        """The layers that vLLM, SGLang and the reference code tap by default (indices into hidden_states)."""
        return (2, self.num_layers // 2, self.num_layers - 3)


def served_name(target: str) -> str:
    """Name by which another program finds a target: absolute paths, and the built-in target's directory."""
    if target == "builtin":
        return str(builtin_path())
    path = Path(target).expanduser()
    return str(path.absolute()) if path.is_dir() or is_gguf(target) else target
