"""`specctl bench`: target steps and batches on this machine, each against its baseline in the same run."""

from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from specctl.decoding.models import target_adapter
from specctl.decoding.models.loading import load_model, pick_device
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target, load_target
from specctl.decoding.timing import bandwidth
from specctl.distillation.prompts import Prompt, read_domains
from specctl.distillation.rejections import Rejections
from specctl.drafters import names, pool
from specctl.measuring.bench import rounds as bench_rounds
from specctl.measuring.bench import shapes
from specctl.measuring.bench import steps as bench_decoding
from specctl.measuring.bench.rounds import RoundRow
from specctl.measuring.bench.steps import DecodingRow, StepRow
from specctl.measuring.contenders import Case, prepare
from specctl.measuring.transformers_baseline import in_fastest_dtype
from specctl.progress import Progress
from specctl.recipe import BenchRecipe
from specctl.runs import Run, hardware, version

PROMPT = 128  # random tokens per prompt, for targets with random weights


@dataclass(frozen=True)
class BenchResult:
    """The result document of `bench`."""

    target: str
    device: str
    dtype: str
    threads: int
    hardware: dict[str, object]
    versions: dict[str, str | None]
    steps: list[StepRow]
    rounds: list[RoundRow]
    decoding: list[DecodingRow]


@torch.inference_mode()
def bench(recipe: BenchRecipe, run: Run) -> BenchResult:
    """Measure the parts named in the recipe.

    Raises DataError, CheckpointError as `specctl eval` does for prompts, target and drafters; UsageError if a shape
    does not fit into free memory.
    """
    shapes.check_memory(recipe)
    device = pick_device(recipe.target.device)
    steps: list[StepRow] = []
    rounds: list[RoundRow] = []
    decoding: list[DecodingRow] = []
    with Progress("bench", unit="measurements") as bar:
        target, model = load(recipe, device)
        run.annotate(target=target.identity)
        weights_ms = 1000 * target.step_bytes / bandwidth(device)
        if model is not None:
            steps = bench_decoding.steps(recipe, target, model, weights_ms, bar)
        del model
        if "rounds" in recipe.parts:
            rounds = bench_rounds.measure(recipe, target, drafters(recipe, target), weights_ms, bar)
        if "decoding" in recipe.parts:
            decoding = bench_decoding.batches(recipe, target, questions(recipe, target, run), bar)
    return BenchResult(
        target=recipe.shape or recipe.target.name,
        device=str(device),
        dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        hardware=hardware(),
        versions={name: version(name) for name in ("torch", "transformers", "triton", "specctl")},
        steps=steps,
        rounds=rounds,
        decoding=decoding,
    )


def load(recipe: BenchRecipe, device: torch.device) -> tuple[Target, LlamaForCausalLM | None]:
    """Load the recipe's target, or one with random weights; for the part `steps` also its `transformers` model."""
    if recipe.shape is not None:
        return shapes.load(recipe, recipe.shape, device)
    target = load_target(**recipe.target.loading)
    if "steps" not in recipe.parts:
        return target, None
    model, adapter = load_model(recipe.target.name, device=target.device, dtype=target.dtype), recipe.target.adapter
    if adapter is not None:
        model = target_adapter.merge(model, adapter, recipe.target.name)
    return target, in_fastest_dtype(model)


def drafters(recipe: BenchRecipe, target: Target) -> dict[str, Drafter]:
    """Drafters for the part `rounds`: the recipe's, and with random weights also a random head."""
    loaded = {names.name_of(name): pool.load_drafter(name, target, recipe.drafting) for name in recipe.drafters}
    if recipe.shape is not None:
        loaded["eagle3, random"] = bench_rounds.random_head(recipe, target)
    return loaded


def questions(recipe: BenchRecipe, target: Target, run: Run) -> list[Case]:
    """Prompts of the domain's test split; for random weights, prompts of random tokens."""
    if recipe.shape is None:
        rejections = Rejections(run.dir / "rejected.jsonl", recipe.data.max_rejected)
        data = recipe.data.model_copy(update={"limit": recipe.limit})
        return prepare(recipe, target, read_domains(data, rejections, split="test"), rejections)
    generator = torch.Generator().manual_seed(recipe.data.seed)
    ids = torch.randint(5, target.vocab_size - 1, (recipe.limit, PROMPT), generator=generator).tolist()
    room = recipe.sampling.max_new_tokens
    return [Case(Prompt(f"{n:012x}", [], "random", f"random {n}"), context, room) for n, context in enumerate(ids)]
