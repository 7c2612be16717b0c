"""Companion text drafter, which reads only text (the present one, or all finished ones) and drafts together with every
head of a stream."""

import time
from collections.abc import Iterable

from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Decoded
from specctl.decoding.target import Target
from specctl.drafters import pool
from specctl.drafters.hybrid.costs import Costs
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.hybrid.gate import GateStatistics
from specctl.drafters.retrieval import drafter as retrieval
from specctl.drafters.retrieval.datastore import GrowingDatastore
from specctl.drafters.tree import CandidateDrafter
from specctl.families import STREAM_RETRIEVAL
from specctl.recipe import DraftingRecipe


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
