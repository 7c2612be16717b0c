"""Typed recipes: all options of the commands, with every default declared once, here.

If a field is None, the library chooses its value: a measured default for the drafter family and the device, or a path
that depends on the domain. Loading, overrides and error reports are in `specctl.recipe.resolve`.
"""

import pkgutil

from specctl.recipe.bench import BenchRecipe
from specctl.recipe.distill import DistillRecipe, FilterRecipe
from specctl.recipe.eval import EvalRecipe, EvalServerRecipe
from specctl.recipe.export import ExportRecipe, ImportRecipe
from specctl.recipe.generate import GenerateRecipe
from specctl.recipe.learn_from_server import LearnFromServerRecipe, PublicationRecipe
from specctl.recipe.learner import LearnerOptions, LearnerRecipe
from specctl.recipe.online import DrafterStreamRecipe, OnlineRecipe
from specctl.recipe.sections import (
    CommandRecipe,
    ConverterRecipe,
    DataRecipe,
    DraftingRecipe,
    Gpu,
    ResourceRecipe,
    ResumableRecipe,
    RunRecipe,
    SamplingRecipe,
    Section,
    TargetRecipe,
    WriterRecipe,
)
from specctl.recipe.select import GameRecipe, PolicyRecipe, PoolRecipe, SelectRecipe
from specctl.recipe.serve import LimitsRecipe, ServeRecipe
from specctl.recipe.server import ServerRecipe
from specctl.recipe.stream import LearningRecipe, StreamRecipe
from specctl.recipe.train import (
    Arch,
    CheckpointRecipe,
    DrafterRecipe,
    FeatureRecipe,
    HeldOutRecipe,
    LoraRecipe,
    OptimizerRecipe,
    TrainRecipe,
)
from specctl.subcommands import SUBCOMMANDS

RECIPES: dict[str, type[CommandRecipe]] = {
    name: pkgutil.resolve_name(f"specctl.{row.recipe}") for name, row in SUBCOMMANDS.items() if row.recipe is not None
}
"""Recipe model of each command, with all keys of the command."""
