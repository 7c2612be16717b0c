"""Table of subcommands, in the order of help. A row holds everything that code outside a subcommand's modules knows.

This module imports no other module of specctl, because help texts read it. It names classes and functions by their path
in `specctl`, `module:name`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Subcommand:
    """One subcommand.

    Attributes:
        cli: its module in `specctl.cli`, with a function `register(app)`.
        recipe: path of its recipe class, or None for a command without a recipe and without runs.
        function: path of the function of (recipe, run) that `api` calls, or None.
        memory_keys: recipe keys that the hint names, to lower or to set, when memory runs out.
        report: its module in `specctl.reporting.commands`, with `contents(runs, looks)`, or None to report its results
            as tables only.
    """

    cli: str
    recipe: str | None
    function: str | None
    memory_keys: tuple[str, ...]
    report: str | None


SPREAD = "target.device_map=auto"
DISTILLING = ("batch_size", "sampling.max_new_tokens", SPREAD)
DECODING = ("sampling.max_new_tokens", "target.dtype=bf16", SPREAD)
BENCH = ("batches", "vocabularies", "context")
TRAINING = ("batch_tokens", "max_length", "gradient_checkpointing=true", "zero_stage=2", "features.mode=online", SPREAD)
SUBCOMMANDS = {
    "generate": Subcommand("generate", "recipe.generate:GenerateRecipe", "commands.generate:generate", DECODING, None),
    "distill": Subcommand(
        "distill", "recipe.distill:DistillRecipe", "distillation.generate:distill", DISTILLING, "distillation"
    ),
    "train-drafter": Subcommand(
        "train_drafter", "recipe.train:TrainRecipe", "training.loop:train_drafter", TRAINING, "training"
    ),
    "online": Subcommand(
        "online", "recipe.online:OnlineRecipe", "commands.online:online", ("batch", *DECODING), "online"
    ),
    "select": Subcommand(
        "select", "recipe.select:SelectRecipe", "commands.select:select", ("batch", *DECODING), "selection"
    ),
    "eval": Subcommand("eval", "recipe.eval:EvalRecipe", "commands.eval:evaluate", DECODING, "evaluation"),
    "bench": Subcommand("bench", "recipe.bench:BenchRecipe", "commands.bench:bench", BENCH, "bench"),
    "export": Subcommand("export", "recipe.export:ExportRecipe", "commands.export:export", (), None),
    "import": Subcommand("import_", "recipe.import_:ImportRecipe", "commands.import_:import_head", (), None),
    "report": Subcommand("report", None, None, (), None),
    "recipes": Subcommand("recipes", None, None, (), None),
    "domains": Subcommand("domains", None, None, (), None),
    "doctor": Subcommand("doctor", None, None, (), None),
    "guide": Subcommand("guide", None, None, (), None),
}
