"""Drafting with one head per depth (`DepthHeads`): static trees with the candidates of head k at depth k + 1."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.protocols import DeviceDraft, Drafter
from specctl.decoding.records import PADDING, DraftTree, Score, empty_draft
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.depth.head import DepthHeads, HeadsConfig
from specctl.drafters.depth.static_tree import StaticTree, Trees, default_shape
from specctl.drafters.family import HeadFamily
from specctl.drafters.feature.head import head_config
from specctl.drafters.feature.layer import HeadWeights
from specctl.drafters.tree import ProposedTree, TreeShape, WorthLevel
from specctl.recipe import DrafterRecipe

DRAFT_HEADS = 4  # same number as Hydra's released heads; Medusa's have up to 5


class DepthDrafter(HeadWeights, Drafter):
    """Base class of drafters that run `DepthHeads`.

    Attributes:
        reads_tokens: the heads read the drafted tokens. If False, all nodes of a depth have the same candidates.
    """

    reads_tokens: bool

    def __init__(self, module: DepthHeads, target: Target, shape: TreeShape, accuracy: Sequence[float]):
        """`accuracy`: by rank among a head's candidates, how often that candidate is the target's token."""
        super().__init__(module, target)
        config = module.config
        self.taps, self.draft_heads = config.taps, config.draft_heads
        depth, children = min(shape.depth, config.draft_heads), min(shape.children, config.draft_vocab_size)
        self.shape = replace(shape, depth=depth, children=children)
        self.trees = Trees(self.shape, accuracy, self.device)
        self.ids = module.draft_ids.to(self.device) if config.draft_vocab_size < config.vocab_size else None

    @abstractmethod
    def logits(self, k: int, states: Tensor, tokens: Tensor) -> Tensor:
        """Logits [R, Vd] of head k.

        Args:
            states: [R, H] of slots i.
            tokens: [R, k + 1] tokens x_{i+1} … x_{i+k+1}.
        """

    @abstractmethod
    def states(self, state: DecodeState, width: int) -> tuple[Tensor, list[int]]:
        """Inputs [B·width, H] of the heads at every sequence's last `width` slots, and the first of these slots."""

    @abstractmethod
    def last(self, state: DecodeState) -> Tensor:
        """Inputs [B, H] of the heads at every sequence's last slot."""

    @abstractmethod
    def rounds(self, tree: StaticTree, state: DecodeState) -> DeviceDraft:
        """Build the device-side drafting rounds for this tree (see `draft_at`)."""

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """Draft a static tree from the last committed token.

        Its depth is limited by the number of heads and by the room of the sequences.
        """
        floor = self.shape.log_stop_below
        grown = self._grow(state, budget, None if floor == -math.inf else lambda joint: max(joint) >= floor)
        return empty_draft(state.batch, state.device) if grown is None else grown[0]

    def propose_candidates(self, state: DecodeState, budget: int, pays: WorthLevel) -> list[ProposedTree]:
        """Candidates after the last committed token of every sequence, at most `budget` nodes each."""
        grown = self._grow(state, budget, pays)
        if grown is None:
            return [ProposedTree([], [], []) for _ in state.rows]
        draft, claimed = grown
        columns = [draft.tokens.tolist(), draft.parents.tolist(), claimed.exp().tolist()]
        sizes = (draft.parents != PADDING).sum(1).tolist()  # nodes that are too deep stand last
        return [ProposedTree(*(part[:size] for part in row)) for size, *row in zip(sizes, *columns, strict=True)]

    def _grow(self, state: DecodeState, budget: int, pays: WorthLevel | None) -> tuple[DraftTree, Tensor] | None:
        """Draft the tree, with the log probability of each node given its parent, or None without room."""
        self.advance(state)
        tree = self.trees.tree_for(state, budget)
        if tree is None:
            return None
        roots = torch.tensor([row.ids[-1] for row in state.rows], device=state.device)
        draft, claimed = self._fill_tree(tree, roots, self.last(state), pays)
        rooms = [row.draft_room for row in state.rows]
        if min(rooms) < len(tree.levels):
            draft = tree.within(draft, torch.tensor(rooms, device=state.device))
        return draft, claimed

    def _fill_tree(
        self, tree: StaticTree, roots: Tensor, states: Tensor, pays: WorthLevel | None
    ) -> tuple[DraftTree, Tensor]:
        """Fill in `tree` after the last tokens `roots` [B], from the last states [B, H]; see `StaticTree.grow`."""
        states = states.unsqueeze(1)

        def logits(depth: int, paths: Tensor) -> Tensor:
            read = paths if self.reads_tokens else paths[:, :1]
            nodes = states.expand(-1, read.shape[1], -1)
            return self.logits(depth, nodes.flatten(0, 1), read.flatten(0, 1)).unflatten(0, (len(roots), -1))

        return tree.grow(roots, logits, self.ids, pays)

    @property
    def fixed_shape(self) -> bool:
        """Whether all drafts have the same form, because none ends early."""
        return self.shape.stop_below <= 0

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft | None:
        """Return the device-side rounds, or None if drafts may end early, because the host decides that."""
        tree = self.trees.full_tree(budget) if self.fixed_shape else None
        return None if tree is None else self.rounds(tree, state)

    def draft_at(self, tree: StaticTree, sequences: DeviceBatch, states: Tensor) -> DraftTree:
        """Fill in `tree` for sequences on the device with last states [B, H]; nodes without room become padding."""
        draft, _ = self._fill_tree(tree, sequences.last[:, 0], states, None)
        return tree.within(draft, sequences.draft_room)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Score a text with head k at depth k + 1, given the true tokens; there are no depths beyond the last head.

        At depth k + 1 the token at position j is predicted from slot j − 2 − k.
        """
        self.advance(state)
        children = (1,) * self.shape.depth if state.exact_rows else self.trees.children
        heads = min(depths, self.draft_heads)
        ends = state.cached
        width = max((end - span.start + 1 + heads for end, span in zip(ends, spans, strict=True) if span), default=0)
        if width == 0:
            return [Score(span, ids=self.ids, children=children) for span in spans]
        width = min(width, max(ends))  # a short prompt has fewer slots
        states, starts = self.states(state, width)
        scores = []
        for b, (row, span) in enumerate(zip(state.rows, spans, strict=True)):
            rows = []
            for k in range(heads):
                slots = [max(position - 2 - k, 0) for position in span]
                tokens = torch.tensor([row.ids[i + 1 : i + k + 2] for i in slots], dtype=torch.long)
                at = torch.tensor([b * width + i - starts[b] for i in slots], dtype=torch.long, device=state.device)
                rows.append(self.logits(k, states[at], tokens.view(len(slots), k + 1).to(state.device)))
            scores.append(Score(span, torch.stack(rows), self.ids, children=children, inner=self.shape.width))
        return scores


class DepthFamily(HeadFamily):
    """Base class of families of `DepthHeads`.

    Attributes:
        layers: default number of layers of a head.
    """

    config: type[HeadsConfig]
    layers: int
    default_shape = staticmethod(default_shape)

    def architecture(self, recipe: DrafterRecipe, target: Target) -> HeadsConfig:
        """Shape of new heads as the recipe sets it.

        The draft vocabulary defaults to the target's, as the published files support no other.
        """
        layer = vars(head_config(recipe, target)) | {
            "draft_vocab_size": min(recipe.vocab_size or target.vocab_size, target.vocab_size),
            "taps": (target.num_layers,),
            "draft_heads": recipe.draft_heads or DRAFT_HEADS,
            "num_layers": recipe.num_layers or self.layers,
        }
        return self.config(**{field.name: layer[field.name] for field in fields(self.config)})
