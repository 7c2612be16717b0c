"""Row budget of a target step: the number of nodes that a draft may have."""

from specctl.decoding.protocols import Proposer
from specctl.decoding.state import DecodeState
from specctl.recipe.sections import MOST_NODES

MAX_NODES = MOST_NODES + 1  # with the root
# Rows of a step, shared by the sequences of a batch: up to this number, a step costs little more than one row. The CPU
# value was measured on the built-in target with 8 sequences. On an H100, a step of an 8B model for 8 sequences takes
# 1.08 times as long with 64 rows as with 8, 1.17 times with 128 and 1.42 times with 256 (1,024 tokens each, bf16). Idle
# rows are computed like the others, so they use up the budget, too.
SHARED_ROWS = {"cpu": 24, "cuda": 128}


def budget_for(share: bool, state: DecodeState, proposer: Proposer) -> int:
    """Draft nodes per sequence for this proposer. A proposer with `weighs_rows` limits the rows of a batch itself, so
    it gets the full budget."""
    return node_budget(state, share and not proposer.weighs_rows)


def node_budget(state: DecodeState, share: bool) -> int:
    """Draft nodes per sequence that a step has room for; `share`: the sequences of a batch share `SHARED_ROWS`."""
    if state.exact_rows:
        return state.exact_rows - 1
    if share and state.batch > 1:
        return nodes_within(SHARED_ROWS["cpu" if state.device.type == "cpu" else "cuda"], state.batch)
    return MAX_NODES - 1


def nodes_within(rows: int, batch: int) -> int:
    """Draft nodes per sequence so that a step of the whole batch has `rows` rows, roots included; at least one."""
    return min(max(rows // batch, 2), MAX_NODES) - 1
