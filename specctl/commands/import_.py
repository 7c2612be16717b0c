"""`specctl import`: convert a foreign head into a specctl drafter, after a short run has tested its drafts."""

from dataclasses import dataclass

from specctl import progress
from specctl.decoding import metrics
from specctl.decoding.models.loading import load_config
from specctl.decoding.models.supported import engine_only_reason
from specctl.decoding.target import Target, load_target
from specctl.distillation.prompts import read_prompts
from specctl.drafters import checkpoint
from specctl.drafters.blueprint import prefix_errors
from specctl.drafters.family import load_family
from specctl.formats import head_directory, registry
from specctl.formats.head import Head, TargetFacts
from specctl.recipe import DraftingRecipe, ImportRecipe
from specctl.replaced_directories import check_free
from specctl.runs import Run
from specctl.training.outcome import decode_greedily


@dataclass(frozen=True)
class HeadProbe:
    """Greedy answers to a few prompts with the imported head; `metrics` defines the numbers."""

    prompts: int
    tokens: int
    mat: float | None
    accept_rate: float | None


@dataclass(frozen=True)
class ImportResult:
    """The result document of `import`. `notes`: changes that were necessary, and assumptions that were made."""

    head: str
    format: str
    family: str
    params: int
    drafter: str
    notes: list[str]
    probe: HeadProbe | None


def import_head(recipe: ImportRecipe, run: Run | None = None, *, target: Target | None = None) -> ImportResult:
    """Read `recipe.head`, fit it to the target, try it, and write it as a drafter.

    Raises:
        UsageError: no head is named, or the output directory is taken.
        CheckpointError: the format is unknown, our head cannot represent it, or it was trained for another target.
        DataError: the prompts of the probe cannot be read.
    """
    source = recipe.source
    check_free(recipe.output.absolute(), recipe.overwrite)
    found = head_directory.read(source)
    name = registry.detect(found) if recipe.format == "auto" else recipe.format
    if target is None:
        reason = engine_only_reason(load_config(**recipe.target.described))
        target = load_target(**recipe.target.loading, whole=reason is None)
    if run is not None:
        run.annotate(target=target.identity)
    head = registry.load(name).read(found, TargetFacts.of_target(target))
    for note in head.notes:
        progress.warn(f"{recipe.head}: {note}")
    with prefix_errors(source):
        module = load_family(head.family).restore({"architecture": head.architecture}, head.tensors)
    notes = list(head.notes)
    if recipe.probe.enabled and not target.whole:
        notes.append(f"the head was not tried: only an engine can run target {target.name}")
    # Before the drafter is written, so that unreadable prompts leave nothing on disk.
    probe = _probe(recipe, head, module, target) if recipe.probe.enabled and target.whole else None
    info = {"imported_from": str(recipe.head), "format": name, "notes": list(head.notes)}
    checkpoint.save(
        recipe.output,
        config={"family": head.family, "architecture": head.architecture, "target": target.identity},
        tensors=head.tensors,
        info=info,
        overwrite=recipe.overwrite,
    )
    params = sum(tensor.numel() for tensor in head.tensors.values() if tensor.is_floating_point())
    return ImportResult(str(recipe.head), name, head.family, params, str(recipe.output), notes, probe)


def _probe(recipe: ImportRecipe, head: Head, module: object, target: Target) -> HeadProbe:
    """Decode a few prompts with the head; warn if almost nothing of its drafts is accepted."""
    drafter = load_family(head.family).make_drafter(module, target, DraftingRecipe())
    data = recipe.data.model_copy(update={"limit": recipe.probe.prompts})
    prompts = read_prompts(data, recipe.data.domain[0], split="test")
    texts = [
        target.render(prompt.messages, **prompt.arguments(recipe.target.chat_template_kwargs)) for prompt in prompts
    ]
    decoded = decode_greedily(target, texts, recipe.probe.max_new_tokens, drafter)
    rate = metrics.accept_rate(decoded)
    if rate is None or rate < recipe.probe.suspicious:
        progress.warn(
            f"{recipe.head}: only {rate or 0:.1%} of its draft tokens are accepted: usual causes are wrong layer ids, "
            f"d2t or RoPE, or a head trained for another target than {target.name}"
        )
    return HeadProbe(len(texts), sum(len(text.output_ids) for text in decoded), metrics.mat(decoded), rate)
