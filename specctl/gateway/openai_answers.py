"""Answers of OpenAI's API: whole documents, and the pieces of streams."""

import json
import math
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specctl.decoding.logprobs import TokenLogprob
from specctl.decoding.records import Decoded
from specctl.gateway import tool_calls
from specctl.gateway.engine_thread import Generation, TextPart
from specctl.gateway.token_text import TokenTexts
from specctl.gateway.tool_calls import HeldCalls

CALLED = "tool_calls"  # how an answer ends that calls tools


@dataclass
class Usage:
    """Numbers of tokens of a request. `first` holds the first text of every prompt."""

    prompt: int
    completion: int = 0
    first: Sequence[Generation] = ()

    @property
    def document(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached for one in self.first)},
        }


@dataclass
class PartialAnswer:
    """One answer while its parts arrive."""

    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    stats: Decoded | None = None

    def add(self, part: TextPart) -> None:
        """Append a part."""
        self.text.append(part.text)
        self.ids += part.ids
        self.logprobs += part.logprobs or []
        self.finish = part.finish or self.finish
        self.stats = part.stats or self.stats


class AnswerFormat:
    """Documents of one request, either a chat or a completion.

    Args:
        alternatives: number of likely tokens that are reported with every token, or None without log probabilities.
        most_calls: number of tool calls that are read from the text of an answer; further calls are left out. None =
            all.

    Attributes:
        tool_names: tools that an answer can call without marks.
        prompts: ids of every answer's prompt, if the documents are to have the token ids, under vLLM's names.
    """

    tool_names: Collection[str] = ()
    prompts: list[list[int]] | None = None

    def __init__(
        self, chat: bool, model: str, tokens: TokenTexts, alternatives: int | None = None, *, most_calls: int | None = 0
    ):
        self.chat, self.model, self.tokens, self.alternatives = chat, model, tokens, alternatives
        self.most_calls = most_calls
        self._held: dict[int, HeldCalls] = {}
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._head = f'data: {{"id":"{self.id}","object":"{self._kind(True)}","created":{self.created},"model":'
        self._head += json.dumps(model) + ',"choices":['

    def _kind(self, stream: bool) -> str:
        if self.chat:
            return "chat.completion.chunk" if stream else "chat.completion"
        return "text_completion"

    def whole(self, choices: list[PartialAnswer], usage: Usage) -> dict[str, Any]:
        """The document of a finished request."""
        made = []
        for index, choice in enumerate(choices):
            text = "".join(choice.text)
            one: dict[str, Any] = {"index": index, "finish_reason": choice.finish, "logprobs": None}
            one |= {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
            if self.most_calls != 0 and choice.finish == "stop" and (parsed := tool_calls.parse(text, self.tool_names)):
                one["message"] |= {"content": parsed.content, "tool_calls": parsed.calls[: self.most_calls]}
                one["finish_reason"] = CALLED
            if self.alternatives is not None:
                one["logprobs"] = self._logprobs(choice.logprobs, 0)
            if self.prompts is not None:
                one |= {"token_ids": choice.ids} | ({} if self.chat else self._prompt_ids(index))
            made.append(one)
        about = {"id": self.id, "object": self._kind(False), "created": self.created, "model": self.model}
        about |= self._prompt_ids(0) if self.chat else {}
        metrics = draft_metrics([choice.stats for choice in choices if choice.stats is not None])
        return about | {"choices": made, "usage": usage.document} | ({"metrics": metrics} if metrics else {})

    def _prompt_ids(self, index: int) -> dict[str, list[int]]:
        return {} if self.prompts is None else {"prompt_token_ids": self.prompts[index]}

    def first(self, index: int) -> bytes:
        """The first piece of an answer: a chat's names the role. Empty if a completion's would say nothing."""
        prompt = self._prompt_ids(index)
        choice: dict[str, Any] = {"index": index, "finish_reason": None}
        if self.chat:
            return self._piece(choice | {"delta": {"role": "assistant", "content": ""}}, prompt)
        return self._piece(choice | {"text": "", "logprobs": None, "token_ids": []} | prompt) if prompt else b""

    def piece(self, part: TextPart, offset: int) -> bytes:
        """The piece of a stream with a part of a text; `offset`: number of characters before it. Empty if all of the
        part is held back. The end of an answer with tool calls has a piece of its own, as OpenAI's: its client reports
        a call as complete when the next piece arrives."""
        calls: list[dict[str, Any]] = []
        if self.most_calls != 0:
            held = self._held.setdefault(part.index, HeldCalls(self.tool_names))
            text = held.add(part.text)
            if part.finish is not None:
                rest, calls = held.end(part.finish)
                text, calls = text + rest, calls[: self.most_calls]
            part = replace(part, text=text, finish=CALLED if calls else part.finish)
            if not self.says(part):
                return b""
        plain = self.alternatives is None and self.prompts is None
        if plain and part.finish is None:  # most pieces: made without building a document
            text = json.dumps(part.text)
            delta = f'"delta":{{"content":{text}}}' if self.chat else f'"text":{text}'
            body = f'{{"index":{part.index},{delta},"logprobs":null,"finish_reason":null}}]}}\n\n'
            return (self._head + body).encode()
        choice: dict[str, Any] = {"index": part.index}
        choice |= {"delta": {"content": part.text} if part.text else {}} if self.chat else {"text": part.text}
        choice |= {"logprobs": None if self.alternatives is None else self._logprobs(part.logprobs or [], offset)}
        choice |= {} if self.prompts is None else {"token_ids": part.ids}
        if not calls:
            return self._piece(choice | {"finish_reason": part.finish})
        choice["delta"] |= {"tool_calls": [{"index": number} | call for number, call in enumerate(calls)]}
        end = {"index": part.index, "delta": {}, "logprobs": None, "finish_reason": part.finish}
        return self._piece(choice | {"finish_reason": None}) + self._piece(end)

    def says(self, part: TextPart) -> bool:
        """Whether a client has a use for the piece of this part."""
        return bool(part.text or part.logprobs or part.last or (part.ids and self.prompts is not None))

    def _piece(self, choice: dict[str, Any] | None, about: dict[str, Any] | None = None) -> bytes:
        text = "" if choice is None else json.dumps(choice, separators=(",", ":"))
        rest = "]," + json.dumps(about, separators=(",", ":"))[1:] if about else "]}"
        return (self._head + text + rest + "\n\n").encode()

    @staticmethod
    def with_usage(piece: bytes, usage: Usage) -> bytes:
        """The events of a piece of a stream, with the numbers of tokens that the stream has reached."""
        numbers = json.dumps(usage.document, separators=(",", ":"))
        return piece.replace(b"}\n\n", f',"usage":{numbers}}}\n\n'.encode())

    def usage(self, usage: Usage, stats: list[Decoded]) -> bytes:
        """The last piece of a stream, for a client that asks for the numbers of tokens."""
        about: dict[str, Any] = {"usage": usage.document}
        if metrics := draft_metrics(stats):
            about["metrics"] = metrics
        return self._piece(None, about)

    def _logprobs(self, found: list[TokenLogprob], offset: int) -> dict[str, Any]:
        return self._chat_logprobs(found) if self.chat else self._completion_logprobs(found, offset)

    def _chat_logprobs(self, found: list[TokenLogprob]) -> dict[str, Any]:
        def shown(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self.tokens.text(token), "logprob": logprob, "bytes": self.tokens.bytes(token)}

        return {
            "content": [
                shown(one.token, one.logprob) | {"top_logprobs": [shown(*other) for other in one.top]} for one in found
            ],
            "refusal": None,
        }

    def _completion_logprobs(self, found: list[TokenLogprob], offset: int) -> dict[str, Any]:
        tokens = [self.tokens.text(one.token) for one in found]
        offsets = list(_offsets(tokens, offset))
        known = [None if math.isnan(one.logprob) else one.logprob for one in found]  # JSON has no NaN
        tops = [None if logprob is None else self._alternatives(one) for one, logprob in zip(found, known, strict=True)]
        return {
            "tokens": tokens,
            "token_logprobs": known,
            "top_logprobs": tops if self.alternatives else None,
            "text_offset": offsets,
        }

    def length_of(self, part: TextPart) -> int:
        """Characters by which a part moves the offset of the next token. A part with log probabilities holds tokens
        with text that may be held back."""
        if part.logprobs is None:
            return len(part.text)
        return sum(len(self.tokens.text(one.token)) for one in part.logprobs)

    def _alternatives(self, one: TokenLogprob) -> dict[str, float]:
        """Log probabilities of the drawn token and of the likeliest ones. If several tokens have the
        same text, the likeliest of them counts."""
        shown: dict[str, float] = {}
        for token, logprob in [(one.token, one.logprob), *one.top]:
            shown.setdefault(self.tokens.text(token), logprob)
        return shown


def _offsets(tokens: list[str], start: int) -> Iterator[int]:
    for token in tokens:
        yield start
        start += len(token)


def draft_metrics(stats: list[Decoded]) -> dict[str, Any] | None:
    """Draft counters of a request in vLLM's form: how many rounds accepted 0, 1, … draft tokens."""
    rounds = sum(one.target_passes for one in stats)
    if not rounds or not any(one.drafted for one in stats):
        return None
    depth = max(len(one.accepted_by_depth) for one in stats)
    at = [sum(one.accepted_by_depth[d] for one in stats if d < len(one.accepted_by_depth)) for d in range(depth)]
    histogram = [more - fewer for more, fewer in zip([rounds, *at], [*at, 0], strict=True)]
    drafted = sum(one.drafted for one in stats)
    return {"speculative_decoding": {"acceptance_histogram": histogram, "num_draft_tokens": drafted}}
