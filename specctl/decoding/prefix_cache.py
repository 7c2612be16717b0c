"""Prefix cache of recent texts, so that no prompt prefix is prefilled twice.

Each turn of a conversation begins with the turns before it. Step-by-step reasoning asks the target to continue the text
it has just written. The texts of a few conversations are enough for this, so they are compared one by one. A server for
many users would keep them in a tree: RadixAttention (Zheng et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import takewhile
from operator import eq
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specctl.decoding.cache import KVCache
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target


class CachedText(NamedTuple):
    """A cached text: its ids, its cache rows [L, n, 2·Hkv, D] and tapped features [n, F]."""

    ids: list[int]
    rows: Tensor
    tapped: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.tapped is None else self.tapped.nbytes)


CPU_BYTES = 512 * 2**20


def cpu_prefix_cache(target: Target, most_bytes: int = CPU_BYTES) -> PrefixCache | None:
    """Make a cache for a target on a CPU. Returns None if `most_bytes` is 0, and on a GPU, where sequences share pages
    (pages.py)."""
    return PrefixCache(most_bytes=most_bytes) if most_bytes and target.device.type == "cpu" else None


class PrefixCache:
    """The texts of one target that were used last.

    Args:
        most_texts: largest number of texts.
        most_bytes: largest sum of their bytes.

    Attributes:
        texts: the cached texts. The one that was used last is at the end. No text is a prefix of another.
        read: number of tokens that prefills have run through the target.
    """

    def __init__(self, most_texts: float = math.inf, most_bytes: float = math.inf):
        self.most_texts, self.most_bytes = most_texts, most_bytes
        self.texts: list[CachedText] = []
        self.read = 0

    @torch.inference_mode()
    def prefill(
        self, target: Target, prompts: list[list[int]], cache: KVCache, taps: tuple[int, ...], slots: list[int]
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Fill `slots` of the cache. Returns the logits [n, V] of each prompt's last token, the tapped states [n, P,
        F], padded on the right, and the number of tokens of each prompt that were cached.

        Prompts run one at a time. Each starts after the longest prefix it shares with a cached text or an earlier
        prompt.
        """
        earlier: list[CachedText] = []
        logits, cached = [], []
        for prompt, slot in zip(prompts, slots, strict=True):
            before = self.read
            last, text = self._prefill_one(target, prompt, cache, taps, slot, earlier)
            earlier.append(text)
            logits.append(last)
            cached.append(len(prompt) - (self.read - before))
        tapped = [text.tapped for text in earlier if text.tapped is not None]
        return torch.cat(logits), pad_sequence(tapped, batch_first=True) if tapped else None, cached

    @torch.inference_mode()
    def read_ahead(self, target: Target, prompt: list[int], taps: tuple[int, ...], count: int) -> bool:
        """Read the next `count` tokens of a prompt into the cache, so that a long prompt can be read in parts.

        Returns False, and reads nothing, if at most `count` tokens are missing or the prompt is too long for the cache.
        """
        end = self.known(prompt, taps) + count
        if end >= len(prompt) or not self.has_room(target, taps, len(prompt)):
            return False
        _, text = self._prefill_one(target, prompt[:end], target.new_cache(1, end), taps, 0)
        self.add(text)
        return True

    def known(self, prompt: list[int], taps: tuple[int, ...]) -> int:
        """Number of tokens of a prompt that need not be read."""
        return self._longest(prompt, taps)[0]

    def has_room(self, target: Target, taps: tuple[int, ...], count: int) -> bool:
        """Whether `count` tokens fit into the cache if it holds nothing else."""
        features = len(taps) * target.hidden_size * target.dtype.itemsize
        return (target.new_cache(1, 1).nbytes + features) * count <= self.most_bytes

    def keep(self, state: DecodeState, slots: list[int]) -> None:
        """Cache the finished texts in `slots`, unless they failed, while their cache rows still exist."""
        for b in slots:
            ids = state.rows[b].ids[:-1]
            if state.rows[b].stop == "failed" or any(text.ids[: len(ids)] == ids for text in self.texts):
                continue
            features = None if state.features is None else state.features[b, : len(ids)].clone()
            self.add(CachedText(ids, state.cache.first_rows(b, len(ids)).clone(), features))

    def add(self, new: CachedText) -> None:
        """Add a text in place of its prefixes, and drop the texts for which there is no room any more. A text that is
        too large for the whole cache is left out."""
        if new.nbytes > self.most_bytes:
            return
        self.texts = [text for text in self.texts if text.ids != new.ids[: len(text.ids)]]
        self.texts.append(new)
        while len(self.texts) > self.most_texts or sum(text.nbytes for text in self.texts) > self.most_bytes:
            del self.texts[0]

    def _prefill_one(
        self,
        target: Target,
        prompt: list[int],
        cache: KVCache,
        taps: tuple[int, ...],
        slot: int,
        earlier: Iterable[CachedText] = (),
    ) -> tuple[Tensor, CachedText]:
        """Fill a slot of the cache, from cached texts and `earlier` ones. Returns the logits [1, V] of the prompt's
        last token, and the prompt as a text over the slot's memory."""
        start, known = self._longest(prompt, taps, earlier)
        if known is not None:
            cache.set_first_rows(slot, known.rows[:, :start])
            self.texts.sort(key=lambda text: text is known)  # it was used last
        logits, _, tapped = target.prefill([prompt], cache, taps, [slot], [start])
        if tapped is not None and known is not None and known.tapped is not None:
            tapped[0, :start] = known.tapped[:start]
        self.read += len(prompt) - start
        rows = cache.first_rows(slot, len(prompt))
        return logits, CachedText(prompt, rows, None if tapped is None else tapped[0])

    def _longest(
        self, prompt: list[int], taps: tuple[int, ...], earlier: Iterable[CachedText] = ()
    ) -> tuple[int, CachedText | None]:
        """Length of the longest shared prefix, and the text that has it. The prompt's last token never counts: it must
        run, as its logits are needed."""
        best: tuple[int, CachedText | None] = (0, None)
        usable = prompt[:-1]
        for text in (*self.texts, *earlier):
            if taps and text.tapped is None:
                continue
            shared = sum(takewhile(bool, map(eq, usable, text.ids)))
            if shared > best[0]:
                best = shared, text
        return best
