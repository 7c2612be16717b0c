"""The forwards of targets and draft LMs: the lean one, that of transformers, and how weights are found and read."""
