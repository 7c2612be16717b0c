"""LoRA adapters of the target, in a training on texts that several adapters wrote.

Engines serve many adapters of one target with one drafter. A distilled directory records the adapter that wrote it.
Unless the recipe names one, the features of each text are computed with the adapter that wrote the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specctl.decoding.models import target_adapter
from specctl.decoding.models.identity import adapter_digest
from specctl.decoding.models.loading import load_config
from specctl.decoding.target_text import TargetText
from specctl.distillation import store
from specctl.errors import CheckpointError, UsageError
from specctl.families import FAMILIES
from specctl.progress import log
from specctl.recipe import TrainRecipe

ONE_HEAD = (
    "and a drafter for several adapters needs one embedding, final norm and vocabulary head",
    "train a drafter for this adapter alone: --target-adapter",
)


def with_adapters(recipe: TrainRecipe) -> tuple[TrainRecipe, dict[Path, str]]:
    """Return a recipe with the adapter of its data. If there are several, return the adapter of each directory as well,
    without the directories of the target itself.

    If one adapter has written all data, it becomes the recipe's. A recipe that names an adapter, or has no distilled
    data, is returned unchanged. With several adapters, features are kept in memory or on disk: for every change of
    adapter the weights are read again.

    Raises:
        CheckpointError: an adapter is gone, has changed since, or changes more than layers.
        UsageError: the recipe computes features on a server, for every batch, or with a target in slices.
    """
    if recipe.target.adapter is not None or recipe.corpus is not None:
        return recipe, {}
    written = {source: recorded(source) for source in recipe.data_dirs if store.exists(source)}
    found = {source: adapter for source, adapter in written.items() if adapter is not None}
    if not found:
        return recipe, {}
    names = ", ".join(f"{source} with {adapter}" for source, adapter in found.items())
    features, sliced = recipe.features, recipe.target.tensor_parallel > 1
    if len({*map(adapter_digest, found.values())}) == 1 and len(found) == len(recipe.data_dirs):
        if sliced or (features.is_served and features.server.model is None):
            key = "target.tensor_parallel" if sliced else f"features.mode={features.mode}"
            hint = "save the target with the adapter merged" if sliced else "name its model: features.server.model=NAME"
            raise UsageError(f"{key} uses no adapter of the target, but the data was written with one ({names})", hint)
        log(f"the drafter is made for the adapter that wrote the data ({names})")
        target = recipe.target.model_copy(update={"adapter": next(iter(found.values()))})
        return recipe.model_copy(update={"target": target}), {}
    if sliced or features.is_served or features.mode == "online":
        key = "target.tensor_parallel" if sliced else f"features.mode={features.mode}"
        raise UsageError(
            f"{key} cannot switch the target's adapter, but the data was written with different ones ({names})",
            "use features.mode=cached without tensor parallelism; or train a drafter for each adapter with --each",
        )
    for adapter in found.values() if FAMILIES[recipe.arch].trainable else ():  # a datastore reads no weights
        target_adapter.check_outside(adapter, recipe.target.name, ONE_HEAD)
    if features.mode == "auto":  # in memory, or on disk if memory is short
        features = features.model_copy(update={"dir": recipe.features_dir})
    return recipe.model_copy(update={"features": features}), found


def recorded(source: Path) -> str | None:
    """The adapter that wrote a distilled directory, or None. CheckpointError if it is gone or has changed since."""
    target = store.summary(source).meta.get("target", {})
    adapter, digest = target.get("adapter"), target.get("adapter_weights")
    if adapter is None:
        return None
    again = f"distil again: specctl distill --output-dir {source} --overwrite --target-adapter DIR"
    written = f"data in {source} was written with adapter {adapter}"
    try:
        same = adapter_digest(str(adapter)) == digest
    except CheckpointError as error:
        raise CheckpointError(f"{written}: {error.message}", f"put it back; or {again}") from error
    if not same:
        raise CheckpointError(f"{written}, which has changed since", f"put the old files back; or {again}")
    return str(adapter)


def use_all(target: TargetText, recipe: TrainRecipe, adapters: Mapping[Path, str]) -> None:
    """Name the adapters of a recipe's data in the identity of its target: a drafter is then made for these adapters.

    `adapters` lists each adapter, with null for none, and the digest of its files. Raises CheckpointError if an adapter
    does not fit the target, before its turn comes.
    """
    config = load_config(**recipe.target.described)
    digests: dict[str | None, str | None] = {}
    for adapter in dict.fromkeys(adapters.get(source) for source in recipe.data_dirs):
        if adapter is not None:
            target_adapter.check(adapter, target.name, config, trust_remote_code=recipe.target.trust_remote_code)
        digests[adapter and adapter_digest(adapter)] = adapter
    target.identity["adapters"] = [{"adapter": one, "adapter_weights": digest} for digest, one in digests.items()]
    log("each text is read by the target with the adapter that wrote it")
