"""Text of a growing list of tokens: parts that can be sent at once, and the end at a stop string."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from specctl.gateway.tool_calls import MARKS

UNFINISHED = "\ufffd"  # how a tokenizer shows the bytes of a character that is not complete

Decode = Callable[[list[int]], str]


def decoder(tokenizer: Any) -> Decode:
    """Function that decodes ids without special tokens, on a copy of the tokenizer, for a thread of its own.

    The Rust tokenizer is called directly if the Python class would add nothing: that takes a tenth of the time. Marks
    of tool calls are text, also for a tokenizer that has them as special tokens.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {id for id, token in added if token.special} | {*tokenizer.all_special_ids}
    hidden = special - {id for id, token in added if token.content in MARKS}
    fast = getattr(tokenizer, "backend_tokenizer", None)
    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    own = copy.deepcopy(tokenizer if fast is None or cleans else fast)
    return lambda ids: str(own.decode([id for id in ids if id not in hidden], skip_special_tokens=False))


class TextStream:
    """Text of one answer while its tokens arrive.

    Args:
        least: number of tokens in which no stop string ends the text.
        shows_stop: the text includes the stop string that ends it.

    Attributes:
        text: the whole text up to now.
        stopped: the stop string that has ended the text, or None.
        used: number of tokens that were read; tokens after a stop string are not.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), least: int = 0, shows_stop: bool = False):
        self._decode, self._stops, self._least, self._shows_stop = decode, stops, least, shows_stop
        self._ids: list[int] = []
        self._from = self._read = 0  # tokens before `_read` are in the text; decoding starts at `_from`
        self._sent = 0
        self.text = ""
        self.stopped: str | None = None

    @property
    def used(self) -> int:
        return len(self._ids)

    def add(self, tokens: Sequence[int]) -> str:
        """Read more tokens. Returns the text that can be sent now: it holds no part of a stop string or character."""
        for group in [[token] for token in tokens] if self._stops else [list(tokens)]:
            self._ids += group
            known = self._decode(self._ids[self._from : self._read]) if self._read > self._from else ""
            both = self._decode(self._ids[self._from :])
            if len(both) > len(known) and not both.endswith(UNFINISHED):
                self._extend(both[len(known) :])
                self._from, self._read = self._read, len(self._ids)
            if self.stopped is not None:
                break
        return self._send(len(self.text) - self._held())

    def finish(self) -> str:
        """End of the tokens: the text that was held back."""
        if self.stopped is None:
            whole = self._decode(self._ids)
            if whole.startswith(self.text):  # always, unless the tokenizer joins tokens far apart
                self._extend(whole[len(self.text) :])
        return self._send(len(self.text))

    def _extend(self, new: str) -> None:
        """Append text, and end it at the stop string that is complete first."""
        known = len(self.text)
        self.text += new
        if len(self._ids) <= self._least:
            return
        places = [(self.text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stops]
        found = [(at + len(stop), stop) for at, stop in places if at >= 0]
        if found:
            end, self.stopped = min(found)
            self.text = self.text[: end if self._shows_stop else end - len(self.stopped)]

    def _held(self) -> int:
        """Number of characters at the end of the text with which a stop string may begin."""
        if self.stopped is not None:
            return 0
        return max((self._begun(stop) for stop in self._stops), default=0)

    def _begun(self, stop: str) -> int:
        """Number of characters at the end of the text with which a stop string begins."""
        at = self.text.find(stop[0], max(0, len(self.text) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(self.text[at:]):
                return len(self.text) - at
            at = self.text.find(stop[0], at + 1)
        return 0

    def _send(self, end: int) -> str:
        part = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return part
