"""`specctl export`: convert a drafter into the directory that an engine or a reference repository reads."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from specctl.decoding.models.loading import ORIGINAL, ORIGINAL_NOTE, load_tokenizer
from specctl.decoding.target_text import TargetText, load_target_text
from specctl.drafters import checkpoint, pool
from specctl.drafters.card import adapters_of, model_card, shown_name
from specctl.drafters.retrieval.datastore import Datastore
from specctl.engines.client import Client
from specctl.engines.corpora import PublishedCorpus
from specctl.errors import CheckpointError, DataError, SpecctlError, UsageError, one_line
from specctl.formats import corpus, gguf_writer, head_directory, registry, replaced_tensors, roundtrip, serving_commands
from specctl.formats.head import Deployment, Files, Head, TargetFacts
from specctl.measuring.served_costs import Tuning, tune
from specctl.recipe import ExportRecipe, TargetRecipe
from specctl.replaced_directories import MARKS, check_free
from specctl.runs import Run, atomic_write, to_json

WITH_ADAPTER = "the drafter was made for the target with {}: serve the target with the same adapters"
LORA_MODULES = " (--enable-lora --lora-modules NAME=DIR)"
NEVER_FASTER = "plain decoding is faster at every measured load: serve the target without the drafter of this command"
(RECORD,) = MARKS["converted drafter"]
"""File in the output directory that says where the export comes from. A directory with this file may be overwritten."""
TOKEN_HINT = "run `hf auth login`, or set HF_TOKEN to a token that may write"


@dataclass(frozen=True)
class ExportResult:
    """The result document of `export`.

    Attributes:
        output: the output directory. It is the drafter's own directory, with no files written, if servers were given a
            corpus or the engine drafts from our format.
        max_difference: largest difference between the weights of the original and of the drafter read back from the
            output; null without --check.
        commands: shell commands that put the output to use.
        published: corpora that servers were given.
        pushed: address of the repository that has the files, or None without --push.
    """

    drafter: str
    family: str
    to: str
    output: str
    files: list[str]
    params: int
    tokens: int
    max_difference: float | None
    tuning: Tuning | None
    commands: list[str]
    notes: list[str]
    published: list[PublishedCorpus] = field(default_factory=list)
    pushed: str | None = None


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
    check_family(recipe, drafter.config["family"])
    facts = facts_of(recipe.target, drafter.config["target"])
    if run is not None:
        run.target = facts.name
    if drafter.config["family"] == "retrieval":
        return export_datastore(recipe, drafter, facts)
    head = Head(drafter.config["family"], drafter.config["architecture"], drafter.tensors)
    form = registry.writer(head.family, recipe.to)
    tuning = read_tuning(recipe, head)
    schedule = tuning.ranges if tuning and any(one.tokens for one in tuning.ranges) else []
    tokens = head.draft_length(max((one.tokens for one in schedule), default=recipe.tokens))
    target = shown_name(facts.name)
    published = replace(facts, name=target) if recipe.push is not None else facts
    files = form.write(head, published, tokens, recipe.to)
    place = recipe.output.absolute()
    check_free(place, recipe.overwrite, "converted drafter")
    serving = form.serving(head, recipe.to, Deployment(place, facts, tokens, schedule))
    with checkpoint.staged(place) as draft:
        _write(files, draft, facts, recipe.target.trust_remote_code)
        write_record(draft, recipe, drafter, serving.commands)
        name = recipe.push or place.name
        commands = [command.replace(str(place), name).replace(facts.name, target) for command in serving.commands]
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
            *original_notes(serving.commands),
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
    if not any(adapters_of(identity).values()):
        return []
    note = WITH_ADAPTER.format(checkpoint.named_adapter(identity))
    return [note + (LORA_MODULES if recipe.to == "vllm" else "")]


def original_notes(commands: list[str]) -> list[str]:
    return [ORIGINAL_NOTE] if any(ORIGINAL in command for command in commands) else []


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


def check_options(recipe: ExportRecipe) -> None:
    """Raise UsageError if the engine cannot draft from a datastore, or an option is for heads only."""
    if recipe.to not in corpus.DEFAULT_DRAFT_TOKENS:
        raise UsageError(f"retrieval drafters cannot be written for {recipe.to}", hint="use --to vllm or --to sglang")
    for option in ("tune", "check", "push"):
        if getattr(recipe, option):
            raise UsageError(f"--{option} is for heads, but {recipe.drafter} is a datastore", f"leave --{option} out")


def export_datastore(recipe: ExportRecipe, drafter: checkpoint.Checkpoint, facts: TargetFacts) -> ExportResult:
    """Write a datastore for `recipe.to`, or publish it into running servers.

    Raises:
        UsageError: as `check_options`, or the output directory is taken.
        CheckpointError: the drafter is damaged, or was collected with another tokenizer than the target's.
        EngineError: a server does not take the corpus.
    """
    store = cast(Datastore, pool.restore_module(drafter))
    tokens = recipe.tokens if "tokens" in recipe.model_fields_set else corpus.DEFAULT_DRAFT_TOKENS[recipe.to]
    place, published = recipe.source.absolute(), []
    if recipe.to == "vllm":
        serving = corpus.serving("vllm", place, facts, tokens)
        commands, notes = serving.commands, serving.notes
    else:
        target = target_of(recipe, drafter, facts)
        texts = corpus.corpus_of(store, target.tokenizer)
        if recipe.server.urls:
            published = publish(recipe, target, texts)
            commands, notes = [], texts.notes
        else:
            place = recipe.output.absolute()
            check_free(place, recipe.overwrite, "converted drafter")
            serving = corpus.serving("sglang", place, facts, tokens, texts)
            commands, notes = serving.commands, serving.notes
            with checkpoint.staged(place) as draft:
                atomic_write(draft / corpus.FILE, texts.lines)
                write_record(draft, recipe, drafter, commands)
    return ExportResult(
        drafter=str(recipe.drafter),
        family="retrieval",
        to=recipe.to,
        output=str(recipe.source if place == recipe.source.absolute() else recipe.output),
        files=sorted(path.name for path in place.iterdir()),
        params=0,
        tokens=tokens,
        max_difference=None,
        tuning=None,
        commands=commands,
        notes=[*original_notes(commands), *notes],
        published=published,
    )


def target_of(recipe: ExportRecipe, drafter: checkpoint.Checkpoint, facts: TargetFacts) -> TargetText:
    """Load the target's tokenizer. Raises CheckpointError if the store was collected with another one."""
    wanted = recipe.target
    target = load_target_text(facts.name, revision=facts.revision, trust_remote_code=wanted.trust_remote_code)
    said = drafter.config["target"].get("vocab_hash")
    if said != target.identity["vocab_hash"]:
        raise CheckpointError(
            f"{recipe.drafter} was collected with another tokenizer than {facts.name} has", "name its target: --target"
        )
    return target


def publish(recipe: ExportRecipe, target: TargetText, texts: corpus.CorpusTexts) -> list[PublishedCorpus]:
    """Publish the texts into all servers, which must serve `target`."""
    with Client(recipe.server) as client:
        client.check(target)
        return client.publish_corpus(recipe.source.absolute().name, texts)


def write_record(directory: Path, recipe: ExportRecipe, drafter: checkpoint.Checkpoint, commands: list[str]) -> None:
    origin = {"drafter": str(recipe.source.absolute()), "to": recipe.to, "target": drafter.config["target"]}
    atomic_write(directory / RECORD, to_json(origin | {"commands": commands}, indent=2) + "\n")


def push(directory: Path, name: str, private: bool) -> str:
    """Upload a directory into a model repository, which is created if it is missing. Returns its address.

    export.json stays here: it holds paths of this machine. The token comes from `hf auth login` or `HF_TOKEN`.

    Raises SpecctlError if the hub cannot be reached or refuses; the directory remains.
    """
    api = HfApi()
    remains = f"the files remain in {directory}"
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=directory, ignore_patterns=[RECORD], commit_message="Upload by specctl export"
        )
    except LocalTokenNotFoundError as error:
        raise SpecctlError(f"no token of the hub; {remains}", TOKEN_HINT) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = str(error.server_message or one_line(error)).replace("\n", " ")
        hint = TOKEN_HINT if status in (401, 403) else f"hf upload {name} {directory} tries again"
        raise SpecctlError(f"{api.endpoint} answered {status}: {reason:.200}; {remains}", hint) from error
    except Exception as error:  # the hub's client raises errors of httpx or httpx2, by its version
        hint = f"run `hf upload {name} {directory}` on a machine that reaches the hub"
        raise SpecctlError(f"the upload to {api.endpoint} failed: {one_line(error)}; {remains}", hint) from error
    return str(url)
