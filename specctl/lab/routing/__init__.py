"""The router: a classifier of prompts, its labels and its training."""
