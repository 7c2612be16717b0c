"""`specctl bench`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from specctl.recipe.sections import CommandRecipe, DataRecipe, DraftingRecipe, GraphicsCard, Name, SamplingRecipe


class BenchRecipe(CommandRecipe):
    """`specctl bench`: kernels, target steps and batches against their baselines, on this machine.

    `shape` puts a target with random weights of that size in the place of `target`: speed does not need their values.
    The part `floors` computes, for `gpus` that need not be here, what a step takes at least.
    """

    parts: Annotated[list[Literal["kernels", "steps", "rounds", "decoding", "floors"]], Field(min_length=1)] = [
        "kernels",
        "steps",
        "rounds",
        "decoding",
    ]
    shape: Literal["1b", "8b", "32b", "70b"] | None = None
    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    drafters: list[Name] = ["lookup"]
    limit: PositiveInt = 16  # prompts
    batches: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 8]
    draft_lengths: list[PositiveInt] = []  # nodes of a draft; besides each drafter's own default
    vocabularies: Annotated[list[PositiveInt], Field(min_length=1)] = [32_000, 128_000]
    drafted: PositiveInt = 8  # rows of a sequence that the kernels verify
    context: PositiveInt = 256  # of the steps that are timed, and of the floors
    gpus: Annotated[list[GraphicsCard], Field(min_length=1)] = ["a100-80g", "h100-80g", "h200"]  # of the floors
    repeats: PositiveInt = 30
    overwrite: bool = False
