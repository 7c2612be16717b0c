"""`specctl export`: convert a drafter into the directory that an engine or a reference repository reads."""

from pathlib import Path
from typing import Any

import torch

from specctl.commands.export_datastore import check_options, export_datastore
from specctl.commands.export_result import RECORD, ExportResult, check_free, push, record
from specctl.decoding.models.loading import load_tokenizer
from specctl.drafters import checkpoint, pool
from specctl.drafters.card import adapters_of, model_card
from specctl.errors import DataError, UsageError
from specctl.formats import gguf_writer, head_directory, registry, replaced_tensors, roundtrip, serving_commands
from specctl.formats.head import Deployment, Files, Head, TargetFacts
from specctl.measuring.served_costs import Tuning, tune
from specctl.recipe import ExportRecipe, TargetRecipe
from specctl.runs import Run, atomic_write, to_json

WITH_ADAPTER = "the drafter was made for the target with {}: serve the target with the same adapters"
LORA_MODULES = " (--enable-lora --lora-modules NAME=DIR)"
NEVER_FASTER = "plain decoding is faster than any draft at every measured load: serve the target without a drafter"


def export(recipe: ExportRecipe, run: Run | None = None) -> ExportResult:
    """Write `recipe.drafter` in the format `recipe.to`, whole or not at all. A LoRA adapter is merged into its base.

    Raises:
        UsageError: no drafter is named, the output directory is taken, or the format does not support the family or a
            schedule of draft lengths.
        DataError: the file of `tune` is no sweep, or a sweep of another drafter.
        CheckpointError: the drafter is damaged, an engine could not feed it, or (with `check`) it reads back
            differently.
        SpecctlError: the hub does not take the files.
    """
    drafter = pool.merge_adapter(pool.read_checkpoint(recipe.source))
    pool.restore_module(drafter)
    collected = drafter.config["family"] == "retrieval"
    check_family(recipe, drafter.config["family"])
    facts = facts_of(recipe.target, drafter.config["target"])
    if run is not None:
        run.target = facts.name
    if collected:
        return export_datastore(recipe, drafter, facts)
    head = Head(drafter.config["family"], drafter.config["architecture"], drafter.tensors)
    form = registry.writer(head.family, recipe.to)
    tuning = read_tuning(recipe, head)
    schedule = tuning.ranges if tuning and any(one.tokens for one in tuning.ranges) else []
    tokens = head.draft_length(max((one.tokens for one in schedule), default=recipe.tokens))
    files = form.write(head, facts, tokens, recipe.to)
    place = recipe.output.absolute()
    check_free(place, recipe.overwrite)
    serving = form.serving(head, recipe.to, Deployment(place, facts, tokens, schedule))
    with checkpoint.staged(place) as draft:
        _write(files, draft, facts, recipe.target.trust_remote_code)
        atomic_write(draft / RECORD, to_json(record(recipe, drafter, serving.commands), indent=2) + "\n")
        name = recipe.push or place.name
        commands = [command.replace(str(place), name) for command in serving.commands]
        atomic_write(draft / checkpoint.CARD, model_card(name, drafter.config, drafter.info, recipe.to, commands))
        if schedule and recipe.to == "sglang":
            atomic_write(
                draft / serving_commands.ADAPTIVE, to_json(serving_commands.adaptive_config(schedule), indent=2) + "\n"
            )
        difference = None
        if recipe.check:
            difference = roundtrip.check(files.held or head, form.read(head_directory.read(draft), facts))
    pushed = push(place, recipe.push, recipe.private) if recipe.push is not None else None
    return ExportResult(
        drafter=str(recipe.drafter),
        family=head.family,
        to=recipe.to,
        output=str(recipe.output),
        files=sorted(path.name for path in place.iterdir()),
        params=sum(tensor.numel() for tensor in files.tensors.values() if tensor.is_floating_point()),
        tokens=tokens,
        max_difference=difference,
        tuning=tuning,
        commands=serving.commands,
        notes=[
            *serving.notes,
            *(tuning.notes if tuning else ()),
            *(
                serving_commands.by_context(recipe.to, {(one.over, one.up_to): one.ranges for one in tuning.contexts})
                if tuning
                else ()
            ),
            *([NEVER_FASTER] if tuning and not schedule else ()),
            *adapter_notes(recipe, drafter.config["target"]),
        ],
        pushed=pushed,
    )


def check_family(recipe: ExportRecipe, family: str) -> None:
    """Raise UsageError if no drafter of a family can be exported as the recipe says."""
    if family == "retrieval":
        check_options(recipe)
    elif recipe.server.urls:
        raise UsageError(
            f"{recipe.drafter} is a head, but export publishes only datastores to running servers",
            "specctl learn-from-server publishes heads that learn",
        )
    else:
        registry.writer(family, recipe.to)


def facts_of(wanted: TargetRecipe, identity: dict[str, Any]) -> TargetFacts:
    """Facts of the target that a drafter was made for (`identity`); name and revision may be given again."""
    named = wanted.name if "name" in wanted.model_fields_set else None
    options = {"revision": wanted.revision} if wanted.revision else {}
    return TargetFacts.of_identity(identity, named, trust_remote_code=wanted.trust_remote_code, **options)


def adapter_notes(recipe: ExportRecipe, identity: dict[str, Any]) -> list[str]:
    """A note that names the adapters of the target that the drafter was made for, if there are any."""
    if not any(adapters_of(identity).values()):
        return []
    note = WITH_ADAPTER.format(checkpoint.named_adapter(identity))
    return [note + (LORA_MODULES if recipe.to == "vllm" else "")]


def read_tuning(recipe: ExportRecipe, head: Head) -> Tuning | None:
    """Draft lengths by load, if the recipe names a sweep. Raises UsageError, DataError."""
    if recipe.tune is None:
        return None
    serving_commands.refuse_schedule(recipe.to, head.family)
    block = "block_size" in head.architecture
    tuning = tune(recipe.tune, block=block)
    longest = head.draft_length(tuning.drafted)
    if longest != tuning.drafted:
        raise DataError(
            f"{recipe.tune} was measured with drafts of {tuning.drafted} tokens, but {recipe.drafter} drafts {longest}",
            "measure a server that drafts with this drafter",
        )
    return tuning


def _write(files: Files, directory: Path, facts: TargetFacts, trust_remote_code: bool) -> None:
    if files.base is not None:
        return replaced_tensors.write(files.base, directory, files.tensors, files.config)
    tensors = checkpoint.untied_cpu_copies(files.tensors)
    if files.weights.endswith(".gguf"):
        return gguf_writer.write(directory / files.weights, files.config, tensors)
    if files.weights.endswith(".safetensors"):
        checkpoint.write_tensors(directory / files.weights, tensors, {"format": "pt"})  # transformers requires it
    else:
        torch.save(tensors, directory / files.weights)
    for name, content in files.pickles.items():
        torch.save(content, directory / name)
    atomic_write(directory / "config.json", to_json(files.config, indent=2) + "\n")
    if files.tokenizer:
        tokenizer = load_tokenizer(facts.name, revision=facts.revision, trust_remote_code=trust_remote_code)
        tokenizer.save_pretrained(directory)
