"""Python interface to the commands: one function per command, which returns the result document as a dataclass.

    from specctl import api
    api.distill(data__domain="sql", data__limit=500)
    api.train_drafter(recipe="train-drafter/eagle3", max_minutes=5.0)

A recipe is a model of `specctl.recipe`, the path of a YAML file, or the name of a shipped recipe. Keyword arguments
override its keys, with `__` for the dot. Keys of a command that was a mode of another one run that command:
`select(replay="table.parquet")` is `replay(replay="table.parquet")`.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import processes, threads
from specctl.errors import Interrupted
from specctl.progress import RESTART, RESUME, interrupts
from specctl.recipe import (
    RECIPES,
    CommandRecipe,
    ConverterRecipe,
    EvalRecipe,
    PoolRecipe,
    ResumableRecipe,
    RunRecipe,
    TrainRecipe,
    WriterRecipe,
    aliases,
)
from specctl.recipe.resolve import Setting, command_for, resolve
from specctl.reporting.plots import write_matrix
from specctl.runs import Run, path_in_errors
from specctl.subcommands import SUBCOMMANDS, TODAY

if TYPE_CHECKING:
    from specctl.commands.bench import BenchResult
    from specctl.commands.eval import EvalResult
    from specctl.commands.eval_server import ServedResult
    from specctl.commands.export import ExportResult
    from specctl.commands.generate import GenerateResult
    from specctl.commands.import_ import ImportResult
    from specctl.commands.learn_from_server import LearnFromServerResult
    from specctl.commands.online import OnlineResult
    from specctl.commands.report import ReportResult
    from specctl.commands.serve import ServeResult
    from specctl.distillation.collect import DistillResult
    from specctl.measuring.select_result import SelectResult
    from specctl.training.outcome import TrainResult

FUNCTIONS = {name: f"specctl.{row.function}" for name, row in SUBCOMMANDS.items() if row.function is not None}


def distill(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> DistillResult:
    """Sample the target's responses to a domain's prompts, as training data for a drafter."""
    return _result("distill", recipe, overrides)


def train_drafter(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> TrainResult:
    """Train a draft head on distilled data, which must exist: only the command line distils it first."""
    return _result("train-drafter", recipe, overrides)


def evaluate(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> EvalResult:
    """Measure drafters × domains against plain decoding, with the losslessness check."""
    return _result("eval", recipe, overrides)


def evaluate_server(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> ServedResult:
    """Measure the drafter of a running engine by load."""
    return _result("eval-server", recipe, overrides)


def generate(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> GenerateResult:
    """Answer one prompt with and without a drafter."""
    return _result("generate", recipe, overrides)


def select(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> SelectResult:
    """Choose among a pool of drafters while decoding, with every policy on the same stream."""
    return _result("select", recipe, overrides)


def record(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> SelectResult:
    """Record every drafter's drafts at every position of the answers, in a table for `replay`."""
    return _result("record", recipe, overrides)


def replay(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> SelectResult:
    """Play policies on a recorded table, without a model."""
    return _result("replay", recipe, overrides)


def train_router(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> SelectResult:
    """Train a classifier that picks a drafter from the prompt, and measure it beside the policies of `select`."""
    return _result("train-router", recipe, overrides)


def route(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> ServeResult:
    """Earlier spelling of `serve` with running engines."""
    return _result("route", recipe, overrides)


def serve(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> ServeResult:
    """Answer requests in OpenAI's protocol, until a signal arrives."""
    return _result("serve", recipe, overrides)


def online(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> OnlineResult:
    """Learn along a stream, from a drafter that must exist: only the command line warms one up first."""
    return _result("online", recipe, overrides)


def learn_from_server(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> LearnFromServerResult:
    """Learn from the texts of running engines, and publish better drafters into them."""
    return _result("learn-from-server", recipe, overrides)


def reason(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> Any:
    """Draft whole reasoning steps along a stream, with a draft LM that must exist: a `ReasoningResult`."""
    return _result("reason", recipe, overrides)


def bench(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> BenchResult:
    """Time target steps, rounds and batches against their baselines."""
    return _result("bench", recipe, overrides)


def export(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> ExportResult:
    """Write a drafter in the format of vLLM, SGLang, speculators or a reference repository."""
    return _result("export", recipe, overrides)


def import_head(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> ImportResult:
    """Convert a published draft head into a specctl drafter, and try it on a few prompts."""
    return _result("import", recipe, overrides)


def report(runs: Sequence[str | Path] = (), output_dir: str | Path | None = None, *, csv: bool = False) -> ReportResult:
    """Write pictures and one HTML page about run directories (default: the newest in ./runs).

    This command has no recipe and makes no run directory.
    """
    from specctl.commands import report

    return report.report(runs, output_dir, csv=csv)


def execute(command: str, recipe: CommandRecipe) -> tuple[Any, dict[str, Any]]:
    """Run a resolved recipe in its run directory. Returns the result dataclass and the result document.

    Raises the errors of the command, and UsageError if another process is running in that directory.
    """
    # Training synchronizes its processes itself.
    if recipe.target.tensor_parallel > 1 and not isinstance(recipe, TrainRecipe):
        return _execute_sliced(command, recipe)
    return _execute(command, recipe)


def _execute(command: str, recipe: CommandRecipe, place: Path | None = None) -> tuple[Any, dict[str, Any]]:
    """Run a recipe in this process. `place`: run directory to use instead of the recipe's."""
    makers = (WriterRecipe, ConverterRecipe)
    # For these recipes output_dir is the product (data, a drafter); for the others it is the run directory.
    run = Run.create(command, recipe, place or (None if isinstance(recipe, makers) else recipe.output_dir))
    place = getattr(recipe, "output", run.dir)
    try:
        with path_in_errors(place), threads.command_threads(recipe.resources.threads), run.held():
            result = pkgutil.resolve_name(FUNCTIONS[command])(recipe, run)
            document = run.result(dataclasses.asdict(result))
            if "matrix" in document:
                write_matrix(document, run.dir)
    except KeyboardInterrupt:
        interrupts.advice = _how_to_continue(recipe, run)
        raise
    except Interrupted as stop:
        if stop.hint == RESUME:  # otherwise the command has said more
            stop.hint = _how_to_continue(recipe, run)
        raise
    return result, document


def _how_to_continue(recipe: CommandRecipe, run: Run) -> str:
    """Hint for a command that a signal stopped."""
    if not isinstance(recipe, ResumableRecipe):
        return RESTART
    return f"{RESUME} --output-dir {run.dir}" if isinstance(recipe, RunRecipe) else RESUME


def _execute_sliced(command: str, recipe: CommandRecipe) -> tuple[Any, dict[str, Any]]:
    """Run a recipe in every process that holds a slice of the target.

    Rank 0 writes the results. The other ranks work in temporary copies of its directories, so they read the same files
    and take the same decisions. The copies are deleted at the end.
    """
    from specctl.decoding.models.loading import pick_device

    count = recipe.target.tensor_parallel
    processes.join_group(count, pick_device(recipe.target.device))
    settings = recipe.model_dump(mode="json")
    if not processes.is_follower():
        processes.check_same("their recipes", settings)  # also a barrier: the other ranks have made their copies
        return _execute(command, recipe)
    with tempfile.TemporaryDirectory() as scratch:
        run, copy = Path(scratch) / "run", Path(scratch) / "copy"
        run.mkdir()
        original = getattr(recipe, "output", recipe.output_dir)
        if original is not None and original.is_dir():
            shutil.copytree(original, copy)
        copy.mkdir(exist_ok=True)
        processes.check_same("their recipes", settings)
        here = recipe.model_copy(update={"output_dir": copy})
        return _execute(command, here, run if isinstance(recipe, WriterRecipe) else copy)


def _result(command: str, recipe: CommandRecipe | str | Path | None, overrides: dict[str, Any]) -> Any:
    """Resolve and run a recipe. If it names no domains, the domains are those that its drafters were made for."""
    resolved = _recipe(command, recipe, overrides)
    if isinstance(resolved, EvalRecipe):
        from specctl.commands.eval import with_domains_of_drafters

        resolved = with_domains_of_drafters(resolved)
    elif isinstance(resolved, PoolRecipe):
        from specctl.commands.select import with_domains_of_pool
        from specctl.selection.arms import pool_paths

        resolved = with_domains_of_pool(resolved, pool_paths(resolved))
    return execute(command_for(resolved), resolved)[0]


def _recipe(command: str, recipe: CommandRecipe | str | Path | None, overrides: dict[str, Any]) -> CommandRecipe:
    if isinstance(recipe, CommandRecipe):
        if command_for(recipe) not in (TODAY.get(name, name) for name in (command, *aliases.modes_of(command))):
            raise TypeError(
                f"{command} takes a {RECIPES[TODAY.get(command, command)].__name__}, not a {type(recipe).__name__}"
            )
        if overrides:
            raise TypeError("overrides need a recipe file or name; a recipe object is used unchanged")
        return recipe
    settings = [Setting(tuple(name.split("__")), value, f"argument {name}") for name, value in overrides.items()]
    return resolve(command, recipe, flags=settings)
