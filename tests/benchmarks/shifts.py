"""Compare policies on texts that change their domain in the middle.

    python -m tests.benchmarks.shifts TABLE POLICY[,…] [KEY=VALUE …]

Recorded texts are joined into one prompt and one game. A text that shifts has `texts` texts of one domain and then
`texts` of a second domain; a text that stays has 2 × `texts` of one domain. The output is the speed by the table's
cost model, as a share of the fastest arm, for each half and for the whole text. Means are over `seeds` drawings.
TABLE is a file of `specctl record`, or `synthetic`: four specialists and two cheap arms with known acceptance.

KEY=VALUE: texts=2, seeds=8; plain=false (without plain decoding as an arm, which live decoding has); steady=20
(`contextual.STEADY` of `cgp-ucb`; 1e9 turns fading off); arms=A,B,… (a subset of the table's); and constants of
policies (`policy`), such as discount=0.9 or window=20.
"""

import json
import random
import sys
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specctl.lab.recorded.hindsight import Hindsight
from specctl.lab.recorded.replay import oracle, replay
from specctl.lab.recorded.table_file import read_table
from specctl.lab.recorded.trace import Table, Trace, of_arms, with_plain
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.selection.policies import contextual
from tests.selection.tables import trace_of

KINDS, DEPTH, TOKENS, QUERIES = 4, 8, 120, 96
DRAWS = 2  # drawings of the table's texts in one stream


class Speed(NamedTuple):
    """Speed of a policy on a stream relative to the fastest arms, and median microseconds per choice."""

    share: float
    decide_us: float


def synthetic(seed: int = 0) -> Table:
    """Return a table with four heads accepted at 0.8 for one kind of prompts each and 0.5 for the others.

    It also has `lookup`, and a datastore that is good for half of the kinds; both are cheap.
    """
    generator = np.random.default_rng(seed)
    directions, traces = generator.normal(size=(KINDS, 32)), []
    for n in range(QUERIES):
        kind = int(generator.integers(KINDS))
        rate = np.array([0.8 if arm == kind else 0.5 for arm in range(KINDS)] + [0.55, 0.62 if kind % 2 else 0.35])
        easy = generator.normal(0, 0.08) + generator.normal(0, 0.1, (1, TOKENS, 1))
        gamma = np.clip(rate[:, None, None] + easy - 0.01 * np.arange(DEPTH), 0.02, 0.98)
        made = trace_of(gamma, int(generator.integers(2**31)), f"q{n}", f"d{kind}")
        traces.append(replace(made, context=directions[kind] + 0.8 * generator.normal(size=32), prompt=50))
    names = [*(f"head{kind}" for kind in range(KINDS)), "lookup", "store"]
    draft_s, step_s = np.array([0.006] * KINDS + [0.0005, 0.001]), np.array([0.010] + [0.011] * len(names))
    return Table(names, DEPTH, traces, draft_s, step_s, np.full(len(names), DEPTH), greedy=True)


def chains(traces: list[Trace], texts: int, turn: bool, seed: int) -> list[tuple[list[Trace], list[Trace]]]:
    """Return both halves of the joined texts in random order; each recorded text occurs at most `DRAWS` times."""
    draw, found = random.Random(seed), []
    for _ in range(DRAWS):
        left: dict[str, list[Trace]] = {}
        for trace in draw.sample(traces, len(traces)):
            left.setdefault(trace.domain, []).append(trace)
        for domain, mine in left.items():
            others = [other for other in left if other != domain]
            while mine:
                first, mine[:] = mine[:texts], mine[texts:]
                source = left[draw.choice(others)] if turn else mine
                second, source[:] = source[:texts], source[texts:]
                if len(first) == len(second) == texts:
                    found.append((first, second))
    draw.shuffle(found)
    return found


def joined(first: Trace, second: Trace) -> Trace:
    """Join two texts. Drafts made in the first know no token of the second."""
    left = first.tokens - np.arange(first.tokens)
    parts = {
        name: np.concatenate([getattr(first, name), getattr(second, name)], 1)
        for name in ("drafted", "gamma", "overlap", "hit")
    }
    accepted = np.concatenate([np.minimum(first.accepted, left).astype(np.int16), second.accepted], 1)
    return replace(first, accepted=accepted, ended=second.ended, **parts)


def played(table: Table, name: str, constants: PolicyRecipe, found: list[tuple[list[Trace], list[Trace]]]) -> Speed:
    """Play a policy on joined texts and compare it with the fastest arm of each half.

    Texts of one domain have the same fastest arm in both halves.
    """
    whole = [reduce(joined, [*first, *second]) for first, second in found]
    turns = found[0][0][0].domain != found[0][1][0].domain
    alone = [reduce(joined, half) for pair in found for half in pair] if turns else whole
    best = oracle(Hindsight(replace(table, traces=alone), "throughput")).seconds.sum()
    done = replay(name, Hindsight(replace(table, traces=whole), "throughput"), constants, GameRecipe())
    decide_us = np.concatenate([game.decide_us for game in done.played])
    return Speed(float(best / done.seconds.sum()), float(np.median(decide_us)))


def main() -> None:
    path, names, *options = sys.argv[1:]
    given = dict(option.split("=", 1) for option in options)
    table = synthetic() if path == "synthetic" else read_table(Path(path))
    if arms := given.pop("arms", None):
        table = of_arms(table, arms.split(","))
    if given.pop("plain", "true") == "true":  # as in live decoding
        table = with_plain(table)
    texts, seeds = int(given.pop("texts", 2)), int(given.pop("seeds", 8))
    contextual.STEADY = float(given.pop("steady", contextual.STEADY))
    constants = PolicyRecipe(**{key: json.loads(value) for key, value in given.items()})
    for name in names.split(","):
        for turn, what in ((True, "turn, of each half's fastest arm"), (False, "stay, of each text's fastest arm")):
            drawn = [chains(list(table.traces), texts, turn, seed) for seed in range(seeds)]
            shares, decide_us = zip(*[played(table, name, constants, found) for found in drawn], strict=True)
            error = np.std(shares) / max(seeds - 1, 1) ** 0.5
            print(f"{name}, {what}: {np.mean(shares):.3f} ± {error:.3f}, {np.median(decide_us):.0f} µs", flush=True)


if __name__ == "__main__":
    main()
