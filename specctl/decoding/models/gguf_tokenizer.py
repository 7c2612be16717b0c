"""Conversion of a GGUF file's tokenizer to the files that `transformers` reads.

`transformers` can build a tokenizer from a GGUF file, too. For some vocabularies, however, it splits texts differently
from the model's training (SmolLM's digits). This module follows llama.cpp, which defines the metadata
(src/llama-vocab.cpp).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specctl.decoding.models.gguf_file import Numbers
from specctl.errors import CheckpointError, one_line

TOKENS, TYPES, SCORES, MERGES = (f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "scores", "merges"))
ADD_BOS, ADD_EOS, ADD_SPACE = (f"tokenizer.ggml.add_{key}" for key in ("bos_token", "eos_token", "space_prefix"))
TEMPLATE = "tokenizer.chat_template"
VALUES: dict[str, type] = {
    **dict.fromkeys((TYPES, SCORES), Numbers),
    **dict.fromkeys((ADD_BOS, ADD_EOS, ADD_SPACE), bool),
    **dict.fromkeys((TEMPLATE, "tokenizer.ggml.pre"), str),
    MERGES: list,
}
"""Types of the metadata."""
LONGEST_TOKEN = 2000  # characters; a token is cut after each of them
CONVERT_HINT = "convert the model again, together with its tokenizer"
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
SPACE = "▁"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+END|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*END"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _WORDS.replace("END", "") + r"|\p{N}" + _OTHERS
GPT4O = _WORDS.replace("END", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _OTHERS
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (QWEN2,)),
    "tekken": (TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (GPT4O,)),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""How a text is split before merges, by `tokenizer.ggml.pre`. Each expression splits the pieces left by the previous
one."""
LIKE_LLAMA3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
"""Vocabularies that look a whole word up before merges are applied to it, and begin a text with a token by default, if
the metadata do not say."""
ENDS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "< EOT >",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<|call|>",
    "<end_of_utterance>",
    "[EOT]",
    "[EOS]",
}
"""Tokens that end a text in any vocabulary, as in llama.cpp: many files name only one of several end tokens. They are
control tokens, even if the file does not say so."""
HARMONY = {"<|return|>", "<|call|>", "<|end|>"}
"""End tokens of a vocabulary in which the last one only ends a part of an answer."""
STRIPPING = ("phi-3", "phi3")
"""Parts of the names of models in which special tokens swallow the white space after them."""
NOT_STRIPPING = {"<unk>", "<s>", "<|endoftext|>"}


@dataclass(frozen=True)
class GGUFTokenizer:
    """Tokenizer built from metadata.

    Attributes:
        document: contents of tokenizer.json.
        special: `bos_token_id` and so on; a missing token is None.
        ends: ids of the tokens that end a text.
        tokens: the vocabulary, by id.
        template: the chat template, if there is one.
    """

    document: str
    special: dict[str, int | None]
    ends: list[int]
    tokens: list[str]
    template: str | None

    def files(self, context: int) -> dict[str, str]:
        """Contents of every file that `transformers` reads, for a model with this context length."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        }
        for key, token in self.special.items():
            if token is not None:
                config[key.removesuffix("_id")] = self.tokens[token]
        found = {"tokenizer.json": self.document, "tokenizer_config.json": json.dumps(config, indent=1)}
        return found if self.template is None else {**found, "chat_template.jinja": self.template}


def build(name: str, metadata: dict[str, Any], rows: int) -> GGUFTokenizer:
    """Build the tokenizer of target `name`, with `rows` rows in its embedding.

    Raises CheckpointError: there is no tokenizer, its kind is not supported, or its parts contradict each other.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get(TOKENS)
    if kind is None or not isinstance(tokens, list) or not tokens:
        raise CheckpointError(
            f"target {name}: the GGUF file has no tokenizer (tokenizer.ggml.model and .tokens)", CONVERT_HINT
        )
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"target {name}: the tokenizer of the GGUF file has kind {kind!r:.60}, which is not supported",
            "use a file with a gpt2 or llama tokenizer, or the model's safetensors files",
        )
    if len(tokens) > rows:
        raise CheckpointError(
            f"target {name}: the GGUF file has {len(tokens):,} tokens, but only {rows:,} embeddings", CONVERT_HINT
        )
    _check(name, metadata, kind)
    kinds = list(metadata.get(TYPES, (1,) * len(tokens)))
    ending = {number for number, token in enumerate(tokens) if token in ENDS}
    for number in ending:
        kinds[number] = CONTROL
    special = {
        f"{ours}_token_id": _id(name, metadata, theirs, len(tokens))
        for ours, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    pre = metadata.get("tokenizer.ggml.pre", "default")
    try:
        if kind == "gpt2":
            model = _byte_level(name, metadata, tokens, pre)
        else:
            model = _sentencepiece(metadata, tokens, kinds, special["unk_token_id"] or 0)
        named = str(metadata.get("general.name", "")).lower()
        _add_special(model, tokens, kinds, strips=any(part in named for part in STRIPPING))
        _add_ends(model, metadata, tokens, special, begins=kind == "llama" or pre in LIKE_LLAMA3)
        document = model.to_str()
    except CheckpointError:
        raise
    except Exception as error:  # contradictory parts can make `tokenizers` raise anything
        raise _damaged(name, one_line(error)) from error
    ends = {special["eos_token_id"], *(_id(name, metadata, key, len(tokens)) for key in ("eot", "eom"))} - {None}
    ends |= ending
    if HARMONY.issubset(tokens):
        ends -= {number for number in ending if tokens[number] == "<|end|>"}
    known = sorted(number for number in ends if number is not None)
    return GGUFTokenizer(document, special, known, tokens, metadata.get(TEMPLATE))


def _check(name: str, metadata: dict[str, Any], kind: str) -> None:
    """Raise CheckpointError if a value is missing, has a wrong type, or belongs to other tokens. Without it texts would
    get other ids."""
    tokens = metadata[TOKENS]
    required = {"gpt2": MERGES, "llama": SCORES}[kind]
    if required not in metadata:
        raise _damaged(name, f"{required} is missing")
    for key, wanted in VALUES.items():
        value = metadata.get(key)
        if value is not None and not isinstance(value, wanted):
            raise _damaged(name, f"{key} is {value!r:.60}")
        if isinstance(value, Numbers) and len(value) != len(tokens):
            raise _damaged(name, f"{key} has {len(value):,} entries for {len(tokens):,} tokens")
    longest = max(map(len, tokens))
    if longest > LONGEST_TOKEN:
        raise _damaged(name, f"a token has {longest:,} characters, more than {LONGEST_TOKEN:,}")


def _damaged(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"target {name}: the tokenizer of the GGUF file is damaged: {what}", CONVERT_HINT)


def _id(name: str, metadata: dict[str, Any], key: str, count: int) -> int | None:
    """A special token's id, or None if the metadata name none."""
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if value is None or value == 2**32 - 1:  # llama.cpp's -1, as an unsigned number
        return None
    if type(value) is not int or not 0 <= value < count:
        raise CheckpointError(
            f"target {name}: the GGUF file has {count:,} tokens, but its tokenizer.ggml.{key}_token_id is "
            f"{value!r:.60}",
            CONVERT_HINT,
        )
    return value


def _byte_level(name: str, metadata: dict[str, Any], tokens: list[str], pre: Any) -> Any:
    """Byte-level BPE, as in GPT-2."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if pre not in SPLITS:
        raise CheckpointError(
            f"target {name}: the tokenizer of the GGUF file uses the pre-tokenizer {pre!r:.60}, which is not supported",
            f"use one of {', '.join(SPLITS)} (tokenizer.ggml.pre), or the model's safetensors files",
        )
    merges = []
    for merge in metadata[MERGES]:
        cut = merge.find(" ", 1)  # the first part may be a space
        merges.append((merge[:cut], merge[cut + 1 :]))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in LIKE_LLAMA3))
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in SPLITS[pre]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    model.decoder = decoders.ByteLevel()
    return model


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], kinds: Sequence[int], unknown: int) -> Any:
    """SentencePiece's BPE: it merges the pair with the best score first; text without a token becomes bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata[SCORES]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    usual = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in (UNKNOWN, CONTROL, BYTE, UNUSED)}
    merges = [
        (-scores[vocabulary[token]], token[:cut], token[cut:])
        for token in usual
        for cut in range(1, len(token))
        if token[:cut] in usual and token[cut:] in usual
    ]
    model = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[merge[1:] for merge in sorted(merges)],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = metadata.get(ADD_SPACE, True)
    steps = [normalizers.Prepend(SPACE)] if prefixed else []
    model.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    trimmed = [decoders.Strip(" ", 1, 0)] if prefixed else []
    model.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *trimmed]
    )
    return model


def _add_special(model: Any, tokens: list[str], kinds: Sequence[int], strips: bool) -> None:
    """Register tokens that are matched whole in a text, before any splitting."""
    from tokenizers import AddedToken

    def found(*wanted: int) -> list[AddedToken]:
        return [
            AddedToken(
                token,
                special=kind != USER_DEFINED,
                normalized=False,
                rstrip=strips and (token not in NOT_STRIPPING),
            )
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in wanted and token
        ]

    model.add_special_tokens(found(UNKNOWN, CONTROL))
    model.add_tokens(found(USER_DEFINED))


def _add_ends(
    model: Any, metadata: dict[str, Any], tokens: list[str], special: dict[str, int | None], begins: bool
) -> None:
    """Add the tokens that are put before and after a text, if the file says so."""
    from tokenizers import processors

    first = special["bos_token_id"] if metadata.get(ADD_BOS, begins) else None
    last = special["eos_token_id"] if metadata.get(ADD_EOS, False) else None
    around = {name: number for name, number in (("BOS", first), ("EOS", last)) if number is not None}
    if around:
        before, after = ["BOS"] * ("BOS" in around), ["EOS"] * ("EOS" in around)
        model.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[
                {"id": name, "ids": [number], "tokens": [tokens[number]]} for name, number in around.items()
            ],
        )
