"""Recipe of `specctl eval`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from specctl.recipe.sections import DataRecipe, DraftingRecipe, LocalPath, Name, RunRecipe, SamplingRecipe
from specctl.recipe.server import ServerRecipe


class EvalRecipe(RunRecipe):
    """`specctl eval`: measure drafters, with one row per drafter × domain.

    The default of output_dir is a new run directory under ./runs. `matrix` adds a table of `metric` over pool ×
    domains, its picture, and a test of its diagonal. The drafters' own domains are then measured, unless `data.domain`
    is given.
    """

    sliceable = True

    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    drafters: list[Name] = []  # drafter directories, or drafters without weights: lookup, suffix
    pool: LocalPath | None = None  # directory of drafter directories
    matrix: bool = False
    metric: Literal["mat", "speedup", "accept_rate"] = "mat"  # shown in the cells of the matrix
    baselines: list[Literal["vanilla", "transformers"]] = ["vanilla", "transformers"]
    split: Literal["train", "test"] = "test"
    limit: PositiveInt | None = 100  # prompts per domain; a sample if a file has more
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = [0]
    save_outputs: bool = False
    server: ServerRecipe = ServerRecipe()  # an engine that drafts itself, measured instead of drafters here
    baseline_server: ServerRecipe = ServerRecipe()  # an engine with the same target and no drafter
    concurrency: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 8]  # requests in flight, one row per number
    # With baseline_server: for each concurrency, predict the speed of drafters with these mats.
    mats: list[Annotated[float, Field(ge=1)]] = [2.0, 2.5, 3.0, 3.5, 4.0]

    @model_validator(mode="after")
    def _consistent(self) -> EvalRecipe:
        if self.data.limit is not None:
            raise ValueError("use `limit`, not `data.limit`")
        if self.matrix and not self.drafters and self.pool is None:
            raise ValueError("a matrix needs drafters: name a pool")
        if self.matrix and self.metric == "speedup" and "vanilla" not in self.baselines:
            raise ValueError("a matrix of speedup needs the vanilla baseline")
        return self

    @model_validator(mode="after")
    def _here_or_served(self) -> EvalRecipe:
        if self.baseline_server.urls and not self.server.urls:
            raise ValueError("baseline_server needs a server to compare with: set server, too")
        if not self.server.urls:
            return self
        here = {
            "drafters": self.drafters,
            "pool": self.pool,
            "matrix": self.matrix,
            "resume": self.resume,
            "sampling.exact": self.sampling.exact,
            "save_outputs": self.save_outputs,
        }
        for key, value in here.items():
            if value:
                raise ValueError(f"{key} is for drafting in this process, but a server drafts by itself: leave it out")
        if len(self.seeds) > 1:
            raise ValueError("a server is measured with one seed: name only one")
        return self
