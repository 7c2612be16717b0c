"""Environment variables that are not recipe keys."""

import os

from specctl.errors import UsageError

ENV_SWITCHES = {
    "SPECCTL_KERNELS": ("reference", "cpu", "triton"),
    "SPECCTL_GRAPHS": ("0", "1", "eager"),
    "SPECCTL_ATTENTION": ("kernel", "sdpa"),
    "SPECCTL_LAYERS": ("fused", "plain"),
    "SPECCTL_KV": ("paged", "contiguous"),
    "SPECCTL_STEP": ("native", "torch", "avx512-bf16", "avx512", "avx2"),
    "SPECCTL_GGUF": ("quantized", "dequantized"),
}
"""Switches with their values; kernel dispatch and decoding loop read them."""
ENV_SIZES = ("SPECCTL_KV_GIB",)
"""Variables with a number of GiB as their value."""
ENV_SECRETS = ("SPECCTL_API_KEY", "SPECCTL_SERVE_KEY")
"""Keys of servers. They are read where they are sent or compared, and stored nowhere."""


def switch(name: str) -> str | None:
    """Return the value of one of `ENV_SWITCHES`, or None if it is not set. Raises UsageError for another value."""
    chosen = os.environ.get(name) or None
    if chosen is not None and chosen not in ENV_SWITCHES[name]:
        raise UsageError(f"{name}={chosen!r} is not a valid value", f"use one of {', '.join(ENV_SWITCHES[name])}")
    return chosen
