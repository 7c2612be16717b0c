"""Recorded tables: what every drafter would have done at every position, and policies replayed on it."""
