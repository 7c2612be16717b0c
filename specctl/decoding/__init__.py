"""Decoding loop: engine, target, KV cache, drafts, and their verification and commit."""
