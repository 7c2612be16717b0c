"""Recipes of `specctl eval` and `specctl eval-server`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from specctl.errors import UsageError
from specctl.recipe.sections import DraftingRecipe, LocalPath, Name, RunRecipe, SampledRecipe, Seeds
from specctl.recipe.server import ServerRecipe


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


class EvalServerRecipe(SampledRecipe):
    """`specctl eval-server`: measure the drafter of a running engine, by load.

    The default of output_dir is a new run directory under ./runs.
    """

    seeds: Annotated[list[NonNegativeInt], Field(min_length=1, max_length=1)] = [0]
    server: ServerRecipe = ServerRecipe()  # the engine that is measured
    baseline_server: ServerRecipe = ServerRecipe()  # an engine with the same target and no drafter
    concurrency: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 8]  # requests in flight, one row per number
    # With baseline_server: for each concurrency, predict the speed of drafters with these mats.
    mats: list[Annotated[float, Field(ge=1)]] = [2.0, 2.5, 3.0, 3.5, 4.0]
    overwrite: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sampling.exact:
            raise ValueError("sampling.exact is for decoding in this process: leave it out")
        return self

    def check_server(self) -> None:
        """Raise UsageError without a server."""
        if not self.server.urls:
            raise UsageError("there is no server to measure", hint="specctl eval-server --server http://host:8000")
