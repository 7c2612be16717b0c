"""Prompts of a domain, read from their source.

Prompts come from one of these sources: the file of `--prompts`, else the domain's public data set if the recipe asks
for it, else the domain's offline generator. `--prompts` is a path, stdin, a file per domain (`{domain}.jsonl`), or
`hub:ID`, a data set that `datasets` loads. `prompt_rows` reads the rows.

Broken lines are collected as file:line:reason in `rejected.jsonl`. If more than `data.max_rejected` of the lines are
broken, the command stops with exit code 3.
"""

import hashlib
import heapq
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specctl import progress
from specctl.distillation.line_streams import json_lines, json_object
from specctl.distillation.messages import checked_messages, prompt_id
from specctl.distillation.prompt_rows import Prompt, prompts_of_row
from specctl.distillation.rejections import EXPECTED, Rejections
from specctl.errors import DataError, UsageError, near_path
from specctl.recipe import DataRecipe

GENERATED_PROMPTS = 2000  # prompts of the endless generator if `data.limit` is not set
CHECKED_LINES = 1000  # first lines of a file, checked before anything loads: one has to be a prompt
SAMPLE_SLACK = 4  # most prompts in memory while a file is sampled, as a multiple of the limit
HUB = "hub:"
"""Prefix of prompts that `datasets` loads: `hub:ID` or `hub:ID:CONFIG`."""


def check_files(data: DataRecipe) -> None:
    """Check that every domain has its own prompts file, and that the file exists and has a prompt among its first
    lines.

    Raises UsageError (one file for several domains) or DataError (a file is missing or is not a file of prompts).
    """
    if data.prompts is None:
        return
    files = {domain: str(data.prompts_of(domain)) for domain in data.domain}
    if len(set(files.values())) < len(files):
        hint = f"name one of {', '.join(files)} with --domain, or give one file per domain with {{domain}} in the name"
        raise UsageError(
            f"a prompts file belongs to one domain, but {data.prompts} is used for {len(files)}", hint=hint
        )
    files = {domain: file for domain, file in files.items() if file != "-" and not file.startswith(HUB)}
    missing = {domain: file for domain, file in files.items() if not Path(file).exists()}
    if missing:
        named = [f"{file} ({domain})" if len(data.domain) > 1 else file for domain, file in missing.items()]
        hint = f"{near_path(next(iter(missing.values())))}give a file of prompts, or - for stdin: specctl guide data"
        raise DataError(f"no prompts file {', '.join(named)}", hint)
    for domain, file in files.items():
        if not Path(file).is_file():
            kind = "a directory" if Path(file).is_dir() else "a pipe or a device"
            raise DataError(f"prompts file {file} is {kind}", hint="give a file of prompts, or - for stdin")
        _check_beginning(file, domain, data.max_rejected)


def check_domains_of_drafters(domains: Iterable[str], data: DataRecipe) -> None:
    """Check that there are prompts of all domains that drafters were made for, which the user has not named.

    Raises UsageError if a domain is not built in, and `data` names no file.
    """
    from specctl import data_prep

    unknown = [domain for domain in domains if domain not in data_prep.DOMAINS]
    if unknown and data.prompts is None:
        hint = "name other domains, such as --domain sql, or a file for each: --prompts 'data/{domain}.jsonl'"
        raise UsageError(f"drafters were made for {', '.join(unknown)}, which has no built-in prompts", hint)


def _check_beginning(file: str, domain: str, max_rejected: float) -> None:
    """Raise DataError if no line of the beginning is a prompt: the user learns of a wrong file before a model loads."""
    rejections = Rejections(None, max_rejected)
    for candidate in itertools.islice(_from_file(file, domain, rejections, suite=True), CHECKED_LINES):
        rejections.seen += 1
        if candidate is not None:
            return
    rejections.check()
    raise no_prompts(file)


def no_prompts(source: str) -> DataError:
    return DataError(f"no prompts in {'<stdin>' if source == '-' else source}", hint=f"expected {EXPECTED}")


def read_domains(
    data: DataRecipe, rejections: Rejections, *, split: str = "train", suite: bool = False
) -> list[Prompt]:
    """Read a sample of each domain of a recipe, domain by domain. Raises the errors of `check_files` and
    `read_prompts`."""
    check_files(data)
    options: dict[str, Any] = {"split": split, "rejected_to": rejections, "sample": True, "suite": suite}
    return [prompt for domain in data.domain for prompt in read_prompts(data, domain, **options)]


def read_prompts(
    data: DataRecipe,
    domain: str,
    *,
    split: str = "train",
    rejected_to: Path | Rejections | None = None,
    sample: bool = False,
    suite: bool = False,
) -> list[Prompt]:
    """Read the first `data.limit` prompts of a domain in source order, each once.

    With `sample`, the prompts of a file come in an order drawn with `data.seed`; a smaller limit gives a prefix of a
    larger one. Files are often sorted by origin, so their first prompts would represent a single origin.

    With `suite`, a row with `turns` may have several turns, and its category is the domain of its prompt; a sampled
    file gives `data.limit` prompts per domain. Without `suite`, such a row is a prompt of `domain`, and rejected if it
    has several turns.

    `rejected_to` receives the rejected lines: a path for `rejected.jsonl`, or a collector that the caller goes on
    using. Raises DataError (unreadable file, too many rejections, no prompt left) and UsageError (unknown domain).
    """
    rejections = rejected_to if isinstance(rejected_to, Rejections) else Rejections(rejected_to, data.max_rejected)
    prompts: dict[str, Prompt] = {}
    repeated = 0
    sampled = sample and data.prompts_of(domain) not in (None, "-")
    crowd = SAMPLE_SLACK * (data.limit or 0)
    for candidate in candidates(data, domain, split, rejections, suite=suite):
        rejections.seen += 1
        if candidate is not None:
            repeated += candidate.id in prompts
            prompts.setdefault(candidate.id, candidate)
        if sampled and data.limit is not None and len(prompts) >= crowd:
            prompts = _sample(prompts, data.limit, data.seed)  # from time to time, to bound memory
            crowd = max(crowd, 2 * len(prompts))
        elif not sampled and len(prompts) == data.limit:
            break
    if sampled:
        prompts = _sample(prompts, data.limit or len(prompts), data.seed)
    rejections.check()
    if not prompts:
        raise no_prompts(str(data.prompts_of(domain) or domain))
    if repeated:
        progress.log(f"{repeated} repeated prompts of {domain} left out: one copy of each is kept")
    return list(prompts.values())


def _sample(prompts: dict[str, Prompt], count: int, seed: int) -> dict[str, Prompt]:
    """The `count` prompts per domain with the smallest hashes of `seed` and id, ascending; a smaller count gives a
    prefix."""

    def rank(id: str) -> bytes:
        return hashlib.sha256(f"{seed}/{id}".encode()).digest()

    domains: dict[str, list[str]] = {}
    for id, prompt in prompts.items():
        domains.setdefault(prompt.domain, []).append(id)
    return {id: prompts[id] for ids in domains.values() for id in heapq.nsmallest(count, ids, key=rank)}


def prompts_in(file: Path | None) -> Iterator[Prompt]:
    """Yield the prompts in a file, or nothing if `file` is None. DataError if a line is not a prompt."""
    if file is None:
        return
    rejections = Rejections(None, 0.0)
    for prompt in _from_file(str(file), "", rejections, suite=True):
        rejections.seen += 1
        rejections.check()
        if prompt is not None:
            yield prompt


def candidates(
    data: DataRecipe, domain: str, split: str, rejections: Rejections, *, suite: bool = False
) -> Iterator[Prompt | None]:
    """Yield the prompts of a domain in source order; a rejected line gives None.

    Only the current line is in memory. Generators and unconditional samples end at `data.limit`, files and public data
    sets at their end. `suite` is explained in `read_prompts`.
    """
    if data.source == "unconditional":
        numbers = range(data.limit or GENERATED_PROMPTS)
        return (Prompt(prompt_id([{split: f"{data.seed}/{n}"}]), [], domain, f"sample {n}") for n in numbers)
    file = data.prompts_of(domain)
    if file is not None and file.startswith(HUB):
        return _from_hub(file, domain, split, rejections, suite)
    if file is not None:
        return _from_file(file, domain, rejections, suite)
    from specctl import data_prep

    entry = data_prep.get(domain)
    if data.source == "public":
        texts = data_prep.load_public(entry, split)
    else:
        texts = entry.generate(data.limit or GENERATED_PROMPTS, data.seed, split)
    return _from_texts(texts, domain, f"{domain}/{split}", rejections)


def _from_file(name: str, domain: str, rejections: Rejections, suite: bool) -> Iterator[Prompt | None]:
    for where, line in json_lines(name):
        try:
            yield from prompts_of_row(json_object(line), domain, where, suite=suite)
        except ValueError as error:
            rejections.add(where, str(error), (line or b"").decode("utf-8", "replace"))
            yield None


def _from_hub(name: str, domain: str, split: str, rejections: Rejections, suite: bool) -> Iterator[Prompt | None]:
    """Yield prompts from the rows of a split of a data set, or of its first split if it has no such split. DataError
    if it cannot be loaded."""
    from specctl.data_prep.public import load_rows

    id, _, config = name.removeprefix(HUB).partition(":")
    hint = "a data set on the hub needs network access the first time; a JSONL file does not"
    rows = load_rows(id, config or None, prefer=split, hint=hint)
    for number, row in enumerate(rows, 1):
        where = f"{name}:{number}"
        try:
            yield from prompts_of_row(row, domain, where, suite=suite)
        except ValueError as error:
            rejections.add(where, str(error), str(row))
            yield None


def _from_texts(texts: Iterable[str], domain: str, source: str, rejections: Rejections) -> Iterator[Prompt | None]:
    for number, text in enumerate(texts, 1):
        where = f"{source}:{number}"
        try:
            messages = checked_messages([{"role": "user", "content": text}])
            yield Prompt(prompt_id(messages), messages, domain, where)
        except ValueError as error:
            rejections.add(where, str(error), str(text))
            yield None
