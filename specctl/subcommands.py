"""The table of subcommands, in the order of help: a row is all that is known of one outside of its own modules.

Nothing is imported here, as help texts read it, too: things are named by their path in `specctl`, `module:name`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Subcommand:
    """Facts of one.

    Attributes:
        cli: module of `specctl.cli`, with `register(app)`.
        recipe: class of its recipe; None = it has no recipe, and no run.
        function: what `api` runs, of (recipe, run).
        smaller: recipe keys to lower or to set when memory runs out.
        report: module of `specctl.reporting.commands`, with `contents(runs, looks)`; None = its results are shown as
            tables.
    """

    cli: str
    recipe: str | None
    function: str | None
    smaller: tuple[str, ...]
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
