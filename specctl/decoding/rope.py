"""Rotary tables (RoPE, Su et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.decoding.plan import Plan


class Rope:
    """Rotary tables [positions, D] in the model's dtype; sin carries the sign of the rotated half.

    Attributes:
        others: tables of a model's other kinds of layers, for the same positions.
    """

    def __init__(self, cos: Tensor, sin: Tensor, others: Sequence[Rope] = ()):
        half = cos.shape[-1] // 2
        self.cos, self.others = cos, others
        self.sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)

    @classmethod
    def of(cls, inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Tables of `positions` [N] from the frequencies [D/2], without any scaling."""
        angle = positions[:, None].float() * inv_freq
        angle = torch.cat((angle, angle), -1)
        return cls(angle.cos().to(dtype), angle.sin().to(dtype))

    def at(self, plan: Plan, heads: int, untouched: int) -> tuple[Tensor, Tensor]:
        """cos and sin [N, heads + untouched, D] for the rows of a plan, made once per step.

        The last `untouched` heads (values) get cos 1 and sin 0, which leaves them exactly unchanged. So queries, keys
        and values are rotated together, and keys and values end up side by side, ready to be stored.
        """
        if plan.contiguous and len(plan.base) == 1:
            start, count = plan.base[0], plan.positions.shape[1]
            return self._wide(self.cos.narrow(0, start, count), self.sin.narrow(0, start, count), heads, untouched)
        return self.rows(plan.positions.reshape(-1), heads, untouched)

    def rows(self, positions: Tensor, heads: int, untouched: int) -> tuple[Tensor, Tensor]:
        """cos and sin for rows at any `positions` [N]."""
        return self._wide(self.cos[positions], self.sin[positions], heads, untouched)

    def ahead(self, base: list[int], steps: int, heads: int, untouched: int) -> list[tuple[Tensor, Tensor]]:
        """One table per forward, for `steps` forwards of one row per sequence, at positions base, base + 1, … ."""
        if len(base) == 1:
            cos, sin = self.cos.narrow(0, base[0], steps), self.sin.narrow(0, base[0], steps)
        else:
            start = torch.tensor(base, device=self.cos.device)
            rows = (torch.arange(steps, device=start.device)[:, None] + start).view(-1)
            cos, sin = self.cos[rows], self.sin[rows]
        wide = self._wide(cos, sin, heads, untouched)
        return list(zip(*(table.split(len(base)) for table in wide), strict=True))

    @staticmethod
    def _wide(cos: Tensor, sin: Tensor, heads: int, untouched: int) -> tuple[Tensor, Tensor]:
        shape = (cos.shape[0], heads + untouched, cos.shape[-1])
        wide = cos.new_ones(shape), cos.new_zeros(shape)
        for table, part in zip(wide, (cos, sin), strict=True):
            table[:, :heads] = part[:, None]
        return wide

    @staticmethod
    def at_start(table: tuple[Tensor, Tensor]) -> Tensor:
        """[N] bool: rows of a table at position 0. At one radian per position, no other position has sine 0."""
        return table[1][:, 0, 0] == 0

    @staticmethod
    def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate x [N, heads, D]. A table of one row serves all N rows."""
        cos, sin = table
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
