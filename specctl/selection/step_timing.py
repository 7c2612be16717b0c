"""Seconds of a target step by its number of rows: the unit of rewards and losses that count time."""

from collections.abc import Sequence
from functools import partial

import torch

from specctl.decoding.plan import plan_rows
from specctl.decoding.target import Target
from specctl.decoding.timing import medians

CONTEXT, REPEATS = 192, 20  # context tokens and repetitions of the timed steps


def step_seconds(target: Target, rows: Sequence[int], batch: int = 1) -> list[float]:
    """Median seconds of a target step with each number of `rows`, after each of `batch` texts of `CONTEXT` tokens."""
    context = min(CONTEXT, target.context_length - max(rows))
    cache = target.model.new_cache(batch, context + max(rows))
    text = torch.arange(context) % target.vocab_size
    target.prefill([text.tolist()] * batch, cache)

    def step(count: int) -> object:
        plan = plan_rows([context] * batch, count, device=target.device, dtype=target.dtype)
        return target.step(torch.zeros(batch, count, dtype=torch.long, device=target.device), cache, plan)

    timed = medians({str(count): partial(step, count) for count in rows}, REPEATS, target.device)
    return [timed[str(count)] for count in rows]
