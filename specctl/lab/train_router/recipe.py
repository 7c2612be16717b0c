"""Recipe of `specctl train-router`."""

from typing import Self

from pydantic import model_validator

from specctl.lab.routing.options import RouterRecipe
from specctl.recipe.sections import LocalPath
from specctl.recipe.select import ROUTER, SelectRecipe


class TrainRouterRecipe(SelectRecipe):
    """`specctl train-router`: a classifier of prompts, beside the policies of `specctl select` on one stream.

    It plays in the policy `router`.
    """

    sliceable = False

    router: RouterRecipe = RouterRecipe()
    router_dir: LocalPath | None = None  # directory of the router (None = in the run directory)
    train_router: bool = True  # false = use the trained router in router_dir
    replay: LocalPath | None = None  # recorded table with the labels, for router.labels=hindsight

    @property
    def companion_arm(self) -> None:
        """No arm but the drafters, which are the classes of the router."""

    @model_validator(mode="after")
    def _with_router(self) -> Self:
        if not self.train_router and self.router_dir is None:
            raise ValueError("there is no router: set router_dir, or train one with train_router")
        if self.choice == "batch":
            raise ValueError("a router chooses per text: leave out choice=batch")
        if self.arms.plain and ROUTER in self.algo:
            raise ValueError("arms.plain: a router knows only drafters, so plain decoding cannot be an arm")
        return self
