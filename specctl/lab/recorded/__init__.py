"""Recorded tables: the drafts of every drafter at every position, to replay policies without a model."""
