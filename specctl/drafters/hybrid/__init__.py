"""Hybrids: a trained drafter and a text drafter in one tree."""
