"""Commands that decode with drafters: `specctl eval`, `specctl generate` and `specctl bench`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from specctl.recipe.sections import (
    CommandRecipe,
    DataRecipe,
    DraftingRecipe,
    LocalPath,
    ResumableRecipe,
    SamplingRecipe,
)


class EvalRecipe(ResumableRecipe):
    """`specctl eval`: one row per drafter × domain; output_dir None = the run directory under ./runs.

    `matrix` asks for the table of `metric` over pool × domains, its picture, and the test of the diagonal; the domains
    are then those that the drafters were made for, unless `data.domain` is given.
    """

    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    drafters: list[str] = []  # drafter directories, or the name of a family without weights: lookup, suffix
    pool: LocalPath | None = None  # directory of drafter directories
    matrix: bool = False
    metric: Literal["mat", "speedup", "accept_rate"] = "mat"  # in the cells of the matrix
    baselines: list[Literal["vanilla", "transformers"]] = ["vanilla", "transformers"]
    split: Literal["train", "test"] = "test"
    limit: PositiveInt | None = 100  # prompts per domain; of a file with more, a sample
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = [0]
    save_outputs: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> EvalRecipe:
        if self.data.limit is not None:
            raise ValueError("use `limit`, not `data.limit`")
        if self.matrix and not self.drafters and self.pool is None:
            raise ValueError("a matrix needs drafters: name a pool")
        if self.matrix and self.metric == "speedup" and "vanilla" not in self.baselines:
            raise ValueError("a matrix of speedup needs the vanilla baseline")
        if self.resume and self.output_dir is None:
            raise ValueError("resume needs output_dir, the directory of the run to continue")
        return self


class GenerateRecipe(CommandRecipe):
    """`specctl generate`: one prompt with and without a drafter."""

    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    prompt: str | None = None
    drafter: str | None = None
    save_outputs: bool = False
    overwrite: bool = False


class BenchRecipe(CommandRecipe):
    """`specctl bench`: kernels, target steps and batches against their baselines, on this machine.

    `shape` puts a target with random weights of that size in the place of `target`: speed does not need their values.
    """

    parts: Annotated[list[Literal["kernels", "steps", "rounds", "decoding"]], Field(min_length=1)] = [
        "kernels",
        "steps",
        "rounds",
        "decoding",
    ]
    shape: Literal["1b", "8b"] | None = None
    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    drafters: list[str] = ["lookup"]
    limit: PositiveInt = 16  # prompts
    batches: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 8]
    draft_lengths: list[PositiveInt] = []  # nodes of a draft; besides each drafter's own default
    vocabularies: Annotated[list[PositiveInt], Field(min_length=1)] = [32_000, 128_000]
    drafted: PositiveInt = 8  # rows of a sequence that the kernels verify
    context: PositiveInt = 256  # of the steps that are timed
    repeats: PositiveInt = 30
    overwrite: bool = False
