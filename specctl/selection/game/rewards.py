"""Rewards of a round for bandits, in [0, 1]. K is the longest draft of the pool (MetaSD's N_max)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from specctl.selection.game.rules import Rules
from specctl.selection.policies.policy import AnyArray


@dataclass(frozen=True)
class Outcome:
    """A finished round.

    Attributes:
        committed: tokens added to the text, bonus token included.
        accepted: accepted tokens of its draft.
        complete: False if the text ended inside the round; a bandit is not told of such a round.
        failed: whether its drafter raised.
        overlap: [≤ K] 1 − TV(p̄, q̄) of each position of the draft (bd).
        seconds: of the round (throughput, of reward or loss).
        texts: number of texts that share the round; tokens and seconds are sums over these texts.
    """

    committed: int
    accepted: int
    complete: bool = True
    failed: bool = False
    overlap: AnyArray | None = None
    seconds: float | None = None
    texts: int = 1


def tokens(Y: float, K: int) -> float:
    """(Y − 1)/K for Y ∈ [1, K + 1] committed tokens, at most 1."""
    return min((Y - 1) / K, 1.0)


def block_efficiency(accepted: float, K: int) -> float:
    """BE = n_acc/N_max (MetaSD, section 3.1), at most 1."""
    return min(accepted / K, 1.0)


def block_divergence(overlap: AnyArray, K: int, first: float | None = None) -> float:
    """BD = 1/N_max Σ (1 − TV(p, q)) over all drafted positions, rejected ones included (MetaSD, Eq. 4).

    In the paper all drafts are N_max long, and E[BD] = α (Lemma 6). A drafter that stops when it is unsure leaves
    positions out. Each of these counts `first`, the mean overlap at the first position of the arm's earlier rounds.
    That keeps E[BD] = α under the lemma's assumption of independent positions: whether position k is drafted is decided
    before its overlap is known, so the drafted positions sum to α E[d] in the mean (Wald), and first positions are
    always drafted. The mean over the d drafted positions would not do, because a draft ends after its worst position. A
    draft without a token counts as a first position with overlap 0.

    Args:
        overlap: [d] of the draft; positions beyond N_max are not counted.
        first: the mean described above, or None before the arm's first round, which uses its own first position.
    """
    drafted = overlap[:K] if len(overlap) else np.zeros(1)
    left_out = float(drafted[0]) if first is None else first
    return (float(drafted.sum()) + (K - len(drafted)) * left_out) / K


def throughput(Y: float, seconds: float, step: float, K: int) -> float:
    """Y tokens per round as a share of K + 1 tokens in the time of one plain decoding step, which no drafter exceeds.

    The unit is fixed before the game, and equal live and in a replay. NaN if `seconds` is no duration.
    """
    return min(Y * step / (seconds * (K + 1)), 1.0) if seconds > 0 else nan


def surplus(Y: float, seconds: float, rate: float, K: int) -> float:
    """½ + (Y − ρ·seconds)/2(K + 1): tokens in excess of the number made in that time at the rate ρ of all rounds.

    An arm with a mean above ½ makes more tokens per second than all arms together (renewal reward; Dinkelbach 1967).
    The mean of Y/seconds does not tell: it is too high for arms that commit most in their cheap rounds. NaN if
    `seconds` is no duration.
    """
    return min(max(0.5 + (Y - rate * seconds) / (2 * (K + 1)), 0.0), 1.0) if seconds > 0 else nan


def surplus_lost(seconds: Sequence[float], rate: float, K: int) -> list[float]:
    """Surplus lost by each time in `seconds` without a token: ρ·seconds/2(K + 1)."""
    return [rate * s / (2 * (K + 1)) for s in seconds]


def reward(rules: Rules, round: Outcome, rate: float = 0.0, first: float | None = None) -> float:
    """The reward of a round in [0, 1]: 0 if its drafter failed, NaN if an overlap or the time is not finite.

    Args:
        rate: tokens per second of all earlier rounds.
        first: as in `block_divergence`.

    Raises ValueError if the outcome lacks a value that the rule needs.
    """
    K, texts = rules.depth, round.texts
    if round.failed:
        return 0.0
    match rules.reward:
        case "tokens":
            return tokens(round.committed / texts, K)
        case "be":
            return block_efficiency(round.accepted / texts, K)
        case "bd":
            if round.overlap is None:
                raise ValueError("the reward bd needs the overlap of every round")
            return block_divergence(round.overlap, K, first)
        case "surplus":
            if round.seconds is None:
                raise ValueError("the reward surplus needs the seconds of every round")
            return surplus(round.committed / texts, round.seconds / texts, rate, K)
        case "throughput":
            if round.seconds is None or rules.step is None:
                raise ValueError("the reward throughput needs the seconds of every round and of a plain step")
            return throughput(round.committed, round.seconds, rules.step, K)
