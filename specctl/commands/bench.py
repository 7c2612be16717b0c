"""`specctl bench`: kernels, target steps and batches on this machine, each against its baseline in the same run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specctl.decoding.models.loading import load_model, load_tokenizer, pick_device, pick_dtype
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target, load_target
from specctl.decoding.timing import bandwidth
from specctl.distillation.prompts import Prompt, Rejections, read_domains
from specctl.drafters import names, pool
from specctl.measuring.bench import kernels as bench_kernels
from specctl.measuring.bench import rounds as bench_rounds
from specctl.measuring.bench import steps as bench_decoding
from specctl.measuring.bench.kernels import KernelRow
from specctl.measuring.bench.rounds import RoundRow
from specctl.measuring.bench.steps import DecodingRow, StepRow
from specctl.measuring.contenders import Case, prepare
from specctl.progress import track
from specctl.recipe import BenchRecipe
from specctl.runs import Run, hardware, version

# Layers, hidden size, heads, key heads, intermediate size: Llama 3.2 1B and Llama 3.1 8B.
SHAPES = {"1b": (16, 2048, 32, 8, 8192), "8b": (32, 4096, 32, 8, 14336)}
VOCABULARY = 128_256
PROMPT = 128  # random tokens of a prompt for random weights


@dataclass(frozen=True)
class BenchResult:
    """The result document of `bench`."""

    target: str
    device: str
    dtype: str
    threads: int
    hardware: dict[str, object]
    versions: dict[str, str | None]
    kernels: list[KernelRow]
    steps: list[StepRow]
    rounds: list[RoundRow]
    decoding: list[DecodingRow]


@torch.inference_mode()
def bench(recipe: BenchRecipe, run: Run) -> BenchResult:
    """Measure the parts that the recipe names.

    Raises DataError, CheckpointError as `specctl eval` does for prompts, target and drafters.
    """
    device = pick_device(recipe.target.device)
    kernels: list[KernelRow] = []
    steps: list[StepRow] = []
    rounds: list[RoundRow] = []
    decoding: list[DecodingRow] = []
    target = None
    with track("bench", unit="measurements") as bar:
        if "kernels" in recipe.parts:
            kernels = bench_kernels.measure(recipe, device, bar)
        if recipe.parts != ["kernels"]:
            target, model = load(recipe, device)
            run.annotate(target=target.identity)
            if {"steps", "rounds"} & {*recipe.parts}:
                model = model or load_model(recipe.target.name, device=target.device, dtype=target.dtype)
                speed = bandwidth(device)
            if "steps" in recipe.parts:
                steps = bench_decoding.steps(recipe, target, model, speed, bar)
            if "rounds" in recipe.parts:
                weights_ms = 1000 * bench_decoding.weight_bytes(model) / speed
                rounds = bench_rounds.measure(recipe, target, drafters(recipe, target), weights_ms, bar)
            del model
            if "decoding" in recipe.parts:
                decoding = bench_decoding.batches(recipe, target, questions(recipe, target, run), bar)
    return BenchResult(
        target=recipe.shape or recipe.target.name,
        device=str(device),
        dtype=str(target.dtype if target else pick_dtype(recipe.target.dtype, device)).removeprefix("torch."),
        threads=torch.get_num_threads(),
        hardware=hardware(),
        versions={name: version(name) for name in ("torch", "transformers", "triton", "specctl")},
        kernels=kernels,
        steps=steps,
        rounds=rounds,
        decoding=decoding,
    )


def load(recipe: BenchRecipe, device: torch.device) -> tuple[Target, LlamaForCausalLM | None]:
    """The recipe's target; or one of random weights, and the model that it was made of."""
    if recipe.shape is None:
        return load_target(**recipe.target.loading), None
    layers, hidden, heads, key_heads, inner = SHAPES[recipe.shape]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=8192,
        eos_token_id=VOCABULARY - 1,
    )
    before = torch.get_default_dtype()
    torch.manual_seed(recipe.data.seed)
    try:
        torch.set_default_dtype(pick_dtype(recipe.target.dtype, device))
        with device:
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return Target(recipe.shape, model, load_tokenizer("builtin"), revision=None), model


def drafters(recipe: BenchRecipe, target: Target) -> dict[str, Drafter]:
    """The drafters whose rounds are timed: the recipe's, and for random weights a random head."""
    loaded = {names.name_of(name): pool.load_drafter(name, target, recipe.drafting) for name in recipe.drafters}
    if recipe.shape is not None:
        loaded["eagle3, random"] = bench_rounds.random_head(recipe, target)
    return loaded


def questions(recipe: BenchRecipe, target: Target, run: Run) -> list[Case]:
    """Prompts of the domain's test split, or random tokens for random weights."""
    if recipe.shape is None:
        rejections = Rejections(run.dir / "rejected.jsonl", recipe.data.max_rejected)
        data = recipe.data.model_copy(update={"limit": recipe.limit})
        return prepare(recipe, target, read_domains(data, rejections, split="test", sample=True), rejections)
    generator = torch.Generator().manual_seed(recipe.data.seed)
    ids = torch.randint(5, VOCABULARY - 1, (recipe.limit, PROMPT), generator=generator).tolist()
    room = recipe.sampling.max_new_tokens
    return [Case(Prompt(f"{n:012x}", [], "random", f"random {n}"), context, room) for n, context in enumerate(ids)]
