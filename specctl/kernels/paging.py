"""The mapping from a text's slots to a pool of pages, which the cache, the layers and attention share."""

from torch import Tensor

# Slots per page. Attention reads 32 slots at a time, in tiles that begin at multiples of 32. A page is a multiple of
# 32, so no tile crosses a page: one entry of the table gives the addresses of a whole tile, with the same alignment as
# without pages. For an 8B target a page has 8 MB. A text wastes half a page on average, and texts share a common prefix
# in whole pages.
PAGE = 64


def slots_of(table: Tensor, positions: Tensor) -> Tensor:
    """Slots [B, T] in the pool for slots `positions` [B, T] of each text, by its pages `table` [B, W] int64."""
    return table.gather(1, positions // PAGE) * PAGE + positions % PAGE


def gather_pages(rows: Tensor, table: Tensor, span: int) -> Tensor:
    """The first `span` slots of each text [B, span, 2·Hkv, D], copied from the `rows` [S, 2·Hkv, D] of a pool."""
    pages = table[:, : -(-span // PAGE)]
    return rows.unflatten(0, (-1, PAGE))[pages].flatten(1, 2)[:, :span]
