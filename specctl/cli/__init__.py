"""The command line: resolves the recipe, calls the library, prints the result. Heavy imports are in the functions."""
