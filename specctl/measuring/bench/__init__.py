"""Benchmarks of kernels, target steps, batches and rounds against their baselines, and floors from data sheets."""
