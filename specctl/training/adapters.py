"""LoRA adapters of the target, in a training on texts that several adapters wrote.

Engines serve many adapters of one target with one drafter. A distilled directory records the adapter that wrote it.
Unless the recipe names one, the features of each text are computed with the adapter that wrote the text. With features
from engines, the text is sent to the engine's model that has this adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specctl.decoding.models import target_adapter
from specctl.decoding.models.loading import load_config
from specctl.decoding.target_text import TargetText, adapter_digest
from specctl.distillation import store
from specctl.errors import CheckpointError, UsageError
from specctl.families import FAMILIES
from specctl.progress import log
from specctl.recipe import FeatureRecipe, TrainRecipe
from specctl.training.example import Author

ONE_HEAD = (
    "and a drafter for several adapters needs one embedding, final norm and vocabulary head",
    "train a drafter for this adapter alone: --target-adapter",
)
TARGET_ITSELF = Author()


def with_adapters(recipe: TrainRecipe) -> tuple[TrainRecipe, dict[Path, Author]]:
    """Return a recipe with the adapter of its data. If there are several, return the author of each directory as well,
    without the directories of the target itself. So it does for an adapter that only engines have.

    If one adapter has written all data, it becomes the recipe's. A recipe that names an adapter, or has no distilled
    data, is returned unchanged. With several adapters, features are kept in memory or on disk, since for every change
    of adapter the weights are read again; or engines compute them.

    Raises:
        CheckpointError: an adapter is gone, has changed since, or changes more than layers.
        UsageError: the recipe computes features for every batch, or with a target in slices; or engines shall compute
            them, and the name of a model is missing there.
    """
    if recipe.target.adapter is not None or recipe.corpus is not None:
        return recipe, {}
    features = recipe.features
    written = {source: author_of(source, features) for source in recipe.data_dirs if store.exists(source)}
    found = {source: author for source, author in written.items() if author != TARGET_ITSELF}
    if not found:
        return recipe, {}
    alone = len({*map(digest_of, found.values())}) == 1 and len(found) == len(recipe.data_dirs)
    if alone and features.is_served and features.server.model is not None:
        found = {source: author._replace(model=features.server.model) for source, author in found.items()}
    _check_features(recipe, found, alone)
    local = [author.adapter for author in found.values() if author.adapter is not None]
    if alone and local:
        log(f"the drafter is made for the adapter that wrote the data ({_named(found)})")
        target = recipe.target.model_copy(update={"adapter": local[0]})
        server = features.server.model_copy(update={"model": next(iter(found.values())).model})
        features = features.model_copy(update={"server": server})
        return recipe.model_copy(update={"target": target, "features": features}), {}
    for adapter in local if FAMILIES[recipe.arch].trainable else ():  # a datastore reads no weights
        target_adapter.check_outside(adapter, recipe.target.name, ONE_HEAD)
    if len(local) < len(found) and features.whole_target is not False:
        features = _without_layers(recipe, found)
    if features.mode == "auto":  # in memory, or on disk if memory is short
        features = features.model_copy(update={"dir": recipe.features_dir})
    return recipe.model_copy(update={"features": features}), found


def _named(found: Mapping[Path, Author]) -> str:
    return ", ".join(f"{source} with {author}" for source, author in found.items())


def _check_features(recipe: TrainRecipe, found: Mapping[Path, Author], alone: bool) -> None:
    """Raise UsageError if the recipe cannot compute features with the adapters in `found`; one if `alone`."""
    features, sliced = recipe.features, recipe.target.tensor_parallel > 1
    key = "target.tensor_parallel" if sliced else f"features.mode={features.mode}"
    unnamed = [author.adapter for author in found.values() if features.is_served and author.model is None]
    if alone and sliced:
        raise UsageError(
            f"{key} uses no adapter of the target, but the data was written with one ({_named(found)})",
            "save the target with the adapter merged",
        )
    if sliced or (features.mode == "online" and not alone):
        raise UsageError(
            f"{key} cannot switch the target's adapter, but the data was written with different ones ({_named(found)})",
            "use features.mode=cached without tensor parallelism; or train a drafter for each adapter with --each",
        )
    if unnamed:
        raise UsageError(
            f"{key} needs the names of the engine's models that have the adapters of the data ({_named(found)})",
            " ".join(f"features.adapters.{Path(str(one)).name}={one}" for one in dict.fromkeys(unnamed)),
        )


def _without_layers(recipe: TrainRecipe, found: Mapping[Path, Author]) -> FeatureRecipe:
    """The recipe of features for adapters that are not all on this machine: the target's layers are not loaded.
    UsageError if they are needed."""
    features, remedy = recipe.features, "name the adapters when distilling: --target-adapter DIR"
    if features.whole_target or not recipe.trains_without_layers:
        needs = "features.whole_target=true" if features.whole_target else f"arch {recipe.arch}"
        raise UsageError(
            f"{needs} needs the adapters that wrote the data, but only engines have them all ({_named(found)})", remedy
        )
    log(f"only engines have all adapters of the data ({_named(found)}): mat is estimated, not measured; {remedy}")
    return features.model_copy(update={"whole_target": False})


def author_of(source: Path, features: FeatureRecipe) -> Author:
    """The model that wrote a distilled directory, with its name at the engines if these compute features: as
    `features.adapters` says, or else as the data records it. CheckpointError like `recorded`."""
    adapter = recorded(source)
    if not features.is_served:
        return Author(adapter)
    model = store.summary(source).meta.get("model")
    model = None if model is None else str(model)
    for name, given in features.adapters.items():
        if given == (adapter or model) or (
            adapter and Path(given).is_dir() and adapter_digest(given) == adapter_digest(adapter)
        ):
            return Author(adapter, name)
    return Author(adapter, model)


def digest_of(author: Author) -> str:
    """Digest of the adapter's files. For an adapter that only engines have, its name there."""
    return adapter_digest(author.adapter) if author.adapter is not None else f"model {author.model}"


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


def use_all(target: TargetText, recipe: TrainRecipe, adapters: Mapping[Path, Author]) -> None:
    """Name the adapters of a recipe's data in the identity of its target: a drafter is then made for these adapters.

    `adapters` lists each adapter, with null for none, and the digest of its files. Raises CheckpointError if an adapter
    does not fit the target, before its turn comes.
    """
    config = load_config(**recipe.target.described)
    digests: dict[str | None, str | None] = {}
    for author in dict.fromkeys(adapters.get(source, TARGET_ITSELF) for source in recipe.data_dirs):
        if author.adapter is not None:
            target_adapter.check(author.adapter, target.name, config, trust_remote_code=recipe.target.trust_remote_code)
        itself = author == TARGET_ITSELF
        digests[None if itself else digest_of(author)] = author.adapter or author.model
    target.identity["adapters"] = [{"adapter": one, "adapter_weights": digest} for digest, one in digests.items()]
    log("each text is read by the target with the adapter that wrote it")
