"""Command-line flags of the commands that run a recipe, with the recipe keys set by each flag."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from specctl import regular_files
from specctl.errors import UsageError, brief
from specctl.families import FAMILIES, STREAM_RETRIEVAL, TEXT_DRAFTERS, listed, online_families
from specctl.formats.registry import readers

OBJECT = """such as '{"enable_thinking": false}'"""
SWITCH = " "  # metavar of a switch, which takes no value
NUMBERS = (int, float)  # types of flags that Typer reads as texts: the recipe refuses other texts, with its own words
METAVARS = {bool: SWITCH, int: "INTEGER", float: "FLOAT"}


_joined = ",".join
"""Conversion of a flag that was given several times to one comma-separated list."""


def _comma_separated(kind: Callable[[str], Any], wanted: str, example: str) -> Callable[[list[str]], list[Any]]:
    """Return the conversion of texts to a list of numbers. `wanted`: the kind of list, for the error."""

    def convert(texts: list[str]) -> list[Any]:
        text = _joined(texts)
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise UsageError(f"{brief(text)!r} is not {wanted}", hint=f"such as {example}") from None

    return convert


_comma_ints = _comma_separated(int, "a list of whole numbers", "0,1,2")
_comma_counts = _comma_separated(int, "a list of whole numbers", "1,8")
_comma_floats = _comma_separated(float, "a number or a list of them", "0,0.7")
_numbers = _comma_separated(float, "a list of numbers", "2,2.5,3")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = regular_files.parse_json(text)
    except ValueError as error:
        raise UsageError(f"not JSON: {error}", OBJECT) from None
    if not isinstance(value, dict):
        raise UsageError("needs a JSON object", OBJECT)
    return value


def _names(values: list[str]) -> list[str]:
    """Split values such as `a,b` into names. An existing path is one name, also as the head of a hybrid."""
    return [name for value in values for name in ([value] if _is_path(value) else value.split(","))]


def _is_path(value: str) -> bool:
    return "," in value and (Path(value).exists() or Path(value.rpartition("+")[0] or value).exists())


def _none_or_names(values: list[str]) -> list[str]:
    return [] if values == ["none"] else _names(values)


@dataclass(frozen=True)
class Flag:
    """One flag: the recipe keys it sets, its type, its help, and the conversion to the value of the keys."""

    keys: tuple[str, ...]
    type: Any
    help: str
    convert: Callable[[Any], Any] | None = None
    metavar: str | None = None

    def annotation(self, name: str, command: str, panel: str | None = None) -> Any:
        """Return the Typer declaration: `Annotated[type | None, Option("--name")]`.

        `command`: name of the command, which may have a help text of its own. `panel`: panel of the help.
        """
        metavar = self.metavar or METAVARS.get(self.type)
        help = HELP.get((command, name), self.help)
        option = typer.Option(spelling(name), help=help, metavar=metavar, show_default=False, rich_help_panel=panel)
        return Annotated[(str if self.type in NUMBERS else self.type) | None, option]


DRAFTERS = f"Drafter directory, {listed([*TEXT_DRAFTERS])}, or both: DIR+lookup"
FLAGS: dict[str, Flag] = {
    "target": Flag(("target.name",), str, "Hugging Face id, directory, GGUF file, or builtin."),
    "target_adapter": Flag(("target.adapter",), str, "LoRA adapter of the target: a directory of peft.", metavar="DIR"),
    "device": Flag(("target.device",), str, "auto, cpu, cuda or cuda:N."),
    "dtype": Flag(("target.dtype",), str, "auto, bf16, fp16 or fp32."),
    "chat_template_kwargs": Flag(
        ("target.chat_template_kwargs",), str, "Arguments of the chat template.", _json_object, metavar="JSON"
    ),
    "domain": Flag(
        ("data.domain",), list[str], "Domain, or several separated by commas; see `specctl domains ls`.", _joined
    ),
    "prompts": Flag(
        ("data.prompts",),
        str,
        "JSONL, CSV, Parquet or text file, {domain} in its name; - for stdin; hub:ID[:CONFIG] for a data set.",
        metavar="FILE",
    ),
    "from_log": Flag(
        ("log", "traffic.log"),
        str,
        "Use existing responses: a log of requests with responses, messages, ShareGPT or Alpaca.",
        metavar="FILE",
    ),
    "exclude": Flag(("exclude",), str, "File of prompts to leave out, such as a test set.", metavar="FILE"),
    "server": Flag(
        ("server.urls",),
        list[str],
        "vLLM, SGLang or llama.cpp server of the target, or several: http://host:8000.",
        _joined,
        metavar="URL",
    ),
    "baseline_server": Flag(
        ("baseline_server.urls",), list[str], "Server without a drafter, to compare with.", _joined, metavar="URL"
    ),
    "listen": Flag(("traffic.listen", "listen"), str, "Address at which clients send requests.", metavar="HOST:PORT"),
    "features_from": Flag(
        ("features.server.urls",),
        list[str],
        "vLLM or SGLang server that computes the target's hidden states.",
        _joined,
        metavar="URL",
    ),
    "concurrency": Flag(("concurrency",), list[str], "Numbers of requests in flight: 1,8.", _comma_counts),
    "mats": Flag(
        ("mats",),
        list[str],
        "With --baseline-server: predict the speed of drafters with mats 2,2.5,3. To check one, serve with vLLM's "
        'rejection_sample_method "synthetic" (on a GPU) and its synthetic_acceptance_length.',
        _numbers,
        metavar="LIST",
    ),
    "seed": Flag(("data.seed", "sampling.seed"), int, "Seed of prompts, sampling and training."),
    "max_new_tokens": Flag(("sampling.max_new_tokens",), int, "Most tokens of a response."),
    "temperature": Flag(("sampling.temperature",), float, "Sampling temperature; 0 is greedy."),
    "temperatures": Flag(("temperatures",), list[str], "Temperatures, mixed over the prompts: 0,0.7.", _comma_floats),
    "top_p": Flag(("sampling.top_p",), float, "Nucleus sampling; 1 is off."),
    "top_k": Flag(("sampling.top_k",), int, "Top-k sampling; 0 is off."),
    "exact": Flag(("sampling.exact",), bool, "Fixed-shape forwards: no ties between nearly equal tokens; slower."),
    "arch": Flag(("arch",), str, f"Drafter family: {listed([*FAMILIES])}."),
    "each": Flag(("each",), bool, "Train one drafter per domain, in one directory, instead of one for the mixture."),
    "init": Flag(("init",), str, "Drafter to start from.", metavar="DIR"),
    "lora": Flag(("lora.enabled",), bool, "Train a low-rank adapter of --init instead of all its weights."),
    "drafter": Flag(("drafter",), str, f"{DRAFTERS}.", metavar="PATH"),
    "drafters": Flag(("drafters",), list[str], f"{DRAFTERS}; repeatable.", _names, metavar="PATH"),
    "pool": Flag(("pool",), str, "Directory of drafter directories.", metavar="DIR"),
    "parts": Flag(("parts",), list[str], "steps,rounds,decoding (default), or some of them.", _none_or_names),
    "shape": Flag(("shape",), str, "Random weights of a size (1b, 8b, 32b, 70b) instead of a target."),
    "batches": Flag(("batches",), list[str], "Batch sizes: 1,8.", _comma_counts),
    "matrix": Flag(("matrix",), bool, "Print and draw the matrix pool × domains, and test its diagonal."),
    "metric": Flag(("metric",), str, "Metric in the cells of the matrix: mat, speedup or accept_rate."),
    "baselines": Flag(
        ("baselines",), list[str], "vanilla,transformers (default), one of them, or none.", _none_or_names
    ),
    "algo": Flag(
        ("algo",),
        list[str],
        "Policy, or several separated by commas: cgp-ucb (default), … (`specctl guide choosing`).",
        _joined,
    ),
    "choose": Flag(
        ("choose",), str, "Policy that chooses among several drafters: cgp-ucb (default), … (`specctl guide choosing`)."
    ),
    "learner": Flag(
        ("algo",), list[str], "Update rule, alone or with a family, or several: ogd, opt-hydra, ens-eagle3, …", _joined
    ),
    "step_algo": Flag(
        ("algo",), list[str], "lr (default), osd-lr, online-lr, or several: how the draft LM learns.", _joined
    ),
    "schedule": Flag(("stream.schedule",), str, "Domains in turn, each with its number of prompts: sql:400,math:400."),
    "mixing": Flag(("stream.kind",), str, "abrupt (default), mix or drift: how one domain follows another."),
    "chunk": Flag(("stream.chunk",), int, "Prompts between two updates."),
    "lr": Flag(("learner.lr",), float, "Learning rate η; in an ensemble, the smallest one."),
    "target_schedule": Flag(
        ("target_schedule",), str, "Targets along the stream: ./step-100:400,./step-200:400.", metavar="LIST"
    ),
    "beside": Flag(
        ("beside",),
        str,
        f"Text drafter in one tree with every head: {STREAM_RETRIEVAL} (default), {listed([*TEXT_DRAFTERS])}; or none.",
        metavar="NAME",
    ),
    "draft_length": Flag(("draft_length",), str, "fixed (default), or auto: the depth that pays off at the moment."),
    "asynchronous": Flag(
        ("asynchronous",), bool, "Learn in a separate process while decoding continues; such runs are not reproducible."
    ),
    "learner_device": Flag(("learner_device",), str, "With --async: device of the learner, such as cuda:1."),
    "online_baselines": Flag(
        ("baselines",),
        list[str],
        "vanilla,static,lookup,retrieval (default), suffix, some of them, or none.",
        _none_or_names,
    ),
    "allow_code_execution": Flag(
        ("reasoning.allow_code_execution",), bool, "Run programs that the target wrote, to score them."
    ),
    "strict": Flag(("strict",), bool, "Refuse a pool with an unusable drafter."),
    "reset": Flag(("reset",), str, "When a policy forgets: after every query (default) or session, or never (stream)."),
    "session": Flag(("session",), int, "Prompts per session, from one domain."),
    "select_baselines": Flag(
        ("baselines",), list[str], "vanilla,beside (default), fixed (every arm), draft-all; or none.", _none_or_names
    ),
    "rivals": Flag(("rivals",), list[str], "Drafter for comparison, not in the pool; repeatable.", _names, "PATH"),
    "record": Flag(("record",), str, "Record every drafter's drafts at every position, and stop.", metavar="FILE"),
    "replay": Flag(("replay",), str, "Play the policies on a recorded table instead of decoding.", metavar="FILE"),
    "train_router": Flag(("train_router",), bool, "Train a classifier of prompts first, for the policy `router`."),
    "router_dir": Flag(("router_dir",), str, "Directory of a trained router, or for a new one.", metavar="DIR"),
    "batch": Flag(("batch",), int, "Sequences decoded at a time."),
    "limit": Flag(("limit",), int, "Prompts per domain."),
    "data_limit": Flag(("data.limit",), int, "Prompts per domain."),
    "seeds": Flag(("seeds",), list[str], "Seeds, one repeat each, for intervals: 0,1,2.", _comma_ints),
    "shard": Flag(("shard",), str, "This job's part of the prompts, for job arrays.", metavar="I/N"),
    "learn": Flag(("learn.enabled",), bool, "Let the drafter learn from the texts that are served."),
    "log": Flag(("log",), list[str], "Also log to tensorboard, wandb or trackio; repeatable.", _names),
    "to": Flag(("to",), str, listed(readers()) + "."),
    "tune": Flag(
        ("tune",),
        str,
        "Result of eval-server with a baseline server: derive draft lengths by load (vllm, sglang).",
        metavar="RESULT",
    ),
    "check": Flag(("check",), bool, "Read the result back and compare its weights."),
    "push": Flag(("push",), str, "Upload the files to this repository of the Hugging Face hub.", metavar="OWNER/NAME"),
    "private": Flag(("private",), bool, "Create that repository as a private one."),
    "format": Flag(("format",), str, "Format of the head; auto detects it."),
    "no_probe": Flag(("probe.enabled",), bool, "Skip the test of the head on a few prompts.", lambda given: not given),
    "save_outputs": Flag(("save_outputs",), bool, "Write outputs.jsonl into the run directory."),
    "output_dir": Flag(("output_dir",), str, "Directory of the result.", metavar="DIR"),
    "resume": Flag(("resume",), bool, "Continue what an earlier run left unfinished."),
    "overwrite": Flag(("overwrite",), bool, "Replace an existing result."),
}
HELP: dict[tuple[str, str], str] = {
    ("learn-from-server", "server"): "vLLM or SGLang server of the target, or several: http://host:8000.",
    ("learn-from-server", "baseline_server"): "Server with a drafter that does not learn, to compare with.",
    ("learn-from-server", "learner"): "Update rule, alone or with a family: ogd (default), opt-hydra, ens-eagle3, …",
    ("export", "server"): "Running SGLang server, or several, that get a datastore.",
    ("train-drafter", "init"): "Drafter to start from; auto: a generalist of the same family.",
    ("select", "batch"): "Sequences decoded at a time; the policy chooses an arm for each.",
    ("online", "arch"): f"Drafter family: {listed([*online_families()])}.",
    ("learn-from-server", "arch"): f"Drafter family: {listed([*online_families()])}.",
}
"""Help texts of single commands, by command and name in `FLAGS`."""

TARGET = ("target", "target_adapter", "device", "dtype", "chat_template_kwargs")
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "exact", "seed")
DATA = ("domain", "prompts")
SPELLING = {
    "temperatures": "temperature",
    "drafters": "drafter",
    "rivals": "rival",
    "data_limit": "limit",
    "select_baselines": "baselines",
    "router_dir": "router",
    "learner": "algo",
    "step_algo": "algo",
    "online_baselines": "baselines",
    "asynchronous": "async",
}
"""Spelling of flags that differ from their names here: several flags may look the same on the command line."""


def settings(given: dict[str, Any], command: str) -> list[Any]:
    """Convert the given flags (by their name in `FLAGS`) into recipe settings of `command`."""
    from specctl.recipe import aliases
    from specctl.recipe.resolve import Setting

    fields = aliases.fields_of(command)

    overrides = []
    for name, value in given.items():
        if value is None or value is False or value == []:
            continue
        flag, origin = FLAGS[name], spelling(name)
        for key in flag.keys:
            path = tuple(key.split("."))
            if path[0] in fields:  # a recipe may have one of the two keys of --seed
                overrides.append(Setting(path, _converted(flag, value, origin), origin))
    return overrides


def _converted(flag: Flag, value: Any, origin: str) -> Any:
    """The value of the keys of a flag. UsageError names the flag, typed as `origin`. A text that is no number stays."""
    if flag.type in NUMBERS:
        with suppress(ValueError):
            value = flag.type(value)
    try:
        return flag.convert(value) if flag.convert else value
    except UsageError as error:
        raise UsageError(f"{origin}: {error.message}", error.hint) from None


def spelling(name: str) -> str:
    """Return the flag as typed: `top_p` → `--top-p`."""
    return "--" + SPELLING.get(name, name).replace("_", "-")
