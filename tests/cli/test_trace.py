"""Budgets for the number of package files that a command enters, because a reader may have to open each file.

A file counts if one of its functions runs after the imports. A budget rises only if the command does more, or if a long
file is split by topic.
"""

import gc
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from specctl.decoding.state import DecodeState
from specctl.decoding.target import load_target
from specctl.kernels import native
from tests.measuring.streams import write_head

PACKAGE = Path(__file__).resolve().parents[2] / "specctl"
BUDGET = {"generate": 66, "select": 84, "export": 35}


class FirstRound(BaseException):
    """Raised at the commit of the first round."""


@contextmanager
def entered(paths):
    """Collect in `paths` the files below the package with functions that are called.

    Code that runs during imports is ignored, because an earlier test may have imported the module.
    """
    importing = 0

    def ends(frame, event, argument):
        nonlocal importing
        importing -= event == "return"

    def trace(frame, event, argument):
        nonlocal importing
        code = frame.f_code
        if code.co_name == "<module>":
            importing, frame.f_trace_lines = importing + 1, False
            return ends
        if not importing and code.co_filename.startswith(f"{PACKAGE}/"):
            paths.add(Path(code.co_filename).relative_to(PACKAGE).as_posix())

    before = sys.gettrace()
    gc.collect()  # run finalizers of earlier tests
    gc.disable()
    sys.settrace(trace)  # unlike a profiler, it is not called for C functions
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()


@pytest.fixture(scope="module")
def pool(tmp_path_factory, four_layers):
    """Two EAGLE-3 heads of the built-in target."""
    place, target = tmp_path_factory.mktemp("heads"), load_target("builtin", device="cpu")
    for seed in range(2):
        write_head(place / f"head{seed}", target, "eagle3", seed)
    return place


def argv(command, pool):
    """Return a command line on the built-in target."""
    match command:
        case "generate":
            return ["generate", "Count to three.", "--drafter", str(pool / "head0"), "--max-new-tokens", "4"]
        case "export":
            return ["export", str(pool / "head0"), "--to", "vllm", "--output-dir", "out"]
        case "select":
            Path("prompts.jsonl").write_text(json.dumps({"prompt": "Count to three."}) + "\n")
            asked = ["--prompts", "prompts.jsonl", "--max-new-tokens", "4", "--beside", "none"]
            return ["select", "--algo", "hedgespec", "--pool", str(pool), "baselines=[]", *asked]


@pytest.mark.parametrize("command", BUDGET)
def test_a_command_enters_few_files(specctl, pool, monkeypatch, command):
    """`select` is traced up to its first round."""
    native.library()  # loaded once in a process: often by an earlier test
    paths, line = set(), argv(command, pool)
    if command == "select":
        monkeypatch.setattr(DecodeState, "commit", lambda *_: (_ for _ in ()).throw(FirstRound))
    try:
        with entered(paths):
            done = specctl(*line)
        assert done.code == 0, done.err
    except FirstRound:
        pass
    assert len(paths) <= BUDGET[command], sorted(paths)


def test_an_entered_file_is_counted():
    """Negative control of the test above."""
    from specctl.errors import did_you_mean

    paths = set()
    with entered(paths):
        did_you_mean("slect", ["select"])
    assert paths == {"errors.py"}
