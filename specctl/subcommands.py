"""Table of subcommands, in the order of help. A row holds everything that code outside a subcommand's modules knows.

This module imports no other module of specctl, because help texts read it. It names modules, classes and functions by
their path in `specctl`: `module`, or `module:name`.
"""

from dataclasses import dataclass

LAB = "Experiments of the papers"
"""Panel of the help for the commands of `specctl.lab`."""


@dataclass(frozen=True)
class Subcommand:
    """One subcommand.

    Attributes:
        cli: path of its module, which registers it.
        recipe: path of its recipe class, or None for a command without a recipe and without runs.
        function: path of the function of (recipe, run) that `api` calls, or None.
        memory_keys: recipe keys that the hint names, to lower or to set, when memory runs out.
        report: its module in `specctl.reporting.commands`, with `contents(runs, looks)`, or None to report its results
            as tables only.
        earlier: the command that had this one as a mode, or None. Recipe files and run directories of that command
            also belong to this one.
        formerly: a command that is a part of this one today, or None. Its command lines, recipe files and run
            directories belong to this one, too.
        panel: panel of the help that lists it, or None for the main one.
    """

    cli: str
    recipe: str | None
    function: str | None
    memory_keys: tuple[str, ...]
    report: str | None
    earlier: str | None = None
    formerly: str | None = None
    panel: str | None = None


SPREAD = "target.device_map=auto"
DISTILLING = ("batch_size", "sampling.max_new_tokens", SPREAD)
DECODING = ("sampling.max_new_tokens", "target.dtype=bf16", SPREAD)
BENCH = ("batches", "context")
TRAINING = ("batch_tokens", "max_length", "gradient_checkpointing=true", "zero_stage=2", "features.mode=online", SPREAD)
SUBCOMMANDS = {
    "generate": Subcommand(
        "cli.generate", "recipe.generate:GenerateRecipe", "commands.generate:generate", DECODING, None
    ),
    "distill": Subcommand(
        "cli.distill", "recipe.distill:DistillRecipe", "distillation.generate:distill", DISTILLING, "distillation"
    ),
    "train-drafter": Subcommand(
        "cli.train_drafter", "recipe.train:TrainRecipe", "training.loop:train_drafter", TRAINING, "training"
    ),
    "online": Subcommand(
        "cli.online", "recipe.online:OnlineRecipe", "commands.online:online", ("batch", *DECODING), "online"
    ),
    "learn-from-server": Subcommand(
        "cli.learn_from_server",
        "recipe.learn_from_server:LearnFromServerRecipe",
        "commands.learn_from_server:learn_from_server",
        DECODING[1:],
        "online_served",
        earlier="online",
    ),
    "select": Subcommand(
        "cli.select", "recipe.select:SelectRecipe", "commands.select:select", ("batch", *DECODING), "selection"
    ),
    "serve": Subcommand(
        "cli.serve",
        "recipe.serve:ServeRecipe",
        "commands.serve:serve",
        ("slots", *DECODING[1:]),
        "serving",
        formerly="route",
    ),
    "eval": Subcommand(
        "cli.eval",
        "recipe.eval:EvalRecipe",
        "commands.eval:evaluate",
        ("baselines=[vanilla]", *DECODING),
        "evaluation",
    ),
    "eval-server": Subcommand(
        "cli.eval_server",
        "recipe.eval:EvalServerRecipe",
        "commands.eval_server:evaluate_server",
        (),
        "eval_served",
        earlier="eval",
    ),
    "bench": Subcommand("cli.bench", "recipe.bench:BenchRecipe", "commands.bench:bench", BENCH, "bench"),
    "export": Subcommand("cli.export", "recipe.export:ExportRecipe", "commands.export:export", (), None),
    "import": Subcommand("cli.import_", "recipe.export:ImportRecipe", "commands.import_:import_head", (), None),
    "report": Subcommand("cli.report", None, None, (), None),
    "recipes": Subcommand("cli.recipes", None, None, (), None),
    "domains": Subcommand("cli.domains", None, None, (), None),
    "doctor": Subcommand("cli.doctor", None, None, (), None),
    "guide": Subcommand("cli.guide", None, None, (), None),
    "record": Subcommand(
        "lab.record.show",
        "lab.record.recipe:RecordRecipe",
        "lab.record.run:record_pool",
        DECODING,
        "selection",
        earlier="select",
        panel=LAB,
    ),
    "replay": Subcommand(
        "lab.replay.show",
        "lab.replay.recipe:ReplayRecipe",
        "lab.replay.run:play_table",
        (),
        "selection",
        earlier="select",
        panel=LAB,
    ),
    "train-router": Subcommand(
        "lab.train_router.show",
        "lab.train_router.recipe:TrainRouterRecipe",
        "lab.train_router.run:train_and_play",
        ("batch", *DECODING),
        "selection",
        earlier="select",
        panel=LAB,
    ),
    "reason": Subcommand(
        "lab.reason.show",
        "lab.reason.recipe:ReasonRecipe",
        "lab.reason.run:reason",
        ("reasoning.budget", "target.dtype=bf16", SPREAD),
        "reasoning",
        earlier="online",
        panel=LAB,
    ),
}

TODAY = {row.formerly: name for name, row in SUBCOMMANDS.items() if row.formerly}
"""Former command → the command that it is a part of today."""
