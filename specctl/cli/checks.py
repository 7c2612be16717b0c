"""Checks before a command loads anything, and the output of `--dry-run`."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import lock, progress, regular_files, replaced_directories
from specctl.cli.output import cell, output
from specctl.errors import CheckpointError, SpecctlError, UsageError, near_path, redacted
from specctl.families import TEXT_DRAFTERS, WEIGHTLESS_DRAFTERS
from specctl.threads import counted

if TYPE_CHECKING:
    import torch

    from specctl.recipe import CommandRecipe, DataRecipe, DraftingRecipe, TargetRecipe

LABEL = r"\w[\w.-]*"  # domains name directories
PRODUCTS = {"train-drafter": "drafter", "import": "drafter", "export": "converted drafter"}
"""Command → kind of the output directory. `--overwrite` replaces such a directory as a whole."""


def check_data(data: DataRecipe) -> None:
    """Check that the domains and their prompts files exist. Raises UsageError, DataError."""
    from specctl import data_prep
    from specctl.distillation.prompts import check_files

    for name in data.domain:
        if data.prompts is not None:
            check_label(name)
        elif data.source != "unconditional":
            data_prep.get(name)
    check_files(data)


def check_label(domain: str) -> None:
    """Check the name of a domain with the user's data. Raises UsageError."""
    if not re.fullmatch(LABEL, domain):
        raise UsageError(f"domain {domain!r} is not a valid name: use letters, digits, . - _")


def check_target(target: TargetRecipe, drafters: Iterable[str] = (), *, strict: bool = True) -> str:
    """Return one line about how specctl itself would run the target, from its configuration.

    Args:
        drafters: names of drafters, as in `check_drafters`, that must have been made for the target.
        strict: whether a drafter of another target is an error. A pool leaves it out instead, with a warning.

    Raises CheckpointError if it cannot be used, UsageError if it cannot be sliced as the recipe says.
    """
    from specctl.decoding.models.describe import path_of
    from specctl.decoding.models.lean import check_slices
    from specctl.decoding.models.supported import check_decodable

    config = target_config(target)
    if config is None:
        return f"target {target.name} is read from the Hugging Face hub; not checked"
    check_decodable(target.name, config)
    check_made_for(target, drafters, strict=strict)
    path, why = path_of(config)
    if target.tensor_parallel > 1:
        check_slices(target.name, config, target.tensor_parallel)
        why = f"{why}, in {target.tensor_parallel} slices"
    return f"target {target.name} runs with {step_name(path)}: {why}"


def copy_step(target: TargetRecipe) -> list[str]:
    """Return the step of a plan in which `transformers` loads the target, with the memory that it takes; [] for a
    target that is not on this machine. Raises the errors of `check_target`."""
    import torch

    from specctl.decoding.models.ends import model_on_meta
    from specctl.decoding.models.lean import pick_target_dtype
    from specctl.decoding.models.loading import pick_device

    config = target_config(target)
    if config is None:
        return []
    parameters = model_on_meta(config, trust_remote_code=target.trust_remote_code).num_parameters()
    # A plan for a GPU may be made on a machine without one.
    device = pick_device("auto") if target.device == "auto" else torch.device(target.device)
    size = size_in_transformers(parameters, pick_target_dtype(target.dtype, device, config), device)
    return [f"load the target a second time, with transformers: {size}, more while it loads"]


def size_in_transformers(parameters: int, dtype: torch.dtype, device: torch.device) -> str:
    """Return the memory of a target that runs in `dtype` as a baseline through `transformers`: `2.52 GB in fp32`."""
    import torch

    from specctl.decoding.models.loading import DTYPES, with_fast_products

    fast = with_fast_products(torch.empty(0, dtype=dtype)).dtype if device.type == "cpu" else dtype
    short = next(short for short, kind in DTYPES.items() if kind == fast)
    return f"{parameters * fast.itemsize / 1e9:,.2f} GB in {short}"


def target_config(target: TargetRecipe) -> Any:
    """Return the configuration of a target that at least an engine can run, or None if it is not on this machine.

    Raises CheckpointError if the target cannot be used.
    """
    from specctl.decoding.models import target_adapter
    from specctl.decoding.models.loading import load_config

    where = local_target(target)
    if where is None:
        if target.adapter is not None:
            target_adapter.files(target.adapter)
        return None
    config = load_config(where, revision=target.revision, trust_remote_code=target.trust_remote_code)
    if target.adapter is not None:
        target_adapter.check(target.adapter, target.name, config, trust_remote_code=target.trust_remote_code)
    return config


def engine_only(target: TargetRecipe) -> str | None:
    """Return the reason why only an engine can run the target, or None if specctl can, or if it is not on this machine.

    Raises CheckpointError if the target cannot be used.
    """
    from specctl.decoding.models.supported import engine_only_reason

    config = target_config(target)
    return None if config is None else engine_only_reason(config)


def local_target(target: TargetRecipe) -> str | None:
    """Return the directory with the target's configuration, or `builtin`.

    For a Hugging Face id this is the directory in the local cache, or None if the target is not cached. The hub is not
    asked, so that --dry-run works offline and at once.
    """
    from specctl.decoding.models.loading import is_hub_id

    if not is_hub_id(target.name):
        return target.name
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(target.name, "config.json", revision=target.revision)
    except HFValidationError as error:
        raise CheckpointError(f"target {target.name} is neither a directory nor a Hugging Face id: {error}") from error
    return str(Path(config).parent) if isinstance(config, str) else None


def up_to(limit: int | None, thing: str) -> str:
    """Return a limit in words: `up to 8 prompts`, or `all prompts` without one."""
    return f"up to {counted(limit, thing)}" if limit else f"all {thing}s"


def every(count: int, thing: str) -> str:
    """Return a period in words: `every prompt`, or `every 8 prompts`."""
    return f"every {thing}" if count == 1 else f"every {counted(count, thing)}"


def step_name(path: str) -> str:
    """Return the name, in words, of the code path that runs a target's steps."""
    names = {"lean": "the lean step", "transformers": "the forward of transformers", "engine": "an engine alone"}
    return names[path]


def check_drafters(names: list[str], drafting: DraftingRecipe) -> None:
    """Check that each name is a drafter directory, a drafter without weights, or a hybrid of both.

    `drafting`: options that a hybrid must support, and that need a hybrid. Raises UsageError, CheckpointError.
    """
    from specctl.drafters.names import HYBRIDS, RESCORED, parts_of

    for name in names:
        parts = parts_of(name)
        if len(parts) > 1 and parts[0] in WEIGHTLESS_DRAFTERS:
            raise UsageError(f"{name}: {parts[0]} is not a trained drafter", HYBRIDS)
        for part in parts:
            if part not in WEIGHTLESS_DRAFTERS:
                check_directory(part, [*WEIGHTLESS_DRAFTERS])
        if len(parts) > 1:
            _check_hybrid(name, parts, drafting)
    if drafting.rescore and all(len(parts_of(name)) == 1 for name in names):
        raise UsageError(*RESCORED)


def _check_hybrid(name: str, parts: list[str], drafting: DraftingRecipe) -> None:
    """Refuse a hybrid of two existing drafters that `pool.load_drafter` refuses."""
    from specctl.drafters import checkpoint
    from specctl.drafters.names import HYBRIDS, RESCORED, SAMPLED

    head, text = (part if part in WEIGHTLESS_DRAFTERS else checkpoint.family(Path(part)) for part in parts)
    if drafting.proposal == "sampled":
        raise UsageError(f"{name}: {SAMPLED[0]}", SAMPLED[1])
    if drafting.rescore:
        if (head, text) != ("medusa", "retrieval"):
            raise UsageError(f"{name}: {RESCORED[0]}", RESCORED[1])
    elif text not in (*TEXT_DRAFTERS, "retrieval"):
        raise UsageError(f"{name}: {Path(parts[1]).name} is not a text drafter", HYBRIDS)
    elif head == "retrieval":
        raise UsageError(f"{name}: {Path(parts[0]).name} is not a trained drafter", HYBRIDS)


def check_made_for(target: TargetRecipe, names: Iterable[str], *, strict: bool = True) -> None:
    """Check that drafters were made for a target on this machine, by its configuration and tokenizer.

    A directory without a drafter is passed over: a run may train one there first. The arguments are as in
    `check_target`. Raises CheckpointError.
    """
    from specctl.decoding.target_text import load_target_text
    from specctl.drafters import checkpoint
    from specctl.drafters.names import parts_of

    where, text = local_target(target), None
    for part in dict.fromkeys(part for name in names for part in parts_of(name) if part not in WEIGHTLESS_DRAFTERS):
        place = Path(part).expanduser()
        if where is None or not (place / checkpoint.CONFIG).is_file():
            continue
        config = checkpoint.read_json(place / checkpoint.CONFIG)
        if not isinstance(config.get("target"), dict):
            continue  # the run names the damaged file
        text = text or load_target_text(**(target.text | {"name": where}))
        text.identity["name"] = target.name
        try:
            checkpoint.check_target(config, text, str(place))
        except CheckpointError as error:
            if strict:
                raise
            progress.warn(f"{part} is left out of the pool: {error.message}")


def check_directory(name: str, others: Sequence[str] = ()) -> None:
    """Check that `name` is the directory of a drafter. Raises UsageError, CheckpointError.

    `others`: other valid names, for the hint.
    """
    if not os.path.isdir(name):  # unlike `Path.is_dir`, False and not an error for a name that is too long
        otherwise = f", or {', '.join(others)}" if others else ""
        hint = f"{near_path(name, others)}name a directory written by specctl train-drafter{otherwise}"
        raise UsageError(regular_files.no_directory("drafter", name), hint)
    if not (Path(name) / "config.json").is_file():
        raise CheckpointError(f"{name} is not a drafter: it has no config.json", hint="see specctl train-drafter")


def target_flags(target: TargetRecipe) -> list[str]:
    """Return the options that name a target and its adapter in another command; none for the built-in target."""
    adapter = ["--target-adapter", target.adapter] if target.adapter else []
    return ([] if target.name == "builtin" else ["--target", target.name]) + adapter


def check_learner_device(device: str) -> None:
    """Raise RecipeError if `device` is a GPU that this machine lacks."""
    import torch

    from specctl.errors import RecipeError
    from specctl.threads import counted

    count = torch.cuda.device_count()
    if device.startswith("cuda") and (torch.device(device).index or 0) >= count:
        raise RecipeError(f"learner_device: {device} does not exist, this machine has {counted(count, 'GPU')}")


def pool_members(pool: Path) -> list[str]:
    """Return the drafter directories at or below `pool`. Raises UsageError, CheckpointError if there are none."""
    from specctl.drafters.pool import find_pool

    return [str(path) for path in find_pool(pool)]


def check_run_dir(command: str, recipe: Any) -> None:
    """Check the run directory that a recipe names, if any, as `check_output` does."""
    if recipe.output_dir:
        resume = getattr(recipe, "resume", None)
        check_output(command, recipe.output_dir, resume=resume, overwrite=recipe.overwrite)


def check_output(command: str, path: Path, *, resume: bool | None = None, overwrite: bool = False) -> None:
    """Check that `command` can write to the directory `path`, which must be free, resumed or overwritten, and must not
    be inside a drafter. `resume` is None for a command that cannot resume.

    Under torchrun only rank 0 checks, because the others may find files that rank 0 has just made. Raises UsageError,
    SpecctlError.
    """
    from specctl.runs import check_same_command

    if not progress.is_rank_zero():
        return
    if os.path.lexists(path) and not os.path.isdir(path):
        kind = "a file, not a directory" if os.path.exists(path) else "a link that leads nowhere"
        raise UsageError(f"{path} is {kind}", hint="choose another --output-dir")
    check_same_command(path, command)
    product = PRODUCTS.get(command)
    if product is not None:
        replaced_directories.check_free(path, overwrite=True, what=product)
    replaced_directories.check_outside(path, "" if product else "meta.json" if command == "distill" else "run.json")
    if not (resume or overwrite) and path.is_dir() and any(there.name != lock.NAME for there in path.iterdir()):
        continues = "" if resume is None else ", --resume continues it"
        raise UsageError(f"{path} exists", hint=f"--overwrite replaces it{continues}; or choose another --output-dir")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Check that a file can be made in the directory `path`, or in the nearest existing one above it. Raises
    UsageError, SpecctlError."""
    parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not parent.is_dir():
        raise UsageError(f"{parent} is a file, not a directory", hint="choose another --output-dir")
    try:
        tempfile.TemporaryFile(dir=parent).close()  # without a name, if the file system can do that
    except OSError as error:  # permissions do not tell: root may write to /proc, which takes no files
        reason = "no files can be made there" if isinstance(error, FileNotFoundError) else error.strerror
        raise SpecctlError(f"cannot write to {parent}: {reason}", hint="choose another --output-dir") from error


def show(command: str, recipe: CommandRecipe, steps: list[str], **more: Any) -> None:
    """Print the answer to --dry-run: the steps, the resolved recipe, and the fields `more` for --json."""
    resolved = recipe.model_dump(mode="json")
    document = {"command": command, "dry_run": True, "steps": redacted(steps), **more, "recipe": resolved}
    output.result(document, partial(_plan, recipe=recipe), brief=command)


def _plan(document: dict[str, Any], recipe: CommandRecipe) -> str:
    """Render the steps, then the keys that differ from their defaults, or all keys with -v."""
    import yaml
    from pydantic import ValidationError

    keys, title, end = document["recipe"], "all keys:", ""
    if not output.verbose:
        defaults = type(recipe).model_construct()
        with suppress(ValidationError):  # some commands need a key
            defaults = type(recipe)()  # `reason` sets some keys itself
        unchanged = {name for name in type(recipe).model_fields if getattr(recipe, name) == getattr(defaults, name)}
        keys = recipe.model_dump(mode="json", exclude_defaults=True, exclude=unchanged)
        title = "keys that differ from their defaults:" if keys else "all keys have their defaults"
        end = "\n--dry-run -v lists all keys; key=value sets one"
    steps = "\n".join(f"{number}. {cell(step)}" for number, step in enumerate(document["steps"], 1))
    shown = "\n" + cell(yaml.safe_dump(keys, sort_keys=False, allow_unicode=True).rstrip()) if keys else ""
    return f"{steps}\n\n{title}{shown}{end}"
