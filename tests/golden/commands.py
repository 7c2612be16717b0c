"""Small runs of every command, in this process and in one directory. Each run uses the files of earlier runs."""

import contextlib
import io
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specctl import progress
from specctl.cli.main import run
from tests.golden.files import shape_of_file
from tests.golden.shapes import Shape, merged, numberless, shape_of

Documents = dict[str, Shape]

CPU = ("--device", "cpu", "--dtype", "fp32")
SHORT = ("--max-new-tokens", 8, *CPU)
TRAINING = ("eval.prompts=1", "eval.fraction=0.5", "eval.max_new_tokens=4", "batch_tokens=32", *CPU)
PROMPTS = ("--prompts", "{domain}.jsonl", "--domain", "sql,math", "--limit", 1, *SHORT)
STREAM = (
    "--prompts",
    "{domain}.jsonl",
    "--schedule",
    "sql:2,math:1",
    "--chunk",
    2,
    "checkpoint.every=1",
    "learner.budget=null",
    *SHORT,
)
STEPS = (
    *("--prompts", "math.jsonl", "--chunk", 1, "--temperature", 0, "checkpoint.every=1", *CPU),
    *("reasoning.budget=12", "reasoning.answer_tokens=4", "reasoning.step_tokens=6", "reasoning.depth=2"),
)
ROUTER = ("--train-router", "router.limit=5", "router.epochs=1", "router.layers=1")
QUESTIONS = {"sql": ["Count to three.", "Say hi."], "math": ["What is 1 + 1?", "What is 2 + 2?"]}

RUNS: dict[str, tuple[Any, ...]] = {
    "version": ("--version",),
    "doctor": ("doctor",),
    "guide": ("guide",),
    "guide TOPIC": ("guide", "lossless"),
    "domains ls": ("domains", "ls"),
    "domains show": ("domains", "show", "sql"),
    "recipes ls": ("recipes", "ls"),
    "recipes show": ("recipes", "show", "eval"),
    "recipes validate": ("recipes", "validate", "eval"),
    "recipes cp": ("recipes", "cp", "eval", "copy.yaml"),
    "distill": ("distill", "--domain", "sql", "--limit", 12, *SHORT),
    "distill, another domain": ("distill", "--domain", "math", "--limit", 6, *SHORT),
    "train-drafter": (
        *("train-drafter", "--domain", "sql", "max_steps=2", "eval.every=1", "checkpoint.every=1"),
        *("drafter.fc_norm=false", "drafter.norm_output=false"),  # for the repository of EAGLE-3
        *TRAINING,
    ),
    "train-drafter, features on disk": (
        *("train-drafter", "--domain", "math", "max_steps=1", "features.mode=cached"),
        *TRAINING,
    ),
    "train-drafter --arch lm": (
        *("train-drafter", "--domain", "sql", "--arch", "lm", "drafter.preset=tiny", "max_steps=1"),
        *("--output-dir", "lms/sql-lm", *TRAINING),
    ),
    "train-drafter --dry-run": ("train-drafter", "--domain", "sql", "--overwrite", "--dry-run", "precision=bf16"),
    "generate": ("generate", "Hi", "--drafter", "drafters/sql-eagle3", *SHORT),
    "eval": (
        *("eval", "--pool", "drafters", "--drafter", "lookup", "--matrix", "save_outputs=true"),
        *("--output-dir", "eval", *PROMPTS),
    ),
    "bench": (
        *("bench", "--drafter", "lookup", "--batches", "1,2", "--limit", 2, "--max-new-tokens", 4, "--device", "cpu"),
        *("repeats=1", "context=8", "draft_lengths=[2]", "--output-dir", "bench"),
    ),
    "select": (
        *("select", "--pool", "drafters", "--algo", "hedgespec,ucbspec", "--baselines", "vanilla,fixed"),
        *("--output-dir", "live", *PROMPTS),
    ),
    "select --train-router": (
        *("select", "--pool", "drafters", "--algo", "router", "--baselines", "fixed", *ROUTER),
        *("--output-dir", "routed", *PROMPTS),
    ),
    "select --record": ("select", "--pool", "drafters", "--record", "t.parquet", "--output-dir", "recorded", *PROMPTS),
    "select --replay": ("select", "--replay", "t.parquet", "--algo", "hedgespec,random", "--output-dir", "replayed"),
    "replay": ("replay", "t.parquet", "--seeds", "0,1", "--output-dir", "replayed again"),
    "online": ("online", "--algo", "ens-eagle3", "--init", "drafters/sql-eagle3", "--output-dir", "online", *STREAM),
    "online --pool": (
        *("online", "--algo", "ogd", "--pool", "drafters", "--baselines", "static"),
        *("--output-dir", "specialists", *STREAM),
    ),
    "online --algo online-lr": (
        *("online", "--algo", "online-lr", "reasoning.draft=./lms/sql-lm", "--output-dir", "steps"),
        *STEPS,
    ),
    "export --to eagle": ("export", "drafters/sql-eagle3", "--to", "eagle", "--check"),
    "export --to vllm": ("export", "drafters/sql-eagle3", "--to", "vllm"),
    "export --tune": (
        *("export", "drafters/sql-eagle3", "--to", "vllm", "--tune", "sweep.json", "--output-dir", "exported/tuned"),
    ),
    "export --to speculators": ("export", "drafters/sql-eagle3", "--to", "speculators"),
    "import": ("import", "exported/sql-eagle3-eagle", "probe.prompts=1", "probe.max_new_tokens=4", *CPU),
    "report": ("report", "online", "live", "eval", "steps", "--csv", "--output-dir", "page"),
}
"""Name of a result document → the command line that prints this document."""

_OWN = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}|/[0-9a-f]{16}(?=/)")
"""The part of a path that names one run or one set of features."""


def specctl(*argv: Any, code: int | None = 0) -> Any:
    """The document that a command line prints; AssertionError where it ends with another code (None: any)."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        ended = run([*map(str, argv), "--json"])
    assert code in (ended, None), f"specctl {' '.join(map(str, argv))} ended with {ended}: {out.getvalue()}"
    return json.loads(out.getvalue())


@contextlib.contextmanager
def alone(place: Path) -> Iterator[pytest.MonkeyPatch]:
    """Work in a directory, with one thread and without the caller's settings; signals are put back."""
    handlers = {number: signal.getsignal(number) for number in progress.STOPPING}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in [name for name in os.environ if name.startswith("SPECCTL_") or name in ("RANK", "WORLD_SIZE")]:
            patch.delenv(name)
        try:
            yield patch
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def sweep() -> list[dict[str, Any]]:
    """Rows of `eval-server` at two loads, as far as `export --tune` reads them."""
    shared = {"domain": "sql", "tokens": 100, "token_s": 0.01, "request_tokens_per_s": 100.0}
    return [
        shared
        | {"server": server, "concurrency": load, "seconds": 1 / load, "mat": mat, "acceptance_by_position": shares}
        for load in (1, 8)
        for server, mat, shares in (("server", 1.5, [0.5]), ("baseline", None, []))
    ]


def results() -> Documents:
    """Run every command in the working directory. Return the shapes of the documents that the commands print."""
    for domain, questions in QUESTIONS.items():
        rows = [{"prompt": text, "response": "#### 2"} for text in questions]
        Path(f"{domain}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("sweep.json").write_text(json.dumps({"servers": sweep()}))
    return {name: shape_of(specctl(*argv)) for name, argv in RUNS.items()}


def kept(place: Path) -> Documents:
    """The shapes of all files that the runs have written, and a list of the files."""
    found: dict[str, list[Shape]] = {}
    listing: Shape = {}
    for path in sorted(place.rglob("*")):
        name = numberless(_OWN.sub("", str(path.relative_to(place))))
        if path.is_file():
            listing[name] = "file"
            if (shape := shape_of_file(path)) is not None:
                found.setdefault(name, []).append(shape)
    return {"files": listing} | {name: merged(shapes) for name, shapes in found.items()}
