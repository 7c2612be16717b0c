"""Recipe of `specctl train-router`."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from specctl.recipe.sections import Fraction, LocalPath, Name, PositiveFloat, Section
from specctl.recipe.select import ROUTER, SelectRecipe

Perturbation = Literal["swap", "drop", "insert", "words", "paraphrase", "wrap", "prefix", "suffix"]


HEAD_SIZE = 32


class RouterRecipe(Section):
    """A classifier from prompts to drafters: a pretrained encoder, or a small one from scratch on the target's tokens.

    `perturbations` change the held-out prompts on which it is measured, each with its strength.
    """

    # JSONL files to train on, with {domain} in the name. The default is prompts of the domains' generators.
    prompts: Name | None = None
    limit: PositiveInt = 300  # prompts per domain
    model: Name | None = None  # Hugging Face id or directory of a BERT-style encoder (None = from scratch)
    revision: Name | None = None
    layers: Annotated[int, Field(ge=1, le=64)] = 2  # from scratch
    hidden_size: Annotated[int, Field(gt=0, le=8192, multiple_of=HEAD_SIZE)] = 128  # from scratch
    lr: PositiveFloat | None = None  # by default 2e-5 for a pretrained encoder, 1e-3 from scratch
    epochs: PositiveInt | None = None  # by default 3 for a pretrained encoder, 10 from scratch
    warmup: Fraction = 0.1
    max_length: Annotated[int, Field(ge=2, le=2**17)] = 128  # tokens of a prompt that are read, from its beginning
    batch_size: PositiveInt = 32
    # Labels of the prompts. domain: the drafter made for the domain. hindsight: the name of the best drafter for the
    # prompt in a recorded table (`replay`).
    labels: Literal["domain", "hindsight"] = "domain"
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2  # share of every domain's prompts
    seed: NonNegativeInt = 0
    perturbations: dict[Perturbation, Fraction] = {
        "swap": 0.1,
        "drop": 0.1,
        "insert": 0.1,
        "words": 0.3,
        "paraphrase": 1.0,
        "wrap": 1.0,
        "prefix": 1.0,
        "suffix": 1.0,
    }

    @property
    def learning_rate(self) -> float:
        """Learning rate: `lr`, or its default for the kind of model."""
        return self.lr or (1e-3 if self.model is None else 2e-5)

    @property
    def passes(self) -> int:
        """Number of epochs: `epochs`, or its default for the kind of model."""
        return self.epochs or (10 if self.model is None else 3)


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
