"""Run by test_tensor_parallel.py under torchrun: command lines, each a JSON list, one after the other."""

import json
import sys

from specctl.cli.main import run

if __name__ == "__main__":
    sys.exit(max(run(json.loads(line)) for line in sys.argv[1:]))
