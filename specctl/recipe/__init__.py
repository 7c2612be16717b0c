"""The typed recipe: everything a command can be told, each default declared once, here.

A field that is None is decided by the library (a measured default of the drafter family and device, a path derived from
the domain). Loading, overrides and error reports are in `specctl.recipe.resolve`.
"""

from __future__ import annotations

import pkgutil

from specctl.recipe.convert import ConverterRecipe, ExportRecipe, ImportRecipe
from specctl.recipe.decode import BenchRecipe, EvalRecipe, GenerateRecipe, SelectRecipe
from specctl.recipe.distill import DistillRecipe
from specctl.recipe.learner import LearnerOptions, LearnerRecipe
from specctl.recipe.lookahead import LOOKAHEAD_CHUNK, JudgeRecipe, LookaheadRecipe, PreferenceRecipe
from specctl.recipe.online import OnlineRecipe
from specctl.recipe.router import Perturbation, RouterRecipe
from specctl.recipe.sections import (
    CommandRecipe,
    DataRecipe,
    DraftingRecipe,
    Gpu,
    ResourceRecipe,
    SamplingRecipe,
    Section,
    TargetRecipe,
    WriterRecipe,
)
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.recipe.stream import StreamRecipe
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

__all__ = [
    "LOOKAHEAD_CHUNK",
    "RECIPES",
    "Arch",
    "BenchRecipe",
    "CheckpointRecipe",
    "CommandRecipe",
    "ConverterRecipe",
    "DataRecipe",
    "DistillRecipe",
    "DrafterRecipe",
    "DraftingRecipe",
    "EvalRecipe",
    "ExportRecipe",
    "FeatureRecipe",
    "GameRecipe",
    "GenerateRecipe",
    "Gpu",
    "HeldOutRecipe",
    "ImportRecipe",
    "JudgeRecipe",
    "LearnerOptions",
    "LearnerRecipe",
    "LookaheadRecipe",
    "LoraRecipe",
    "OnlineRecipe",
    "OptimizerRecipe",
    "Perturbation",
    "PolicyRecipe",
    "PreferenceRecipe",
    "ResourceRecipe",
    "RouterRecipe",
    "SamplingRecipe",
    "Section",
    "SelectRecipe",
    "StreamRecipe",
    "TargetRecipe",
    "TrainRecipe",
    "WriterRecipe",
]

RECIPES: dict[str, type[CommandRecipe]] = {
    name: pkgutil.resolve_name(f"specctl.{row.recipe}") for name, row in SUBCOMMANDS.items() if row.recipe is not None
}
"""The recipe model of each command."""
