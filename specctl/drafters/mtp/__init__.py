"""Family `mtp`: the target's own layer for multi-token prediction, fine-tuned (FastMTP)."""
