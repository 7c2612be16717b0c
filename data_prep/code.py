"""Code prompts: a function to write from a sentence and tests, or a documented stub to complete."""

import re
from random import Random

from . import code_tasks
from .code_examples import Task
from .domain import Domain, PublicSet
from .grammar import capitalized, pick
from .phrasebook import phrasebook

_STUB = "Complete the body of this Python function:\n\n"
_METHOD = "Complete the body of this Python function (a method of class `{}`):\n\n"
_PREFIXES = ("", "", "", "", "get_", "find_", "compute_", "calc_", "my_", "list_", "_")
_SUFFIXES = ("", "", "", "", "", "_list", "_fast", "_iterative", "_recursive", "_2")
_NEW_LINE = re.compile(r" (?=:param|:return|Raises |Returns )")  # docstring sentences that start on a new line
_OPENINGS = (
    "Write a function to ",
    "Write a function to ",
    "Write a python function to ",
    "Write a function that can ",
)


def _name(random: Random, task: Task) -> str:
    name = f"{pick(random, _PREFIXES)}{task.name}{pick(random, _SUFFIXES)}"
    if random.random() < 0.15:
        return "_".join(part.capitalize() for part in name.strip("_").split("_"))
    return name


def _examples(random: Random, task: Task, count: int) -> list[tuple[str, object]]:
    """Distinct calls without the function's name, with their results; at most `count`, fewer if the task has fewer."""
    found: dict[str, object] = {}
    for _ in range(3 * count):
        arguments = task.arguments(random)
        found.setdefault(", ".join(map(repr, arguments)), task.run(*arguments))
        if len(found) == count:
            break
    return list(found.items())


def _from_tests(random: Random, task: Task) -> str:
    name, equals = _name(random, task), pick(random, (" == ", " == ", "=="))
    tests = "\n".join(f"assert {name}({call}){equals}{result!r}" for call, result in _examples(random, task, 3))
    return f"{pick(random, _OPENINGS)}{task.text}. Your code should pass these tests:\n\n{tests}"


def _stub(random: Random, task: Task) -> str:
    name = _name(random, task)
    typed = random.random() < 0.8
    parameters = ", ".join(f"{parameter}: {kind}" if typed else parameter for parameter, kind in task.parameters)
    text = f"{capitalized(task.text)}."
    lines = [*_fields(random, task), ""] if random.random() < 0.35 else []
    for call, result in _examples(random, task, random.randint(1, 5)):
        lines += [f">>> {name}({call})", repr(result)]
    head = f"def {name}({parameters}){f' -> {task.returns}' if typed else ''}:\n"
    opening = f'"""{text}' if random.random() < 0.3 else f'"""\n    {text}'
    blank = "\n" if random.random() < 0.6 else ""
    return (
        f"{_STUB}{head}    {opening}\n{blank}" + "".join(f"    {line}".rstrip() + "\n" for line in lines) + '    """\n'
    )


def _fields(random: Random, task: Task) -> list[str]:
    style = random.random()
    if style < 0.5:
        return [
            *(f":param {name}: {_meaning(kind)}" for name, kind in task.parameters),
            f":return: {_meaning(task.returns)}",
        ]
    if style < 0.8:
        return [
            "Args:",
            *(f"    {name}: {_meaning(kind)}" for name, kind in task.parameters),
            "Returns:",
            f"    {_meaning(task.returns)}",
        ]
    return [
        f"Input: {', '.join(_meaning(kind) for _, kind in task.parameters)}",
        f"Output: {_meaning(task.returns)}",
        "Examples:",
    ]


def _meaning(kind: str) -> str:
    names = {
        "int": "an integer",
        "str": "a string",
        "bool": "True or False",
        "float": "a number",
        "list[int]": "a list of integers",
    }
    return names.get(kind, "a list of strings" if kind == "list[str]" else "the result")


def _method(random: Random) -> str:
    book = phrasebook("code_methods")
    # Each thing has the same name throughout a method.
    bound = {name: book.grammar.draw(random, name) for name in ("item", "key", "type", "store", "table", "cipher")}
    owner, signature, text = book.write(random, "methods", bound).split(" ## ")
    text = _NEW_LINE.sub("\n    ", text)
    if random.random() < 0.3:
        signature = signature.split(" -> ")[0]
    inline = "\n" not in text and random.random() < 0.4
    body = f'    """{text}"""\n' if inline else f'    """\n    {text}\n    """\n'
    return f"{_METHOD.format(owner)}def {signature}:\n{body}"


def _sample(random: Random) -> str:
    kind = random.random()
    if kind < 0.2:
        return _method(random)
    task = code_tasks.draw(random)
    return _from_tests(random, task) if kind < 0.65 else _stub(random, task)


DOMAIN = Domain(
    name="code",
    description="Python functions to write from tests or from a documented stub",
    public=PublicSet(
        id="google-research-datasets/mbpp",
        config="full",
        split={"train": "train", "test": "test"},
        columns={"text": "text", "tests": "test_list"},
        template="{text} Your code should pass these tests:\n\n{tests}",
        licence="CC-BY-4.0",
        citation="Austin et al., Program Synthesis with Large Language Models (2021)",
    ),
    sample=_sample,
)
