"""Options of the decoding engine."""

from dataclasses import dataclass

from specctl.decoding.catch_up import RECOMPUTE, CatchUp
from specctl.decoding.prefixes import Prefixes


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        slots: most sequences at a time; other requests wait (default: all at once).
        share_rows: the sequences of a batch share the rows that cost little more than one (`SHARED_ROWS`). Drafts get
            shorter, throughput gets higher. False: drafts are as long as for one sequence, to measure those drafts.
        exact: fixed shapes, so that speculative and plain decoding are bitwise equal in bf16, too (chains only). All
            slots must be taken by the first step.
        catch_up: how much of a text a lagging drafter reads (also at its first use, when it has read nothing).
        keeps_hidden: keep the target's hidden states at every new position (`DecodeState.hidden`).
        on_host: run every round from the host, so that contenders can be compared. Otherwise rounds run on the device
            if they can (device/rounds.py).
        prefixes: cached texts of earlier calls. A prefix that a prompt shares with a cached text or an earlier prompt
            is not prefilled again.
    """

    slots: int | None = None
    share_rows: bool = True
    exact: bool = False
    catch_up: CatchUp = RECOMPUTE
    keeps_hidden: bool = False
    on_host: bool = False
    prefixes: Prefixes | None = None


DEFAULT_OPTIONS = EngineOptions()
