"""Back end with an engine in this process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, NoReturn

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from specctl.decoding.constraint import Constraint, grammar_tokenizer
from specctl.decoding.logprobs import PromptLogprobs
from specctl.decoding.records import Label, Request
from specctl.decoding.target import Target
from specctl.distillation.messages import arguments_with, text_of
from specctl.errors import CheckpointError, DataError
from specctl.gateway import forms, openai_requests, tokenizing
from specctl.gateway.engine_thread import Channel, EngineThread, Generation
from specctl.gateway.limits import BUSY_S
from specctl.gateway.metrics import Meter
from specctl.gateway.openai_answers import AnswerFormat, PartialAnswer, Usage
from specctl.gateway.openai_errors import ApiError
from specctl.gateway.openai_requests import ChatRequest, CompletionRequest, TextsRequest
from specctl.gateway.sse import DONE, EventResponse, event
from specctl.gateway.token_text import TokenTexts
from specctl.recipe.serve import ServeRecipe

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CHAT = "/v1/chat/completions"
TOKEN_PATHS = (tokenizing.TOKENIZE, tokenizing.DETOKENIZE)


class OwnEngine:
    """Answers requests with the engine of an `EngineThread`.

    Args:
        name: name of the model for clients.
    """

    def __init__(self, thread: EngineThread, target: Target, name: str, recipe: ServeRecipe):
        self.thread, self.target, self.name, self.recipe = thread, target, name, recipe
        self.meter: Meter = thread.meter
        self.created = int(time.time())
        self._alive = True
        # Tokenizing a long prompt takes seconds, in which other requests must go on.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._token_texts = TokenTexts(target.tokenizer)
        self._queries = itertools.count()
        self._shows_tools = False  # whether a request has shown that the chat template renders tools

    def warm_up(self) -> None:
        """Start the process of the chat template, before there are other threads."""
        with suppress(DataError):  # a base model has no chat template
            self.target.render([{"role": "user", "content": "Hi"}], **self.recipe.target.chat_template_kwargs)

    async def texts(self, request: HttpRequest, body: bytes) -> Response:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError("send the body without 'Content-Encoding': it must not be compressed", 415)
        path = request.scope["path"]  # `request.url` also depends on the header Host
        if path in TOKEN_PATHS:
            return await self._tokenizer(path, body)
        chat = path == CHAT
        asked: TextsRequest = openai_requests.parse(ChatRequest if chat else CompletionRequest, body)
        self._check_model(asked)
        prompts = await self._prompts(asked)
        try:
            constraint = await self._constraint(asked)
        except ApiError as error:
            raise asked.in_client_words(error) from None
        channel = Channel()
        generations = self._generations(asked, prompts, constraint, channel)
        if isinstance(asked, CompletionRequest) and asked.echo:
            await asyncio.get_running_loop().run_in_executor(self._tokenizing, self._echo, asked, generations)
        self._check_room(len(generations))
        usage = Usage(sum(map(len, prompts)), first=generations[:: asked.n])
        self.meter.prompt_tokens.inc(usage.prompt)
        form = AnswerFormat(chat, self.name, self._token_texts, asked.alternatives, most_calls=asked.most_calls)
        form.tool_names = [tool["function"]["name"] for tool in asked.callable_tools]
        if asked.return_token_ids:
            form.prompts = [generation.request.prompt for generation in generations]
        for generation in generations:
            self.thread.submit(generation)
        if asked.stream:
            try:
                events = self._events(asked, generations, channel, form, usage)
                first = await anext(events, b"")
            except BaseException:
                self._cancel(generations)
                raise

            async def close() -> None:
                self._cancel(generations)

            return EventResponse(first, events, close)
        try:
            choices = await self._finished(generations, channel, usage)
        finally:
            self._cancel(generations)
        # Log probabilities of a long answer take seconds.
        return await asyncio.to_thread(lambda: JSONResponse(form.whole(choices, usage)))

    async def _tokenizer(self, path: str, body: bytes) -> Response:
        """Answer /tokenize or /detokenize."""
        run, worker = asyncio.get_running_loop().run_in_executor, self._tokenizing
        if path == tokenizing.DETOKENIZE:
            given = await run(worker, tokenizing.parse_detokenize, body)
            self._check_name(given.model)
            if given.tokens and max(given.tokens) >= self.target.vocab_size:
                self._unknown_ids("tokens")
            return JSONResponse({"prompt": str(await run(worker, self.target.tokenizer.decode, given.tokens))})
        asked = await run(worker, tokenizing.parse_tokenize, body)
        self._check_name(asked.model)
        if isinstance(asked, ChatRequest):
            (ids,), strings = await self._prompts(asked), False
        else:
            ids, strings = await run(worker, tokenizing.encoded, self.target, asked), asked.return_token_strs
        return JSONResponse(await run(worker, tokenizing.answer, self.target, ids, strings))

    async def other(self, request: HttpRequest) -> Response:
        if request.scope["path"] == tokenizing.INFO:
            return JSONResponse(tokenizing.information(self.target))
        name = request.path_params.get("name")
        about = {"id": self.name, "object": "model", "created": self.created, "owned_by": "specctl"}
        about["max_model_len"] = self.target.context_length
        if name is None:
            return JSONResponse({"object": "list", "data": [about]})
        self._check_name(name)
        return JSONResponse(about)

    def healthy(self) -> bool:
        return self._alive

    async def ready(self) -> bool:
        return self._alive

    def died(self) -> None:
        """From now on refuse all requests: the engine's thread has ended."""
        self._alive = False

    async def close(self) -> None:
        self.thread.stop()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def _check_model(self, asked: TextsRequest) -> None:
        if not self._alive:
            raise ApiError("the engine has failed", 503)
        self._check_name(asked.model)
        for param, ids in (("logit_bias", map(int, asked.logit_bias)), ("stop_token_ids", asked.stop_token_ids)):
            if any(id >= self.target.vocab_size for id in ids):
                self._unknown_ids(param)

    def _check_name(self, name: str | None) -> None:
        if name and name != self.name:  # as with vLLM, no name is the only model
            message = f"the model does not exist: use {self.name}"
            raise ApiError(message, 404, param="model", code="model_not_found")

    def _check_room(self, texts: int) -> None:
        """Refuse texts that would wait behind too many others."""
        slots = self.thread.engine.options.slots or 0
        if len(self.thread.open) + texts > slots + self.recipe.waiting:
            self.meter.refused("waiting texts")
            raise ApiError("too many texts are waiting: try again later", 429, code="busy", retry_s=BUSY_S)

    async def _prompts(self, asked: TextsRequest) -> list[list[int]]:
        """The prompts as ids. Raises ApiError for one that does not fit."""
        loop = asyncio.get_running_loop()
        try:
            if isinstance(asked, ChatRequest):
                return [await loop.run_in_executor(self._tokenizing, self._rendered, asked)]
            assert isinstance(asked, CompletionRequest)
            if not asked.prompts or len(asked.prompts) * asked.n > openai_requests.MOST_ANSWERS:
                raise ApiError(f"1 to {openai_requests.MOST_ANSWERS} texts can be asked for at once", param="prompt")
            return await loop.run_in_executor(self._tokenizing, self._encoded, asked)
        except ApiError:
            raise
        except (CheckpointError, DataError) as error:  # the template's process may have ended
            message = error.message.replace(self.target.name, self.name)  # clients need not know the path
            raise ApiError(message, param="messages" if isinstance(asked, ChatRequest) else "prompt") from None

    async def _constraint(self, asked: TextsRequest) -> Constraint | None:
        """The form that the answers must have, or None. Raises ApiError if it cannot be enforced."""
        if not asked.has_form:
            return None
        for param in ("ignore_eos", "min_tokens"):
            if getattr(asked, param):
                raise ApiError(f"'{param}' cannot be combined with a form of the answer", param=param)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._tokenizing, self._compiled, asked)
        except DataError as error:
            param = "response_format" if asked.schema_of_answer is not None else "tools"
            param = "structured_outputs" if asked.structured_outputs is not None else param
            raise ApiError(error.message.replace(self.target.name, self.name), param=param) from None

    def _compiled(self, asked: TextsRequest) -> Constraint:
        return Constraint(self._grammar_tokenizer, forms.grammar(asked, self._is_special))

    def _is_special(self, text: str) -> bool:
        id = self.target.tokenizer.get_vocab().get(text)
        return id is not None and self._grammar_tokenizer.is_special_token(id)

    @cached_property
    def _grammar_tokenizer(self) -> LLTokenizer:
        """The tokenizer for forms, which takes seconds to make."""
        return grammar_tokenizer(self.target)

    def _rendered(self, asked: ChatRequest) -> list[int]:
        conversation = asked.conversation
        messages = conversation.messages
        self._check_characters(sum(len(text_of(message)) for message in messages), "messages")
        arguments = arguments_with(self.recipe.target.chat_template_kwargs, conversation.tools, conversation.options)
        ids = self._checked(self.target.render(messages, **arguments), "messages")
        if conversation.tools and not self._shows_tools:
            if self.target.ignores_tools(messages, arguments):
                message = "the chat template of this model does not render tools: leave 'tools' out"
                raise ApiError(message, param="tools", code="unsupported_parameter")
            self._shows_tools = True
        return ids

    def _encoded(self, asked: CompletionRequest) -> list[list[int]]:
        made = []
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                self._check_characters(len(prompt), "prompt")
                prompt = [int(token) for token in self.target.tokenizer.encode(prompt)]
            made.append(self._checked(prompt, "prompt"))
        return made

    def _check_characters(self, count: int, param: str) -> None:
        """Refuse a text that cannot fit even if all its tokens are the longest ones: reading it takes long."""
        if count > self.target.longest_text:
            self._too_long(f"{count} characters", param)

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise ApiError("the prompt is empty", param=param)
        if len(ids) >= self.target.context_length:
            self._too_long(f"{len(ids)} tokens", param)
        if max(ids) >= self.target.vocab_size:
            self._unknown_ids(param)
        return ids

    def _unknown_ids(self, param: str) -> NoReturn:
        message = f"Invalid value for '{param}': token ids must be below {self.target.vocab_size}"
        raise ApiError(message, param=param, code="invalid_value")

    def _too_long(self, size: str, param: str) -> NoReturn:
        longest = self.target.context_length
        # Clients that shorten a conversation recognize it by OpenAI's words.
        message = f"This model's maximum context length is {longest} tokens, answer included; the prompt has {size}"
        raise ApiError(message, param=param, code="context_length_exceeded")

    def _generations(
        self, asked: TextsRequest, prompts: list[list[int]], constraint: Constraint | None, channel: Channel
    ) -> list[Generation]:
        seed, made = asked.first_seed(), []
        for place, ids in enumerate(prompts):
            room = self.target.context_length - len(ids)
            limit = room if asked.limit is None else asked.limit
            limit = min(limit, self.recipe.max_new_tokens or room, room)
            for number in range(asked.n):
                label, index = Label(str(next(self._queries))), place * asked.n + number
                # With a seed, equal prompts get equal texts.
                own_seed = (seed + (index if asked.seed is None else number)) % openai_requests.MOST_SEED
                form = None if constraint is None else constraint.copy(len(ids))
                request = Request(
                    ids,
                    asked.sampling,
                    limit,
                    own_seed,
                    label=label,
                    ends=frozenset(asked.stop_token_ids),
                    ignores_eos=asked.ignore_eos,
                    constraint=form,
                    adjustment=asked.adjustment(self.target.eos_ids),
                    reports_logits=asked.alternatives is not None,
                )
                generation = Generation(request, channel, index, asked.stops, top_logprobs=asked.alternatives)
                generation.least, generation.shows_stop = asked.min_tokens, asked.include_stop_str_in_output
                made.append(generation)
        return made

    def _echo(self, asked: CompletionRequest, generations: list[Generation]) -> None:
        """Let the answers begin with their prompts, and with their log probabilities if they are asked for."""
        scores, taps = None, self.thread.engine.state.taps
        for generation in generations:
            place, number = divmod(generation.index, asked.n)
            prompt, ids = asked.prompts[place], generation.request.prompt
            generation.echo = prompt if isinstance(prompt, str) else str(self.target.tokenizer.decode(ids))
            if asked.alternatives is not None and number == 0:
                scores = PromptLogprobs(self.target, ids, asked.alternatives, taps)
            generation.scores = scores

    def _cancel(self, generations: list[Generation]) -> None:
        for generation in generations:
            self.thread.cancel(generation)

    async def _finished(self, generations: list[Generation], channel: Channel, usage: Usage) -> list[PartialAnswer]:
        """Wait for all answers. Raises ApiError if one fails."""
        choices = [PartialAnswer() for _ in generations]
        while any(choice.finish is None for choice in choices):
            for part in await channel.take():
                if part.error is not None:
                    raise _api_error(part.error)
                choices[part.index].add(part)
                usage.completion += len(part.ids)
        return choices

    async def _events(
        self, asked: TextsRequest, generations: list[Generation], channel: Channel, form: AnswerFormat, usage: Usage
    ) -> AsyncIterator[bytes]:
        """The events of a stream. Parts that have come meanwhile are sent together."""
        unfinished, offsets, stats = len(generations), [0] * len(generations), []
        begun: set[int] = set()
        counts_always = asked.stream_options.include_usage and asked.stream_options.continuous_usage_stats
        while unfinished:
            made = []
            for part in await channel.take():
                if part.error is not None:
                    error = _api_error(part.error)
                    if not begun:
                        raise error
                    made.append(event(error.document))
                    unfinished = 0
                    break
                counted = partial(form.with_usage, usage=usage) if counts_always else bytes
                if part.index not in begun:
                    made.append(counted(form.first(part.index)))
                begun.add(part.index)
                usage.completion += len(part.ids)
                if form.says(part):
                    made.append(counted(form.piece(part, offsets[part.index])))
                offsets[part.index] += form.length_of(part)
                if part.last:
                    unfinished -= 1
                    stats += [part.stats] if part.stats is not None else []
            if made:
                yield b"".join(made)
        if asked.stream_options.include_usage:
            yield form.usage(usage, stats)
        yield DONE


def _api_error(error: Exception) -> ApiError:
    """The error of a text as its client gets it."""
    if isinstance(error, DataError):
        return ApiError(error.message)
    return ApiError("the engine failed on this request", 500)
