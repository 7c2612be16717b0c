"""From a name or a directory to a drafter that is ready to propose."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor, nn

from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target
from specctl.drafters import checkpoint
from specctl.drafters.blueprint import CONFIG, located, misfit, shown
from specctl.drafters.hybrid.costs import Costs, costs_of
from specctl.drafters.hybrid.drafter import Grower, Hybrid, TextDrafter
from specctl.drafters.hybrid.gate import Past
from specctl.drafters.lora import Adapter, Update
from specctl.drafters.names import HYBRIDS, name_of, parts_of
from specctl.errors import CheckpointError, UsageError
from specctl.families import FAMILIES, NAMED
from specctl.recipe import DraftingRecipe, TrainRecipe


class FamilyModule(Protocol):
    """The Python module of a family whose drafters are kept in directories.

    Drafters of a family with `adaptable` projections have `adapted(adapter)`.

    `module` is what one of them holds, weights or a datastore; `config` is a checkpoint's config.json, `tensors` its
    model.safetensors.
    """

    def restore(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        """The module that was trained or collected, with a method `check(target)` that raises CheckpointError where it
        is not for that target; CheckpointError (which begins with the name of the file) where tensors and architecture
        do not fit."""
        ...

    def drafter(self, module: Any, target: Target, drafting: DraftingRecipe) -> Drafter:
        """Inference of the module, with a copy of its weights in the target's dtype."""
        ...

    def config(self, module: Any, target: dict[str, Any]) -> dict[str, Any]:
        """config.json of a checkpoint of this module; `target` is `Target.identity`."""
        ...


class TrainableFamily(FamilyModule, Protocol):
    """A family whose modules are `nn.Module`s and learn by gradients."""

    def prepare(self, module: Any, recipe: TrainRecipe) -> None:
        """Set the module's training options (a restored one is made to decode)."""
        ...

    def published(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The module's state dict as a checkpoint stores it."""
        ...

    def build(self, recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> nn.Module:
        """A new module to train, started from the target where the family can. `frequent(n)`: a draft vocabulary of the
        n tokens most frequent in the training responses."""
        ...


class CollectedFamily(FamilyModule, Protocol):
    """A family whose drafters are collected from responses."""

    def collect(self, texts: Iterable[tuple[list[int], int]]) -> Any:
        """The contents of a drafter, from (tokens, prompt length) of every text."""
        ...

    def tensors(self, module: Any) -> dict[str, Tensor]:
        """model.safetensors of a checkpoint of it."""
        ...


def family(name: str) -> FamilyModule:
    """The module of a family."""
    return cast(FamilyModule, importlib.import_module(FAMILIES[name].module))


def trainable(name: str) -> TrainableFamily:
    """The module of a family that learns by gradients."""
    return cast(TrainableFamily, family(name))


def collected(name: str) -> CollectedFamily:
    """The module of a family that is collected without gradient steps."""
    return cast(CollectedFamily, family(name))


def load_drafter(
    path_or_name: str, target: Target, drafting: DraftingRecipe, bases: dict[str, Drafter] | None = None
) -> Drafter:
    """A drafter without weights by its name, the one in a directory, checked against its manifest and the target, or
    a hybrid of two: `drafters/sql-eagle3+lookup`.

    Args:
        bases: drafters loaded so far that are no LoRA adapters, by their contents. Give one dictionary to all drafters
            of a pool, and adapters share the weights of their base, also with the base as a member.

    Raises:
        CheckpointError: there is no such drafter, it is damaged, of an unknown family, or made for another target.
        UsageError: two that cannot draft as one.
    """
    if path_or_name in NAMED:
        return cast(Drafter, pkgutil.resolve_name(NAMED[path_or_name])(drafting))
    if len(parts := parts_of(path_or_name)) > 1:
        if drafting.proposal == "sampled":
            raise UsageError(f"{path_or_name}: a hybrid's proposals are not sampled", "set drafting.proposal otherwise")
        head, text = (load_drafter(part, target, drafting, bases) for part in parts)
        return hybrid(path_or_name, head, text, hybrid_costs(path_or_name, head, target))
    found = read_drafter(path_or_name, target)
    bases = {} if bases is None else bases
    base = find_base(found) if "lora" in found.config else found
    key = f"{checkpoint.weights_digest(base.path)} {base.config}"
    if key not in bases:
        bases[key] = _drafter(base, target, drafting)
    if base is found:
        return bases[key]
    return bases[key].adapted(adapter(found, base))  # type: ignore[attr-defined]


def hybrid(name: str, head: Drafter, text: Drafter, costs: Costs, past: Past | None = None) -> Hybrid:
    """A head and a text drafter, loaded, as one; `name`: of both; `past`: of the stream's texts. UsageError where the
    other is no text drafter."""
    if not hasattr(text, "offer"):
        raise UsageError(f"{name}: {name_of(parts_of(name)[1])} is no text drafter", HYBRIDS)
    return Hybrid(cast(Grower, head), cast(TextDrafter, text), costs, past)


def hybrid_costs(name: str, head: Drafter, target: Target) -> Costs:
    """The costs of a hybrid's rounds, which depend on family and shape of its head. UsageError where that is none."""
    directory = parts_of(name)[0]
    if not hasattr(head, "grow"):
        raise UsageError(f"{name}: {name_of(directory)} is no trained drafter", HYBRIDS)
    config = checkpoint.read_json(checkpoint.present(Path(directory)) / CONFIG)
    shape = json.dumps([config["family"], config.get("architecture")], sort_keys=True)
    return costs_of(target, cast(Grower, head), shape)


def read_drafter(directory: str | Path, target: Target) -> checkpoint.Checkpoint:
    """The contents of a drafter directory for `target`. Raises CheckpointError as `load_drafter`."""
    path = Path(directory).expanduser()
    if not os.path.lexists(path) and path.name == str(directory):
        raise CheckpointError(
            f"no drafter {str(directory)!r}", hint=f"give one of {', '.join(NAMED)}, or a drafter directory"
        )
    found = known(path)
    checkpoint.check_target(found.config, target, str(path))
    return found


def known(directory: str | Path) -> checkpoint.Checkpoint:
    """The contents of a drafter directory, for whatever target. CheckpointError for a family that is not known."""
    found = checkpoint.load(directory)
    name = found.config["family"]
    if name not in FAMILIES:
        those = f"known families: {', '.join(FAMILIES)}"
        raise CheckpointError(f"drafter {found.path} is of family {shown(name)}", hint=those)
    return found


def whole(found: checkpoint.Checkpoint) -> checkpoint.Checkpoint:
    """A checkpoint that stands alone: itself, or an adapter merged into its base."""
    if "lora" not in found.config:
        return found
    base = find_base(found)
    return replace(base, tensors=adapter(found, base).merge(base.tensors), info=found.info)


def adapter(found: checkpoint.Checkpoint, base: checkpoint.Checkpoint) -> Adapter:
    """The update that a LoRA adapter makes to `base`. CheckpointError where it makes none."""
    with located(found.path):
        update = Adapter.of(found.config, found.tensors)
        update.check(base.tensors)
    return update


def module(found: checkpoint.Checkpoint, target: Target) -> Any:
    """Contents of a drafter directory, weights or a datastore, once it is known to fit itself and `target`.

    Raises CheckpointError naming directory, file and key.
    """
    made = sound(found)
    with located(found.path):
        made.check(target)
    return made


def sound(found: checkpoint.Checkpoint) -> Any:
    """Contents of a drafter directory, once known to fit itself. CheckpointError names directory, file and key."""
    with located(found.path):
        return family(found.config["family"]).restore(found.config, found.tensors)


def find_base(found: checkpoint.Checkpoint) -> checkpoint.Checkpoint:
    """The drafter whose weights a LoRA adapter updates: where it was, or among the adapter's neighbours.

    Raises CheckpointError where it is nowhere, or its weights are not those the adapter was trained on.
    """
    with located(found.path):
        wanted = Update.of(found.config).base
        if wanted is None:
            raise misfit(CONFIG, "lora.base", "is missing")
        if not FAMILIES[found.config["family"]].adaptable:
            raise misfit(CONFIG, "lora", f"drafters of family {found.config['family']} take no adapters")
    here = found.path.absolute()
    recorded = Path(os.path.normpath(here / wanted.path))
    neighbours = sorted(path for path in here.parent.iterdir() if path != here and checkpoint.is_drafter(path))
    for path in (recorded, *neighbours):
        if checkpoint.is_drafter(path) and checkpoint.weights_digest(path) == wanted.sha256:
            base = checkpoint.load(path)
            if base.config["family"] == found.config["family"]:
                return base
    raise CheckpointError(
        f"{found.path} is an adapter of {wanted.path}, which is not there or has other weights",
        hint="keep the base where it was, or put it beside the adapter",
    )


def _drafter(found: checkpoint.Checkpoint, target: Target, drafting: DraftingRecipe) -> Drafter:
    return family(found.config["family"]).drafter(module(found, target), target, drafting)


def domains_of(path_or_name: str) -> list[str]:
    """The domains that the drafter in a directory was made for, as its drafter.json says; none for one by name. Those
    of a hybrid are those of both.

    Raises CheckpointError where drafter.json cannot be read.
    """
    if path_or_name in NAMED:
        return []
    if len(parts := parts_of(path_or_name)) > 1:
        return list(dict.fromkeys(domain for part in parts for domain in domains_of(part)))
    named = checkpoint.read_info(path_or_name).get("domain") or []
    return [named] if isinstance(named, str) else [str(domain) for domain in named]


def find_pool(directory: str | Path) -> list[Path]:
    """Every drafter directory at or below `directory`, sorted by path.

    Raises:
        UsageError: there is no such directory.
        CheckpointError: there is no drafter in it, or a link leads out of it.
    """
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise UsageError(f"no pool directory {root}", hint="a directory of drafter directories, such as ./drafters")
    found: list[Path] = []
    for here, below, _ in os.walk(root):
        for name in below:
            if not name.isprintable() or not (Path(here) / name).resolve().is_relative_to(root.resolve()):
                raise CheckpointError(
                    f"{Path(here) / name!r} leads out of the pool", hint="copy the drafter into the pool"
                )
        # Neither drafters being written or replaced, nor what training keeps beside them.
        below[:] = [name for name in below if not name.startswith(".") and not name.endswith(checkpoint.TRAINING)]
        if checkpoint.is_drafter(Path(here)):
            found.append(Path(here))
            below.clear()
    if not found:
        raise CheckpointError(f"no drafters in {root}", hint="specctl train-drafter --domain sql makes one")
    return sorted(found)
