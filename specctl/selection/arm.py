"""Drafters made of drafters: one that survives failures of its drafter, and one that drafts with all at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specctl import processes, progress
from specctl.decoding.plain import NoDraft
from specctl.decoding.prompt_features import PromptClusters
from specctl.decoding.protocols import DeviceDraft, Drafter, Proposer
from specctl.decoding.records import DraftTree, empty_draft, topology
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.timing import synchronise, work_clock
from specctl.errors import SpecctlError

Tree = tuple[list[int], list[int]]  # tokens and parents


@dataclass(frozen=True)
class TimedDraft:
    """A draft and its seconds; the draft is empty if its drafter `failed`."""

    draft: DraftTree
    seconds: float
    failed: bool


class Arm(Proposer):
    """An arm's drafter. If it raises, the round is decoded plainly: a broken drafter costs speed, never the text.

    Attributes:
        name: of the arm, in messages.
        nodes: most nodes of a draft (None = no limit by the arm).
        scored: the drafter that is scored while the arm is idle. For a hybrid this is its head, if all arms share the
            text drafter.
        weighs_rows: whether the arm limits its rows itself, and so has the full budget of nodes in a batch, too.
        trained_on: kinds of prompts, empty if not known.
        failures: number of rounds that were decoded plainly because the drafter raised.
        made: the last draft that the host has asked for.
        budget: number of nodes available in rounds like the last one.
    """

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        nodes: int | None = None,
        scored: Drafter | None = None,
        weighs_rows: bool = False,
        trained_on: PromptClusters | None = None,
    ):
        self.name, self.drafter, self.nodes = name, drafter, nodes
        self.scored = scored or drafter
        self.weighs_rows = weighs_rows or drafter.weighs_rows
        self.trained_on = trained_on or PromptClusters.none()
        self.taps = drafter.taps
        self.failures = 0
        self.made: TimedDraft | None = None
        self.budget = 0

    @property
    def plain(self) -> bool:
        """Whether it never drafts anything."""
        return isinstance(self.drafter, NoDraft)

    def copy(self, scored: Drafter | None = None) -> Arm:
        """A copy of this arm with a separate count of failures."""
        return Arm(self.name, self.drafter, self.nodes, scored, self.weighs_rows, self.trained_on)

    def exchange(self, drafter: Drafter) -> None:
        """Draft with a drafter that reads the same hidden states from now on."""
        self.scored = drafter if self.scored is self.drafter else self.scored
        self.drafter = drafter

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        failed = False
        clock = work_clock(state.device)
        began = clock()
        try:
            draft = self.drafter.propose(state, self._node_budget(budget))
        except SpecctlError:  # it tells the user what to do: no accident
            raise
        except Exception as error:
            self._failed(state, error)
            draft, failed = empty_draft(state.batch, state.device), True
        synchronise(state.device)
        self.made, self.budget = TimedDraft(draft, processes.broadcast_value(clock() - began), failed), budget
        return draft

    def advance(self, state: DecodeState) -> None:
        """Read the committed tokens, like any `Drafter`. A failure shows again in `propose`, and is counted there."""
        try:
            self.drafter.advance(state)
        except SpecctlError:
            raise
        except Exception:
            self.drafter.invalidate(state)

    def catch_up(self, state: DecodeState) -> float:
        """Read the tokens that the drafter has missed; return the seconds this took."""
        clock = work_clock(state.device)
        began = clock()
        self.advance(state)
        synchronise(state.device)
        return processes.broadcast_value(clock() - began)

    @property
    def kind(self) -> str:
        """Kind of its rounds on a device, which is its drafter's."""
        return self.drafter.kind

    @property
    def fixed_shape(self) -> bool:
        """Whether the drafter can usually draft on a device."""
        return self.drafter.fixed_shape

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft | None:
        """The drafter's part of rounds on the device, or None if its rounds run on the host."""
        self.budget = budget
        return self.drafter.on_device(state, self._node_budget(budget))

    def invalidate(self, state: DecodeState) -> None:
        """Clear the drafter's memory of the texts."""
        self.drafter.invalidate(state)

    def _node_budget(self, budget: int) -> int:
        return budget if self.nodes is None else min(budget, self.nodes)

    def forget(self) -> None:
        """Reset the failure count."""
        self.failures = 0

    def _failed(self, state: DecodeState, error: Exception) -> None:
        if not self.failures:
            progress.log(
                f"drafter {self.name} failed; its failed rounds are decoded without a draft: "
                f"{type(error).__name__}: {error}"
            )
        self.failures += 1
        self.drafter.invalidate(state)  # its memory may be half written


class DraftAll(Proposer):
    """All drafters draft and everything is verified (`draft-all`, MetaSD table 5): the union of their trees.

    If the union is too large, its deepest nodes are left out.
    """

    def __init__(self, drafters: Sequence[Arm]):
        self.drafters = drafters
        self.taps = taps_of(drafters)

    @property
    def failures(self) -> int:
        """Number of failed drafts."""
        return sum(drafter.failures for drafter in self.drafters)

    def forget(self) -> None:
        for drafter in self.drafters:
            drafter.forget()

    def invalidate(self, state: DecodeState) -> None:
        for drafter in self.drafters:
            drafter.invalidate(state)

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        drafts = [drafter.propose(state, budget) for drafter in self.drafters]
        trees = [
            union([(draft.tokens[b].tolist(), draft.parents[b].tolist()) for draft in drafts], budget)
            for b in range(state.batch)
        ]
        return DraftTree.from_trees(trees, state.device)


def taps_of(drafters: Iterable[Arm | Drafter]) -> tuple[int, ...]:
    """The target's hidden states that any of the drafters reads."""
    return tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))


def prompt_taps(arms: Sequence[Arm], target: Target) -> tuple[int, ...]:
    """The target's hidden states that describe a prompt: those in which the arms' kinds of prompts are known, or else
    all that drafters read, or else the last."""
    kinds = next((arm.trained_on.taps for arm in arms if arm.trained_on.taps), ())
    return kinds or taps_of(arms) or (target.num_layers,)


def union(trees: Sequence[Tree], nodes: int) -> Tree:
    """Merge trees into the tree of all paths, shallow nodes first, without padding and with at most `nodes` nodes."""
    nodes_by_depth: list[tuple[int, int, int, int]] = []  # depth, tree, node, token
    for number, (tokens, parents) in enumerate(trees):
        depths, _ = topology(parents)
        nodes_by_depth += [(depth, number, node, tokens[node]) for node, depth in enumerate(depths) if depth]
    merged: dict[tuple[int, int], int] = {}  # (parent, token) → node
    place: dict[tuple[int, int], int] = {(number, -1): -1 for number in range(len(trees))}
    for _, number, node, token in sorted(nodes_by_depth):
        parent = place.get((number, trees[number][1][node]))
        if parent is None:  # its parent was left out
            continue
        if (parent, token) not in merged:
            if len(merged) == nodes:
                continue
            merged[parent, token] = len(merged)
        place[number, node] = merged[parent, token]
    return [token for _, token in merged], [parent for parent, _ in merged]
