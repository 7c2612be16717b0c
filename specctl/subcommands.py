"""The table of subcommands, in the order of help: a row is all that is known of one outside of its own modules.

Nothing is imported here, as help texts read it, too: things are named by their path, `module:name`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Subcommand:
    """Facts of one; None where it has no such thing.

    Attributes:
        cli: module with `register(app)`.
        recipe: class of its recipe.
        function: of (recipe, run), what `api` runs.
        report: maker of its part of a report; without one its results are shown as tables.
        smaller: recipe keys to lower or to set when memory runs out.
    """

    cli: str
    recipe: str | None
    function: str | None
    report: str | None
    smaller: tuple[str, ...]


DECODING = ("sampling.max_new_tokens", "target.dtype=bf16", "target.device_map=auto")
SUBCOMMANDS = {
    "generate": Subcommand(
        "specctl.cli.generate",
        recipe="specctl.recipe.decode:GenerateRecipe",
        function="specctl.commands.generate:generate",
        report=None,
        smaller=DECODING,
    ),
    "distill": Subcommand(
        "specctl.cli.distill",
        recipe="specctl.recipe.distill:DistillRecipe",
        function="specctl.distillation.generate:distill",
        report=None,
        smaller=("batch_size", "sampling.max_new_tokens", "target.device_map=auto"),
    ),
    "train-drafter": Subcommand(
        "specctl.cli.train_drafter",
        recipe="specctl.recipe.train:TrainRecipe",
        function="specctl.training.loop:train_drafter",
        report="specctl.reporting.commands.training:contents",
        smaller=(
            "batch_tokens",
            "max_length",
            "gradient_checkpointing=true",
            "zero_stage=2",
            "features.mode=online",
            "target.device_map=auto",
        ),
    ),
    "online": Subcommand(
        "specctl.cli.online",
        recipe="specctl.recipe.online:OnlineRecipe",
        function="specctl.commands.online:online",
        report="specctl.reporting.commands.online:contents",
        smaller=("batch", *DECODING),
    ),
    "select": Subcommand(
        "specctl.cli.select",
        recipe="specctl.recipe.decode:SelectRecipe",
        function="specctl.commands.select:select",
        report="specctl.reporting.commands.selection:contents",
        smaller=("batch", *DECODING),
    ),
    "eval": Subcommand(
        "specctl.cli.eval",
        recipe="specctl.recipe.decode:EvalRecipe",
        function="specctl.commands.eval:evaluate",
        report="specctl.reporting.commands.evaluation:contents",
        smaller=DECODING,
    ),
    "bench": Subcommand(
        "specctl.cli.bench",
        recipe="specctl.recipe.decode:BenchRecipe",
        function="specctl.commands.bench:bench",
        report="specctl.reporting.commands.bench:contents",
        smaller=("batches", "vocabularies", "context"),
    ),
    "export": Subcommand(
        "specctl.cli.export",
        recipe="specctl.recipe.convert:ExportRecipe",
        function="specctl.commands.export:export",
        report=None,
        smaller=(),  # the drafter is all that it loads
    ),
    "import": Subcommand(
        "specctl.cli.import_",
        recipe="specctl.recipe.convert:ImportRecipe",
        function="specctl.commands.import_:import_head",
        report=None,
        smaller=(),
    ),
    "report": Subcommand("specctl.cli.report", recipe=None, function=None, report=None, smaller=()),
    "recipes": Subcommand("specctl.cli.recipes", recipe=None, function=None, report=None, smaller=()),
    "domains": Subcommand("specctl.cli.domains", recipe=None, function=None, report=None, smaller=()),
    "doctor": Subcommand("specctl.cli.doctor", recipe=None, function=None, report=None, smaller=()),
}
