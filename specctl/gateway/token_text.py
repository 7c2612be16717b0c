"""Text and bytes of single tokens, for log probabilities."""

import functools
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from specctl.gateway.text_stream import UNFINISHED

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a token for one byte, in SentencePiece's vocabularies


_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}  # of the letters of byte-level vocabularies


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens in the middle of a text."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False)
        self._known = tokenizer.decode(self._before)
        self.text = functools.lru_cache(65536)(self._text)

    def _text(self, token: int) -> str:
        """Text of a token after another one. Alone it may lose a leading space."""
        both = str(self.tokenizer.decode([*self._before, token]))
        return both[len(self._known) :] if both.startswith(self._known) else str(self.tokenizer.decode([token]))

    def bytes(self, token: int) -> list[int]:
        """UTF-8 bytes of a token. The tokens of a character have parts of its bytes."""
        text = self.text(token)
        if UNFINISHED not in text:
            return list(text.encode())
        name = str(self.tokenizer.convert_ids_to_tokens(token))
        if found := _FALLBACK.fullmatch(name):
            return [int(found[1], 16)]
        return [_BYTES[letter] for letter in name] if _BYTES.keys() >= {*name} else list(text.encode())
