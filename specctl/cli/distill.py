"""`specctl distill`: the target generates training data for its drafter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import regular_files
from specctl.cli import checks
from specctl.cli.command import recipe_command, run_or_plan
from specctl.cli.options import TARGET
from specctl.cli.output import fields, with_next
from specctl.errors import DataError, near_path
from specctl.threads import counted

if TYPE_CHECKING:
    from specctl.recipe import DataRecipe, DistillRecipe

FLAGS = (
    *("domain", "prompts", "data_limit", *TARGET),
    *("max_new_tokens", "temperatures", "top_p", "top_k", "exact", "seed"),
    *("from_log", "exclude", "server", "shard", "output_dir", "resume", "overwrite"),
)


@recipe_command("distill", FLAGS, "specctl distill --domain sql --prompts sql.jsonl --temperature 0,0.7")
def distill(recipe: DistillRecipe, dry_run: bool) -> None:
    """Generate training data for a drafter: the target's responses to a domain's prompts."""
    if recipe.log is None:
        checks.check_data(recipe.data)
    else:
        check_log(recipe, recipe.log)
    check_excluded(recipe)
    shared = recipe.shard != "0/1"  # the jobs of an array share one directory, and each writes its shards
    checks.check_output("distill", recipe.output, resume=recipe.resume or shared, overwrite=recipe.overwrite)
    run_or_plan("distill", recipe, dry_run, lambda: steps(recipe), partial(show, recipe=recipe), "output")


def show(document: dict[str, Any], recipe: DistillRecipe) -> Any:
    """Render the result, and the command that trains on it, unless other jobs write the rest of the data."""
    shown = fields(document)
    if recipe.shard != "0/1":
        return shown
    place = [f"distilled={recipe.output_dir}"] if recipe.output_dir else []
    named = [*checks.target_flags(recipe.target), "--domain", ",".join(recipe.data.domain), *place]
    return with_next(shown, ["specctl", "train-drafter", *named])


def check_log(recipe: DistillRecipe, log: str) -> None:
    """Check that the log begins with responses, and that its domain can name a directory. A pipe can be read only once.

    Raises UsageError, DataError.
    """
    from specctl.distillation.logs import check_beginning

    checks.check_label(recipe.data.domain[0])
    if log != "-" and not (Path(log).is_file() or Path(log).is_fifo()):  # the shell's `<(…)` is a pipe
        hint = f"{near_path(log)}give a log of responses, or - for stdin"
        raise DataError(f"log file {log} {regular_files.fault(log)}", hint)
    if Path(log).is_file():
        check_beginning(log, recipe.data.max_rejected)


def check_excluded(recipe: DistillRecipe) -> None:
    """Check that the file of excluded prompts begins with a prompt. A pipe can be read only once. Raises DataError."""
    from specctl.distillation.prompts import prompts_in

    if recipe.exclude is not None and not (str(recipe.exclude) == "-" or recipe.exclude.is_fifo()):
        next(prompts_in(recipe.exclude), None)


def server_step(recipe: DistillRecipe) -> str:
    """Return one line about the servers, without asking them. Raises CheckpointError if no engine runs the target."""
    checks.target_config(recipe.target)
    server = recipe.server
    return (
        f"request responses of {recipe.target.name} from {', '.join(server.urls)}, {server.concurrency} at a time; "
        "the servers are not checked"
    )


def steps(recipe: DistillRecipe) -> list[str]:
    data = recipe.data
    if recipe.log is not None:
        checks.target_config(recipe.target)
        return [
            f"read the responses in {recipe.log}, and render them with the chat template of {recipe.target.name}",
            *prompt_filters(recipe),
            *response_filters(recipe),
            f"write shards to {recipe.output}",
        ]
    temperatures = ", ".join(f"{temperature:g}" for temperature in recipe.temperatures)
    return [
        server_step(recipe) if recipe.server.urls else checks.check_target(recipe.target),
        f"read {checks.up_to(data.limit, 'prompt')} {origin(data)} for {', '.join(data.domain)}",
        *prompt_filters(recipe),
        f"generate {counted(recipe.samples_per_prompt, 'response')} per prompt, up to "
        f"{counted(recipe.sampling.max_new_tokens, 'token')} each, at temperatures {temperatures}",
        *response_filters(recipe),
        f"write shards to {recipe.output}",
    ]


def origin(data: DataRecipe) -> str:
    """Say where the prompts come from, after the word "prompts"."""
    words = {"public": "of the public data set", "unconditional": "(empty)"}
    return f"from {data.prompts}" if data.prompts else words.get(data.source, "of the built-in generator")


def prompt_filters(recipe: DistillRecipe) -> list[str]:
    near, kinds = recipe.filters.near_excluded, ["duplicates"]
    if recipe.exclude is not None:
        alike = f" and near-duplicates of them (similarity {near:g})" if near is not None else ""
        kinds.append(f"the prompts in {recipe.exclude}{alike}")
    return [f"leave out {', '.join(kinds)}"]


def response_filters(recipe: DistillRecipe) -> list[str]:
    loops, truncated = recipe.filters.loops, recipe.filters.truncated
    kinds = [f"{loops} loops"] if loops != "keep" else []
    kinds += ["drop truncated responses"] if truncated == "drop" else []
    return [f"filter the responses: {', '.join(kinds)}"] if kinds else []
