"""Decoding rounds that run on the device without waiting for the host, and their CUDA graphs."""
