"""Self-distillation: the prompts of a domain, the target's responses, and the shards that store them."""
