"""The arms of `specctl select`: the drafters of a pool, and how much each of them drafts.

An `Arm` survives failures of its drafter. `DraftAll` drafts with all arms at once.
A `Companion` is a text drafter that drafts together with every head.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl import processes, progress
from specctl.decoding.controllers import NoDraft
from specctl.decoding.prompt_features import PromptClusters, width
from specctl.decoding.protocols import DeviceDraft, Drafter, Proposer
from specctl.decoding.records import Decoded, DraftTree, empty_draft, topology
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.timing import synchronise, work_clock
from specctl.drafters import checkpoint, pool
from specctl.drafters.checkpoint import PROMPTS
from specctl.drafters.hybrid.costs import Costs
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.hybrid.gate import GateStatistics
from specctl.drafters.hybrid.weighed import WeighedText, unweighed
from specctl.drafters.names import labels
from specctl.drafters.retrieval import drafter as retrieval
from specctl.drafters.retrieval.datastore import GrowingDatastore
from specctl.drafters.text.lookup import DEPTH
from specctl.drafters.tree import CandidateDrafter, DepthLimited, TreeDrafter
from specctl.errors import CheckpointError, SpecctlError, UsageError
from specctl.families import STREAM_RETRIEVAL, TEXT_DRAFTERS
from specctl.recipe import DraftingRecipe, PoolRecipe, SelectRecipe, ServeRecipe
from specctl.recipe.select import ArmRecipe

PLAIN = "no draft"
DEFAULT_POOL = Path("drafters")
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
    """The target's hidden states that describe a prompt: the states in which the arms' kinds of prompts are known. If
    no kinds are known, all states that drafters read; if drafters read none, the last one."""
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


def pool_paths(recipe: PoolRecipe | ServeRecipe) -> list[str]:
    """Paths and names of the pool's drafters. If there are fewer than two, the untrained drafters join.

    Raises UsageError (a drafter twice), CheckpointError (no drafter in a pool other than the default one).
    """
    named_alone = isinstance(recipe, ServeRecipe) and recipe.pool is None  # without the default pool of experiments
    names = [*([] if named_alone else map(str, _directories(recipe.pool))), *recipe.drafters]
    places = [os.path.realpath(name) for name in names]  # ./a and a are the same
    twice = [name for name, place in zip(names, places, strict=True) if places.count(place) > 1]
    if twice:
        raise UsageError(f"{twice[0]} is in the pool twice", hint="name it once")
    return names if len(names) > 1 else [*names, *(name for name in TEXT_DRAFTERS if name not in names)]


def learners_of(recipe: ServeRecipe) -> dict[Path, list[str]]:
    """Directories of the weights that learn while a recipe is served, and the drafters that draft with them. UsageError
    if there are none."""
    paths = recipe.drafters
    if recipe.chooses and not recipe.server.urls:
        by_name = {name: path for path, name in labels(pool_paths(recipe)).items()}
        paths = [by_name[name] for name in chosen_names(recipe.arms, list(by_name))]
    return pool.learnable_parts(paths)


def _directories(named: Path | None) -> list[Path]:
    """The drafter directories of a pool. The default pool may be missing or empty, another one may not."""
    if named not in (None, DEFAULT_POOL):
        return pool.find_pool(named)
    try:
        return pool.find_pool(DEFAULT_POOL) if DEFAULT_POOL.is_dir() else []
    except CheckpointError:
        return []


def load_pool(
    recipe: PoolRecipe | ServeRecipe, target: Target, paths: Iterable[str], companion: Companion | None = None
) -> dict[str, Drafter]:
    """Load the drafters by name. One that cannot be used is left out with a warning; with `strict` it is an error.

    Args:
        companion: a text drafter that every head drafts with.

    Raises CheckpointError (strict, or no drafter is left).
    """
    paths = list(paths)
    joined = [path for path in paths if path in TEXT_DRAFTERS and path not in recipe.drafters]
    if joined:
        number = len(paths) - len(joined)
        progress.log(f"a pool of {number}: {' and '.join(joined)} join it, because they need no training")
    bases: dict[str, Drafter] = {}
    drafters: dict[str, Drafter] = {}
    for path, name in labels(paths).items():
        try:
            alone = pool.load_drafter(path, target, recipe.drafting, bases)
            drafters[name] = alone if companion is None else companion.with_text_drafter(path, alone)
        except CheckpointError as error:
            if recipe.strict:
                raise
            progress.warn(f"{path} is left out of the pool: {error.message}")
    if not drafters:
        raise CheckpointError(
            "no drafter of the pool can be used", hint="run with --strict to see the error of the first one"
        )
    return {name: drafters[name] for name in chosen_names(recipe.arms, list(drafters))}


def chosen_names(arms: ArmRecipe, pool: list[str]) -> list[str]:
    """Names of the drafters that become arms. Raises UsageError if the recipe names one that the pool lacks."""
    missing = [name for name in arms.names if name not in pool]
    if missing:
        raise UsageError(f"arms.names: the pool has no {missing[0]}", hint=f"use names of {', '.join(pool)}")
    return arms.names or pool


def trained_on(places: Mapping[str, str], target: Target) -> dict[str, PromptClusters]:
    """The kinds of prompts that drafters were trained on, by name, for the drafters with a directory (`places`) that
    says so. Kinds can only be compared by the states of the same layers. So one set of layers is used: the most
    frequent one, and of equally frequent ones the deepest."""
    layers = range(1, target.num_layers + 1)
    recorded = {
        name: checkpoint.read_info(place).get(PROMPTS) for name, place in places.items() if Path(place).is_dir()
    }
    known = {
        name: (tuple(prompts["taps"]), [(kind["mean"], kind["error"]) for kind in prompts["kinds"].values()])
        for name, prompts in recorded.items()
        if prompts and all(tap in layers for tap in prompts["taps"])
        if all(len(kind["mean"]) == width(target, prompts["taps"]) for kind in prompts["kinds"].values())
    }
    counts = Counter(taps for taps, _ in known.values())
    used = max(counts, key=lambda taps: (counts[taps], taps), default=())
    return {name: PromptClusters.of(kinds, taps) for name, (taps, kinds) in known.items() if taps == used}


def make_arms(recipe: SelectRecipe, drafters: dict[str, Drafter], kinds: Mapping[str, PromptClusters]) -> list[Arm]:
    """Make one arm per drafter; or one per drafter and each of `arms.draft_nodes` and `arms.shapes`, and one plain arm.

    `kinds`: kinds of prompts that drafters were trained on. Raises UsageError if a shape is given and a drafter cannot
    change its own.
    """
    arms = recipe.arms
    if not arms.draft_nodes and not arms.shapes:
        return [Arm(name, drafter, trained_on=kinds.get(name)) for name, drafter in drafters.items()]
    made = [plain_arm()] if 0 in arms.draft_nodes else []
    own = recipe.choice == "batch"  # otherwise the texts of a batch share the rows that cost little
    for name, drafter in drafters.items():
        drafter = unweighed(drafter)  # the recipe sets the size
        made += [Arm(f"{name} ×{nodes}", drafter, nodes, weighs_rows=own) for nodes in arms.draft_nodes if nodes]
        made += [Arm(f"{name} {label(shape)}", shaped(name, drafter, shape), weighs_rows=own) for shape in arms.shapes]
    return made


def plain_arm() -> Arm:
    """The arm that drafts nothing."""
    return Arm(PLAIN, NoDraft())


def longest_draft(drafter: Drafter) -> int:
    """The longest draft of a drafter, in tokens; a hybrid's is sometimes a little longer."""
    if isinstance(drafter, Hybrid):
        return max(longest_draft(drafter.head), drafter.longest)
    if isinstance(drafter, WeighedText):
        return drafter.longest
    if hasattr(drafter, "shape"):
        return drafter.shape.depth
    if isinstance(drafter, DepthLimited):
        return drafter.depth or max(DEPTH.values())
    return 0


def label(shape: DraftingRecipe) -> str:
    """Label of a shape, such as `depth=4 width=2`, from the values it sets."""
    return " ".join(f"{key}={value}" for key, value in shape.model_dump(exclude_unset=True).items()) or "default"


def shaped(name: str, drafter: Drafter, shape: DraftingRecipe) -> Drafter:
    """Change the shape of a drafter's drafts; the new drafter and the old one use one memory."""
    if not isinstance(drafter, TreeDrafter):
        raise UsageError(f"drafter {name} has a fixed draft shape", hint="leave out arms.shapes, or the drafter")
    return drafter.shaped(shape)


class Companion:
    """A text drafter by name, and hybrids of heads with this drafter.

    Attributes:
        text: the drafter, which all hybrids share.
        store: datastore of the finished texts, which `retrieval` reads.
    """

    def __init__(self, name: str | None, target: Target, drafting: DraftingRecipe, store: GrowingDatastore):
        """`name`: name of the text drafter; if None, heads draft alone."""
        self.name, self.target, self.drafting, self.store = name, target, drafting, store
        self.text = None if name is None else self._load(name)
        self._costs: dict[str, Costs] = {}  # of hybrids, by the names of both drafters

    def text_drafter(self, name: str) -> Drafter:
        """An untrained drafter that drafts alone: `retrieval` over this store, or one that reads only the present
        text."""
        text = self.text if self.text is not None and name == self.name else self._load(name)
        return pool.weighed(text, self.target, self.drafting)

    def _load(self, name: str) -> Drafter:
        if name == STREAM_RETRIEVAL:
            return retrieval.FAMILY.make_drafter(self.store, self.target, self.drafting)
        return pool.load_single(name, self.target, self.drafting)

    def with_text_drafter(self, directory: str, drafter: Drafter) -> Drafter:
        """Join the drafter of `directory` with the text drafter. A drafter that is no head comes back unchanged."""
        return self.hybrid(directory, drafter) if self.name and isinstance(drafter, CandidateDrafter) else drafter

    def hybrid(self, directory: str, head: Drafter, past: GateStatistics | None = None) -> Hybrid:
        """Join a head with the text drafter. `past` is the record of the texts it has drafted before. Raises UsageError
        if it is no head."""
        assert self.text is not None
        both = f"{directory}+{self.name}"
        if both not in self._costs:
            self._costs[both] = pool.hybrid_costs(both, head, self.target)
        return pool.hybrid(both, head, self.text, self._costs[both], past)

    def head_of(self, drafter: Drafter) -> Drafter:
        """The head of a hybrid with this text drafter; any other drafter comes back unchanged."""
        return drafter.head if isinstance(drafter, Hybrid) and drafter.text is self.text else drafter

    def add_to_store(self, texts: Iterable[Decoded]) -> float:
        """Add finished texts to the store; return the seconds this took."""
        began = time.perf_counter()
        self.store.add(retrieval.document(text.prompt_ids + text.output_ids, len(text.prompt_ids)) for text in texts)
        return time.perf_counter() - began
