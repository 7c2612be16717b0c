"""A text whose kind changes within it: python -m tests.benchmarks.shifts TABLE POLICY[,…] [KEY=VALUE …]

Recorded texts are joined in pairs of different domains, as if the second went on from the first: one prompt, one game.
Printed are tokens a round, and the speed by the table's cost model as a share of that of each half's fastest arm.
KEY=VALUE: constants of policies (`policy`), such as discount=0.9 or window=20; arms=A,B,… are some of the table's.
"""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from specctl.lab.recorded.hindsight import Hindsight
from specctl.lab.recorded.replay import oracle, replay
from specctl.lab.recorded.table_file import read_table
from specctl.lab.recorded.trace import Trace, of_arms
from specctl.recipe.select import GameRecipe, PolicyRecipe

PASSES = 4  # every text is in so many pairs


def pairs(traces: list[Trace]) -> list[tuple[Trace, Trace]]:
    """The texts, two by two of different domains."""
    found = []
    for seed in range(PASSES):
        left = random.Random(seed).sample(traces, len(traces))
        while left:
            first = left.pop()
            place = next((i for i, other in enumerate(left) if other.domain != first.domain), None)
            if place is not None:
                found.append((first, left.pop(place)))
    return found


def joined(first: Trace, second: Trace) -> Trace:
    """The first text, which goes on as the second: no draft that was made in the first knows a token of that."""
    left = first.tokens - np.arange(first.tokens)
    parts = {
        name: np.concatenate([getattr(first, name), getattr(second, name)], 1)
        for name in ("drafted", "gamma", "overlap", "hit")
    }
    accepted = np.concatenate([np.minimum(first.accepted, left).astype(np.int16), second.accepted], 1)
    return replace(first, accepted=accepted, ended=second.ended, session=None, **parts)


def main() -> None:
    path, names, *options = sys.argv[1:]
    given = dict(option.split("=", 1) for option in options)
    table = read_table(Path(path))
    if arms := given.pop("arms", None):
        table = of_arms(table, arms.split(","))
    found = pairs(list(table.traces))
    halves = Hindsight(replace(table, traces=[half for pair in found for half in pair]), "throughput")
    best = oracle(halves).seconds.sum()
    hindsight = Hindsight(replace(table, traces=[joined(*pair) for pair in found]), "throughput")
    print(f"the arm that is fastest of the whole, known: {best / oracle(hindsight).seconds.sum():.3f}")
    for name in names.split(","):
        constants = PolicyRecipe(**{key: json.loads(value) for key, value in given.items()})
        played = replay(name, hindsight, constants, GameRecipe())
        length = hindsight.tokens.sum() / played.rounds.sum()
        print(f"{name}: {length:.2f} tokens a round, {best / played.seconds.sum():.3f} of each half's fastest arm")


if __name__ == "__main__":
    main()
