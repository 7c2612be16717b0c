"""Where a slot of a text lies in a pool of pages: the one mapping that the cache, the layers and attention share."""

from __future__ import annotations

from torch import Tensor

# Slots of a page. A multiple of the 32 that attention reads at a time, whose tiles begin at multiples of 32: no tile
# crosses a page, so that one number of the table gives the addresses of a whole tile, as aligned as without pages. Of
# an 8B target a page is 8 MB; a text wastes half a page on average, and texts share what they begin with by pages.
PAGE = 64


def slots_of(table: Tensor, positions: Tensor) -> Tensor:
    """Slots [B, T] in the pool of the slots `positions` [B, T] of each text, by its pages `table` [B, W] int64."""
    return table.gather(1, positions // PAGE) * PAGE + positions % PAGE


def gathered(rows: Tensor, table: Tensor, span: int) -> Tensor:
    """The first `span` slots of each text [B, span, 2·Hkv, D], copied out of the `rows` [S, 2·Hkv, D] of a pool."""
    pages = table[:, : -(-span // PAGE)]
    return rows.unflatten(0, (-1, PAGE))[pages].flatten(1, 2)[:, :span]
