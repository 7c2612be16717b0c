"""Requests of OpenAI's API for texts: their fields, limits and defaults."""

import secrets
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import from_json

from specctl.decoding.sampling import Adjustment, Sampling
from specctl.distillation.messages import Conversation, checked_messages, template_options, tool_list
from specctl.gateway.openai_errors import ApiError, of_validation

MOST_ANSWERS = 64  # texts of one request
MOST_STOPS, LONGEST_STOP = 16, 1024  # stop strings, and characters of one
MOST_FIELDS = 64  # of an object in a body
MOST_BIASES = 1024  # tokens of a bias
MOST_CHOICES = 256  # texts of which an answer can be one
LONGEST_FORM = 65536  # characters of a regular expression, or of a schema that is sent as text
MOST_MESSAGES, MOST_IDS = 10_000, 2**20  # beyond any context
COLDEST = 1e-3  # a lower temperature is greedy: its logits would overflow
MOST_SEED = 2**63

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "echo": (False,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "priority": (0,),
}
"""Fields of OpenAI and vLLM that this engine does not serve, with the values that ask for nothing. Chats have tools.

So does null, for every field.
"""

OLDER_FORMS = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}


class Body(BaseModel):
    """An object of JSON with known fields of exact types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, document: Any) -> Any:
        """Refuse objects with many fields: naming each unknown one takes seconds. Leave out fields that are null."""
        if not isinstance(document, dict):
            return document
        if len(document) > MOST_FIELDS:
            raise ApiError(f"an object has {len(document)} fields: at most {MOST_FIELDS} are allowed")
        return {name: value for name, value in document.items() if value is not None}


class StreamOptions(Body):
    """Options of a stream: `include_usage` adds a last event with the numbers of tokens. With it,
    `continuous_usage_stats` (vLLM's) adds the numbers up to now to every event."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """A schema for an answer. It is always enforced, also if `strict` is false."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "'response_format.json_schema' goes with the type 'json_schema', which needs it"
            raise ApiError(message, param="response_format", code="invalid_value")
        return self


class StructuredOutputs(Body):
    """vLLM's form of an answer: one of a JSON schema, any object, a regular expression, and a list of texts."""

    json_: dict[str, Any] | Annotated[str, Field(max_length=LONGEST_FORM)] | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Annotated[str, Field(max_length=LONGEST_FORM)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if len(self.model_fields_set) != 1:
            message = "'structured_outputs' must have one of json, json_object, regex and choice"
            raise ApiError(message, param="structured_outputs", code="invalid_value")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that answers must match, or None. Raises ApiError."""
        if self.json_object:
            return {"type": "object"}
        if not isinstance(self.json_, str):
            return self.json_
        try:
            schema = from_json(self.json_)
        except ValueError:
            schema = None
        if not isinstance(schema, dict):
            message = "'structured_outputs.json' must be a JSON schema, which is an object"
            raise ApiError(message, param="structured_outputs", code="invalid_value")
        return schema


def _few(bias: Any) -> Any:
    """Refuse a long bias at once: pydantic checks all tokens before it counts them."""
    if isinstance(bias, dict) and len(bias) > MOST_BIASES:
        raise ValueError(f"it has {len(bias)} tokens: at most {MOST_BIASES} are allowed")
    return bias


Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class TextsRequest(Body):
    """Fields that both kinds of requests share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few)] = {}
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    seed: Annotated[int, Field(ge=-MOST_SEED, lt=MOST_SEED)] | None = None
    stop: (
        Annotated[str, Field(max_length=LONGEST_STOP)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)]
    ) = ""
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    response_format: ResponseFormat | None = None
    # vLLM's fields.
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MOST_BIASES)] = []
    include_stop_str_in_output: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] = 0
    ignore_eos: bool = False
    return_token_ids: bool = False
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # Fields without an effect on the text.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    _older_form: str | None = PrivateAttr(None)  # the field that was sent in place of `structured_outputs`

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_fields(cls, document: Any) -> Any:
        """Leave out fields that ask for nothing. Raises ApiError if one asks for more than the engine serves."""
        if not isinstance(document, dict):
            return document
        neutral = NEUTRAL.keys() & document.keys() - cls.model_fields.keys()
        for name in neutral:
            value = document[name]
            if value is not None and not any(
                value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL[name]
            ):
                message = f"'{name}' is not supported: leave it out"
                raise ApiError(message, param=name, code="unsupported_parameter")
        return {name: value for name, value in document.items() if name not in neutral}

    @model_validator(mode="before")
    @classmethod
    def _older_names_of_forms(cls, document: Any) -> Any:
        """Read `guided_json`, `guided_regex` and `guided_choice`, vLLM's names before `structured_outputs`."""
        names = [name for name in OLDER_FORMS if isinstance(document, dict) and document.get(name) is not None]
        if not names:
            return document
        if len(names) > 1 or document.get("structured_outputs") is not None:
            message = f"'{names[0]}' is not allowed with another form of the answer"
            raise ApiError(message, param=names[0], code="invalid_value")
        rest = {name: value for name, value in document.items() if name not in OLDER_FORMS}
        return rest | {"structured_outputs": {OLDER_FORMS[names[0]]: document[names[0]]}}

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        form = self.response_format
        if self.structured_outputs is not None and form is not None and form.type != "text":
            message = "'structured_outputs' is not allowed with 'response_format'"
            raise ApiError(message, param="structured_outputs", code="invalid_value")
        return self

    @model_validator(mode="after")
    def _least_within_limit(self) -> Self:
        if self.limit is not None and self.min_tokens > self.limit:
            message = f"'min_tokens' can be at most the limit of new tokens, {self.limit}"
            raise ApiError(message, param="min_tokens", code="invalid_value")
        return self

    @model_validator(mode="after")
    def _stream_options_of_streams(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ApiError("'stream_options' is only allowed with 'stream'", param="stream_options")
        return self

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn. Without values it is OpenAI's default: temperature 1 without filters."""
        temperature = self.temperature if self.temperature >= COLDEST else 0.0
        return Sampling(temperature, max(self.top_k, 0), max(self.top_p, 1e-6), self.repetition_penalty, self.min_p)

    def adjustment(self, eos_ids: frozenset[int]) -> Adjustment | None:
        """Penalties, bias and minimum length for a target with these end tokens, or None.

        With `ignore_eos` the end tokens stay possible: they end no text, and load tests would pay for their exclusion.
        """
        bias = {int(token): value for token, value in self.logit_bias.items()}
        ends = frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids)
        least = self.min_tokens if ends else 0
        if not (self.presence_penalty or self.frequency_penalty or bias or least):
            return None
        return Adjustment(self.presence_penalty, self.frequency_penalty, bias, least, ends if least else frozenset())

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop)

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that answers must match, or None. Raises ApiError."""
        if self.structured_outputs is not None:
            return self.structured_outputs.schema_of_answer
        form = self.response_format
        if form is None or form.type == "text":
            return None
        return {"type": "object"} if form.json_schema is None else form.json_schema.schema_

    def in_client_words(self, error: ApiError) -> ApiError:
        """Return an error about the form of the answer with the name of the field that the client has sent."""
        return with_form_name(error, self._older_form)

    @property
    def most_calls(self) -> int | None:
        """Most tool calls of an answer, or None for any number."""
        return 0

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Tools that an answer may call: the tool that `tool_choice` names, or all tools that the target sees."""
        return []

    @property
    def must_call(self) -> bool:
        """Whether an answer must be a call."""
        return False

    @property
    def has_form(self) -> bool:
        """Whether answers must have a form: a JSON schema, an expression, one of some texts, or tool calls."""
        return self.structured_outputs is not None or self.schema_of_answer is not None or self.must_call

    def first_seed(self) -> int:
        """Seed of the first answer; the others have the following ones. Without one it is drawn."""
        return secrets.randbits(62) if self.seed is None else self.seed % MOST_SEED

    @property
    def limit(self) -> int | None:
        """Most new tokens, or None for the rest of the context."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of likely tokens to report with every token, or None."""
        return None


class Message(Body):
    """A message of a conversation; `checked_messages` checks the values."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    # Fields of OpenAI's answers, which clients send back.
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    function_call: Any = None

    def document(self) -> dict[str, Any]:
        """The message as a row of a data set has it. A missing content is empty."""
        made = self.model_dump(exclude_none=True)
        calls = self.role == "assistant" and (self.tool_calls or self.function_call)
        return (
            made
            | {"role": "system" if self.role == "developer" else self.role}
            | ({} if "content" in made else {"content": None if calls else ""})
        )


class ChatRequest(TextsRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _alternatives_of_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("'top_logprobs' is only allowed with 'logprobs'", param="top_logprobs")
        return self

    @model_validator(mode="after")
    def _choice_of_tools(self) -> Self:
        if self.must_call and not self.tools:
            message = "'tool_choice' is only allowed with 'tools'"
            raise ApiError(message, param="tool_choice", code="invalid_value")
        known = self.must_call or self.tool_choice in (None, "none", "auto")
        if not known or (self.must_call and not self.callable_tools):
            message = "'tool_choice' can be 'none', 'auto', 'required' or a function of 'tools'"
            raise ApiError(message, param="tool_choice", code="invalid_value")
        return self

    @property
    def shows_tools(self) -> bool:
        """Whether the target sees tools, so that its answer may call them."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def most_calls(self) -> int | None:
        if not self.shows_tools:
            return 0
        # Small targets repeat a required call without end, so several calls must be asked for.
        several = not self.must_call if self.parallel_tool_calls is None else self.parallel_tool_calls
        return None if several and not isinstance(self.tool_choice, dict) else 1

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        tools = (self.conversation.tools if self.shows_tools else None) or []
        if not isinstance(self.tool_choice, dict):
            return tools
        function = self.tool_choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        return [tool for tool in tools if tool["function"]["name"] == name]

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, dict)

    @property
    def conversation(self) -> Conversation:
        """The conversation as chat templates read it. Raises ApiError.

        With the choice `none` the target does not see the tools: nothing else keeps it from calling them.
        """
        param = "messages"
        try:
            messages = checked_messages([message.document() for message in self.messages], allow_empty=True)
            param = "tools"
            tools = tool_list(self.tools)
            param = "chat_template_kwargs"
            options = template_options(self.chat_template_kwargs)
        except ValueError as error:
            raise ApiError(f"Invalid value for '{param}': {error}", param=param, code="invalid_value") from None
        return Conversation(messages, tools if self.shows_tools else None, options)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MOST_IDS, fail_fast=True)]
Text = TypeVar("Text")
Several = Annotated[list[Text], Field(max_length=MOST_ANSWERS, fail_fast=True)]  # one error for a list, not a million


class CompletionRequest(TextsRequest):
    """Body of /v1/completions."""

    prompt: str | Several[str] | Ids | Several[Ids]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: int | None = None
    echo: bool = False
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = 16  # OpenAI's default

    @model_validator(mode="after")
    def _tokens_or_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            message = "Invalid value for 'max_tokens': only with 'echo' it can be 0"
            raise ApiError(message, param="max_tokens", code="invalid_value")
        return self

    @model_validator(mode="after")
    def _all_answers(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ApiError("'best_of' is not supported: leave it out", param="best_of", code="unsupported_parameter")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts, or lists of ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(cast(list[str | list[int]], self.prompt))

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


Parsed = TypeVar("Parsed", bound=TextsRequest)
Valid = TypeVar("Valid", bound=Body)


def document_of(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError."""
    try:
        document = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        reason = str(error).partition(" at line")[0]
        raise ApiError(f"the body is not valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    return document


def validated(kind: type[Valid], document: dict[str, Any]) -> Valid:
    """The document as a request. Raises ApiError."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise of_validation(error) from None


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """Parse the body of a request for texts. Raises ApiError."""
    document = document_of(body)
    older = next((name for name in OLDER_FORMS if document.get(name) is not None), None)
    try:
        asked = validated(kind, document)
    except ApiError as error:
        raise with_form_name(error, older) from None
    asked._older_form = older
    return asked


def with_form_name(error: ApiError, older: str | None) -> ApiError:
    """Return an error about `structured_outputs` in the words of a client that has sent the field `older` instead."""
    if older is not None:
        for name in (f"structured_outputs.{OLDER_FORMS[older]}", "structured_outputs"):
            error.message = error.message.replace(name, older)
            error.param = error.param and error.param.replace(name, older)
    return error
