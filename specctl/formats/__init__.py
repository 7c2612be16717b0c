"""Formats of engines and other repositories: their directories of draft heads, read and written."""
