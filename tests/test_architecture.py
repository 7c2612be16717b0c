"""Allowed imports between the packages of specctl. A wrong import is how layers rot."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from specctl.families import FAMILIES
from tests.test_maps import statements

ROOT = Path(__file__).resolve().parent.parent
LEAVES = [
    *(
        "environment",
        "errors",
        "families",
        "formats.registry",
        "hub",
        "lock",
        "processes",
        "progress",
        "recipe",
    ),
    *("regular_files", "replaced_directories", "runs", "subcommands", "threads"),
]
LOWER = {*LEAVES, "kernels", "decoding"}
DRAFTING = LOWER | {"drafters", "formats"}
MIDDLE = [
    *("engines", "distillation", "training", "selection", "adaptation", "gateway", "measuring"),
    *("reporting", "commands"),
]
"""A later one may use an earlier one."""

ALLOWED: dict[str, set[str]] = {
    "": set(),  # specctl/__init__.py
    "__main__": {"cli", "errors", "progress"},
    "environment": {"errors"},
    "errors": set(),
    "families": set(),
    "hub": set(),
    "subcommands": set(),
    "processes": {"errors"},
    "progress": {"errors", "processes"},
    "lock": {"errors", "progress", "regular_files"},
    "regular_files": set(),
    "replaced_directories": {"errors"},
    "runs": {"errors", "lock", "progress", "regular_files", "subcommands", "threads"},
    "threads": {"progress"},
    "recipe": {
        *("environment", "errors", "families", "formats.registry", "progress", "recipes"),
        *("regular_files", "subcommands"),
    },
    "recipes": set(),
    "recipes.online": {"adaptation", "data_prep", "decoding", "recipe"},  # an example of a user's script
    "data_prep": {"errors", "hub"},
    "kernels": set(),
    "decoding": {*LEAVES, "kernels"},
    "drafters": DRAFTING,
    "formats": DRAFTING,
    "formats.registry": {"errors", "formats"},  # a table that refers to its own package for types only
    **{package: DRAFTING | {"data_prep", *MIDDLE[:order]} for order, package in enumerate(MIDDLE)},
    "api": DRAFTING | {"data_prep", *MIDDLE},
    "cli": DRAFTING | {"data_prep", "api", "", *MIDDLE},
    "lab": DRAFTING | {"data_prep", "api", "cli", "", *MIDDLE},  # not imported by other packages
}


def imported(source: str, package: list[str]) -> set[str]:
    """Return the modules of specctl that a source file imports, as dotted names below `specctl`.

    Imports inside functions count.
    """
    found = set()
    for node in statements(parsed(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "specctl" else [module]
        else:
            continue
        found |= {name.removeprefix("specctl").removeprefix(".") for name in names if name.split(".")[0] == "specctl"}
    return found


def package_of(module: str) -> str:
    """Map `decoding.offline` to `decoding`, and a file with its own rule to itself.

    Other names belong to the root (`from specctl import __version__`).
    """
    first, two = module.split(".")[0], ".".join(module.split(".")[:2])
    return next((package for package in (two, first) if package in ALLOWED), "")


def violations(files: dict[str, str]) -> list[str]:
    """Return `a imports b` for every forbidden import; `files` maps dotted paths below specctl to sources."""
    wrong = []
    for name, source in files.items():
        package = ["specctl", *name.split(".")[:-1]]
        for module in imported(source, package):
            if package_of(module) not in {*ALLOWED[package_of(name)], package_of(name)}:
                wrong.append(f"{name} imports {module}")
    return sorted(wrong)


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def sources() -> dict[str, str]:
    folders = {ROOT / "specctl": "", ROOT / "data_prep": "data_prep.", ROOT / "recipes": "recipes."}
    return {
        prefix + ".".join(path.relative_to(folder).with_suffix("").parts): path.read_text()
        for folder, prefix in folders.items()
        for path in folder.rglob("*.py")
    }


def test_imports_follow_the_layers():
    assert violations(sources()) == []


def test_every_package_has_an_import_rule():
    packages = {path.name for path in (ROOT / "specctl").iterdir() if any(path.glob("*.py"))}
    modules = {path.stem for path in (ROOT / "specctl").glob("*.py")} - {"__init__"}
    assert packages | modules <= set(ALLOWED)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kernels.cpu", "from specctl.errors import UsageError"),
        ("kernels.cpu", "from ..decoding import loop"),
        ("decoding.loop", "def f():\n    from specctl.drafters.text.lookup import Lookup"),
        ("training.loop", "import specctl.measuring.records"),
        ("distillation.store", "from specctl.cli.output import output"),
        ("progress", "from specctl import runs"),
        ("commands.select", "def f():\n    from specctl.lab.recorded import trace"),
    ],
)
def test_a_forbidden_import_is_noticed(name, source):
    """Negative control of the check above."""
    assert violations({name: source})


def cycles(files: dict[str, str]) -> list[list[str]]:
    """Return groups of files that import each other, including imports inside functions and for annotations."""
    edges = {name: imports(name, source, files) for name, source in files.items()}
    reached: dict[str, set[str]] = {}
    for start in files:
        found, left = set(), [start]
        while left:
            for file in edges[left.pop()] - found:
                found.add(file)
                left.append(file)
        reached[start] = found
    groups = {frozenset({name} | {other for other in reached[name] if name in reached[other]}) for name in files}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def imports(name: str, source: str, files: dict[str, str]) -> set[str]:
    """Return the files that a file imports, directly or by importing their names."""
    found = set()
    for node in statements(parsed(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("specctl"):
            module = node.module.removeprefix("specctl").removeprefix(".")
            inside = {f"{module}.{alias.name}".removeprefix(".") for alias in node.names} & {*files}
            found |= inside or {module, f"{module}.__init__"} & {*files}
    return found - {name}


def test_there_are_no_import_cycles():
    assert cycles(sources()) == []


def test_an_import_cycle_is_noticed():
    files = {"a": "from specctl import b", "b": "def f():\n    from specctl.c import x", "c": "from specctl.a import y"}
    assert cycles(files | {"d": "from specctl.a import y"}) == [["a", "b", "c"]]


def test_an_import_cycle_through_a_package_is_noticed():
    """The file of package `a` is `a/__init__.py`, and is imported as `a`."""
    files = {"a.__init__": "from specctl.c import x", "a.b": "import os", "c": "from specctl.a import z"}
    assert cycles(files) == [["a.__init__", "c"]]


def borrowed(files: dict[str, str]) -> list[str]:
    """Return `a imports b` if a file of drafters/ imports from a family's package and lies outside this package."""
    inside = {name: source for name, source in files.items() if name.startswith("drafters.")}
    packages = {f"drafters.{family}." for family in FAMILIES}
    edges = [(name, file) for name, source in inside.items() for file in imports(name, source, files)]
    lent = [(name, file, package) for name, file in edges for package in packages if file.startswith(package)]
    return sorted(f"{name} imports {file}" for name, file, package in lent if not name.startswith(package))


def test_drafter_families_do_not_import_each_other():
    """Shared code has a separate package, so that a family can be read, changed or removed alone."""
    assert borrowed(sources()) == []


def test_an_import_from_another_family_is_noticed():
    own = {"drafters.lm.model": "", "drafters.lm.drafter": "from specctl.drafters.lm import model"}
    assert borrowed(own) == []
    other = {"drafters.eagle.drafter": "def f():\n    from specctl.drafters.lm.model import LM"}
    assert borrowed(own | other) == ["drafters.eagle.drafter imports drafters.lm.model"]


PATHS = {"read_text", "read_bytes"}
LIBRARIES = {"load_file", "safe_open", "ParquetFile", "read_table", "read_schema"}
"""They open whatever is there, so that it is to be looked at before."""
OUR_OWN = {"chat._size", "native._source"}
OUR_OWN |= {
    *("app.front_page", "guide.text", "lock._machine", "phrasebook.read", "resolve.shipped", "runs.cpu_model"),
    *("threads._limit", "threads._lines"),
}
"""Functions that read files of the kernel, or of the package."""
LOOKED_AT = {
    "checkpoint.load",
    "head_directory._names",
    "head_directory._tensors",
    "line_streams._parquet",
}
LOOKED_AT |= {"replaced_tensors._exchange"}
"""Functions whose files another function has looked at."""


def called(call: ast.Call) -> tuple[str, str]:
    """Return (`pq`, `read_table`) for `pq.read_table(…)` and ("", `open`) for `open(…)`."""
    match call.func:
        case ast.Name(id=name):
            return "", name
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return owner, name
        case ast.Attribute(attr=name):
            return "…", name
    return "…", ""


def unguarded(files: dict[str, str]) -> list[str]:
    """Return each `module.function` that opens a file without a check for pipes and devices.

    The check is `regular_files.check`, or reading with `specctl.regular_files`.
    """
    wrong = set()
    for name, source in files.items():
        module = name.removesuffix(".__init__").split(".")[-1]
        for function in ast.walk(parsed(source)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = {called(node) for node in ast.walk(function) if isinstance(node, ast.Call)}
                bare = ("", "open") in calls or any(what in PATHS and of != "regular_files" for of, what in calls)
                ours = {("", "read_table")}  # defined in `lab/recorded/table_file.py`
                if bare or (("regular_files", "check") not in calls and {what for _, what in calls - ours} & LIBRARIES):
                    wrong.add(f"{module}.{function.name}")
    return sorted(wrong)


def test_files_from_outside_are_checked_before_they_are_opened():
    """A named pipe in place of a file used to block forever, and a device was read without end."""
    files = {name: source for name, source in sources().items() if name != "regular_files"}
    assert set(unguarded(files)) == OUR_OWN | LOOKED_AT


@pytest.mark.parametrize(
    "line",
    [
        "with open(path) as file: ...",
        "Path(path).read_text()",
        "self.place.read_bytes()",
        "load_file(path)",
        "pq.read_table(path)",
        "pyarrow.parquet.ParquetFile(path)",
    ],
)
def test_an_unchecked_file_is_noticed(line):
    """Negative control of the check above."""
    assert unguarded({"a.b": f"def f(path):\n    {line}\n"}) == ["b.f"]
    assert (
        unguarded({"a.b": "def f(path):\n    regular_files.check(path)\n    load_file(path)\n    lock.open()\n"}) == []
    )


def test_help_imports_nothing_heavy():
    """Heavy imports would delay `specctl --help`."""
    code = (
        "import sys\nfrom specctl.cli.main import run\ncode = run(['--help'])\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'datasets', 'deepspeed', 'yaml'} & set(sys.modules)\n"
        "sys.exit(code or ','.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train-drafter" in done.stdout


def test_a_wrong_drafter_is_refused_before_torch_is_imported():
    code = (
        "import sys\nfrom specctl.cli.main import run\ncode = run(['eval', '--drafter', 'nowhere+lookup'])\n"
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "no drafter nowhere" in done.stderr


def test_class_names_are_unique():
    """A search for a class name should find one class."""
    names = [
        node.name
        for source in sources().values()
        for node in statements(parsed(source))
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []


MOST_PARAMETERS = 6
MANY_PARAMETERS = {
    "decoding.cache": 1,
    "decoding.device.device_batch": 1,
    "decoding.plan": 1,
    "decoding.target": 1,
    "kernels.cpu": 1,
    "kernels.distill": 2,
    "kernels.reference": 3,
}
"""Functions with more parameters, by file. A budget that may only fall."""


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of a function's parameters without `self` and `cls`."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [each.arg for each in every if each is not None and each.arg not in ("self", "cls")]


def wide(source: str) -> list[str]:
    """Return the functions of a file with more than `MOST_PARAMETERS` parameters."""
    functions = (node for node in statements(parsed(source)) if isinstance(node, ast.FunctionDef))
    return [function.name for function in functions if len(parameters(function)) > MOST_PARAMETERS]


def test_functions_have_few_parameters():
    """Triton kernels are exempt, because they take addresses and strides as single arguments."""
    counted = {
        name: wide(source) for name, source in sources().items() if not name.startswith("kernels.triton_backend.")
    }
    assert {
        name: functions for name, functions in counted.items() if len(functions) > MANY_PARAMETERS.get(name, 0)
    } == {}
    assert {name: len(counted[name]) for name in MANY_PARAMETERS} == MANY_PARAMETERS, "lower the budget"


def test_a_function_with_many_parameters_is_noticed():
    """Negative control of the check above."""
    assert wide("def f(a, b, c, /, d, *e, g=1, **h): ...\nclass C:\n    def m(self, a, b, c, d, e, f): ...") == ["f"]
