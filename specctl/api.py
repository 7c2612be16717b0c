"""The commands as functions: they take what the command line takes and return its result documents as dataclasses.

    from specctl import api
    api.distill(data__domain="sql", data__limit=500)
    api.train_drafter(recipe="train-drafter/eagle3", max_minutes=5.0)

A recipe is a model of `specctl.recipe`, a YAML file, or the name of a shipped recipe; keyword arguments override its
keys, with `__` for the dot.
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
from specctl.recipe import (
    RECIPES,
    CommandRecipe,
    ConverterRecipe,
    EvalRecipe,
    SelectRecipe,
    TrainRecipe,
    WriterRecipe,
    model_for,
)
from specctl.recipe.resolve import Setting, resolve
from specctl.reporting import artefacts
from specctl.runs import Run, naming
from specctl.subcommands import SUBCOMMANDS

if TYPE_CHECKING:
    from specctl.commands.bench import BenchResult
    from specctl.commands.eval import EvalResult
    from specctl.commands.export import ExportResult
    from specctl.commands.generate import GenerateResult
    from specctl.commands.import_ import ImportResult
    from specctl.commands.online import OnlineResult
    from specctl.commands.reason import ReasoningResult
    from specctl.commands.report import ReportResult
    from specctl.commands.select import SelectResult
    from specctl.commands.select_served import ServedSelectResult
    from specctl.distillation.result import DistillResult
    from specctl.training.outcome import TrainResult

FUNCTIONS = {name: f"specctl.{row.function}" for name, row in SUBCOMMANDS.items() if row.function is not None}


def distill(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> DistillResult:
    """Responses of the target to a domain's prompts, as data for a drafter."""
    return execute("distill", _recipe("distill", recipe, overrides))[0]


def train_drafter(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> TrainResult:
    """Train a draft head on distilled data (which must be there: only the command line distils first)."""
    return execute("train-drafter", _recipe("train-drafter", recipe, overrides))[0]


def evaluate(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> EvalResult:
    """Measure drafters × domains against plain decoding, with the losslessness check."""
    from specctl.commands.eval import with_domains_of_drafters

    resolved = _recipe("eval", recipe, overrides)
    assert isinstance(resolved, EvalRecipe)
    return execute("eval", with_domains_of_drafters(resolved))[0]


def generate(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> GenerateResult:
    """Answer one prompt with and without a drafter."""
    return execute("generate", _recipe("generate", recipe, overrides))[0]


def select(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> SelectResult | ServedSelectResult:
    """Choose among a pool of drafters while decoding, every policy on the same stream; or among servers, until a signal
    comes."""
    from specctl.commands.select import with_domains_of_pool
    from specctl.selection.arms import members

    resolved = _recipe("select", recipe, overrides)
    assert isinstance(resolved, SelectRecipe)
    if resolved.server.urls:
        return execute("select", resolved)[0]
    return execute("select", with_domains_of_pool(resolved, members(resolved)))[0]


def online(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> OnlineResult | ReasoningResult:
    """Drafters that learn along a stream, from one that must be there: only the command line warms up first."""
    return execute("online", _recipe("online", recipe, overrides))[0]


def bench(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> BenchResult:
    """Time kernels, target steps and batches against their baselines."""
    return execute("bench", _recipe("bench", recipe, overrides))[0]


def export(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> ExportResult:
    """Write a drafter as vLLM, SGLang, speculators or a reference repository reads it."""
    return execute("export", _recipe("export", recipe, overrides))[0]


def import_head(recipe: CommandRecipe | str | Path | None = None, **overrides: Any) -> ImportResult:
    """Convert someone else's head into a drafter of ours, and try it on a few prompts."""
    return execute("import", _recipe("import", recipe, overrides))[0]


def report(runs: Sequence[str | Path] = (), output_dir: str | Path | None = None, *, csv: bool = False) -> ReportResult:
    """Pictures and one HTML page of run directories (default: the newest in ./runs); it has no recipe, and no run."""
    from specctl.commands import report

    return report.report(runs, output_dir, csv=csv)


def execute(command: str, recipe: CommandRecipe) -> tuple[Any, dict[str, Any]]:
    """Run a resolved recipe in a run directory of its own. Returns the result dataclass and the result document.

    Raises what the command raises, and UsageError where another process runs in that directory.
    """
    if recipe.target.tensor_parallel > 1 and not isinstance(recipe, TrainRecipe):  # whose processes know each other
        return _execute_as_one(command, recipe)
    return _execute(command, recipe)


def _execute(command: str, recipe: CommandRecipe, place: Path | None = None) -> tuple[Any, dict[str, Any]]:
    """`execute` in this process. `place`: of the run, if the recipe's own is not meant."""
    makers = (WriterRecipe, ConverterRecipe)
    # Their output_dir is what it makes (data, a drafter); other commands make nothing but their run directory.
    run = Run.create(command, recipe, place or (None if isinstance(recipe, makers) else recipe.output_dir))
    place = getattr(recipe, "output", run.dir)
    with naming(place), threads.chosen(recipe.resources.threads), run.held():
        result = pkgutil.resolve_name(FUNCTIONS[command])(recipe, run)
        document = run.result(dataclasses.asdict(result))
        artefacts.write(document, run.dir)
    return result, document


def _execute_as_one(command: str, recipe: CommandRecipe) -> tuple[Any, dict[str, Any]]:
    """`execute` in every process that holds a slice of the target. The first one writes; what the others write goes
    into copies of its directories, which are thrown away: so they read what it reads, and do what it does."""
    from specctl.decoding.models.loading import pick_device

    count = recipe.target.tensor_parallel
    processes.join(count, pick_device(recipe.target.device))
    told = recipe.model_dump(mode="json")
    if not processes.follows():
        processes.same("their recipes", told)  # waits for the copies
        return _execute(command, recipe)
    with tempfile.TemporaryDirectory() as scratch:
        run, copy = Path(scratch) / "run", Path(scratch) / "copy"
        run.mkdir()
        original = getattr(recipe, "output", recipe.output_dir)
        if original is not None and original.is_dir():
            shutil.copytree(original, copy)
        copy.mkdir(exist_ok=True)
        processes.same("their recipes", told)
        here = recipe.model_copy(update={"output_dir": copy})
        return _execute(command, here, run if isinstance(recipe, WriterRecipe) else copy)


def _recipe(command: str, recipe: CommandRecipe | str | Path | None, overrides: dict[str, Any]) -> CommandRecipe:
    if isinstance(recipe, CommandRecipe):
        if not isinstance(recipe, (RECIPES[command], model_for(command, dict(recipe)))):
            raise TypeError(f"{command} takes a {RECIPES[command].__name__}, not a {type(recipe).__name__}")
        if overrides:
            raise TypeError("overrides go with a recipe file or name; a recipe object is used as it is")
        return recipe
    settings = [Setting(tuple(name.split("__")), value, f"argument {name}") for name, value in overrides.items()]
    return resolve(command, recipe, flags=settings)
