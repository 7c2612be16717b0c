"""Rounds that run on a GPU without the host."""
