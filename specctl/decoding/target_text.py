"""Text side of a target, without its weights: tokenizer, chat template, end-of-sequence ids, sizes.

A digest of the weights' files detects another checkpoint under the same path.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

from specctl import regular_files
from specctl.decoding.models import gguf_file, gguf_target, target_adapter
from specctl.decoding.models.chat import Renderer
from specctl.decoding.models.loading import (
    is_gguf,
    load_config,
    load_generation_config,
    load_tokenizer,
    model_directory,
)
from specctl.decoding.models.supported import context_limit, weight_files
from specctl.errors import ChatTemplateError, CheckpointError, DataError

BASE_TEMPLATE = '{% for m in messages %}{{ m.content + "\\n" }}{% endfor %}'
"""Chat template that a base model can use: the messages, one below the other."""


WHOLE = 2**26  # bytes up to which a file is read completely; this takes a twentieth of a second


BLOCK = 2**12  # bytes read in the middle of every tensor of a larger file: some megabytes for a 70B target


BLOCKS = 2**10  # blocks read of a larger file without a list of tensors


class ModelVersion(NamedTuple):
    """The version of a model's files: a revision on the hub, and a digest of the weights. With an adapter, also the
    adapter's directory and the digest of its files; `weights` then covers both."""

    revision: str | None = None
    weights: str | None = None
    adapter: str | None = None
    adapter_weights: str | None = None


UNKNOWN_VERSION = ModelVersion()


class TargetText:
    """A target's tokenizer, chat template, sizes and identity, without its weights.

    Attributes:
        config: configuration of the text model.
        vocab_size: rows of the embedding; without the weights, the size in the configuration.
        identity: fields that a drafter is checked against: name, hidden size, number of layers, vocabulary size and
            hash. A resumed run is also checked against `weights` (`weights_digest`). Only with an adapter, its
            directory and digest follow: `adapter`, `adapter_weights`. In a drafter of several adapters, `adapters` has
            such a pair for each of them, with None for the target without one.
        eos_ids: ids that end a response.
        end_id: the id to append to a response with unknown end (None if the target names no end token).
        context_length: longest sequence that the target supports.
        tool_sources: data sets for which it was checked whether the chat template shows their tools.
    """

    def __init__(
        self,
        name: str,
        config: Any,
        generation_config: Any,
        tokenizer: Any,
        *,
        vocab_size: int | None = None,
        version: ModelVersion = UNKNOWN_VERSION,
    ):
        self.name, self.tokenizer, self.generation_config = name, tokenizer, generation_config
        self._renderer: Renderer | None = None
        self.tool_sources: set[str] = set()
        self.config = config.get_text_config()
        self.vocab_size = vocab_size or self.config.vocab_size
        self.hidden_size, self.num_layers = self.config.hidden_size, self.config.num_hidden_layers
        self.context_length = context_limit(self.config) or int(tokenizer.model_max_length)
        self.eos_ids = eos_ids(generation_config, config, tokenizer)
        self.end_id = end_id(generation_config, config, tokenizer)
        self.identity: dict[str, Any] = {
            "name": name,
            "revision": version.revision,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "vocab_hash": vocab_hash(tokenizer),
            "weights": version.weights,
        }
        if version.adapter is not None:
            self.identity |= {"adapter": version.adapter, "adapter_weights": version.adapter_weights}

    def render(self, messages: list[dict[str, Any]], **chat_template_kwargs: Any) -> list[int]:
        """Prompt ids of a conversation (`distillation/messages.py` describes it), with the generation prompt appended.

        The template gets an assistant's `reasoning_content` under each name that published templates read. The tools
        are the argument `tools`.

        Raises:
            DataError: there is no chat template.
            ChatTemplateError (a DataError): the template refuses the conversation, fails on it, or leaves out the last
                of several messages, tool calls or the last tool's result.
            CheckpointError: the template takes more time or memory than `chat` allows.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise DataError(
                f"target {self.name} has no chat template",
                f"add chat_template.jinja to the model directory (a base model can use '{BASE_TEMPLATE}')",
            )
        if self._renderer is None or not self._renderer.serves(self.tokenizer):
            self._renderer = Renderer(self.tokenizer)
        named = [
            message | {"reasoning": thinking, "thinking": thinking}
            if (thinking := message.get("reasoning_content"))
            else message
            for message in messages
        ]
        if any(one.get("tool_calls") for one in messages) and "tool_calls" not in str(self.tokenizer.chat_template):
            raise ChatTemplateError(
                f"the chat template of target {self.name} does not render tool calls", "use a template for tools"
            )
        ids = self._renderer(self.name, named, chat_template_kwargs)
        # A template that lays out only one message would give every turn the same prompt.
        results = [one for one in messages if one["role"] == "tool"][-1:]
        last = messages[-1:] if len(messages) > 1 and messages[-1]["role"] == "user" else []
        if missing := next((one for one in [*last, *results] if not self.shows(ids, one)), None):
            what = f"the last of {len(messages)} messages" if missing is messages[-1] else "the result of a tool"
            raise ChatTemplateError(
                f"the chat template of target {self.name} leaves out {what}",
                "use a template that goes through all `messages`",
            )
        return ids

    @cached_property
    def longest_text(self) -> int:
        """Number of characters that fit the context if all tokens are the longest one. Longer texts need not be
        tokenized, which takes seconds for a file of some MB."""
        return self.context_length * max(map(len, self.tokenizer.get_vocab()), default=1)

    def ignores_tools(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> bool:
        """Whether the chat template renders the same ids without the `tools` among its `arguments`."""
        others = {name: value for name, value in arguments.items() if name != "tools"}
        return self.render(messages, **others) == self.render(messages, **arguments)

    def shows(self, ids: list[int], message: dict[str, Any]) -> bool:
        """Whether these ids contain the text of a message, whitespace aside. Templates write the results of tools as
        text or as JSON."""
        content, whole = message["content"], self.characters(ids)
        texts = [part["text"] for part in content] if isinstance(content, list) else [content]
        return all(
            self.normalized(text) in whole
            or (message["role"] == "tool" and self.normalized(json.dumps(text, ensure_ascii=False)[1:-1]) in whole)
            for text in texts
        )

    def normalized(self, text: str) -> str:
        """A text without whitespace after a round trip through the tokenizer, which may change letters (NFC, lower
        case)."""
        return self.characters(self.tokenizer.encode(text, add_special_tokens=False))

    def characters(self, ids: list[int]) -> str:
        """The text of some ids without whitespace, special tokens included."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return "".join(text.split())

    def document_start(self) -> list[int]:
        """Ids at the beginning of every document: the chat template's tokens before a user's first words, or else the
        token that begins every text. After these ids the target writes freely (Magpie, Xu et al. 2024).

        Raises DataError if the target names no such token.
        """
        if getattr(self.tokenizer, "chat_template", None) is not None:
            one, other = (self.render([{"role": "user", "content": text}]) for text in ("a", "1"))
            same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), 0)
            if same:
                return one[:same]
        begin = self.tokenizer.bos_token_id
        begin = self.end_id if begin is None else begin
        if begin is None:
            raise DataError(
                f"target {self.name} defines no token that begins a document",
                "set bos_token in its tokenizer_config.json, or eos_token_id in its generation_config.json",
            )
        return [begin]


def vocab_hash(tokenizer) -> str:
    """16 hex digits over the sorted (token, id) pairs: equal iff two tokenizers share their vocabulary."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=False).encode()).hexdigest()[:16]


def eos_ids(generation_config, config, tokenizer) -> frozenset[int]:
    """All ids that end a response, from the generation config, the config and the tokenizer. CheckpointError if one of
    them is no integer. Ids outside of the vocabulary are left out: some files name -1, or an added token that the
    embedding lacks."""
    ids: list[Any] = []
    for source in (generation_config, config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids += value if isinstance(value, list) else [value]
    if not all(type(one) is int for one in ids):
        where = getattr(config, "_name_or_path", "") or "the target"
        raise CheckpointError(f"{where}: eos_token_id is {sorted(map(str, ids))!r:.60}, not a list of token ids")
    size = config.get_text_config().vocab_size
    return frozenset(one for one in ids if 0 <= one < size)


def end_id(generation_config, config, tokenizer) -> int | None:
    """The tokenizer's end token, if the configurations name it, too, or name none; otherwise their smallest id.

    For a chat model, the tokenizer's token ends a turn, while the smallest id may end documents. Returns None if no
    file names an end token.
    """
    known = eos_ids(generation_config, config, None) or eos_ids(None, config, tokenizer)
    own = getattr(tokenizer, "eos_token_id", None)
    return own if own in known else min(known, default=None)


def load_target_text(
    name: str = "builtin", *, revision: str | None = None, trust_remote_code: bool = False, adapter: str | None = None
) -> TargetText:
    """Load the text side of a target; its weight files may be absent. CheckpointError if a file cannot be read, or if
    the LoRA adapter in the directory `adapter` does not fit the target."""
    config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    generation = load_generation_config(name, config, revision=revision)
    tokenizer = load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
    if adapter is not None:
        target_adapter.check(adapter, name, config, trust_remote_code=trust_remote_code)
    return TargetText(name, config, generation, tokenizer, version=version_of(name, revision, adapter))


def version_of(name: str, revision: str | None = None, adapter: str | None = None) -> ModelVersion:
    """The version of the target `name` with the LoRA adapter in the directory `adapter`. CheckpointError if files
    cannot be read."""
    weights = weights_digest(name, revision, adapter)
    return ModelVersion(revision, weights, adapter, None if adapter is None else adapter_digest(adapter))


def weights_digest(name: str, revision: str | None = None, adapter: str | None = None) -> str | None:
    """16 hex digits over the sizes, headers and a sample of a target's weight files, and of the files of its `adapter`.
    None if there are no such files.

    File times are not used: a copy has new ones, and a file overwritten in place may keep its old one. CheckpointError
    if the files cannot be read.
    """
    try:
        if is_gguf(name):
            files = gguf_target.files(name)
        else:
            directory = model_directory(name, revision)
            files = weight_files(directory) if directory is not None else []
        return _digest([*files, *(target_adapter.files(adapter) if adapter is not None else ())])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"target {name}: its weights cannot be read: {error}", "copy the weights again"
        ) from error


def adapter_digest(adapter: str) -> str:
    """16 hex digits over the files of a target's adapter, like `weights_digest`. CheckpointError if there are none."""
    try:
        return str(_digest(target_adapter.files(adapter)))
    except OSError as error:
        raise CheckpointError(f"adapter {adapter} cannot be read: {error}", "copy the files again") from error


def _digest(files: list[Path]) -> str | None:
    digest = hashlib.sha256()
    for path in files:
        with regular_files.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size}\n".encode())
            for start, length in [(0, size)] if size <= WHOLE else _sample(path, file, size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()[:16] if files else None


def with_weights_digest(kept: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The description `kept` of an earlier run, made comparable with `now`; both have an identity under `target`. If an
    older specctl has stored no weights digest, the digest of `now` is filled in, and thus makes no difference."""
    there, here = kept.get("target"), now.get("target")
    if not isinstance(there, Mapping) or not isinstance(here, Mapping) or "weights" not in here:
        return dict(kept)
    return {**kept, "target": {"weights": here["weights"], **there}}


def _sample(path: Path, file: IO[bytes], size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the parts of a file to read: the header and a block of every tensor, or blocks spread over the
    whole file."""
    start = file.read(8)
    if start[:4] == b"GGUF":
        contents = gguf_file.read(path)
        begin = contents.headers[path]
        ranges = [(one.start, one.start + one.size) for one in contents.tensors.values() if one.file == path]
    else:
        header = int.from_bytes(start, "little")
        begin = 8 + header
        if not 0 < header < size:  # not a safetensors file
            return ((size * block // BLOCKS, BLOCK) for block in range(BLOCKS))
        entries = regular_files.parse_json(file.read(header)).items()
        offsets = [entry["data_offsets"] for name, entry in entries if name != "__metadata__"]
        ranges = [(begin + first, begin + end) for first, end in offsets]
    middles = sorted(max(first, (first + end - BLOCK) // 2) for first, end in ranges)
    return iter([(0, begin), *((middle, BLOCK) for middle in middles)])
