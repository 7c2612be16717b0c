"""Prefill of a batch's new sequences, and their first tokens."""

import torch
from torch import Tensor

from specctl import threads
from specctl.decoding.prefixes import Prefixes
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.verify import nonfinite_rows


def prefill(target: Target, state: DecodeState, slots: list[int], share: bool, prefixes: Prefixes | None) -> Tensor:
    """Run the prompts in `slots` and commit the first token of each. A sequence is failed if its logits are not finite.
    Returns the logits [n, V] at the ends of the prompts.

    `share`: the prompts share the pages of common prefixes. `prefixes`: cached texts of earlier calls.
    """
    prompts = [state.rows[b].ids for b in slots]
    with threads.step_threads(target.row_flops * sum(map(len, prompts))):
        if share:
            logits, tapped = target.prefill_shared(prompts, state.cache, slots), None
        elif prefixes is None:
            logits, _, tapped = target.prefill(prompts, state.cache, state.taps, slots)
        else:
            logits, tapped = prefixes.prefill(target, prompts, state.cache, state.taps, slots)
    failed = nonfinite_rows(target, logits)
    positions = torch.tensor([[len(prompt)] for prompt in prompts])
    draws = state.draws.select(slots)
    penalised = draws.penalise(logits.unsqueeze(1), prompts, [[] for _ in prompts], positions[:, :0])
    first = draws.draw(penalised, positions)
    state.begin(slots, [row[0] for row in first.tolist()], tapped)
    for place, error in failed.items():
        row = state.rows[slots[place]]
        del row.ids[row.prompt_length :]  # drop the token: it was sampled from logits that are not finite
        row.fail(error)
    return logits
