"""Drafters that copy from text: `lookup`, `suffix`, and code shared with `retrieval`."""
