"""Decoding: the engine and its records, the target, its cache, and how a draft is verified and committed."""
