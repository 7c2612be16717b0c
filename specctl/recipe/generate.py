"""Recipe of `specctl generate`."""

from specctl.recipe.sections import CommandRecipe, DraftingRecipe, Name, SamplingRecipe


class GenerateRecipe(CommandRecipe):
    """`specctl generate`: answer one prompt with and without a drafter."""

    sliceable = True

    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    prompt: str | None = None
    drafter: Name | None = None
    save_outputs: bool = False
    overwrite: bool = False
