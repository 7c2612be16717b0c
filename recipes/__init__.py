"""Recipes shipped with the package: YAML per command, DeepSpeed JSON. Read through `specctl.recipe.resolve`."""
