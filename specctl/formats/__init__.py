"""Readers and writers for the draft-head directories of engines and other repositories."""
