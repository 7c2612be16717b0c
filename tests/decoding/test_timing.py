"""Timing of functions in turn."""

import signal

import pytest
import torch

from specctl.decoding.timing import medians
from specctl.errors import Interrupted
from specctl.progress import interrupts


def test_a_signal_ends_the_timing_within_a_call():
    calls = []

    def signalled():
        calls.append(interrupts.handle(signal.SIGTERM))

    try:
        with pytest.raises(Interrupted):
            medians({"one": signalled, "other": signalled}, 20, torch.device("cpu"))
    finally:
        interrupts.reset()
    assert len(calls) == 1
