"""vLLM's tokenizer paths, for clients without a tokenizer: /tokenize, /detokenize and /tokenizer_info."""

from typing import Any

from specctl.decoding.target import Target
from specctl.gateway.openai_errors import ApiError
from specctl.gateway.openai_requests import Body, ChatRequest, Ids, document_of, validated

TOKENIZE, DETOKENIZE, INFO = "/tokenize", "/detokenize", "/tokenizer_info"
LONGEST = 2**20  # characters: a second of work
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token")


class TokenizeRequest(Body):
    """Body of /tokenize with a text. A body with `messages` is a `ChatRequest` instead."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Ids


def parse_tokenize(body: bytes) -> TokenizeRequest | ChatRequest:
    """Parse the body of /tokenize. Raises ApiError."""
    document = document_of(body)
    return validated(ChatRequest, document) if "messages" in document else validated(TokenizeRequest, document)


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Parse the body of /detokenize. Raises ApiError."""
    return validated(DetokenizeRequest, document_of(body))


def encoded(target: Target, asked: TokenizeRequest) -> list[int]:
    """The ids of a text. Raises ApiError for a text that takes too long."""
    if len(asked.prompt) > LONGEST:
        message = f"Invalid value for 'prompt': at most {LONGEST} characters are tokenized at once"
        raise ApiError(message, param="prompt", code="invalid_value")
    return [int(id) for id in target.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)]


def answer(target: Target, ids: list[int], strings: bool) -> dict[str, Any]:
    """The answer of /tokenize, with the names of the tokens in the vocabulary if they are asked for."""
    names = target.tokenizer.convert_ids_to_tokens(ids) if strings else None
    return {"count": len(ids), "max_model_len": target.context_length, "tokens": ids, "token_strs": names}


def information(target: Target) -> dict[str, Any]:
    """The fields of tokenizer_config.json that say how a client renders and ends texts; no paths."""
    tokenizer = target.tokenizer
    found = {name: getattr(tokenizer, name, None) for name in TOKENS}
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several templates by name
        template = template.get("default")
    about = {"tokenizer_class": type(tokenizer).__name__, "model_max_length": target.context_length}
    return about | found | ({} if template is None else {"chat_template": template})
