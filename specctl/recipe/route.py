"""Recipe of `specctl route`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt

from specctl.errors import UsageError
from specctl.recipe.sections import CommandRecipe, Names
from specctl.recipe.select import PolicyRecipe
from specctl.recipe.server import Listen, ServerRecipe

EXAMPLE = "specctl route --server http://a:8000,http://b:8000 --listen 127.0.0.1:8100"


class RouteRecipe(CommandRecipe):
    """`specctl route`: a proxy that sends each request to the server with the drafter that suits its prompt."""

    algo: Annotated[Names, Field(min_length=1, max_length=1)] = ["cgp-ucb"]  # the policy that chooses a server
    policy: PolicyRecipe = PolicyRecipe()
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1, max_length=1)] = [0]  # seed of the policy's draws
    server: ServerRecipe = ServerRecipe()  # engines of one model with different drafters
    listen: Listen | None = None  # HOST:PORT of the proxy that takes the requests
    overwrite: bool = False

    def check_servers(self) -> None:
        """Raise UsageError without a choice of servers, or without an address for requests."""
        if len(self.server.urls) < 2:
            names = "server names only one engine" if self.server.urls else "there is no server"
            raise UsageError(f"{names}: name at least two with --server", hint=EXAMPLE)
        if self.listen is None:
            raise UsageError("listen is missing: set HOST:PORT of the proxy with --listen", hint=EXAMPLE)
