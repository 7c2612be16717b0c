"""Run a command line inside this process, in an empty directory; tests may replace the library function it calls."""

import json
import os
import signal
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specctl import api, progress
from specctl.distillation.store import ShardWriter


@dataclass
class Done:
    """Result of a command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class CommandLine:
    """Run command lines; `capture` returns stdout and stderr since its last call."""

    def __init__(self, capture):
        self.capture = capture

    def __call__(self, *argv: str) -> Done:
        from specctl.cli.main import run

        self.capture()
        code = run(list(argv))
        return Done(code, *self.capture())

    def ok(self, *argv: str) -> Done:
        """Run a command line that must succeed."""
        done = self(*argv)
        assert done.code == 0, done.err
        return done


@pytest.fixture
def specctl(monkeypatch, tmp_path, capfd):
    """Return a `CommandLine`. The working directory is tmp_path, and signal handlers are restored."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SPECCTL_") or name in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)
    before = {number: signal.getsignal(number) for number in progress.STOPPING}
    yield CommandLine(capfd.readouterr)
    for number, handler in before.items():
        signal.signal(number, handler)
    progress.interrupts.reset()
    progress.set_quiet(False)


@pytest.fixture
def distilled():
    """Return `write(folder, complete)`, which writes distilled data with one response."""

    def write(folder: Path, complete: bool = True) -> None:
        row = {
            **{"id": "0" * 32, "prompt_id": "1" * 16, "domain": "sql", "temperature": 0.0, "seed": 0, "stop": "eos"},
            **{"messages": [{"role": "user", "content": "Q"}], "prompt_ids": [1], "response_ids": [2], "text": "A"},
            "target": "2" * 16,
        }
        with ShardWriter(folder, {"domain": "sql"}) as store:
            store.append([row])
            if complete:
                store.complete()

    return write


@pytest.fixture
def library(monkeypatch):
    """Return `replace(command, function)`, which makes a command call `function(recipe, run)`."""

    def replace(command: str, function) -> None:
        module = types.ModuleType(f"replaced_{command.replace('-', '_')}")
        module.function = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(api.FUNCTIONS, command, f"{module.__name__}:function")

    return replace


@pytest.fixture(autouse=True)
def output_as_at_first():
    """An earlier test in this process may have run a command with -q or --json."""
    from specctl.cli.output import output

    output.reset([])
