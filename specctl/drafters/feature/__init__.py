"""Heads on the target's hidden states: code shared by several families."""
