"""What foretells drafted tokens: python -m tests.benchmarks.confidence DFLASH-DRAFTER PROMPTS.jsonl [TEMPERATURE]

By the probability that the head gives them, and by DSpark's confidence head, which is trained for that. Of every place
of a chain that was reached, and of whole beginnings of chains (products): the area under the ROC curve. 1 = all that
came true were foretold as likelier than all that did not; 0.5 = nothing was foretold.
"""

import json
import sys
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from specctl.decoding.sampling import Sampling
from specctl.decoding.target import load_target
from specctl.drafters import checkpoint, pool
from specctl.recipe import DraftingRecipe
from tests.toys.decoding import decode

PROMPTS, TOKENS = 60, 128
CHAIN = DraftingRecipe(depth=7, width=1, children=1, nodes=7, stop_below=0)


class Foretold(NamedTuple):
    """A place of a chain: its depth, the head's probability, the confidence head's, and whether it came true."""

    depth: int
    own: float
    confidence: float
    calibration: bool


def area(scores: np.ndarray, came_true: np.ndarray) -> float:
    """The area under the ROC curve (Mann and Whitney)."""
    ranks, positive = scores.argsort().argsort(), came_true.sum()
    return float((ranks[came_true].sum() - positive * (positive - 1) / 2) / (positive * (len(came_true) - positive)))


@torch.inference_mode()
def chains(place: str, prompts: list[list[int]], target, temperature: float) -> list[list[Foretold]]:
    """The places of all chains that were drafted for some prompts."""
    module = pool.load_module(checkpoint.load(place), target)
    assert module.confidence_head is not None, "train it with drafter.confidence=true"
    drafter = pool.load_drafter(place, target, CHAIN)
    drafted: list[list[tuple[float, float]]] = []
    found: list[list[Foretold]] = []
    chosen = drafter.rows

    def rows(state, tokens, states, logits):
        """Note what is claimed of each place."""
        claims = chosen(state, tokens, states, logits)
        drafted.clear()
        for b, chain in enumerate(tokens):
            before = torch.tensor([state.rows[b].ids[-1], *chain[:-1]])
            inputs = states[b][: len(chain)].float(), module.markov_head.markov_w1(before).float()
            sure = torch.sigmoid(module.confidence_head(*inputs)).tolist() if chain else []
            probabilities = claims.of(b, len(chain)).float().softmax(-1) if chain else []
            places = [int((drafter.ids == token).nonzero()) if drafter.ids is not None else token for token in chain]
            drafted.append([(float(row[at]), one) for row, at, one in zip(probabilities, places, sure, strict=True)])
        return claims

    def on_round(state, draft, verdict):
        if not drafted:  # no room for a draft
            return
        for claims, committed, stop in zip(drafted, verdict.committed, verdict.stops, strict=True):
            accepted = len(committed) - 1
            known = accepted if stop in ("eos", "length") else len(claims)
            found.append([Foretold(k, *claim, k < accepted) for k, claim in enumerate(claims[:known])])
        drafted.clear()

    drafter.rows = rows
    run = partial(decode, target, sampling=Sampling(temperature, 0, 1.0), max_new_tokens=TOKENS, drafter=drafter)
    for number, prompt in enumerate(prompts):
        run([prompt], seeds=[number], on_round=on_round)
    return found


def main(place: str, file: str, temperature: float) -> None:
    target = load_target("builtin", device="cpu")
    with open(file, encoding="utf-8") as lines:
        texts = [json.loads(line)["prompt"] for line, _ in zip(lines, range(PROMPTS), strict=False)]
    prompts = [target.render([{"role": "user", "content": text}]) for text in texts]
    found = chains(place, prompts, target, temperature)
    reached = [one for chain in found for one in chain if one.depth <= sum(other.calibration for other in chain)]
    begun = [
        Foretold(
            end, *(float(np.prod([claim[1 + who] for claim in chain[: end + 1]])) for who in (0, 1)), last.calibration
        )
        for chain in found
        for end, last in enumerate(chain)
    ]
    for name, places in (("a place that was reached", reached), ("the beginning of a chain", begun)):
        true = np.array([one.calibration for one in places])
        own, sure = (area(np.array([one[1 + who] for one in places]), true) for who in (0, 1))
        print(f"{name}: its own probability {own:.3f}, confidence head {sure:.3f} ({len(places)} of them)")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
