"""Family `mtp`: the target's own multi-token prediction layer, fine-tuned (FastMTP)."""
