"""Streams, exit codes and error documents that scripts rely on."""

import errno
import functools
import gc
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field

import pytest

from specctl import errors, progress
from specctl.cli import eval_server, import_, online, options, select
from specctl.cli.doctor import Finding, _report
from specctl.cli.failures import explain
from specctl.cli.main import run
from specctl.cli.output import output, table, with_next
from specctl.lab.reason import show as reason_show
from specctl.recipe import RECIPES
from specctl.reporting import tables
from specctl.subcommands import SUBCOMMANDS


@dataclass
class Result:
    domain: str = "sql"
    output: str = "distilled/sql"
    rate: float = float("nan")
    rows: list = field(default_factory=list)


def raiser(error):
    def function(recipe, run):
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SpecctlError("disk went away", "plug it in"), 1),
        (errors.UsageError("no such thing"), 2),
        (errors.DataError("bad line"), 3),
        (errors.CheckpointError("damaged"), 4),
        (errors.Interrupted("stopped"), 75),
        (KeyboardInterrupt(), 130),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 1),
        (RuntimeError("boom"), 1),
        (MemoryError(), 1),
    ],
)
def test_each_error_has_its_exit_code_and_one_line(specctl, library, error, code):
    library("distill", raiser(error))
    done = specctl("distill", "--json")
    assert done.code == code
    assert set(done.json["error"]) == {"type", "message", "hint"}
    assert [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["generate", "Hello"], "start the command again"),
        (["distill"], "continue with --resume"),
        (["eval", "--drafter", "lookup", "--output-dir", "run"], "continue with --resume --output-dir run"),
    ],
)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, functools.partial(errors.Interrupted, "stopped", progress.RESUME)]
)
def test_an_interrupted_command_says_how_to_continue(argv, hint, error, specctl, library):
    """`generate` used to suggest an option of other commands, and `eval` did not name its run directory."""
    library(argv[0], raiser(error()))
    assert specctl(*argv, "--json").json["error"]["hint"] == hint


class OutOfMemoryError(RuntimeError):
    """Stand-in for PyTorch's error, which is recognized by name."""


@pytest.mark.parametrize(
    ("command", "knob"),
    [
        ("distill", "batch_size"),
        ("train-drafter", "batch_tokens"),
        ("eval", "max_new_tokens"),
        ("select", "batch"),
        ("online", "max_new_tokens"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 9 bytes"
        ),
        MemoryError(),
    ],
)
def test_out_of_memory_names_keys_that_reduce_memory(command, knob, error):
    failure = explain(error, command)
    assert (failure.type, failure.code) == ("MemoryError", 1)
    assert failure.message.startswith("out of memory") and "enforce" not in failure.message
    assert knob in failure.hint


def test_a_process_that_is_gone_is_named_as_such():
    """The others ended with the address of a socket and a line of gloo's source."""
    failure = explain(RuntimeError("[/pytorch/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:2"))
    assert failure.message == "another process of this job has ended or does not answer"


def test_the_memory_keys_exist():
    for command, row in SUBCOMMANDS.items():
        for key in row.memory_keys:
            value = RECIPES[command]()
            for name in key.partition("=")[0].split("."):
                value = getattr(value, name)


def test_without_json_an_error_leaves_stdout_empty(specctl, library):
    library("distill", raiser(errors.DataError("p.jsonl:3: not JSON", "fix it")))
    done = specctl("distill")
    assert (done.code, done.out) == (3, "")
    assert done.err.strip() == "error: p.jsonl:3: not JSON (hint: fix it)"


def test_a_hint_follows_all_lines_of_a_message(specctl, library):
    """It used to look like a part of the last of several problems."""
    library("distill", raiser(errors.DataError("2 rejected\n  p:1: bad\n  p:2: bad", "fix them")))
    assert specctl("distill").err.splitlines()[-2:] == ["  p:2: bad", "(hint: fix them)"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "error: the command is missing (hint: see specctl --help)"),
        (["-q"], "error: the command is missing (hint: see specctl --help)"),
        (["recipes"], "error: the command is missing (hint: see specctl recipes --help)"),
        (["eval", "--domain"], "error: Option '--domain' requires an argument (hint: see specctl eval --help)"),
        (["train-drafter", "--arch", "x"], "error: --arch: should be 'eagle', "),
        (["generate", "hi", "--dtype", "x"], "error: --dtype: target.dtype: should be 'auto', "),
        (["distill", "batch_size=x"], "error: batch_size=x: should be a whole number (got 'x')"),
        (["distill", "--limit", "x"], "error: --limit: data.limit: should be a whole number (got 'x')"),
        (["distill", "--limit", "1.5"], "error: --limit: data.limit: should be a whole number (got '1.5')"),
        (["distill", "--limit", "0"], "error: --limit: data.limit: should be greater than 0 (got 0)"),
        (["generate", "hi", "--top-p", "x"], "error: --top-p: sampling.top_p: should be a number (got 'x')"),
        (["generate", "hi", "sampling.top_p="], "sampling.top_p=: should be a number (got null)"),
        (["reason", "reasoning.depth=x"], "error: reasoning.depth=x: should be 1, 2, 3, 4 or 'auto' (got 'x')"),
        (
            ["reason", "--algo", "x"],
            "error: --algo: 'x' is no algo that drafts steps: use lr, osd-lr, online-lr",
        ),
        (["bench", "--batches", "x"], "error: --batches: 'x' is not a list of whole numbers (hint: such as 1,8)"),
        (
            ["reason", "reasoning.draft=drafters"],
            "error: reasoning.draft: drafters is not a model directory",
        ),
        (["export", "drafters/sql-eagle3+lookup"], "lookup is a hybrid, which no engine drafts with (hint: export its"),
        (["export", "d", "--private"], "error: export: private needs push (--push OWNER/NAME), the repository"),
        (["eval", "--recipe", "latin.yaml"], "error: latin.yaml: not UTF-8 at byte 15: name a file of YAML"),
        (["export", "p.jsonl"], "error: drafter p.jsonl is a file, not a directory (hint: name a directory written"),
        (["import", "p.jsonl"], "error: head p.jsonl is a file, not a directory (hint: download it first"),
        (["select", "--pool", "p.jsonl"], "error: pool directory p.jsonl is a file, not a directory (hint: give a"),
        (["distill", "--exclude", "drafters"], "Is a directory (hint: give a file of prompts, or - for stdin)"),
        (["distill", "--from-log", "drafters"], "Is a directory (hint: give a log of responses, or - for stdin)"),
        (["eval", "--seeds", "0,x"], "error: --seeds: '0,x' is not a list of whole numbers (hint: such as 0,1,2)"),
        (["distill", "--temperature", "x"], "error: --temperature: 'x' is not a number or a list of them"),
        (["distill", "--chat-template-kwargs", "[" * 10**5], "error: --chat-template-kwargs: not JSON: nested"),
        (["eval", "--drafter", "lokup"], "error: no drafter lokup (hint: did you mean lookup? name a directory"),
        (["eval", "--drafter", "drafters/sql-eagl3"], "(hint: did you mean drafters/sql-eagle3? name a directory"),
        (["train-drafter", "resources.gpu=h100"], "(did you mean h100-80g?)"),  # it said h200
        (["generate", "How", "many?"], "(hint: give one PROMPT, and quote it if it has spaces; write overrides as"),
        (["generate", "hi", "--output-dir", "drafters"], "(hint: --overwrite replaces it; or choose another --output-"),
        (["distill", "--output-dir", "drafters"], "(hint: --overwrite replaces it, --resume continues it; or choose"),
    ],
)
def test_a_wrong_command_line_gives_one_error_line(specctl, tmp_path, argv, said):
    (tmp_path / "drafters" / "sql-eagle3").mkdir(parents=True)
    (tmp_path / "p.jsonl").touch()
    (tmp_path / "q.jsonl").touch()  # has a near name, but is no better than the file that exists
    (tmp_path / "latin.yaml").write_bytes("data: {domain: \xe9}".encode("latin-1"))
    assert said in specctl(*argv).err.splitlines()[-1]


def test_an_option_with_one_value_that_is_given_twice_is_noticed(specctl):
    """`generate --drafter lookup --drafter suffix` ran one of them without a word. Lists may be repeated."""
    done = specctl.ok("generate", "hi", "--drafter", "lookup", "--seed=1", "--drafter=suffix", "--dry-run")
    assert done.err == "warning: --drafter is given 2 times: the last value counts\n" and "suffix" in done.out
    assert specctl.ok("eval", "--drafter", "lookup", "--drafter", "suffix", "--dry-run").err == ""


def test_counts_in_plans_have_their_noun(specctl):
    """A plan said "up to 1 test prompts", and named a drafter twice that runs once."""
    steps = specctl.ok("eval", "--limit", "1", *["--drafter", "lookup"] * 2, "--dry-run", "--json").json["steps"]
    assert "decode up to 1 test prompt per domain" in steps[2] and steps[3].startswith("with lookup; baselines")
    steps = specctl.ok("distill", "--limit", "2000", "--temperature", "0", "--dry-run", "--json").json["steps"]
    assert steps[1].startswith("read up to 2,000 prompts of the built-in generator") and steps[3].endswith(
        "at temperatures 0"
    )


@pytest.mark.parametrize(("chunk", "period"), [("1", "after every prompt: "), ("8", "after every 8 prompts: ")])
def test_the_plan_of_online_names_its_period(specctl, chunk, period):
    plan = specctl.ok("online", "--algo", "ogd", "--schedule", "sql:8", "--chunk", chunk, "--dry-run", "--json")
    assert any(f"learn {period}" in step for step in plan.json["steps"])


def test_an_overlong_pool_name_is_a_usage_error(specctl):
    done = specctl("select", "--pool", "a" * 300, "--dry-run")
    assert done.code == 2 and "File name too long" in done.err


def test_a_home_that_does_not_exist_is_a_usage_error(specctl):
    """It used to end as an unexpected RuntimeError."""
    done = specctl("eval", "--drafter", "~nobody-here/x", "--dry-run")
    assert (done.code, done.err) == (
        2,
        "error: a path begins with ~, but there is no such home (hint: write the whole path)\n",
    )


@pytest.mark.parametrize("flag", ["--output-dir", "--pool"])
def test_an_empty_directory_is_refused(specctl, flag):
    """`--output-dir "$UNSET"` used to be the working directory, which --overwrite replaced."""
    done = specctl("eval", flag, "", "--dry-run")
    assert (done.code, done.err) == (2, f"error: {flag}: is empty (got '')\n")


def test_an_overlong_drafter_name_is_reported_as_missing(specctl):
    done = specctl("eval", "--drafter", "x" * 5000, "--dry-run")
    assert done.code == 2 and "no drafter xxx" in done.err and "File name too long" not in done.err


def test_messages_are_limited_in_length(specctl, library):
    found = explain(errors.UsageError("\n".join(f"{n}: " + "x" * 5000 for n in range(100)), "y" * 5000))
    assert len(found.message) < 2000 and len(found.message.splitlines()) <= 12 and len(found.hint) <= 1500
    assert explain(errors.UsageError("a\x1b[31mb")).message == "a\\x1b[31mb"
    command = "vllm serve MODEL " + "--option value " * 60
    assert explain(errors.UsageError("no server", command)).hint == command  # a command without its middle is useless
    library("distill", raiser(errors.DataError("p.jsonl: " + "x" * 100_000)))
    assert len(specctl("distill", "--json").json["error"]["message"]) < 500


def test_an_invalid_hf_endpoint_is_named(monkeypatch):
    """huggingface_hub fails during its import, and mentions only a port."""
    error = ValueError("Port could not be cast to integer value as 'abc'")
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:abc")
    found = explain(error)
    assert (found.code, found.message) == (2, "HF_ENDPOINT is not an address: http://localhost:abc")
    monkeypatch.setenv("HF_ENDPOINT", "https://huggingface.co")
    assert explain(error).message.startswith("unexpected ValueError")


@pytest.mark.parametrize(("number", "remedy"), [(errno.EFBIG, "raise ulimit -f"), (errno.EDQUOT, "free space")])
def test_a_limit_of_the_system_names_its_remedy(number, remedy):
    assert remedy in (explain(OSError(number, os.strerror(number), "runs/x")).hint or "")
    assert explain(OSError(number, "larger than the limit of 9 bytes", "runs/x")).hint is None


@pytest.mark.parametrize(("command", "place"), [("eval", "mine"), ("distill", "distilled/sql")])
def test_a_full_disk_names_the_output(specctl, library, command, place):
    """A failing write carries no file name."""
    library(command, raiser(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    done = specctl(command, *(["--output-dir", "mine"] if command == "eval" else []))
    assert done.code == 1 and done.err.startswith(f"error: {place}: No space left on device (hint: free space")


def test_passwords_are_masked_everywhere_but_in_the_run(specctl, library, tmp_path, monkeypatch):
    """In plans, resolved recipes, run.json, messages and tracebacks."""
    secret = "reasoning.judge.endpoint=http://me:HUSH@host/v1"
    command = ["reason", "--algo", "lr", "reasoning.judge.kind=model", "reasoning.judge.name=m", secret]
    command += ["reasoning.draft=./d", "reasoning.judge.timeout_s=1"]
    monkeypatch.setattr(reason_show, "check", lambda recipe: None)
    monkeypatch.setattr(sys, "argv", ["specctl", *command])
    used = []

    def works(recipe, run):
        used.append(recipe.reasoning.judge.endpoint)
        run.annotate()
        progress.warn(f"no answer of {used[0]}")
        raise errors.SpecctlError(f"{used[0]} is down")

    library("reason", works)
    said = [specctl(*command, "--dry-run"), specctl(*command, "--dry-run", "--json")]
    said += [specctl(*command, "--json", "-v"), specctl(*command, secret.replace("judge", "jugde"))]
    assert used == ["http://me:HUSH@host/v1"]
    kept = "".join(path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert "me:***@host" in kept and "me:***@host" in said[0].out and "me:***@host" in said[2].err
    assert "HUSH" not in kept + "".join(done.out + done.err for done in said)


@pytest.mark.parametrize("command", ["eval", "select", "online", "bench", "generate", "distill", "train-drafter"])
@pytest.mark.parametrize("switch", ["--overwrite", "--resume"])
def test_a_run_of_another_command_is_not_overwritten_or_resumed(specctl, tmp_path, command, switch):
    """`eval --overwrite` used to mix its files with those already there."""
    (tmp_path / "run.json").write_text('{"command": "report"}')
    if switch == "--resume" and command in ("select", "bench", "generate"):
        argv = [command, "--dry-run", "--overwrite"]  # these commands cannot resume a run directory
    else:
        argv = [command, "--dry-run", switch]
    done = specctl(*argv, "--output-dir", str(tmp_path))
    assert done.code == 2 and "holds a run of specctl report" in done.err


def test_prompts_of_a_file_get_no_warm_up_drafter_of_sql(specctl, tmp_path):
    """`online` used to take the drafter of sql, or to train one on sql prompts."""
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Q"}\n')
    done = specctl("online", "--algo", "opt-hydra", "--prompts", "mine.jsonl", "--dry-run")
    assert done.code == 2 and "no drafter in drafters/mine-hydra, and no prompts of mine" in done.err
    assert "distilled/mine" in specctl("distill", "--prompts", "mine.jsonl", "--dry-run").out
    assert specctl("distill", "--prompts", "mine.jsonl", "--domain", "../x", "--dry-run").code == 2


def test_a_traceback_is_shown_only_with_v(specctl, library):
    library("distill", raiser(RuntimeError("boom")))
    assert "Traceback" in specctl("distill", "-v").err


@pytest.mark.parametrize(
    "argv",
    [
        ["genrate"],
        ["eval", "--nope"],
        ["eval", "--limit", "many"],
        ["eval", "plain-argument"],
        ["distill", "--domain", "sqk"],
        ["distill", "--recipe", "nowhere"],
        ["distill", "--recipe", "eval"],
        ["distill", "shard=3/2"],
        ["train-drafter", "--arch", "eagle9"],
        ["eval", "--drafter", "nowhere"],
        ["eval", "--pool", "nowhere"],
        ["eval", "--seeds", "1,x"],
        ["generate", "hello", "--chat-template-kwargs", "[1]"],
        ["generate", "hello", "world"],
        ["recipes", "show", "nowhere"],
        ["domains", "show", "sqk"],
        ["distill", "--resume", "--overwrite"],
    ],
)
def test_wrong_command_lines_exit_2(specctl, argv):
    done = specctl(*argv, "--json")
    assert done.code == 2, done.err
    assert done.json["error"]["message"]


@pytest.mark.parametrize("argv", [["--json", "distill"], ["distill", "--json"]])
def test_json_prints_one_document(specctl, library, argv):
    def noisy(recipe, run):
        print("a library prints to stdout")
        os.write(1, b"and so does C code\n")
        return Result()

    library("distill", noisy)
    done = specctl.ok(*argv)
    assert done.json["output"] == "distilled/sql"
    assert done.json["rate"] is None, "NaN is not JSON"
    assert {"schema_version", "command", "run_dir", "target", "seed", "elapsed_s"} <= set(done.json)
    assert "a library prints" in done.err
    assert "so does C" in done.err


def test_quiet_prints_only_the_path(specctl, library):
    library("distill", lambda recipe, run: (progress.log("working"), Result())[1])
    done = specctl("distill", "-q")
    assert (done.out, done.err) == ("distilled/sql\n", "")


def test_the_run_directory_holds_recipe_environment_and_result(specctl, library, tmp_path):
    library("distill", lambda recipe, run: Result())
    run = tmp_path / specctl("distill", "--json", "--seed", "7").json["run_dir"]
    assert {path.name for path in run.iterdir()} == {"recipe.resolved.yaml", "run.json", "result.json"}
    specctl.ok("recipes", "validate", str(run / "recipe.resolved.yaml"))


def test_only_rank_zero_prints(specctl, library, monkeypatch, tmp_path):
    library("distill", lambda recipe, run: Result())
    monkeypatch.setenv("RANK", "1")
    done = specctl("distill", "--json")
    assert (done.code, done.out) == (0, "")
    assert not (tmp_path / "runs").exists()


@pytest.fixture(params=progress.STOPPING)
def number(request):
    """A signal that stops commands; `nohup make test` ignores SIGHUP."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_is_remembered_once_work_has_begun(specctl, library, number):
    def interrupted(recipe, run):
        run.annotate()
        signal.raise_signal(number)
        assert progress.interrupts.requested()
        progress.interrupts.check()

    library("distill", interrupted)
    done = specctl("distill")
    assert done.code == 75
    assert f"interrupted by {number.name} (hint: continue with --resume)" in done.err


def test_a_signal_before_the_work_ends_the_command_at_once(specctl, library, number):
    """The imports and a large target take minutes, which a command that was told to stop used to wait for."""

    def interrupted(recipe, run):
        signal.raise_signal(number)
        raise AssertionError("the command went on")

    library("distill", interrupted)
    done = specctl("distill")
    assert (done.code, done.err) == (75, f"error: interrupted by {number.name} (hint: start the command again)\n")


def test_a_signal_at_the_end_of_a_warm_up_ends_the_command(specctl, library):
    """The second command of a process begins with its own work only if no signal has come before."""

    def late(recipe, run):
        run.annotate()
        signal.raise_signal(signal.SIGTERM)
        return Result()

    library("distill", late)
    assert specctl("distill").code == 0
    assert specctl("distill").code == 75


def test_without_a_terminal_output_is_plain_and_complete(specctl):
    done = specctl("domains", "ls")
    assert "\x1b" not in done.out
    assert "…" not in done.out
    assert all(line == line.rstrip() for line in done.out.splitlines())


def stdout_as_terminal(monkeypatch, columns="80"):
    """Replace stdout by a terminal, until the end of the test. Return its content."""
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    return shown


@pytest.mark.parametrize("columns", ["80", "30"])
def test_tables_on_a_narrow_terminal_keep_names_and_numbers_whole(monkeypatch, columns):
    """Names and numbers used to be split over lines, and some columns were dropped."""
    terminal = stdout_as_terminal(monkeypatch, columns)
    heads = ("drafter", "domain", "× plain", "× transformers", "tokens/s × static, net", "tokens", "what it is for")
    row = ["summarization-eagle3", "summarization", 2.06, 4.46, 0.83, 12345, "a sentence of several words " * 3]
    output.result({}, lambda _: table(*heads, rows=[row]))
    lines = terminal.getvalue().splitlines()
    named = [line for line in lines if "summarization-eagle3" in line]
    assert len(named) == 1 or columns == "30"
    assert re.findall(r"[\d.,]+", " ".join(named).replace("eagle3", "")) == ["2.06", "4.46", "0.83", "12,345"]
    assert {"transformers", "static,", "tokens"} <= set(re.sub(r"\x1b\[[0-9;]*m", " ", "\n".join(lines)).split())


@pytest.mark.parametrize(
    "shown", ["next: " + "specctl " * 20, with_next("", ["specctl"] * 20)], ids=["the text of a plan", "a command"]
)
def test_a_terminal_shows_a_command_without_line_breaks(monkeypatch, shown):
    """A copied command was several commands: it had a line break after every 80 columns."""
    terminal = stdout_as_terminal(monkeypatch)
    output.result({}, lambda _: shown)
    assert [line.rstrip() for line in terminal.getvalue().splitlines() if line] == ["next:" + " specctl" * 20]


def test_the_table_of_eval_fits_80_columns(monkeypatch):
    """It was 92 columns wide, so that a terminal broke every row."""
    terminal = stdout_as_terminal(monkeypatch)
    heads = ("drafter", "domain", "mat", "accepted", "tokens/s", "× plain", "× transformers", "tokens")
    rows = [
        ["sql-eagle3+lookup", "sql", 4.2, 0.89, 233.8, 2.56, 12.5, 1558],
        ["transformers+lookup", "sql", 1.75, None, 38.28, 0.25, 1.4, 1558],
    ]
    output.result({}, lambda _: table(*heads, rows=rows))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    assert "sql-eagle3+lookup sql 4.20 0.89 233.8 2.56 12.50 1,558" in [" ".join(line.split()) for line in lines]


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("heads", [online.COLUMNS, select.COLUMNS | select.MODELLED, eval_server.COLUMNS], ids=len)
def test_columns_that_do_not_fit_follow_below(monkeypatch, heads, width):
    """The tables of online, replay and eval-server were wider than a terminal, which broke every row."""
    terminal = stdout_as_terminal(monkeypatch, str(width))
    rows = [
        [name, "sql", *(100 + at + 0.25 * (name == "lookup") for at in range(len(heads) - 2))]
        for name in ("sql-eagle3", "lookup")
    ]
    output.result({}, lambda _: table(*heads.values(), rows=rows))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= width and "…" not in terminal.getvalue()
    for name, *cells in rows:
        shown = [line.split() for line in lines if line.split()[:1] == [name]]
        assert [word for words in shown for word in words if word not in (name, "sql")] == [
            tables.text(number) for number in cells[1:]
        ]


@pytest.mark.parametrize("probe", [{"mat": 2.0}, None])
def test_an_imported_head_is_evaluated_next_if_it_could_be_tried(capsys, probe):
    document = {
        "format": "eagle3",
        "family": "eagle3",
        "params": 1,
        "drafter": "drafters/a",
        "notes": [],
        "probe": probe,
    }
    recipe = RECIPES["import"](head="a", target={"name": "b"})
    output.result({}, lambda _: import_.show(document, recipe))
    last = capsys.readouterr().out.splitlines()[-1]
    assert (last == "next: specctl eval --target b --drafter drafters/a --drafter lookup") == (probe is not None)


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("argv", [["recipes", "ls"], ["domains", "ls"], ["guide"], ["guide", "lossless"]], ids=" ".join)
def test_pages_and_lists_fit_a_terminal(monkeypatch, argv, width):
    """One long word made the list of recipes wider than the terminal, which broke every line."""
    terminal = stdout_as_terminal(monkeypatch, str(width))
    run(argv)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= width


def test_a_long_path_of_a_target_does_not_widen_the_report_of_doctor(monkeypatch):
    terminal = stdout_as_terminal(monkeypatch)
    finding = Finding(f"target /{'directory/' * 9}model.gguf", "ok", "lean step: llama is one of its architectures")
    output.result({"findings": [asdict(finding)], "missing": 0}, lambda document: _report(document, about=None))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert lines[0].startswith("ok  target model.gguf  lean step: ") and len(lines[0]) <= 80


def test_a_closed_pipe_is_not_an_error():
    """`specctl … | head -1` succeeds without a traceback."""
    command = f"{sys.executable} -m specctl domains show sql --samples 3000 | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def ended(command: str, **environ: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of `specctl` in a separate shell."""
    shown = [sys.executable, "-m", "specctl"]
    done = subprocess.run(
        ["bash", "-c", f"{' '.join(shown)} {command}"], capture_output=True, text=True, env={**os.environ, **environ}
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["domains ls --json", "--help", "domains show nope --json"])
def test_a_full_stdout_gives_one_error_line(command):
    """The error used to be printed to the same full stdout, which gave a traceback."""
    code, _, said = ended(f"{command} > /dev/full")
    assert code == (2 if "nope" in command else 1)
    assert len(said.splitlines()) == 1 and said.startswith("error: ")


def test_a_full_stderr_does_not_change_document_and_exit_code():
    code, shown, _ = ended("domains show nope --json 2> /dev/full")
    assert (code, json.loads(shown)["error"]["type"]) == (2, "UnknownDomain")


def test_the_process_runs_exit_handlers_and_flushes_output():
    """It exits without freeing its objects, and starts without garbage collection."""
    code = """
import atexit, gc, sys
import specctl.__main__, specctl.cli.main
def run(argv):
    atexit.register(print, "registered", end="")
    print(f"{argv} {gc.isenabled()}", end="; ")
    return 75
specctl.cli.main.run = run
specctl.__main__.main()
"""
    done = subprocess.run([sys.executable, "-c", code, "eval"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (75, "['eval'] False; registered", "")


def test_garbage_collection_is_on_while_a_command_computes(specctl, library):
    def works(recipe, run):
        assert gc.isenabled()
        return Result()

    library("distill", works)
    gc.disable()
    try:
        specctl.ok("distill")
    finally:
        gc.enable()
        gc.unfreeze()


def test_text_that_stdout_cannot_encode_is_escaped():
    code, shown, _ = ended("guide choosing --json", PYTHONIOENCODING="ascii")
    assert code == 0 and shown.isascii() and not json.loads(shown)["text"].isascii()
    for name, path in (("'naïve 😀'", "naïve 😀"), ("$'\\xff'", "\udcff")):
        code, shown, _ = ended(f"report {name} --json", PYTHONIOENCODING="ascii")
        assert (code, json.loads(shown)["error"]["message"]) == (2, f"{path} is not a directory")


def test_an_option_with_a_list_may_be_repeated(specctl):
    """Only the last one counted, without a word, while --drafter could be repeated."""
    lists = ["--domain", "sql", "--domain", "math, code", "--seeds", "0", "--seeds", "1,2", "--baselines", "vanilla"]
    recipe = specctl.ok("eval", *lists, "--baselines", "transformers", "--dry-run", "--json").json["recipe"]
    assert recipe["data"]["domain"] == ["sql", "math", "code"] and recipe["seeds"] == [0, 1, 2]
    assert recipe["baselines"] == ["vanilla", "transformers"]
    lists = ["--algo", "ucbspec", "--algo", "fixed,hedge", "--baselines", "none"]
    recipe = specctl.ok("select", *lists, "--dry-run", "--json").json["recipe"]
    assert (recipe["algo"], recipe["baselines"]) == (["ucbspec", "fixed", "hedge"], [])


def test_a_name_that_comes_twice_in_a_list_counts_once(specctl):
    """A domain was measured twice, and a seed that was played twice made the intervals narrower."""
    lists = ["--domain", "sql", "--domain", "sql,math", "--seeds", "1,0,1"]
    for command in ("eval", "select"):
        recipe = specctl.ok(command, *lists, "--dry-run", "--json").json["recipe"]
        assert (recipe["data"]["domain"], recipe["seeds"]) == (["sql", "math"], [1, 0])


def test_a_wrong_value_is_told_once_and_in_plain_words(specctl):
    assert specctl("eval", "--domain", "").err == "error: --domain: data.domain: needs at least 1 item (got '')\n"
    assert specctl("distill", "--server", "a:1").err.count("a:1") == 1
    assert specctl("eval", "--device", "gpu").err.count("'gpu'") == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("serve --port 8000", "use --listen HOST:PORT"),
        ("eval --model x", "use --target MODEL"),
        ("eval --tensor-parallel-size 2", "use target.tensor_parallel=N"),
        ("eval --port 8000", "see specctl eval --help"),
    ],
)
def test_options_of_engines_lead_to_ours(specctl, words, hint):
    """`serve --port` used to suggest --pool."""
    shown = specctl(*words.split())
    assert shown.code == 2 and f"No such option: {words.split()[1]}" in shown.err and f"(hint: {hint})" in shown.err


def test_the_word_of_a_command_leads_to_its_guide(specctl):
    """`specctl guide eval` used to suggest the guide of eval-server."""
    assert "did you mean results?" in specctl("guide", "eval").err


def test_a_locale_without_utf8_changes_no_word_of_the_command_line():
    """Python decodes the words byte by byte there. Messages used to show surrogates, only prompts were read right."""
    _, _, said = ended("guide näß", LC_ALL="C", PYTHONUTF8="0")
    assert said.startswith("error: no guide 'näß' ")
    code, _, said = ended("guide $'\\xff'", LC_ALL="C", PYTHONUTF8="0")  # not UTF-8: it starts only once again
    assert code == 2 and said.startswith("error: no guide '\\udcff' ")


def test_python_without_docstrings_is_refused():
    code, _, said = ended("domains ls", PYTHONOPTIMIZE="2")
    assert code == 2 and said.startswith("error: ") and len(said.splitlines()) == 1


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75)])
@pytest.mark.parametrize("module", ["specctl.cli.main", "specctl.recipe.resolve"])
def test_a_signal_during_imports_gives_its_exit_code(tmp_path, module, number, code):
    """An interrupted import makes transformers raise an ImportError, which used to exit with code 1. The first imports
    gave no hint."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            try:\n"
        f"                os.kill(os.getpid(), signal.{number})\n"
        "            except BaseException as error:\n"
        "                raise ModuleNotFoundError('could not import') from error\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    search = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    found, _, said = ended("eval --dry-run", PYTHONPATH=search)
    assert found == code
    assert len(said.splitlines()) == 1 and said.endswith(f"{number} (hint: start the command again)\n")


def test_a_working_directory_that_is_gone_is_named(specctl, tmp_path, monkeypatch):
    """Intel's MKL used to end the process with a message about libtorch."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = specctl("eval", "--dry-run")
    monkeypatch.chdir(tmp_path)
    assert done.code == 2
    assert done.err == "error: the working directory does not exist any more (hint: cd to another one)\n"


def test_a_warning_is_one_line(tmp_path):
    """Python's own format adds a path and a line of the program."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, warnings\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'specctl.cli.main':\n"
        "            warnings.warn('no compiler')\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    search = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    assert ended("--version", PYTHONPATH=search)[2] == "warning: no compiler\n"


def test_matplotlib_logs_only_on_request(specctl):
    """It logs where its fonts are if the home directory is read-only."""
    specctl.ok("--version")
    assert not logging.getLogger("matplotlib").isEnabledFor(logging.WARNING)
    specctl.ok("-v", "--version")
    assert logging.getLogger("matplotlib").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(("closed", "printed"), [("<&- >&-", ""), ("2>&-", "specctl")])
def test_closed_streams_are_not_an_error(closed, printed):
    """With `>&-`, sys.stdout is None and the next opened file gets descriptor 1."""
    command = f"{sys.executable} -m specctl --version {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(" ")[0], done.stderr) == (0, printed, "")


def test_version(specctl):
    from specctl import __version__

    assert specctl("--version").out == f"specctl {__version__}\n"


def test_a_comma_in_an_existing_path_does_not_split_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b").mkdir()
    assert options._names(["a,b", "a,b+lookup", "a,c", "lookup"]) == ["a,b", "a,b+lookup", "a", "c", "lookup"]
