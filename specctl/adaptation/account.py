"""The time that learning may take: a share of that of decoding, as a running account."""

from __future__ import annotations


class Account:
    """Seconds that were earned by decoding and spent on learning.

    Time that is not needed is saved up: where the traffic changes after a while, much can be learnt at once.
    """

    def __init__(self, share: float | None):
        """`share` of the time of decoding; None = as much as it takes."""
        self.share = share
        self.balance = 0.0
        self.price = 0.0  # of the last lesson

    @property
    def short(self) -> bool:
        """Whether a lesson at the last one's price is more than there is."""
        return self.balance < self.price

    def earn(self, decode_s: float) -> None:
        """Take in the seconds of decoding."""
        self.balance += (self.share or 0.0) * decode_s

    def spend(self, learn_s: float) -> None:
        """Pay for a lesson, if need be of what is still to be earned."""
        if self.share is not None:
            self.price = learn_s
            self.balance -= learn_s
