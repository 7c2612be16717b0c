"""Self-distillation: prompts of a domain, the target's responses to them, and the shards they are kept in."""
