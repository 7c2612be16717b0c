"""Measurement of drafters and policies: contenders side by side, their metrics, result rows and records."""
