"""Run by test_tensor_parallel.py under torchrun: run several command lines, each a JSON list, in order."""

import json
import sys

from specctl.cli.main import run

if __name__ == "__main__":
    sys.exit(max(run(json.loads(line)) for line in sys.argv[1:]))
