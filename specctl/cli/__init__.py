"""The command line: resolve the recipe, call the library, hand the result to `output`. No heavy imports up here."""
