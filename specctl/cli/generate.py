"""`specctl generate`: answer one prompt with and without a drafter, as a first look."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from specctl import progress
from specctl.cli import checks
from specctl.cli.command import Operand, recipe_command, run_or_plan
from specctl.cli.options import SAMPLING, TARGET
from specctl.cli.output import cell, fields
from specctl.errors import DataError, UsageError
from specctl.reporting.tables import unusable_notes, with_mark

if TYPE_CHECKING:
    from specctl.recipe import GenerateRecipe

FLAGS = ("drafter", *TARGET, *SAMPLING, "save_outputs", "output_dir", "overwrite")
NUMBERS = (
    *("drafter", "tokens", "mat", "accept_rate", "tokens_per_s", "vanilla_tokens_per_s", "speedup", "identical"),
    *("machine", "run_dir"),
)


@recipe_command(
    "generate",
    FLAGS,
    'specctl generate "How many students are there?" --drafter drafters/sql-eagle3',
    Operand("prompt", "Prompt to answer; - reads stdin."),
)
def generate(recipe: GenerateRecipe, dry_run: bool) -> None:
    """Answer one prompt with and without a drafter, and show the difference. Prompt - reads stdin."""
    checks.check_drafters([recipe.drafter] if recipe.drafter else [], recipe.drafting)
    checks.check_run_dir("generate", recipe)
    recipe = recipe.model_copy(update={"prompt": prompt_of(recipe)})
    run_or_plan("generate", recipe, dry_run, lambda: steps(recipe), show, "text")


def prompt_of(recipe: GenerateRecipe) -> str:
    """Return the prompt: as given, from stdin, or the first prompt of the SQL generator."""
    if recipe.prompt is None:
        from specctl import data_prep

        progress.log("no prompt given: answering one from the SQL generator (--json shows it)")
        return next(data_prep.get("sql").generate(1, recipe.sampling.seed, "test"))
    try:
        if recipe.prompt == "-":
            from specctl.distillation.line_streams import open_prompts

            with open_prompts("-") as file:
                text = file.read().decode("utf-8-sig")
        else:
            text = recipe.prompt
            text.encode()  # bytes that are not UTF-8 have become surrogates
    except UnicodeError:
        raise DataError("the prompt is not UTF-8") from None
    if os.path.isfile(text):
        progress.warn(f"the prompt is the name of a file; its content is the prompt of specctl generate - < {text}")
    if not text.strip():
        raise UsageError("the prompt is empty", hint='specctl generate "your question"')
    return text


def steps(recipe: GenerateRecipe) -> list[str]:
    how = f"without a drafter and with {recipe.drafter}" if recipe.drafter else "without a drafter"
    target = checks.check_target(recipe.target, filter(None, [recipe.drafter]))
    return [target, f"decode up to {recipe.sampling.max_new_tokens} tokens, {how}"]


def show(document: dict[str, Any]) -> Any:
    """Render the text, with accepted draft tokens in color, then the numbers."""
    from rich.console import Group
    from rich.text import Text

    text = Text()
    for piece in document["pieces"]:
        text.append(piece["text"], style="green" if piece["accepted"] else "")
    numbers = {name: with_mark(document, name) for name in NUMBERS if document[name] is not None}
    return Group(text, "", fields(numbers), *map(cell, unusable_notes(document)))
