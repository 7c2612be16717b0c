"""Log probabilities of tokens that an engine commits, for the requests that ask for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.records import RoundResult, Sequence
from specctl.decoding.sampling import Draws, Sampling
from specctl.decoding.state import DecodeState


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a token under the target, and its likeliest alternatives."""

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


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [n, V] of the distributions that tokens are drawn from: divided by the temperature, with −inf at the
    tokens that cannot be drawn. A repetition penalty is not applied."""
    if sampling.temperature >= kernels.GREEDY_BELOW and not sampling.top_k and sampling.top_p == 1:
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
