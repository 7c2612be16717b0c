"""One of two processes that share their tokens: DIRECTORY RANK CASE. Prints its tokens before and after as JSON."""

import json
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist

from specctl.training.tokens import TokenArray, share

directory, rank, case = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
tempfile.tempdir = str(directory / "tmp")
Path(tempfile.tempdir).mkdir(exist_ok=True)
if case == "two machines":
    socket.gethostname = lambda: f"node{rank}"
if case == "no room":
    tempfile.tempdir = "/dev/full/none"
dist.init_process_group("gloo", f"file://{directory}/store", timedelta(minutes=1), 2, rank)
tokens = TokenArray()
other = int(case == "other tokens" and rank == 1)
texts = [tokens.add(range(n, 3 * n + other)) for n in range(20)]
before = [list(text) for text in texts]
share(tokens)
read = [list(text) for text in texts]
print(json.dumps({"mapped": isinstance(tokens.ids, np.memmap), "before": before, "read": read}))
dist.destroy_process_group()
