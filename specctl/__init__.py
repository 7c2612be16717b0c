"""specctl: train, adapt, select and measure draft heads for speculative decoding."""

__version__ = "0.1.0"
