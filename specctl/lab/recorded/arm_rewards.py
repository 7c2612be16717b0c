"""Statistics of rewards on a recorded table (MetaSD, Table 2)."""

from typing import Literal

import numpy as np

from specctl.lab.recorded.hindsight import Hindsight
from specctl.measuring.policy_rows import ArmReward
from specctl.selection.arms import PLAIN
from specctl.selection.game.rewards import block_divergence, block_efficiency


def arm_rewards(hindsight: Hindsight) -> list[ArmReward]:
    """BE and BD of the rounds that each arm plays when it is alone, without rounds that the end of a text cut short.

    The mean overlap that stands for positions without a draft is the mean of all rounds here. In a game it is the
    mean of the rounds before.
    """
    table, rows = hindsight.table, []
    K = table.depth
    for arm, name in enumerate(table.arms):
        if name == PLAIN:
            continue
        be: list[float] = []
        overlaps = []
        for trace, begins in zip(table.traces, hindsight.begins, strict=True):
            for at in np.flatnonzero(begins[arm]):
                accepted = int(trace.accepted[arm, at])
                if at + accepted < trace.tokens:
                    be.append(block_efficiency(accepted, K))
                    overlaps.append(np.trim_zeros(trace.overlap[arm, at].astype(float), "b"))
        first = float(np.mean([overlap[0] if len(overlap) else 0.0 for overlap in overlaps] or [0.0]))
        rows += _statistics(name, "be", be)
        rows += _statistics(name, "bd", [block_divergence(overlap, K, first) for overlap in overlaps])
    return rows


def _statistics(arm: str, reward: Literal["be", "bd"], values: list[float]) -> list[ArmReward]:
    """One row; none if the arm has no complete round."""
    if not values:
        return []
    zeros = values.count(0.0) / len(values)
    return [ArmReward(arm, len(values), float(np.mean(values)), float(np.std(values)), reward, zeros)]
