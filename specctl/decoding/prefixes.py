"""Prefix cache of recent texts, so that no prompt prefix is prefilled twice.

Step-by-step reasoning asks the target to continue the text it has just written, and several texts with a common
beginning. A few cached texts are enough for this. A server would keep them in a tree: RadixAttention (Zheng et al.
2024).
"""

from collections import deque
from itertools import takewhile
from operator import eq
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specctl.decoding.cache import KVCache
from specctl.decoding.plan import plan_rows
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target


class CachedText(NamedTuple):
    """A cached text: its ids, its cache rows [L, n, 2·Hkv, D] and tapped features [n, F]."""

    ids: list[int]
    rows: Tensor
    tapped: Tensor | None


class Prefixes:
    """The last `lines` finished texts of one target.

    Attributes:
        read: number of tokens that prefills have run through the target.
    """

    def __init__(self, lines: int):
        self.lines: deque[CachedText] = deque(maxlen=lines)
        self.read = 0

    @torch.inference_mode()
    def prefill(
        self, target: Target, prompts: list[list[int]], cache: KVCache, taps: tuple[int, ...], slots: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Fill `slots` of the cache. Returns the logits [n, V] of each prompt's last token and the tapped states [n, P,
        F], padded on the right.

        Prompts run one at a time. Each starts after the longest prefix it shares with a cached text or an earlier
        prompt.
        """
        here: list[CachedText] = []
        logits = []
        for prompt, slot in zip(prompts, slots, strict=True):
            alone = cache.sequence(slot)
            lines = [line for line in (*self.lines, *here) if line.tapped is not None or not taps]
            start, line = self._longest(prompt, lines)
            if line is not None:
                alone.set_first_rows(0, line.rows[:, :start])
            plan = plan_rows([start], len(prompt) - start, device=target.device, dtype=target.dtype)
            tokens = torch.tensor([prompt[start:]], device=target.device)
            hidden, tapped = target.model.forward(tokens, alone, plan, taps)
            self.read += len(prompt) - start
            features = None
            if tapped is not None:
                features = (
                    tapped[0] if line is None or line.tapped is None else torch.cat((line.tapped[:start], tapped[0]))
                )
            here.append(CachedText(prompt, alone.first_rows(0, len(prompt)), features))
            logits.append(target.model.logits(hidden[:, -1]))
        kept = [line.tapped for line in here if line.tapped is not None]
        return torch.cat(logits), pad_sequence(kept, batch_first=True) if kept else None

    def keep(self, state: DecodeState, slots: list[int]) -> None:
        """Cache the finished texts in `slots`, while their cache rows still exist."""
        for b in slots:
            row = state.rows[b]
            count = len(row.ids) - 1
            if all(line.ids != row.ids[:count] for line in self.lines):
                features = None if state.features is None else state.features[b, :count].clone()
                self.lines.append(CachedText(row.ids[:count], state.cache.first_rows(b, count).clone(), features))

    @staticmethod
    def _longest(prompt: list[int], lines: list[CachedText]) -> tuple[int, CachedText | None]:
        """Length of the longest shared prefix, and the cached text that has it. The prompt's last token never counts:
        it must run, as its logits are needed."""
        best: tuple[int, CachedText | None] = (0, None)
        for line in lines:
            shared = sum(takewhile(bool, map(eq, prompt[:-1], line.ids)))
            if shared > best[0]:
                best = shared, line
        return best
