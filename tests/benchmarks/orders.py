"""How much the order of the prompts matters to a policy: python -m tests.benchmarks.orders TABLE POLICY SESSION [ARM …]

The table's own order of texts, and 15 others: of its sessions of SESSION texts, and of single texts, in turns. Printed
is the speed, by the table's cost model, as a share of that of each text's fastest arm: of all texts, and of the first
`BEGINNING`; where the table says what its arms were trained on, also as if it did not.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from specctl.lab.recorded.hindsight import Hindsight
from specctl.lab.recorded.replay import oracle, replay
from specctl.lab.recorded.table_file import read_table
from specctl.lab.recorded.trace import Table, of_arms
from specctl.recipe.select import GameRecipe, PolicyRecipe

ORDERS = 15
BEGINNING = 20


def orders(table: Table, session: int) -> Iterator[Table]:
    """The table as it is, and in other orders."""
    yield table
    traces = list(table.traces)
    for seed in range(ORDERS):
        size = 1 if seed % 2 else session
        parts = [traces[start : start + size] for start in range(0, len(traces), size)]
        random.Random(seed).shuffle(parts)
        yield replace(table, traces=[trace for part in parts for trace in part])


def main() -> None:
    path, policy, session, *arms = sys.argv[1:]
    table = read_table(Path(path))
    table = of_arms(table, arms) if arms else table
    show(policy, table, int(session))
    if any(len(kinds.means) for kinds in table.trained_on):
        show(f"{policy}, without what arms were trained on", replace(table, trained_on=()), int(session), policy)


def show(title: str, table: Table, session: int, policy: str | None = None) -> None:
    """Print a line."""
    shares, begun = [], []
    for one in orders(table, session):
        hindsight = Hindsight(one, "throughput")
        best = oracle(hindsight).seconds
        seconds = replay(policy or title, hindsight, PolicyRecipe(), GameRecipe()).seconds
        shares.append(best.sum() / seconds.sum())
        begun.append(best[:BEGINNING].sum() / seconds[:BEGINNING].sum())
    print(
        f"{title}: mean {fmean(shares):.3f}, least {min(shares):.3f}, the table's own order {shares[0]:.3f}; "
        f"the first {BEGINNING} texts {fmean(begun):.3f}"
    )


if __name__ == "__main__":
    main()
