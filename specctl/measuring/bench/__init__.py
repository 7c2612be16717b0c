"""Benchmarks of target steps, batches and rounds against their baselines."""
