"""Prompts from the rows of a file or a data set, and their token ids by the target's chat template.

A row is a prompt, a chat, the trace of an agent, or a row of a benchmark suite: Spec-Bench, MT-Bench and SPEED-Bench
have `turns` and a `category`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specctl.distillation.messages import (
    ANSWERED,
    ChatMessage,
    ContextExceeded,
    Conversation,
    Tool,
    arguments_with,
    check_tools,
    checked_messages,
    conversation_with,
    prompt_id,
    text_of,
)
from specctl.distillation.rejections import Rejections
from specctl.distillation.traces import conversation_of, keys_of
from specctl.errors import ChatTemplateError

if TYPE_CHECKING:
    from specctl.decoding.target_text import TargetText

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
    try:
        ids = target.render(prompt.messages, **prompt.arguments(options))
    except ChatTemplateError as error:
        raise ValueError(error.message) from None
    if prompt.tools:
        check_tools(target, prompt.messages, prompt.arguments(options), prompt.where)
    if not 0 < len(ids) < target.context_length:
        raise ContextExceeded(len(ids), target)
    return ids
