"""Recipe section `learn` of `specctl serve`: the drafter learns from the texts that are served."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from specctl.recipe.learn_from_server import PublicationRecipe
from specctl.recipe.learner import LearnerOptions, rule_and_family
from specctl.recipe.online import BufferRecipe
from specctl.recipe.sections import Device, Name, PositiveFloat, Section


class ServeLearningRecipe(Section):
    """Learning from served texts: in a process beside the target's own engine, or from the texts of running engines.

    Keys that say "own engine" have no effect on running engines, and the other way round.
    """

    enabled: bool = False
    algo: Name = "ogd"  # update rule of `specctl online`
    learner: LearnerOptions = LearnerOptions()
    # max_mb is the size of the texts that the gateway collects; the learner may hold three times as much.
    buffer: BufferRecipe = BufferRecipe(max_mb=256)
    chunk: PositiveInt | None = None  # texts between two updates (None = the default of the drafter's family)
    longest: Annotated[int, Field(ge=4)] = 2048  # own engine: longest text to learn from, in tokens, prompt included
    device: Device = "auto"  # own engine: of the learner, such as cuda:1
    save_s: PositiveFloat = 60.0  # own engine: shortest time between two copies of the drafter on the disk
    seed: NonNegativeInt = 0
    publication: PublicationRecipe = PublicationRecipe()  # running engines
    max_log_mb: PositiveFloat = 256.0  # running engines: size at which the log of their texts is rotated

    @field_validator("algo")
    @classmethod
    def _learns(cls, algo: str) -> str:
        rule, family = rule_and_family(algo)
        if rule == "static" or family is not None:
            raise ValueError(f"{algo!r}: name a rule that learns, without a family, such as ogd or ens")
        return algo
