"""Scoring of committed text: where its drafts begin, and attention over cached slots and the rows of a draft."""

import torch
import torch.nn.functional as F
from torch import Tensor


def draft_start_slots(spans: list[range], depths: int) -> list[list[int]]:
    """First slots [L][W] of the drafts that reach the positions of `spans` [L] in 1 to `depths` steps.

    W is the longest span + depths − 1; shorter rows repeat their last slot. After a short prompt the deepest drafts
    would begin before the text, so they use slot 0 instead.
    """
    width = max(map(len, spans)) + depths - 1
    begun = [range(span.start - 1 - depths, span.stop - 2) for span in spans]
    return [[max(min(part.start + i, part[-1]), 0) for i in range(width)] for part in begun]


def hidden_context(at: Tensor, span: int, skipped: list[range], own: bool) -> Tensor:
    """Mask [L, W, span], True for the slots that a block beginning at slot `at` [L, W] must not attend to.

    These are the slots after its own, its own unless `own`, and the skipped ones.
    """
    slots = torch.arange(span, device=at.device)
    hidden = slots > at[..., None] if own else slots >= at[..., None]
    for row, gone in enumerate(skipped):
        hidden[row, :, gone.start : gone.stop] = True
    return hidden


def block_mask(context: Tensor, inside: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias [L, 1, W·S, span + W·S] added to scores.

    Rows do not attend to context slots that are True in `context` [L, W, S, span]. Row s of a block attends to the rows
    of its own block that are True in `inside` [S, S].
    """
    many, width = context.shape[:2]
    blocks = torch.eye(width, dtype=torch.bool, device=context.device)
    others = ~torch.kron(blocks, inside).expand(many, -1, -1)
    return additive(torch.cat((context.flatten(1, 2), others), -1)[:, None], dtype)


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias of the same shape, −inf where `hidden` is True, that is added to scores."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))


def attend_all(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention output [L·R, Hq·D] of queries [L·R, Hq, D].

    `keys`, `values`: [L, Hkv, S, D]; `mask`: bias [L, 1, R, S] added to scores.
    """
    query = query.unflatten(0, (len(mask), -1)).transpose(1, 2)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).flatten(1)
