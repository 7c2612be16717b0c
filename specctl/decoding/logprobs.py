"""Log probabilities of tokens that an engine commits, for the requests that ask for them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.cache import KVCache
from specctl.decoding.prefix_cache import CachedText
from specctl.decoding.records import RoundResult, Sequence
from specctl.decoding.sampling import Draws, Sampling
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a token under the target, and its likeliest alternatives. A prompt's first token has NaN."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def of_rows(logits: Tensor, tokens: list[int], count: int) -> list[TokenLogprob]:
    """Log probabilities of `tokens` [n] under logits [n, V], each with the `count` likeliest tokens."""
    rows = logits.float().log_softmax(-1)
    chosen = rows.gather(1, torch.tensor(tokens, device=rows.device).unsqueeze(1)).squeeze(1).tolist()
    best = rows.topk(count, -1) if count else None
    tops = [
        list(zip(best.indices[n].tolist(), best.values[n].tolist(), strict=True)) if best is not None else []
        for n in range(len(tokens))
    ]
    return [TokenLogprob(*parts) for parts in zip(tokens, chosen, tops, strict=True)]


class PromptLogprobs:
    """Log probabilities of a prompt's tokens, which are read in parts.

    Args:
        count: number of alternatives for each token.
        taps: layers with hidden states for the prefix cache.

    Attributes:
        found: log probabilities of the first tokens; at the end, of all.
    """

    def __init__(self, target: Target, prompt: list[int], count: int, taps: tuple[int, ...]):
        self.target, self.prompt, self.count, self.taps = target, prompt, count, taps
        self.found = [TokenLogprob(prompt[0], math.nan, [])]
        self._cache: KVCache | None = None
        self._tapped: list[Tensor] = []

    @property
    def unread(self) -> int:
        """Number of tokens that are still to be read. The last token of the prompt is not: it predicts the answer."""
        return len(self.prompt) - len(self.found)

    def read_ahead(self, count: int) -> bool:
        """Read `count` tokens. Returns False, and reads nothing, if at most `count` tokens are missing."""
        if self.unread <= count:
            return False
        self.read(count)
        return True

    @torch.inference_mode()
    def read(self, count: int) -> None:
        """Read the next `count` tokens."""
        start = len(self.found) - 1
        end = start + count
        if not count:
            return
        if self._cache is None:
            self._cache = self.target.new_cache(1, len(self.prompt))
        _, hidden, tapped = self.target.prefill([self.prompt[:end]], self._cache, self.taps, [0], [start])
        logits = self.target.model.logits(hidden[0, start:end])
        if tapped is not None:
            self._tapped.append(tapped[0, start:end])
        self.found += of_rows(logits, self.prompt[start + 1 : end + 1], self.count)

    def cached(self) -> CachedText | None:
        """Return the tokens that were read, for a prefix cache, or None if there are none."""
        if self._cache is None:
            return None
        size = len(self.found) - 1
        rows = self._cache.first_rows(0, size)
        return CachedText(self.prompt[:size], rows, torch.cat(self._tapped) if self._tapped else None)


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [n, V] of the distributions that tokens are drawn from: divided by the temperature, with −inf at the
    tokens that cannot be drawn. A repetition penalty is not applied."""
    unfiltered = not sampling.top_k and sampling.top_p == 1 and not sampling.min_p
    if sampling.temperature >= kernels.GREEDY_BELOW and unfiltered:
        return logits.float() / sampling.temperature
    return kernels.probabilities(Draws([sampling], [0], logits.device).rows(logits.unsqueeze(0))).log()


class LogprobRecorder:
    """Records the log probabilities of every new token of the sequences in `wanted`.

    Attributes:
        as_drawn: record log probabilities under the distribution that the token was drawn from (`filtered`), which RL
            needs. Otherwise they are the target's, before temperature and filters, as OpenAI reports them.
        wanted: number of alternatives, by sequence id.
        found: log probabilities that were not collected yet, by sequence id.
    """

    def __init__(self, as_drawn: bool = False) -> None:
        self.as_drawn = as_drawn
        self.wanted: dict[int, int] = {}
        self.found: dict[int, list[TokenLogprob]] = {}

    def on_prefill(self, state: DecodeState, slots: list[int], logits: Tensor) -> None:
        """Record first tokens, given the logits [n, V] at the ends of the prompts in `slots`."""
        for place, slot in enumerate(slots):
            row = state.rows[slot]
            if row.index in self.wanted and row.output:
                self._add(row, logits[place : place + 1], row.output[:1])

    def on_round(self, state: DecodeState, result: RoundResult) -> None:
        """Record the tokens of a round that ran on the host."""
        asked = {b: state.rows[b] for b in result.counts if state.rows[b].index in self.wanted}
        if not asked or result.verdict is None:
            return
        counts = [result.counts[b].committed if b in asked else 0 for b in range(state.batch)]
        rows = result.verdict.predicting(result.verdict.logits, counts)
        for b, row in asked.items():
            if counts[b]:
                self._add(row, rows[b], row.ids[-counts[b] :])

    def take(self, id: int) -> list[TokenLogprob]:
        """The log probabilities of a sequence since the last call."""
        return self.found.pop(id, [])

    def forget(self, id: int) -> None:
        """Record nothing more of a sequence."""
        self.wanted.pop(id, None)
        self.found.pop(id, None)

    def _add(self, row: Sequence, logits: Tensor, tokens: list[int]) -> None:
        logits = filtered(logits, row.request.sampling) if self.as_drawn else logits
        self.found.setdefault(row.index, []).extend(of_rows(logits, tokens, self.wanted[row.index]))
