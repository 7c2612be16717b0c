"""`specctl export` of a datastore: a command for vLLM, a file of texts for SGLang, or a corpus in running servers."""

from typing import cast

from specctl.commands.export_result import RECORD, ExportResult, check_free, record
from specctl.decoding.target_text import TargetText, load_target_text
from specctl.drafters import checkpoint, pool
from specctl.drafters.retrieval.datastore import Datastore
from specctl.engines.client import Client
from specctl.engines.corpora import PublishedCorpus
from specctl.errors import CheckpointError, UsageError
from specctl.formats import corpus
from specctl.formats.head import TargetFacts
from specctl.recipe import ExportRecipe
from specctl.runs import atomic_write, to_json


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
            check_free(place, recipe.overwrite)
            serving = corpus.serving("sglang", place, facts, tokens, texts)
            commands, notes = serving.commands, serving.notes
            with checkpoint.staged(place) as draft:
                atomic_write(draft / corpus.FILE, texts.lines)
                atomic_write(draft / RECORD, to_json(record(recipe, drafter, commands), indent=2) + "\n")
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
        notes=notes,
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
