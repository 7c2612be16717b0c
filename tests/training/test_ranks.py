"""Two processes with gloo: if one fails in a block that ends together, the other leaves with its exit code."""

import multiprocessing
import signal

import pytest
import torch
import torch.distributed as dist

from specctl.errors import DataError, Interrupted
from specctl.training.ranks import ends_together, over_ranks


def play(rank, store, error):
    """Leave a block with `error` in rank 1. A process that is left alone ends by SIGALRM."""
    signal.alarm(60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    device = torch.device("cpu")
    assert over_ranks([rank, 1], device) == [1, 2]
    try:
        with ends_together(device):
            if rank == 1 and error is not None:
                raise error
    except (DataError, OSError, Interrupted):
        over_ranks([1], device)  # in the real training it ends; here it would close the connection too soon
        raise SystemExit(9) from None
    except SystemExit:
        over_ranks([1], device)
        raise


@pytest.mark.parametrize(
    ("error", "codes"),
    [(None, [0, 0]), (DataError("of one"), [1, 9]), (OSError(28, "full"), [1, 9]), (Interrupted("SIGTERM"), [75, 9])],
)
def test_all_ranks_end_when_one_of_them_does(tmp_path, error, codes):
    """Only errors of specctl were shared: with a full disk the other rank waited."""
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=play, args=(rank, tmp_path / "store", error)) for rank in range(2)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == codes
