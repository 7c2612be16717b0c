"""Recipe of `specctl eval-server`."""

from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from specctl.errors import UsageError
from specctl.recipe.sections import SampledRecipe
from specctl.recipe.server import ServerRecipe


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
