"""The user guides: their commands parse, the names in them exist, and `specctl guide` prints them.

Every `specctl …` in a shell block is parsed by the command line and resolved to a recipe, and then stopped. Commands
that need no model, server or network are run.
"""

import ast
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from specctl.cli import guide
from specctl.cli.main import app
from specctl.environment import ENV_SECRETS, ENV_SIZES, ENV_SWITCHES
from specctl.errors import UsageError
from specctl.recipe.resolve import resolve
from specctl.subcommands import SUBCOMMANDS
from tests.cli.conftest import specctl
from tests.test_maps import sources

__all__ = ["specctl"]

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
KEY = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)(?:=.*)?")
FLAG = re.compile(r"--[a-z][a-z_-]+")
VARIABLE = re.compile(r"SPECCTL_[A-Z_]+")
FILES = (".json", ".jsonl", ".yaml", ".parquet", ".md", ".py", ".safetensors", ".jinja", ".sbatch", ".txt")
ENGINES = {
    *("--per-request-spec-decode-metrics", "--no-enable-prefix-caching", "--disable-radix-cache"),
    *("--max-num-batched-tokens", "--max-num-seqs", "--max-model-len"),
    *("--metrics", "--parallel", "--ctx-size", "--lora-modules", "--max-lora-rank"),
    *("--speculative-adaptive-config", "--speculative-algorithm", "--speculative-ngram-external-sam-budget"),
    *("--nproc-per-node", "--no_local_rank", "--num_gpus", "--module", "--no-deps", "--help"),
}
"""Flags of vLLM, SGLang, torchrun, deepspeed and pip, and the option `--help` of every command."""
OTHERS_MESSAGES = {"No such option", "No space left on device"}
"""Messages of Typer and of the operating system."""
NEEDS_NOTHING = ("doctor", "domains", "recipes", "guide")
SHELL = {"&&", "||", "|", ";", "&"}


def page(topic: str) -> str:
    return guide.text(topic)


def commands(text: str) -> list[list[str]]:
    """Return the arguments of every `specctl` command in the shell blocks of a page, in order."""
    found: list[list[str]] = []
    for language, block in FENCE.findall(text):
        if language != "sh":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            found += [argv for part in _simple(line) if (argv := _arguments(part)) is not None]
    return found


def _simple(line: str) -> list[list[str]]:
    """Split a line of shell into simple commands, as words."""
    parts: list[list[str]] = [[]]
    for word in shlex.split(line, comments=True):
        if word in SHELL:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _arguments(words: list[str]) -> list[str] | None:
    """Return the arguments of `VARIABLE=… specctl …` or `torchrun … -m specctl …`, or None for another program."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[:1] == ["specctl"]:
        return words[1:]
    for at in range(len(words) - 1):
        if words[at : at + 2] == ["-m", "specctl"]:
            return words[at + 2 :]
    return None


def subcommand(argv: list[str]) -> str:
    return next((word for word in argv if not word.startswith("-")), "")


def runs_here(argv: list[str]) -> bool:
    """Return whether a command needs no model, drafter, server or network."""
    name = subcommand(argv)
    if name in NEEDS_NOTHING:
        return "--target" not in argv or argv[argv.index("--target") + 1] == "builtin"
    return "--dry-run" in argv and "--pool" not in argv


@pytest.fixture
def understood(specctl, monkeypatch, tmp_path):
    """Return `check(argv)`: the error of a command or ""; recipes are resolved and not run."""
    seen: list[object] = []

    def stop(*args, **options):
        seen.append(resolve(*args, **options))
        raise UsageError("parsed")

    (tmp_path / "mine.yaml").write_text((ROOT / "recipes/train-drafter/eagle3.yaml").read_text())
    real = resolve

    def check(argv: list[str]) -> str:
        if SUBCOMMANDS.get(subcommand(argv), SUBCOMMANDS["doctor"]).recipe is None:
            return parsed(argv)
        seen.clear()
        monkeypatch.setattr("specctl.recipe.resolve.resolve", stop)
        done = specctl(*argv)
        monkeypatch.setattr("specctl.recipe.resolve.resolve", real)
        return "" if len(seen) == 1 and done.code == 2 else done.err.strip() or "it was not parsed"

    return check


def parsed(argv: list[str]) -> str:
    """Return Typer's error for a command without a recipe, or ""."""
    try:
        command, rest = get_command(app), [*argv]
        context = command.make_context("specctl", rest)
        while words := [*getattr(context, "_protected_args", ()), *context.args]:
            if not hasattr(command, "commands"):
                break
            name, command, rest = command.resolve_command(context, words)
            context = command.make_context(name, rest, parent=context)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("topic", guide.TOPICS)
def test_every_command_of_a_guide_parses(topic, understood):
    """Catches a renamed option before the first user copies the command."""
    found = commands(page(topic))
    assert found, "a guide shows at least one command"
    wrong = {shlex.join(argv): said for argv in found if (said := understood(argv))}
    assert wrong == {}


@pytest.mark.parametrize(
    "wrong",
    [
        "specctl eval --drafer lookup",
        "specctl eval --limit many",
        "specctl train-drafter optimizer.lrr=1",
        "specctl train-drafter --arch eagle4",
        "specctl learn-from-server --server http://a:8000 --pool drafters",
        "specctl doctor --targets builtin",
        "specctl recipes list",
        "specctl recipes cp eval",
        "specctl guides",
        "specctl evaluate",
        "torchrun --nproc-per-node 2 -m specctl train-drafter --zero 2",
        "SPECCTL_KV=paged specctl distill --domains sql",
    ],
)
def test_a_wrong_command_is_noticed(wrong, understood):
    """Negative control of the test above."""
    (argv,) = commands(f"```sh\n{wrong}\n```\n")
    assert understood(argv)


def test_commands_are_found_in_shell_blocks():
    """Continued lines, pipes, variables and comments are handled; other programs and output are skipped."""
    text = "```sh\ncat a | specctl eval \\\n  --prompts -   # stdin\nA=1 specctl doctor && vllm serve specctl\n```\n"
    text += "```text\nspecctl nothing\n```\n"
    assert commands(text) == [["eval", "--prompts", "-"], ["doctor"]]


def test_commands_that_need_no_model_run(specctl):
    """Runs lists, checks and plans of all guides, in page order, in one directory."""
    kept = [argv for topic in guide.TOPICS for argv in commands(page(topic)) if runs_here(argv)]
    unique = [list(argv) for argv in dict.fromkeys(map(tuple, kept))]
    assert {"doctor", "domains", "recipes", "guide", "distill", "train-drafter"} <= set(map(subcommand, unique))
    failed = {shlex.join(argv): done.err for argv in unique if (done := specctl(*argv)).code}
    assert failed == {}


@cache
def keys() -> frozenset[str]:
    """Return all keys of recipes and their sections."""
    recipes = json.loads((ROOT / "tests/golden/recipes.json").read_text())
    names = {key for known in recipes.values() for key in known}
    return frozenset(names | {name.rpartition(".")[0] for name in names})


@cache
def flags() -> frozenset[str]:
    options = json.loads((ROOT / "tests/golden/options.json").read_text())
    return frozenset(part for known in options.values() for names in known for part in names.split(", "))


def unknown(text: str) -> list[str]:
    """Return recipe keys, flags and variables in backticks that do not exist."""
    spans = SPAN.findall(FENCE.sub("", text))
    wrong = []
    for span in spans:
        key = KEY.fullmatch(span)
        if key and not key[1].endswith(FILES) and key[1] not in keys():
            wrong.append(span)
        wrong += [flag for flag in FLAG.findall(span) if flag not in flags() | ENGINES]
        for variable in VARIABLE.findall(span):
            name = variable.removeprefix("SPECCTL_").lower().replace("__", ".")
            if variable not in (*ENV_SWITCHES, *ENV_SIZES, *ENV_SECRETS, "SPECCTL_") and name not in keys():
                wrong.append(variable)
    return wrong


@pytest.mark.parametrize("topic", guide.TOPICS)
def test_keys_flags_and_variables_of_a_guide_exist(topic):
    assert unknown(page(topic)) == []


@pytest.mark.parametrize("wrong", ["`filters.near`", "`--temprature 0`", "`SPECCTL_KVS=1`", "`drafting.widht=2`"])
def test_an_unknown_name_is_noticed(wrong):
    """Negative control, together with names that exist."""
    right = "`filters.near_excluded`, `--seed N`, `SPECCTL_TARGET__DTYPE=fp32`, `SPECCTL_KV_GIB`, `result.json`"
    assert unknown(right) == []
    assert len(unknown(f"{right} {wrong}")) == 1


@cache
def strings() -> str:
    """Return all string constants of the package, joined."""
    constants = (node.value for tree in sources().values() for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(value for value in constants if isinstance(value, str))


def unsaid(text: str) -> list[str]:
    """Return parts of the messages in the table `Errors` that occur in no string of the package."""
    table = text.partition("## Errors\n")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    parts = [part.strip(" ,?)=") for message in quoted for part in re.split(r"…|\(", message)]
    return [part for part in parts if part and part not in strings() and part not in OTHERS_MESSAGES]


def test_the_explained_errors_exist():
    """Catches a message that was reworded in the code only."""
    text = page("troubleshooting")
    assert text.count("\n| `") > 20 and unsaid(text) == []
    assert unsaid(text.replace("`no drafter …`", "`no drafter anywhere …`")) == ["no drafter anywhere"]


@pytest.mark.parametrize("topic", guide.TOPICS)
def test_a_guide_has_the_common_layout(topic):
    """Short enough for its reader and for a terminal."""
    lines = page(topic).splitlines()
    assert 60 <= len(lines) <= 150
    assert max(map(len, lines)) <= 150
    assert re.fullmatch(rf"# {topic}: .{{20,90}}", lines[0], re.IGNORECASE)
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[0] == "## Shortest command" and headings[-1] == "## What it does not do"


def test_every_file_is_a_topic():
    assert sorted(path.stem for path in (ROOT / "specctl/guides").iterdir()) == sorted(guide.TOPICS)
    assert set(guide.SEARCHED.values()) == set(guide.TOPICS)
    assert set(guide.SEARCHED).isdisjoint(guide.TOPICS)


def test_the_list_shows_all_guides(specctl):
    assert specctl("guide", "-q").out.split() == list(guide.TOPICS)
    rows = specctl("guide", "--json").json["guides"]
    assert [row["topic"] for row in rows] == list(guide.TOPICS)
    shown = specctl("guide").out
    assert all(row["topic"] in shown and row["about"] in shown for row in rows)


def test_a_guide_in_a_pipe_is_printed_verbatim(specctl):
    """rich would take `[0,4,8]` for markup and cut lines at 80 columns."""
    for topic in guide.TOPICS:
        assert specctl("guide", topic).out == page(topic)
    assert specctl("guide", "gpu", "--json").json == {"topic": "gpu", "text": page("gpu")}


def test_a_guide_on_a_terminal_is_formatted(specctl, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    for topic in guide.TOPICS:
        done = specctl("guide", topic)
        assert done.code == 0 and "```" not in done.out and "## " not in done.out
        assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", done.out).splitlines())) <= 60


@pytest.mark.parametrize(("word", "meant"), [("lernin", "learning"), ("export", "engines"), ("vlm", "engines")])
def test_a_similar_word_suggests_a_guide(specctl, word, meant):
    done = specctl("guide", word)
    assert done.code == 2 and f"did you mean {meant}?" in done.err


def test_an_unknown_word_lists_the_guides(specctl):
    done = specctl("guide", "zzzz", "--json")
    assert done.code == 2 and done.json["error"]["hint"] == f"guides: {', '.join(guide.TOPICS)}"


def test_guide_imports_nothing_heavy():
    """Guides are read on login nodes; torch alone takes seconds."""
    code = (
        "import sys; from specctl.cli.main import run; run(['guide', 'gpu'])\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.strip() == "[]"
