"""Recipe of `specctl bench`."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from specctl.recipe.sections import CommandRecipe, DataRecipe, DraftingRecipe, Name, SamplingRecipe


class BenchRecipe(CommandRecipe):
    """`specctl bench`: time target steps, rounds and batches against their baselines, on this machine.

    `shape` replaces `target` by a model of that size with random weights, because speed does not depend on their
    values.
    """

    parts: Annotated[list[Literal["steps", "rounds", "decoding"]], Field(min_length=1)] = [
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
    context: PositiveInt = 256  # tokens of every sequence before a step, for steps and rounds
    repeats: PositiveInt = 30  # timed calls per measurement
    overwrite: bool = False

    @field_validator("parts", mode="before")
    @classmethod
    def _still_parts(cls, parts: Any) -> Any:
        """Name what replaces the parts of earlier versions."""
        if isinstance(parts, list):
            if "kernels" in parts:
                raise ValueError("bench times no kernels: leave the part out, or run tests/benchmarks/kernels.py")
            if "floors" in parts:
                raise ValueError(
                    "bench computes no floors from data sheets: leave the part out, or time --parts rounds"
                )
        return parts
