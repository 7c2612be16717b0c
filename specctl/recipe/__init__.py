"""Typed recipes: all options of the commands, with every default declared once, here.

If a field is None, the library chooses its value: a measured default for the drafter family and the device, or a path
that depends on the domain. Loading, overrides and error reports are in `specctl.recipe.resolve`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any

from specctl.recipe.bench import BenchRecipe
from specctl.recipe.distill import DistillRecipe, FilterRecipe
from specctl.recipe.eval import EvalRecipe
from specctl.recipe.export import ExportRecipe
from specctl.recipe.generate import GenerateRecipe
from specctl.recipe.import_ import ImportRecipe
from specctl.recipe.learner import LearnerOptions, LearnerRecipe
from specctl.recipe.lookahead import LOOKAHEAD_CHUNK, REASONING, JudgeRecipe, LookaheadRecipe, PreferenceRecipe
from specctl.recipe.online import OnlineRecipe, PublicationRecipe
from specctl.recipe.reasoning import ReasonRecipe
from specctl.recipe.router import Perturbation, RouterRecipe
from specctl.recipe.sections import (
    CommandRecipe,
    ConverterRecipe,
    DataRecipe,
    DraftingRecipe,
    Gpu,
    ResourceRecipe,
    SamplingRecipe,
    Section,
    TargetRecipe,
    WriterRecipe,
)
from specctl.recipe.select import GameRecipe, PolicyRecipe, SelectRecipe
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
    "FilterRecipe",
    "GameRecipe",
    "GenerateRecipe",
    "Gpu",
    "HeldOutRecipe",
    "ImportRecipe",
    "JudgeRecipe",
    "LearnerOptions",
    "LearnerRecipe",
    "LearningRecipe",
    "LookaheadRecipe",
    "LoraRecipe",
    "OnlineRecipe",
    "OptimizerRecipe",
    "Perturbation",
    "PolicyRecipe",
    "PreferenceRecipe",
    "PublicationRecipe",
    "ReasonRecipe",
    "ResourceRecipe",
    "RouterRecipe",
    "SamplingRecipe",
    "Section",
    "SelectRecipe",
    "ServerRecipe",
    "StreamRecipe",
    "TargetRecipe",
    "TrainRecipe",
    "WriterRecipe",
]

RECIPES: dict[str, type[CommandRecipe]] = {
    name: pkgutil.resolve_name(f"specctl.{row.recipe}") for name, row in SUBCOMMANDS.items() if row.recipe is not None
}
"""Recipe model of each command, with all keys of the command."""


def model_for(command: str, values: Mapping[str, Any]) -> type[CommandRecipe]:
    """Return the recipe model of a command for these values: `online` has a second model for lookahead reasoning."""
    algo = values.get("algo", "")
    named = algo.split(",") if isinstance(algo, str) else algo
    steps = command == "online" and isinstance(named, list) and any(name in REASONING for name in named)
    return ReasonRecipe if steps else RECIPES[command]
