"""Drafters that keep learning while they are used: `specctl online`."""
