"""Drafters that are named, not loaded.

Nothing heavy is imported on the way to the table: the command line checks names against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specctl.decoding.protocols import Drafter
    from specctl.recipe import DraftingRecipe


def _none(drafting: DraftingRecipe) -> Drafter:
    from specctl.decoding.plain import NoDraft

    return NoDraft()


def _lookup(drafting: DraftingRecipe) -> Drafter:
    from specctl.drafters.lookup import Lookup

    return Lookup(drafting.depth)


def _suffix(drafting: DraftingRecipe) -> Drafter:
    from specctl.drafters.suffix import Suffix

    return Suffix(drafting.depth, drafting.nodes, drafting.children)


WEIGHTLESS: dict[str, Callable[[DraftingRecipe], Drafter]] = {"none": _none, "lookup": _lookup, "suffix": _suffix}
