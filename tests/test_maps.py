"""README.md, specctl/README.md, .github/CONTRIBUTING.md and the user guides name only files and names that exist.

The map in specctl/README.md lists every package. Checked are backticks, code blocks and links: paths, modules, and
names written like code (`Engine`, `DraftTree`, `on_round`, `Game.scored`). A plain word (`decode`, `eagle3`) must be a
name or a string of the package.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAP = "specctl/README.md"
GUIDES = tuple(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "specctl/guides").glob("*.md")))
PAGES = ("README.md", MAP, ".github/CONTRIBUTING.md", *GUIDES)
FOLDERS = ("specctl", "data_prep", "recipes")  # of the installed package
PACKAGES = sorted(path.name for path in (ROOT / "specctl").iterdir() if (path / "__init__.py").exists())
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"[\w./-]*\w\.(?:py|md)\b(?!/)")
FOLDER = re.compile(r"(?:[\w-]+/)+|(?:\.ci|\.github|tests|recipes|specctl|data_prep)/[\w/.-]+")
MODULE = re.compile(r"python -m ((?:specctl|tests)[\w.]*)")
WRITTEN_LIKE_CODE = re.compile(r"[A-Z][a-z]+(?:[A-Z]\w*)+|[a-z]+(?:_[a-z0-9]+)+|[A-Z]+(?:_[A-Z]+)+")
DOTTED = re.compile(r"`(?:specctl\.)?([a-z_]\w*(?:\.[A-Za-z_]\w*)+)(?=[`(\[ =])")
MEMBER = re.compile(r"([A-Z]\w*[a-z]\w*)\.(\w+)")
FOREIGN = {"README.md", "__main__.py"}
"""Files that are named as such: every drafter has a page, every package may have the other."""


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of every file of the package, by path below the root."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in found}


@cache
def words() -> tuple[frozenset[str], frozenset[str]]:
    """Return (defined, strings).

    `defined` holds modules, classes, functions, arguments, variables, attributes, imports and `Class.member`s.
    `strings` holds constants that are words, such as values of recipes.
    """
    names = {part for path in sources() for part in path.removesuffix(".py").split("/")}
    strings: set[str] = set()
    for node in (node for tree in sources().values() for node in ast.walk(tree)):
        match node:
            case ast.ClassDef(name=name):
                names |= {name} | {f"{name}.{member}" for member in _members(node)}
            case ast.FunctionDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
                names.update(name.split("."))
            case ast.Constant(value=str(text)) if text.isidentifier():
                strings.add(text)
    return frozenset(names), frozenset(strings)


def _members(node: ast.ClassDef) -> set[str]:
    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    names |= {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    return names


def there(path: str) -> bool:
    """Return whether a path on a page exists, from the root or from any folder of the package."""
    path = path.removeprefix("../").removeprefix("./")
    if (ROOT / path).exists():
        return True
    return (ROOT / "specctl" / path).exists() or any(f"/{name}".endswith(f"/{path}") for name in sources())


def missing(page: str, text: str) -> list[str]:
    """Return the names on a page that do not exist, each once."""
    spans, blocks = SPAN.findall(BLOCK.sub("", text)), BLOCK.findall(text)
    code = "\n".join([*spans, *blocks])
    wrong = {path for path in FILE.findall(code) if path not in FOREIGN and not there(path)}
    wrong |= {span for span in spans if FOLDER.fullmatch(span) and not there(span)}
    links = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    wrong |= {link for link in links if link and not (ROOT / page).parent.joinpath(link).exists()}
    wrong |= {module for module in MODULE.findall(code) if not _is_module(module)}
    defined, strings = words()
    prose = "\n".join(MODULE.sub("", span) for span in spans if not FILE.search(span) and "://" not in span)
    wrong |= {f"{of}.{member}" for of, member in MEMBER.findall(prose) if f"{of}.{member}" not in defined}
    plain = {span for span in spans if re.fullmatch(r"[A-Z][a-z]+|[a-z]+\d?", span)} - {"None", "True", "False"}
    names = {name for span in prose.split("\n") for name in re.findall(r"[\w$]+", span) if _like_code(name, span)}
    return sorted(wrong | {name for name in plain | names if name not in defined | strings})


def _like_code(name: str, span: str) -> bool:
    """Return whether a name looks like one of ours; environment variables and file names do not."""
    return bool(WRITTEN_LIKE_CODE.fullmatch(name)) and not re.search(rf"\$|{name}\.\w+$|^(?:OMP|SPECCTL)_", span)


def _is_module(name: str) -> bool:
    path = name.replace(".", "/")
    return any((ROOT / file).exists() for file in (f"{path}.py", f"{path}/__init__.py"))


def mapped(text: str) -> set[str]:
    """Return the packages in the first column of the map's table, as paths below the root."""
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    packages = {package for row in rows for package in re.findall(r"`([\w/]+)/`", row)}
    return {package if package.split("/")[0] in FOLDERS else f"specctl/{package}" for package in packages}


def packages() -> set[str]:
    """Return the folders of the package with Python files, as paths below the root."""
    return {path.rpartition("/")[0] for path in sources()}


@pytest.mark.parametrize("page", PAGES)
def test_names_on_a_page_exist(page):
    """Catches a page that refers to a moved or renamed file."""
    assert missing(page, (ROOT / page).read_text()) == []


def test_the_map_lists_every_package():
    assert mapped((ROOT / MAP).read_text()) == packages()


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node. `ast.walk` would also visit expressions, which are most of a tree."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, block, ()):
            yield node
            yield from statements(node)


@cache
def remarks(source: str) -> list[str]:
    """Return the docstrings and comments of a module."""
    nodes = (node for node in statements(ast.parse(source)) if isinstance(node, ast.Expr))
    constants = (node.value.value for node in nodes if isinstance(node.value, ast.Constant))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return [text for text in constants if isinstance(text, str)] + comments


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax trees of all modules and packages by dotted name, including recipes/ and data_prep/."""
    parts = ((path.removesuffix(".py").split("/"), tree) for path, tree in sources().items())
    return {".".join(names).removeprefix("specctl.").removesuffix(".__init__"): tree for names, tree in parts}


@cache
def contents(module: str) -> frozenset[str]:
    """Return the names that a module or a package's `__init__` defines or imports, and members of its classes."""
    nodes = list(ast.walk(modules()[module])) if module in modules() else []
    names = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    aliases = (part for node in nodes if isinstance(node, ast.ImportFrom) for part in node.names)
    return frozenset(names | {alias.asname or alias.name for alias in aliases})


def stale(source: str) -> set[str]:
    """Return files and dotted names cited in docstrings and comments that do not exist here.

    Files of other repositories are skipped.
    """
    if not (FILE.search(source) or DOTTED.search(source)):
        return set()
    texts = remarks(source)
    files = {path for text in texts for path in FILE.findall(text)}
    wrong = {path for path in files if path not in FOREIGN and not path.startswith("vllm/") and not there(path)}
    dotted = {name for text in texts for name in DOTTED.findall(text) if not FILE.match(name)}
    return wrong | {name for name in dotted if _cites(name, source) and not _resolves(name)}


def _cites(name: str, source: str) -> bool:
    """Return whether a dotted name refers to one of our modules: it starts with a package or a file name.

    Recipe keys, and attributes of a variable in the source (`state.memory`), do not count.
    """
    first = name.split(".")[0]
    if _is_key(name) or name.endswith((".json", ".jsonl", ".txt", ".yaml")):
        return False
    if first in PACKAGES and first != "recipe":
        return True
    return first in {module.split(".")[-1] for module in modules()} and first not in _variables(source)


def _variables(source: str) -> set[str]:
    """Return the names of arguments, variables and attributes of a source, without its imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Attribute(attr=name) | ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name):
                found.add(name)
    return found


def _resolves(name: str) -> bool:
    """Return whether `package.module`, `module.name`, `package.module.Class.member` and similar names exist."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        head = ".".join(parts[:count])
        found = [module for module in modules() if f".{module}".endswith(f".{head}")]
        if found:
            return count == len(parts) or any(set(parts[count:]) <= contents(module) for module in found)
    return False


@cache
def _keys() -> str:
    return (ROOT / "tests/golden/recipes.json").read_text()


def _is_key(name: str) -> bool:
    """Return whether recipes have this key."""
    return f'{name}"' in _keys()


def test_names_in_docstrings_and_comments_exist():
    """A comment that refers to a renamed file is worse than none."""
    wrong = {path: stale((ROOT / path).read_text()) for path in sources()}
    assert {path: names for path, names in wrong.items() if names} == {}


STALE = [
    "see stage.py",
    "the law (kernels.md)",
    "as `formats.checkpoint.staged` does",
    "forked by `decoding.chat`",
    "see `drafters.checkpoint.saved_there`",
    "as `watchdog.Watchdog.barks` says",
]


@pytest.mark.parametrize("remark", STALE)
def test_a_stale_comment_is_noticed(remark):
    """Negative control, together with an existing file, module, name, recipe key and attribute."""
    right = "see engine.py, `drafters.checkpoint`, `watchdog.Watchdog.state`, `stream.chunk`, `plan.width`"
    assert stale(f'"""A module; {right}."""\n\n\ndef f(plan):\n    pass\n') == set()
    assert len(stale(f'"""A module; {remark}."""\n')) == len(stale(f"x = 1  # {remark}\n")) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        "see `decoding/stage.py`",
        "see `stage.py`",
        "[the map](../ARCHITECTURE.md)",
        "`python -m specctl.training.against_others`",
        "a `ScoreKeeper` keeps scores",
        "an `Engin` decodes",
        "`Engine.stepp` goes on",
        "`on_every_round` is told",
        "`tests/gold/` compares",
        "the rules of `scoring/`",
        "`decodes` prompts",
        "```\nspecctl generate\n  decoding/measure.py   measures\n```",
    ],
)
def test_a_wrong_name_is_noticed(wrong):
    """Negative control of the check of pages."""
    assert len(missing(MAP, f"# A page\n\nAn `Engine` and `decoding/engine.py`.\n\n{wrong}\n")) == 1


def test_a_missing_package_is_noticed():
    """Negative control: a removed row, and a row for a package that does not exist."""
    text = (ROOT / MAP).read_text()
    assert packages() - mapped(re.sub(r"^\| `kernels/` .*\n", "", text, flags=re.MULTILINE)) == {"specctl/kernels"}
    assert mapped(text + "| `stages/` | Which? |\n") - packages() == {"specctl/stages"}
