"""Per-sequence state of drafters, and the sequences that a drafter reads separately."""

import pytest
import torch

from specctl.decoding.state import PerText, lagging_sequences


def test_per_text_memory_follows_its_sequence():
    memory = PerText(list, 3)
    a, _, c = memory.rows
    memory.select(torch.tensor([2, 0]))
    assert memory.rows[0] is c and memory.rows[1] is a
    memory.rows[0].append(1)
    memory.renew(0)
    assert memory.rows[0] == [] and memory.rows[1] is a


@pytest.mark.parametrize(
    ("missing", "device", "alone"),
    [
        ([3, 90, 1], "cpu", [1]),
        ([80, 90, 70], "cpu", [0, 1, 2]),
        ([80, 90, 70], "cuda", []),
        ([3, 90, 1], "cuda", [1]),
        ([90], "cpu", []),
        ([3, 2, 1], "cpu", []),
    ],
)
def test_sequences_that_lag_far_behind_read_alone(missing, device, alone):
    assert lagging_sequences(missing, torch.device(device)) == alone
