"""Rounds that run from the host, one at a time: draft, verify, commit."""

from collections.abc import Callable

from specctl import processes
from specctl.decoding.controllers import PerSequence
from specctl.decoding.protocols import Proposer, ReadsVerdicts
from specctl.decoding.records import RoundResult
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.timing import work_clock
from specctl.decoding.verify import budget_for, node_budget, verify


class HostRunner:
    """Runs the rounds of a batch from the host.

    Args:
        share_rows: see `EngineOptions`.
        report: called with every finished round.
    """

    def __init__(self, target: Target, share_rows: bool, report: Callable[[DecodeState, RoundResult], None]):
        self.target, self.share_rows, self.report = target, share_rows, report
        self.clock = work_clock(target.device)

    def play(self, state: DecodeState, proposer: Proposer) -> None:
        """Run one round and report it. Sequences that the proposer cannot draft for are failed."""
        state.rounds += 1
        began = self.clock()
        try:
            draft = proposer.propose(state, budget_for(self.share_rows, state, proposer))
        except Exception as error:  # a drafter may raise anything; only the sequences it cannot draft for are failed
            self.report(state, RoundResult({}, 0.0))
            self._fail_undraftable(state, proposer, error)
            return
        if processes.group_size() > 1:  # ranks with different drafts would add up slices of different forwards
            processes.check_same("the drafts", [draft.tokens.tolist(), draft.parents.tolist()])
        verdict = verify(self.target, state, draft)
        for drafter in state.memory:
            if isinstance(drafter, ReadsVerdicts):
                drafter.read_verdict(state, draft, verdict)
        counts = state.commit(verdict)
        self.report(state, RoundResult(counts, self.clock() - began, draft, verdict))

    def _fail_undraftable(self, state: DecodeState, proposer: Proposer, error: Exception) -> None:
        """Fail the sequences for which drafting raises an error even alone. If drafting fails for no sequence alone,
        fail all of the batch."""
        errors = {}
        for b in state.live if len(state.live) > 1 else ():
            drafter, alone = proposer.drafters[b] if isinstance(proposer, PerSequence) else proposer, state.single(b)
            try:
                drafter.propose(alone, node_budget(alone, self.share_rows))
            except Exception as fault:
                errors[b] = fault
        for b, reason in (errors or dict.fromkeys(state.live, error)).items():
            state.rows[b].fail(reason)
        proposer.invalidate(state)  # its memory of the other sequences may be half written
