"""Measuring: metrics of finished sequences, baselines, losslessness, the drafter × domain matrix."""
