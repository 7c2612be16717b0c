"""Forwards of targets and draft LMs (the lean one and `transformers`' own), and loading of weights."""
