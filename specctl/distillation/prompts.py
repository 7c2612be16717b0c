"""Prompts of a domain, read from their source.

Prompts come from one of these sources: the file of `--prompts`, else the domain's public data set if the recipe asks
for it, else the domain's offline generator. `--prompts` is a path, stdin, a file per domain (`{domain}.jsonl`), or
`hub:ID`, a data set that `datasets` loads. A row is a prompt, a chat, the trace of an agent, or a row of a benchmark
suite: Spec-Bench, MT-Bench and SPEED-Bench have `turns` and a `category`.

Broken lines are collected as file:line:reason in `rejected.jsonl`. If more than `data.max_rejected` of the lines are
broken, the command stops with exit code 3.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import progress
from specctl.distillation.line_streams import json_lines, json_object
from specctl.distillation.messages import (
    ANSWERED,
    ChatMessage,
    ContextExceeded,
    Conversation,
    Tool,
    arguments_with,
    check_length,
    check_tools,
    checked_messages,
    conversation_with,
    prompt_id,
    text_of,
)
from specctl.distillation.rejections import EXPECTED, Rejections
from specctl.distillation.traces import conversation_of, keys_of
from specctl.errors import ChatTemplateError, DataError, UsageError, near_path
from specctl.recipe import DataRecipe
from specctl.threads import counted

if TYPE_CHECKING:
    from specctl.decoding.target_text import TargetText

GENERATED_PROMPTS = 2000  # prompts of the endless generator if `data.limit` is not set
CHECKED_LINES = 1000  # first lines of a file, checked before anything loads: one has to be a prompt
SAMPLE_SLACK = 4  # most prompts in memory while a file is sampled, as a multiple of the limit
HUB = "hub:"
"""Prefix of prompts that `datasets` loads: `hub:ID` or `hub:ID:CONFIG`."""


PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""Text of SPEED-Bench's rows (arXiv 2604.09557) from sources that may not be redistributed."""


@dataclass(frozen=True)
class Prompt:
    """One conversation that waits for the target's answer; without messages the target begins the text itself."""

    id: str  # stable hash of the messages: the same prompt has the same id in every file
    messages: list[ChatMessage]
    domain: str
    where: str  # "file:line" (or the generator), for error messages
    reference: str | None = None  # answer that the source contains, if any
    later_turns: tuple[str, ...] = ()  # the user's later turns, one after each answer of the target
    license: str | None = None  # of the row, if given
    language: str | None = None
    first_turn_id: str | None = None  # for a later turn: id of the conversation's first turn
    tools: list[Tool] | None = None  # that the target may call
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template for this prompt alone

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of the chat template, given the recipe's `options`."""
        return arguments_with(options, self.tools, self.options)


def prompts_of_row(row: Mapping[str, Any], domain: str, where: str = "", *, suite: bool = False) -> list[Prompt]:
    """The prompts of a row; `suite` as in `read_prompts`. ValueError says why it has none.

    A chat is one prompt: the target answers its end, or answers in place of the assistant's last message. The trace of
    an agent is one prompt for each turn of the assistant.
    """
    if "turns" in row and not row.keys() & {"prompt", "messages"}:
        return [_suite_row(row, domain, where, suite)]
    license, language = (value if isinstance(value := row.get(key), str) else None for key in ("license", "language"))
    whole = _conversation(row)
    messages = whole.messages
    reference = row.get("response") if "prompt" in row else None
    places = whole.answered_places() if whole.is_trace else []
    if messages[-1]["role"] in ANSWERED:
        places.append(len(messages))
    elif not places:  # chat data sets end with the assistant's turn, which is the reference
        places = [len(messages) - (messages[-1]["role"] == "assistant")]
    made: list[Prompt] = []
    for place in places:
        asked = whole.before(place)
        ends_with_question(asked.messages)
        answer = text_of(messages[place]) if place < len(messages) else reference
        first = made[0].id if made else None
        prompt = Prompt(asked.id, asked.messages, domain, where, answer if isinstance(answer, str) else None)
        made.append(
            replace(
                prompt,
                license=license,
                language=language,
                first_turn_id=first,
                tools=asked.tools,
                options=asked.options,
            )
        )
    return made


def _suite_row(row: Mapping[str, Any], domain: str, where: str, suite: bool) -> Prompt:
    """Convert a row of Spec-Bench, MT-Bench or SPEED-Bench. The id covers all turns of the user."""
    turns, category = row["turns"], row.get("category")
    if not isinstance(turns, list) or not turns:
        raise ValueError("`turns` must be a non-empty list")
    messages = checked_messages([{"role": "user", "content": turn} for turn in turns])
    if any(PLACEHOLDER in text_of(message) for message in messages):
        raise ValueError("contains a placeholder: fetch the text of this row with SPEED-Bench's script first")
    if category is not None and not (isinstance(category, str) and category.strip()):
        raise ValueError(f"`category` must be a name, got {category!r:.40}")
    if len(turns) > 1 and not suite:
        raise ValueError(f"has {len(turns)} turns; only `specctl eval` supports several turns")
    name = category if suite and category else domain
    return Prompt(prompt_id(messages), messages[:1], name, where, later_turns=tuple(turns[1:]))


def _conversation(row: Mapping[str, Any]) -> Conversation:
    """The conversation of a row; all other keys are ignored."""
    prompt = row.get("prompt")
    if "prompt" in row and "messages" not in row and not isinstance(prompt, list):
        if not isinstance(prompt, str):
            raise ValueError(f"`prompt` must be a string, got {type(prompt).__name__}")
        return conversation_with(row, [{"role": "user", "content": prompt}])
    conversation = conversation_of(row)
    if conversation is None:
        raise ValueError(f"needs `prompt`, `messages`, `turns`, `conversations` or `instruction`, but {keys_of(row)}")
    if isinstance(prompt, str) and prompt not in map(text_of, conversation.messages):  # UltraChat has it in both
        raise ValueError("needs either `prompt` or `messages`, has both")
    return conversation


def ends_with_question(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages unchanged. ValueError if they do not end with something to answer."""
    if not messages or messages[-1]["role"] not in ANSWERED:
        raise ValueError("`messages` does not end with a user message to answer")
    return messages


def render(target: TargetText, prompt: Prompt, rejections: Rejections, options: dict[str, Any]) -> list[int] | None:
    """Render a prompt to ids with the chat template and its `options`. Returns None and adds a rejection if the
    template refuses the messages, or if they leave no room for an answer."""
    if not prompt.messages:
        return target.document_start()
    try:
        return prompt_ids(target, prompt, options)
    except ContextExceeded as error:
        add = rejections.add if prompt.first_turn_id is None else rejections.leave_out
        add(prompt.where, str(error), text_of(prompt.messages[-1]))
    except ValueError as error:
        rejections.add(prompt.where, str(error), text_of(prompt.messages[-1]))
    return None


def prompt_ids(target: TargetText, prompt: Prompt, options: dict[str, Any]) -> list[int]:
    """Ids of a prompt by the target's chat template, with the recipe's `options`. Raises ValueError if the template
    refuses the prompt, and ContextExceeded if it leaves no room for an answer."""
    check_length(prompt.messages, target)
    try:
        ids = target.render(prompt.messages, **prompt.arguments(options))
    except ChatTemplateError as error:
        raise ValueError(error.message) from None
    if prompt.tools:
        check_tools(target, prompt.messages, prompt.arguments(options), prompt.where)
    if not 0 < len(ids) < target.context_length:
        raise ContextExceeded(len(ids), target)
    return ids


def check_files(data: DataRecipe) -> None:
    """Check that every domain has its own prompts file, and that the file exists and has a prompt among its first
    lines.

    Raises UsageError (one file for several domains, a data set without a name) or DataError (a file is missing or is
    not a file of prompts).
    """
    if data.prompts is None:
        return
    files = {domain: str(data.prompts_of(domain)) for domain in data.domain}
    if len(set(files.values())) < len(files):
        hint = f"name one of {', '.join(files)} with --domain, or give one file per domain with {{domain}} in the name"
        raise UsageError(
            f"a prompts file belongs to one domain, but {data.prompts} is used for {len(files)}", hint=hint
        )
    if any(file.startswith(HUB) and file.removeprefix(HUB)[:1] in ("", ":") for file in files.values()):
        raise UsageError(f"{data.prompts} names no data set", hint="hub:OWNER/NAME, or hub:OWNER/NAME:CONFIG")
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
        progress.log(f"{counted(repeated, 'repeated prompt')} of {domain} left out: one copy of each is kept")
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
