"""The text drafter that every head of a stream drafts with: it reads the text alone, or all texts so far, too."""

from __future__ import annotations

import time
from collections.abc import Iterable

from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Decoded
from specctl.decoding.target import Target
from specctl.drafters import pool
from specctl.drafters.hybrid.costs import Costs
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.hybrid.gate import Past
from specctl.drafters.retrieval import drafter as retrieval
from specctl.drafters.retrieval.datastore import GrowingDatastore
from specctl.families import GROWING
from specctl.recipe import DraftingRecipe


class Companion:
    """A text drafter by name, and hybrids with it.

    Attributes:
        text: the drafter; all hybrids share it.
        store: the texts so far, which `retrieval` reads.
    """

    def __init__(self, name: str | None, target: Target, drafting: DraftingRecipe, store: GrowingDatastore):
        """`name`: None = heads draft alone."""
        self.name, self.target, self.drafting, self.store = name, target, drafting, store
        self.text = None if name is None else self.text_drafter(name)
        self._costs: dict[str, Costs] = {}  # of hybrids, by the names of both

    def text_drafter(self, name: str) -> Drafter:
        """A drafter that nobody trains: `retrieval` of this store, another one of the text alone."""
        if name == GROWING:
            return retrieval.drafter(self.store, self.target, self.drafting)
        return pool.load_drafter(name, self.target, self.drafting)

    def beside(self, directory: str, drafter: Drafter) -> Drafter:
        """The drafter of `directory` and the text drafter as one; a drafter that is no head as it is."""
        return self.hybrid(directory, drafter) if self.name and hasattr(drafter, "grow") else drafter

    def hybrid(self, directory: str, head: Drafter, past: Past | None = None) -> Hybrid:
        """A head and the text drafter as one; `past`: of the texts that it has drafted so far. UsageError where it is
        no head."""
        assert self.text is not None
        both = f"{directory}+{self.name}"
        if both not in self._costs:
            self._costs[both] = pool.hybrid_costs(both, head, self.target)
        return pool.hybrid(both, head, self.text, self._costs[both], past)

    def head_of(self, drafter: Drafter) -> Drafter:
        """The head of a hybrid with this text drafter; another drafter as it is."""
        return drafter.head if isinstance(drafter, Hybrid) and drafter.text is self.text else drafter

    def remember(self, texts: Iterable[Decoded]) -> float:
        """Take finished texts into the store: the seconds that it has taken."""
        began = time.perf_counter()
        self.store.add(retrieval.document(text.prompt_ids + text.output_ids, len(text.prompt_ids)) for text in texts)
        return time.perf_counter() - began
