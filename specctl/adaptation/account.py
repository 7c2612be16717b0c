"""The time that learning may take: a share of that of decoding, as a running account."""

from __future__ import annotations

MOST_SAVED = 5  # times that what has to be saved for a lesson is doubled


class Account:
    """Seconds that were earned by decoding and spent on learning.

    A lesson is taken when it can be paid for. One that may be in vain, as the first or behind one that was, is saved
    for twice as long as the one before, and where it was in vain all that was saved for it is gone: traffic that a
    drafter knows is to cost next to nothing.

    Attributes:
        balance: seconds; below 0 it is owed.
        price: of the last lesson, or of the first as it is foreseen; None = not known.
        vain: how often what has to be saved is doubled.
    """

    def __init__(self, share: float | None):
        """`share` of the time of decoding; None = as much as it takes."""
        self.share = share
        self.balance = 0.0
        self.price: float | None = None
        self.vain = 1

    @property
    def affords(self) -> bool:
        """Whether enough was saved for a lesson."""
        saved = self.price is not None and self.balance >= self.price * 2**self.vain
        return self.share is None or saved

    @property
    def lends(self) -> bool:
        """Whether a lesson may be paid for later: where nothing is owed yet."""
        return self.balance >= 0

    def earn(self, decode_s: float) -> None:
        """Take in the seconds of decoding."""
        self.balance += (self.share or 0.0) * decode_s

    def spend(self, seconds: float) -> None:
        """Pay for what was done."""
        if self.share is not None:
            self.balance -= seconds

    def taken(self, seconds: float, *, vain: bool) -> None:
        """Note what a lesson took, and whether it was in vain."""
        if self.share is None:
            return
        self.price, self.vain = seconds, min(self.vain + 1, MOST_SAVED) if vain else 0
        if vain:
            self.balance = min(self.balance, 0.0)
