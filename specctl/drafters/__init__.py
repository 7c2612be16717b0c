"""Drafters: their families, the drafter directory, and loading a drafter by name."""
