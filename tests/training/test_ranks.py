"""Two processes with gloo: if one fails in a block that ends together, the other leaves with its exit code."""

import multiprocessing
import signal

import torch
import torch.distributed as dist

from specctl.errors import DataError, Interrupted
from specctl.training.engine import ends_together, over_ranks

CASES = [
    (None, [0, 0]),
    (DataError("of one"), [1, 9]),
    (OSError(28, "full"), [1, 9]),
    (Interrupted("SIGTERM"), [75, 9]),
]


def play(rank, store, codes):
    """Put the exit codes of all cases: rank 1 leaves the block with its error. A process that is left alone ends by
    SIGALRM."""
    signal.alarm(60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    device = torch.device("cpu")
    assert over_ranks([rank, 1], device) == [1, 2]
    for error, _ in CASES:
        code = 0
        try:
            with ends_together(device):
                if rank == 1 and error is not None:
                    raise error
        except (DataError, OSError, Interrupted):
            code = 9
        except SystemExit as end:
            code = end.code
        codes.put((rank, code))
    dist.destroy_process_group()


def test_all_ranks_end_when_one_of_them_does(tmp_path):
    """Only errors of specctl were shared: with a full disk the other rank waited."""
    spawn = multiprocessing.get_context("spawn")  # a fork has the process group of an earlier test
    codes = spawn.Queue()
    running = [spawn.Process(target=play, args=(rank, tmp_path / "store", codes)) for rank in range(2)]
    for process in running:
        process.start()
    ended = [codes.get(timeout=90) for _ in range(2 * len(CASES))]
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, 0]
    assert [[code for of, code in ended if of == rank] for rank in range(2)] == [
        [expected[rank] for _, expected in CASES] for rank in range(2)
    ]
