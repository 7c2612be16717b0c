"""Drafters on disk: specctl's own directory."""
