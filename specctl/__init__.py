"""specctl: train, adapt, select and measure draft heads for speculative decoding."""

import os

__version__ = "0.1.0"

# GNU OpenMP reads this once, when torch is imported. Threads that wait for others spin 300,000 times by default, some
# milliseconds, before they free their core. If another process is busy, the last thread often needs that
# core: a step of two threads then took 980 ms instead of 13, and with 20,000 spins 96. With 2,000 spins it took 46, but
# training on an idle machine lost a fifth of its speed; with 20,000 it loses nothing. Child processes inherit it. It
# has no effect if torch was imported before.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
