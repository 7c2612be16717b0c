"""Time budget for learning: a running account that earns a share of the decoding time and pays for updates."""

from __future__ import annotations

MAX_DOUBLINGS = 5  # largest number of doublings of the saving before an update
MAX_RAISES = 1  # largest number of doublings of the share while updates help


class TimeBudget:
    """Seconds earned by decoding and spent on learning.

    An update runs once the balance has reached its price times 2^`doublings`. The first update, and one after an update
    in vain, have to be saved for longer, because they may be in vain too. After an update in vain the rest of the
    balance is dropped. So a drafter that already knows the traffic spends next to nothing on learning.

    While updates help, the share is twice as large, and they are paid for afterwards. An update in vain ends this.

    Drafters that learn in turns have one account each, which earns by the time in which that drafter drafted. No update
    is paid from seconds that another account of the `group` owes. So together they spend no more than one drafter.

    Attributes:
        balance: seconds; negative if updates were paid in advance.
        price: seconds of the last update, or an estimate for the first one (None = not known).
        doublings: number of doublings of the price that has to be saved.
        raises: number of doublings of the share.
        group: all accounts of the drafters that learn in turns, this one included; empty for a single drafter.
    """

    def __init__(self, share: float | None):
        """`share`: learning time as a share of the decoding time (None = no limit)."""
        self.share = share
        self.balance = 0.0
        self.price: float | None = None
        self.doublings = 1
        self.raises = 0
        self.group: list[TimeBudget] = []

    @property
    def available(self) -> float:
        """Seconds of the balance that no other account of the group owes."""
        return self.balance + sum(min(one.balance, 0.0) for one in self.group if one is not self)

    @property
    def can_pay(self) -> bool:
        """Whether enough was saved for an update; always true without a limit."""
        if self.share is None or self.price is None:
            return self.share is None
        return self.available >= (0.0 if self.raises else self.price * 2**self.doublings)

    @property
    def may_borrow(self) -> bool:
        """Whether an update may run now and be paid for later: only while nothing is owed."""
        return self.available >= 0

    def earn(self, decode_s: float) -> None:
        """Credit the share of these seconds of decoding."""
        self.balance += (self.share or 0.0) * 2**self.raises * decode_s

    def spend(self, seconds: float) -> None:
        """Pay for seconds of learning."""
        if self.share is not None:
            self.balance -= seconds

    def record_update(self, seconds: float, *, vain: bool, helped: bool) -> None:
        """Note the time of an update, and whether it was in vain or helped by more than chance. An update that was not
        judged did neither."""
        if self.share is None:
            return
        self.price, self.doublings = seconds, min(self.doublings + 1, MAX_DOUBLINGS) if vain else 0
        self.raises = min(self.raises + 1, MAX_RAISES) if helped else 0
        if vain:
            self.balance = min(self.balance, 0.0)
