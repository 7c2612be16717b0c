"""Recipe of `specctl bench`."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from specctl.recipe.sections import CommandRecipe, DataRecipe, DraftingRecipe, GraphicsCard, Name, SamplingRecipe


class BenchRecipe(CommandRecipe):
    """`specctl bench`: time kernels, target steps and batches against their baselines, on this machine.

    `shape` replaces `target` by a model of that size with random weights, because speed does not depend on their
    values. The part `floors` computes the least possible time of a step on `gpus`, which need not be in this machine.
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
    limit: PositiveInt = 16  # number of prompts that are decoded
    batches: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 8]  # sequences at a time
    draft_lengths: list[PositiveInt] = []  # nodes of a draft, in addition to each drafter's default
    vocabularies: Annotated[list[PositiveInt], Field(min_length=1)] = [32_000, 128_000]  # sizes, for kernels
    drafted: PositiveInt = 8  # draft tokens per sequence, for kernels and floors
    context: PositiveInt = 256  # tokens of every sequence before a step, for steps, rounds and floors
    gpus: Annotated[list[GraphicsCard], Field(min_length=1)] = ["a100-80g", "h100-80g", "h200"]  # for floors
    repeats: PositiveInt = 30  # timed calls per measurement
    overwrite: bool = False
