"""Load drafters: turn a name or a drafter directory into a `Drafter` that is ready to propose tokens."""

import json
import os
import pkgutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from specctl import progress, regular_files
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target
from specctl.drafters import checkpoint
from specctl.drafters.blueprint import CONFIG, config_error, prefix_errors, shortened_repr
from specctl.drafters.family import load_family
from specctl.drafters.hybrid.costs import Costs, costs_of
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.hybrid.gate import GateStatistics, quality_of
from specctl.drafters.hybrid.rescored import IndependentHeads, Rescored
from specctl.drafters.hybrid.weighed import WeighedText
from specctl.drafters.lora import AdaptableDrafter, Adapter, LoraConfig
from specctl.drafters.names import HYBRIDS, RESCORED, SAMPLED, name_of, parts_of
from specctl.drafters.text.suffix import Suffix
from specctl.drafters.tree import CandidateDrafter, TextDrafter
from specctl.errors import CheckpointError, UsageError, near_path
from specctl.families import FAMILIES, LM, WEIGHTLESS_DRAFTERS, online_families
from specctl.recipe import DraftingRecipe

NO_HEAD = "no head"  # name of the costs of rounds without a head


def load_drafter(
    path_or_name: str, target: Target, drafting: DraftingRecipe, bases: dict[str, Drafter] | None = None
) -> Drafter:
    """Load a drafter for `target`.

    `path_or_name` is the name of a drafter without weights, a drafter directory, or a hybrid of two drafters such as
    `drafters/sql-eagle3+lookup`. A directory is checked against its manifest and the target.

    Args:
        bases: cache of the loaded drafters that are not LoRA adapters, keyed by their contents. Pass the same
            dictionary for all drafters of a pool: adapters then share the weights of their base, even if the base is in
            the pool too.

    Raises:
        CheckpointError: the drafter does not exist, is damaged, is of an unknown family, or was made for another
            target.
        UsageError: the two drafters cannot form a hybrid.
    """
    if len(parts := parts_of(path_or_name)) == 1:
        return weighed(load_single(path_or_name, target, drafting, bases), target, drafting)
    if drafting.proposal == "sampled":
        raise UsageError(f"{path_or_name}: {SAMPLED[0]}", SAMPLED[1])
    head, text = (load_single(part, target, drafting, bases) for part in parts)
    if drafting.rescore:
        return rescored(path_or_name, head, text)
    return hybrid(path_or_name, head, text, hybrid_costs(path_or_name, head, target))


def load_single(
    path_or_name: str, target: Target, drafting: DraftingRecipe, bases: dict[str, Drafter] | None = None
) -> Drafter:
    """Load a drafter that is no hybrid, as a part of one: a text drafter does not weigh its nodes. For the arguments
    and errors see `load_drafter`."""
    if path_or_name in WEIGHTLESS_DRAFTERS:
        return cast(Drafter, pkgutil.resolve_name(WEIGHTLESS_DRAFTERS[path_or_name])(drafting))
    found = read_drafter(path_or_name, target)
    bases = {} if bases is None else bases
    if drafting.proposal == "sampled" and found.config["family"] != LM:
        progress.warn(f"{path_or_name} proposes its likeliest tokens: drafting.proposal=sampled is for family lm")
    base = find_base(found) if "lora" in found.config else found
    key = f"{checkpoint.weights_digest(base.path)} {base.config}"
    if key not in bases:
        module = load_module(base, target)
        bases[key] = load_family(base.config["family"]).make_drafter(module, target, drafting)
    drafter = bases[key]
    if base is found:
        return drafter
    assert isinstance(drafter, AdaptableDrafter)
    return drafter.adapted(load_adapter(found, base))


def weighed(drafter: Drafter, target: Target, drafting: DraftingRecipe) -> Drafter:
    """Let a text drafter draft as many nodes as pay off. This is for a CPU, and for recipes that do not set the size of
    its drafts. Any other drafter comes back unchanged."""
    sized = (drafting.depth, drafting.nodes, drafting.children) != (None, None, None)
    if sized or target.device.type != "cpu" or not isinstance(drafter, TextDrafter):
        return drafter
    return WeighedText(drafter, costs_of(target, None, NO_HEAD))


def hybrid(name: str, head: Drafter, text: Drafter, costs: Costs, past: GateStatistics | None = None) -> Hybrid:
    """Combine a loaded head and a loaded text drafter into one hybrid drafter.

    Args:
        name: name of the hybrid, `head+text`.
        past: the record that the hybrid's gate keeps of earlier texts of the stream.

    Raises UsageError if the first drafter is not a trained head, or the second is not a text drafter.
    """
    if not isinstance(text, TextDrafter):
        raise UsageError(f"{name}: {name_of(parts_of(name)[1])} is not a text drafter", HYBRIDS)
    trained = _trained(name, head)
    return Hybrid(trained, text, costs, past, quality_of(checkpoint.read_info(parts_of(name)[0]).get("mat")))


def rescored(name: str, head: Drafter, text: Drafter) -> Rescored:
    """Combine a loaded head and a datastore into a head with rescored candidates. UsageError if they are of other
    families."""
    if not isinstance(head, IndependentHeads) or not isinstance(text, Suffix) or text.corpus is None:
        raise UsageError(f"{name}: {RESCORED[0]}", RESCORED[1])
    return Rescored(head, text.corpus)


def learnable_parts(paths: Iterable[str]) -> dict[Path, list[str]]:
    """Return the directories of the weights that can learn, and the drafters that draft with them: each drafter, or the
    head of a hybrid. Drafters without such weights are left out. UsageError if there are no such weights at all."""
    found: dict[Path, list[str]] = {}
    given = list(paths)
    for path in given:
        head = Path(parts_of(path)[0]).expanduser()
        if checkpoint.is_drafter(head) and checkpoint.family(head) in online_families():
            same = next((one for one in found if os.path.realpath(one) == os.path.realpath(head)), head)
            found.setdefault(same, []).append(path)
    if not found:
        have = f"{', '.join(given)} {'has' if len(given) == 1 else 'have'}"
        raise UsageError(f"{have} no weights that learn", "name the directory of a head: --drafter DIR")
    return found


def hybrid_costs(name: str, head: Drafter, target: Target) -> Costs:
    """Costs of a hybrid's rounds. The head's part depends on its family and shape, and on the width of its trees. The
    target's part is the same as for a text drafter alone: measured twice, it would differ by the noise of the machine.

    Raises UsageError if the first drafter is not a trained head.
    """
    trained = _trained(name, head)
    config = checkpoint.read_json(checkpoint.existing_directory(Path(parts_of(name)[0])) / CONFIG)
    width = getattr(getattr(head, "shape", None), "width", 1)
    measured = ["reading", *([f"{width} nodes per level"] if width > 1 else [])]  # not in costs of earlier versions
    key = [config["family"], config.get("architecture"), *measured]
    return costs_of(target, None, NO_HEAD).with_head(costs_of(target, trained, json.dumps(key, sort_keys=True)))


def _trained(name: str, head: Drafter) -> CandidateDrafter:
    if not isinstance(head, CandidateDrafter):
        raise UsageError(f"{name}: {name_of(parts_of(name)[0])} is not a trained drafter", HYBRIDS)
    return head


def read_drafter(directory: str | Path, target: Target) -> checkpoint.Checkpoint:
    """Read a drafter directory and check it against `target`. Raises CheckpointError as `load_drafter` does."""
    path = Path(directory)
    if not os.path.lexists(path) and path.name == str(directory):
        raise CheckpointError(
            f"no drafter {str(directory)!r}",
            hint=f"give one of {', '.join(WEIGHTLESS_DRAFTERS)}, or a drafter directory",
        )
    found = read_checkpoint(path)
    checkpoint.check_target(found.config, target, str(path))
    return found


def read_checkpoint(directory: str | Path) -> checkpoint.Checkpoint:
    """Read a drafter directory without checking the target. Raises CheckpointError if the family is unknown."""
    found = checkpoint.load(directory)
    name = found.config["family"]
    if name not in FAMILIES:
        hint = f"known families: {', '.join(FAMILIES)}"
        raise CheckpointError(f"drafter {found.path} has the unknown family {shortened_repr(name)}", hint)
    return found


def merge_adapter(found: checkpoint.Checkpoint) -> checkpoint.Checkpoint:
    """Return a checkpoint that stands alone: an adapter is merged into its base, any other checkpoint is unchanged."""
    if "lora" not in found.config:
        return found
    base = find_base(found)
    return replace(base, tensors=load_adapter(found, base).merge(base.tensors), info=found.info)


def load_adapter(found: checkpoint.Checkpoint, base: checkpoint.Checkpoint) -> Adapter:
    """Return the low-rank update of a LoRA adapter. Raises CheckpointError if it does not fit `base`."""
    with prefix_errors(found.path):
        update = Adapter.of(found.config, found.tensors)
        update.check(base.tensors)
    return update


def load_module(found: checkpoint.Checkpoint, target: Target) -> Any:
    """Build the contents of a drafter (weights or a datastore) and check them against `target`.

    Raises CheckpointError, which names the directory, file and key.
    """
    made = restore_module(found)
    with prefix_errors(found.path):
        made.check(target)
    return made


def restore_module(found: checkpoint.Checkpoint) -> Any:
    """Build the contents of a drafter, checked for consistency but not against a target.

    Raises CheckpointError, which names the directory, file and key.
    """
    with prefix_errors(found.path):
        return load_family(found.config["family"]).restore(found.config, found.tensors)


def find_base(found: checkpoint.Checkpoint) -> checkpoint.Checkpoint:
    """Find the base drafter of a LoRA adapter: at its recorded path, or among the adapter's sibling directories.

    Raises CheckpointError if no such drafter exists, or if its weights differ from the weights the adapter was trained
    on.
    """
    with prefix_errors(found.path):
        wanted = LoraConfig.of(found.config).base
        if wanted is None:
            raise config_error(CONFIG, "lora.base", "is missing")
        if not FAMILIES[found.config["family"]].lora_modules:
            raise config_error(CONFIG, "lora", f"drafters of family {found.config['family']} do not support adapters")
    here = found.path.absolute()
    recorded = Path(os.path.normpath(here / wanted.path))
    neighbors = sorted(path for path in here.parent.iterdir() if path != here and checkpoint.is_drafter(path))
    for path in (recorded, *neighbors):
        if _has_weights(path, wanted.sha256):
            base = checkpoint.load(path)
            if base.config["family"] == found.config["family"]:
                return base
    raise CheckpointError(
        f"{found.path} is an adapter of {wanted.path}, which is missing or has different weights",
        hint="put the base back, or put it next to the adapter",
    )


def _has_weights(path: Path, digest: str) -> bool:
    """Whether a directory is a drafter with these weights. A damaged neighbor of an adapter is not."""
    try:
        return checkpoint.is_drafter(path) and checkpoint.weights_digest(path) == digest
    except CheckpointError:
        return False


def domains_of(path_or_name: str) -> list[str]:
    """Domains that a drafter was made for, as recorded in its drafter.json.

    The list is empty for a drafter without weights. For a hybrid it joins the domains of both drafters. Raises
    CheckpointError if drafter.json cannot be read.
    """
    if path_or_name in WEIGHTLESS_DRAFTERS:
        return []
    if len(parts := parts_of(path_or_name)) > 1:
        return list(dict.fromkeys(domain for part in parts for domain in domains_of(part)))
    named = checkpoint.read_info(path_or_name).get("domain") or []
    return [named] if isinstance(named, str) else [str(domain) for domain in named]


def find_pool(directory: str | Path) -> list[Path]:
    """Return every drafter directory at or below `directory`, sorted by path.

    A link to a drafter directory is a member. Links to other directories are not followed.

    Raises:
        UsageError: `directory` does not exist.
        CheckpointError: it contains no drafter, or a directory with a control character in its name.
    """
    root = Path(directory).expanduser()
    if not root.is_dir():
        hint = f"{near_path(root)}give a directory of drafter directories, such as ./drafters"
        raise UsageError(regular_files.no_directory("pool directory", root), hint)
    found: list[Path] = []
    for here, below, _ in os.walk(root):
        for name in below:
            if not name.isprintable():
                raise CheckpointError(f"{root} has a directory {name!r}", hint="rename it: use printable characters")
        # Skip drafters that are being written or replaced (hidden directories) and the checkpoints of training runs.
        below[:] = [name for name in below if not name.startswith(".") and not name.endswith(checkpoint.TRAINING)]
        if checkpoint.is_drafter(Path(here)):
            found.append(Path(here))
            below.clear()
        found += [link for name in below if (link := Path(here) / name).is_symlink() and checkpoint.is_drafter(link)]
    if not found:
        raise CheckpointError(f"no drafters in {root}", hint="train one: specctl train-drafter --domain sql")
    return sorted(found)
