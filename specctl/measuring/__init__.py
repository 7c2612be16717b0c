"""Measuring: contenders side by side, what they are measured by, and the rows and records that this leaves."""
