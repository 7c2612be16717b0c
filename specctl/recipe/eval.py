"""Recipe of `specctl eval`."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from specctl.recipe.sections import DraftingRecipe, LocalPath, Name, RunRecipe, SampledRecipe, Seeds


class EvalRecipe(RunRecipe, SampledRecipe):
    """`specctl eval`: measure drafters, with one row per drafter × domain.

    The default of output_dir is a new run directory under ./runs. `matrix` adds a table of `metric` over pool ×
    domains, its picture, and a test of its diagonal. The drafters' own domains are then measured, unless `data.domain`
    is given.
    """

    sliceable = True

    drafting: DraftingRecipe = DraftingRecipe()
    drafters: list[Name] = []  # drafter directories, or drafters without weights: lookup, suffix
    pool: LocalPath | None = None  # directory of drafter directories
    matrix: bool = False
    metric: Literal["mat", "speedup", "accept_rate"] = "mat"  # shown in the cells of the matrix
    baselines: list[Literal["vanilla", "transformers"]] = ["vanilla", "transformers"]
    seeds: Seeds = [0]
    save_outputs: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> EvalRecipe:
        if self.matrix and not self.drafters and self.pool is None:
            raise ValueError("a matrix needs drafters: name a pool (--pool DIR)")
        if self.matrix and self.metric == "speedup" and "vanilla" not in self.baselines:
            raise ValueError("a matrix of speedup needs the vanilla baseline")
        return self
