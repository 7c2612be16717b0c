"""`specctl doctor`: check software, hardware and a target, and show how to fix each problem."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specctl import regular_files
from specctl.cli import checks
from specctl.cli.command import command, library_output
from specctl.cli.output import cell, fields, output
from specctl.errors import CheckpointError, SpecctlError

if TYPE_CHECKING:
    from specctl.decoding.models.describe import Description
    from specctl.threads import CpuFacts

TargetName = Annotated[
    str | None, typer.Option("--target", help="Also describe this target and how it would run.", show_default=False)
]
AdapterName = Annotated[
    str | None, typer.Option("--target-adapter", help="LoRA adapter of the target.", metavar="DIR", show_default=False)
]
LOW_DISK_GB = 5
LOW_MEMORY_GB = 5
WITH_ENGINES = {
    "distill --server": "",
    "distill --from-log": "",
    "eval-server": "",
    "train-drafter --features-from": "mat is estimated, not measured",
    "train-drafter features.mode=cached": "mat is not measured",
    "train-drafter --arch retrieval": "mat is not measured",
    "export": "",
    "import": "the head is not tried",
    "serve --server": "",
}
"""Commands in which specctl never runs the target's layers, and the measurement that is left out without the layers."""
OWN_FORWARD = (
    *("generate", "distill", "eval", "select", "online", "learn-from-server", "serve", "bench", "train-drafter"),
    *("record", "train-router", "reason"),
)
"""Commands, without the options above, in which specctl itself runs the target."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    State `missing` is a failed requirement; `note` costs speed or an option. `fix`: a command or other advice.
    """

    what: str
    state: Literal["ok", "note", "missing"]
    value: str
    fix: str | None = None

    def unless(self, value: str | None) -> Finding:
        """Return that all is well if there is a `value`, otherwise this finding."""
        return Finding(self.what, "ok", value) if value else self


@dataclass(frozen=True)
class CommandUse:
    """A command, whether it works with a target, and the limit that the target sets (empty: none)."""

    command: str
    works: bool
    without: str = ""


@command("doctor", "specctl doctor --target meta-llama/Llama-3.1-8B-Instruct")
def doctor(target: TargetName = None, target_adapter: AdapterName = None) -> None:
    """Check this machine and a target: show problems, and the command that fixes each."""
    with library_output():
        machine = [*software(), *hardware(), *working_directory()]
        about, usable = describe_target(target or "builtin")
        files = weights_of(target) if about and target else []
        if about and target_adapter:
            files.append(adapter_of(target or "builtin", target_adapter))
    findings = [*machine, *files, usable]
    missing = sum(finding.state == "missing" for finding in findings)
    document = {
        "healthy": missing == 0,
        "missing": missing,
        "findings": [asdict(finding) for finding in findings],
        "target": asdict(about) if about is not None else None,
        "commands": [asdict(use) for use in commands_of(about.path == "engine")] if about is not None else [],
    }
    shown = about if target is not None else None  # the built-in target is described only on request
    output.result(document, partial(_report, about=shown), brief="ok" if not missing else f"{missing} missing")
    if missing:
        unusable = missing == sum(finding.state == "missing" for finding in (*files, usable))
        raise typer.Exit(CheckpointError.exit_code if unusable else SpecctlError.exit_code)


def software() -> Iterator[Finding]:
    """Check Python, every required package against its bounds, and optional software."""
    from importlib import metadata

    from packaging.requirements import Requirement

    from specctl import runs

    try:
        own = metadata.distribution("specctl")
    except metadata.PackageNotFoundError:
        advice = "in the folder with pyproject.toml: pip install -e ."
        yield Finding("specctl", "note", "not installed, so versions of packages cannot be checked", advice)
    else:
        yield package("python", own.metadata["Requires-Python"] or "", platform.python_version())
        for requirement in map(Requirement, own.requires or []):
            if requirement.marker is None:
                yield package(requirement.name, str(requirement.specifier), runs.version(requirement.name))
    lack = Finding("triton", "note", "not installed; only needed with a GPU", "pip install 'triton>=3.2'")
    yield lack.unless(runs.version("triton"))
    need = "none; the CPU step in bf16 and DeepSpeed's optimizers need one"
    lack = Finding("C++ compiler", "note", need, "apt install g++")
    yield lack.unless(shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++"))


def package(name: str, bounds: str, installed: str | None) -> Finding:
    """Check that Python or a required package is installed, within its version bounds."""
    from packaging.specifiers import SpecifierSet

    if installed is None:
        return Finding(name, "missing", "not installed", f"pip install '{name}{bounds}'")
    if not SpecifierSet(bounds).contains(installed, prereleases=True):
        return Finding(name, "missing", f"{installed}, but {bounds} is needed", f"pip install '{name}{bounds}'")
    return Finding(name, "ok", installed)


def hardware() -> Iterator[Finding]:
    import psutil
    import torch

    from specctl import runs, threads
    from specctl.kernels import native

    yield Finding("cpu", "ok", f"{runs.cpu_model()}, {threads.counted(threads.cores(), 'core')}")
    yield threads_finding(threads.read_cpu_facts(threads.cores(), environ={}), threads.requested_threads(os.environ))
    if (kind := native.chosen()) is None:
        step = "on PyTorch: SPECCTL_STEP=torch" if native.instructions() else "on PyTorch: the C++ step needs AVX2"
    else:
        step = f"in C++ with {kind.upper()}" if native.library() else "on PyTorch: the C++ step is not compiled"
    yield Finding("CPU step in bf16", "ok", step)
    memory = psutil.virtual_memory()
    text = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    low = Finding("memory", "note", text, "lower features.budget_gb and batch_tokens")
    yield low.unless(text if memory.available >= LOW_MEMORY_GB * 2**30 else None)
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    none = Finding("cuda", "note", f"no device, torch {torch.__version__}", "not needed: everything runs on the CPU")
    yield none.unless(", ".join(devices))


def threads_finding(facts: CpuFacts, asked: int | None) -> Finding:
    """Report on the threads that commands use. `asked`: the user's number, which may exceed the free cores."""
    from specctl import threads

    count = threads.free_threads(facts)
    text = f"{threads.counted(asked or count, 'thread')} on {threads.counted(facts.allowed, 'core')}"
    if count < facts.default:
        text += f": {threads.reason_for_fewer(facts)}"
    if asked and asked > count:
        return Finding("threads", "note", text, f"unset OMP_NUM_THREADS: commands then use {count}")
    if count < facts.default:
        return Finding("threads", "note", text, "speeds measured now are lower than on an idle machine")
    return Finding("threads", "ok", text)


def working_directory() -> Iterator[Finding]:
    here = Path.cwd()
    locked = Finding("working directory", "missing", f"{here} is read-only", "cd to a directory you can write to")
    yield locked.unless(f"{here} is writable" if os.access(here, os.W_OK) else None)
    free = shutil.disk_usage(here).free / 2**30
    full = Finding("disk", "note", f"{free:.1f} GiB free", "free disk space, or set features.mode=online")
    yield full.unless(full.value if free >= LOW_DISK_GB else None)


def describe_target(name: str) -> tuple[Description | None, Finding]:
    """Describe a target from its configuration alone, with a finding on whether and how it can run."""
    from specctl.decoding.models.describe import describe
    from specctl.decoding.models.loading import is_gguf, load_tokenizer
    from specctl.decoding.target_text import BASE_TEMPLATE
    from specctl.recipe import TargetRecipe

    what = f"target {name}"
    try:
        where = checks.local_target(TargetRecipe(name=name))
        if where is None:
            raise CheckpointError(
                "not a local directory, and not in the Hugging Face cache",
                f"hf download {name} --include '*.json' '*.jinja' (no weights; doctor does not contact the hub)",
            )
        about = describe(where, name)
    except SpecctlError as error:
        fix = "install specctl again, from its checkout" if name == "builtin" else error.hint
        return None, Finding(what, "missing", error.message, fix)
    path = f"{checks.step_name(about.path).removeprefix('the ')}: {about.why}"
    if about.path == "engine" and about.chat_template:
        return about, Finding(what, "note", path, "an engine runs it; the table shows the commands that work")
    if about.chat_template is None:
        try:
            load_tokenizer(where)
        except CheckpointError as error:
            return about, Finding(what, "missing", error.message, error.hint)
    if not about.chat_template:
        fix = f"add chat_template.jinja to the target's directory (for a base model: '{BASE_TEMPLATE}')"
        if is_gguf(name):
            fix = f"gguf-new-metadata --chat-template '{BASE_TEMPLATE}' {name} NEW.gguf (for a base model)"
        return about, Finding(what, "note", f"{path}; it has no chat template, which is needed to render prompts", fix)
    return about, Finding(what, "ok", path)


def weights_of(target: str) -> list[Finding]:
    """Check the weights of a target that could be described; empty if its weights are not examined."""
    from specctl.decoding.models import gguf_target
    from specctl.decoding.models.loading import is_gguf

    if is_gguf(target):  # the description has checked the sizes and shapes of all tensors
        parts = gguf_target.files(target)
        return [Finding("weights", "ok", f"{parts[0].name}{f' and {len(parts) - 1} more' if parts[1:] else ''}")]
    return [weights(Path(target))] if Path(target).is_dir() else []


def adapter_of(target: str, adapter: str) -> Finding:
    """Check that an adapter fits a target that could be described, without reading weights."""
    from specctl.decoding.models import target_adapter
    from specctl.recipe import TargetRecipe

    try:
        checks.target_config(TargetRecipe(name=target, adapter=adapter))
    except CheckpointError as error:
        return Finding(f"adapter {adapter}", "missing", error.message, error.hint)
    number = len(target_adapter.shapes(adapter))
    return Finding(f"adapter {adapter}", "ok", f"{number} tensors, which loading merges into the target's weights")


def weights(directory: Path) -> Finding:
    """Check the weight files of a target, without reading weights.

    All files must exist, have the size in their headers, and hold the tensors that config.json requires.
    """
    from safetensors import SafetensorError, safe_open

    from specctl.decoding.models.loading import load_config
    from specctl.decoding.models.supported import check_headers, weight_files

    file = directory / "model.safetensors.index.json"
    try:
        files, single = weight_files(directory), directory / "model.safetensors"
        if not files and os.path.lexists(single):  # a dangling link, a pipe or a directory
            files = [single]
        if not files:
            return Finding("weights", "missing", f"none in {directory}", "put model.safetensors next to config.json")
        for file in files:
            regular_files.check(file)
        if files[0].suffix == ".bin":
            return Finding("weights", "ok", "pytorch_model.bin; its content is not checked")
        for file in files:
            with safe_open(file, "pt"):  # compares the size with the header
                pass
        check_headers(f"target {directory}", directory, load_config(str(directory)))
    except OSError as error:
        return Finding("weights", "missing", f"{error.filename}: {error.strerror}", "copy the file again")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Finding("weights", "missing", f"{file} is damaged: {error}", "copy the file again")
    except CheckpointError as error:
        return Finding("weights", "missing", error.message, error.hint)
    return Finding("weights", "ok", f"{', '.join(file.name for file in files[:2])}{' …' if len(files) > 2 else ''}")


def commands_of(only_engines: bool) -> list[CommandUse]:
    """All commands that read a target. `only_engines`: specctl cannot run the target itself."""
    served = [CommandUse(name, True, left_out if only_engines else "") for name, left_out in WITH_ENGINES.items()]
    return served + [CommandUse(name, not only_engines) for name in OWN_FORWARD]


def _in_words(about: Description) -> dict[str, Any]:
    from specctl.decoding.models.loading import DTYPES, pick_device

    copy = checks.size_in_transformers(about.parameters, DTYPES[about.dtype], pick_device("auto"))
    context: Any = about.context_length
    if about.trained_context:
        context = f"{context:,} of {about.trained_context:,}: beyond that, {', '.join(about.rope)} changes frequencies"
    heads, kv_heads, head_dim = (n or "(layers differ)" for n in (about.heads, about.kv_heads, about.head_dim))
    form = ", quantized as in the file" if about.quantized else f" in {about.dtype}, as --dtype auto selects"
    return {
        "architecture": about.architecture,
        "runs by": f"{checks.step_name(about.path)}: {about.why}",
        "parameters": f"{about.parameters:,}: {about.bytes / 1e9:,.2f} GB{form}",
        **({} if about.path == "engine" else {"baseline": f"{copy} more in eval and bench, for transformers"}),
        "checkpoint in": about.checkpoint_dtype,
        "layers": f"{about.layers}, of hidden size {about.hidden_size:,}",
        "heads": f"{heads} of dimension {head_dim}, {kv_heads} KV heads",
        "vocabulary": f"{about.vocab_size:,}, {'head tied to the embedding' if about.tied_head else 'separate head'}",
        "context": context,
        "RoPE": about.rope or "none",
        "sliding window": about.sliding_window or "none",
        "ends with": f"token {' or '.join(map(str, about.eos_ids))}",
        "chat template": "not known" if about.chat_template is None else about.chat_template,
        "features": f"hidden states 0 to {about.features}, for drafters that read features",
    }


def _commands(uses: list[dict[str, Any]], about: Description, missing: int) -> Any:
    """Render the commands that work and the commands that do not; one line if all work."""
    from specctl.cli.output import table

    if all(use["works"] for use in uses):
        lack = " once it has a chat template" if about.chat_template is False else ""
        return f"commands: all work with this target{' once nothing is missing' if missing else lack}"
    groups: dict[tuple[bool, str], list[str]] = {}
    for use in uses:
        groups.setdefault((use["works"], use["without"]), []).append(use["command"])
    rows = [[", ".join(names), "yes" if works else "no", without] for (works, without), names in groups.items()]
    return table("commands", "work", "without the layers", rows=rows)


def _label(what: str) -> str:
    """Shorten the path of a target or an adapter to its last part, so that the column stays narrow."""
    kind, _, place = what.partition(" ")
    return f"{kind} {Path(place).name}" if place.startswith((".", "/", "~")) else what


def _report(document: dict[str, Any], about: Description | None) -> Any:
    from rich.console import Group
    from rich.table import Table

    from specctl.threads import counted

    colors = {"ok": "green", "note": "yellow", "missing": "bold red"}
    grid = Table.grid(padding=(0, 2))
    for finding in document["findings"]:
        state = f"[{colors[finding['state']]}]{finding['state']}[/]"
        fix = f"→ {cell(finding['fix'])}" if finding["fix"] else ""
        grid.add_row(state, cell(_label(finding["what"])), f"{cell(finding['value'])}  {fix}".rstrip())
    missing = document["missing"]
    lacking = f"{counted(missing, 'requirement')} {'is' if missing == 1 else 'are'} missing"
    verdict = lacking if missing else "all requirements are met"
    described = [fields(_in_words(about)), "", _commands(document["commands"], about, missing), ""] if about else []
    return Group(grid, "", *described, verdict)
