"""Base class of drafters, with the defaults of a drafter that keeps no state between rounds."""

from specctl.decoding.protocols import Drafter
from specctl.decoding.state import DecodeState


class BaseDrafter(Drafter):
    """Base class of drafters. By default a drafter reads no hidden states and has no tokens to catch up with.

    Attributes:
        weighs_rows: the drafter never proposes more nodes than their rows are worth, even in a batch.
    """

    taps: tuple[int, ...] = ()
    weighs_rows: bool = False

    @property
    def kind(self) -> str:
        """Kind of the drafter's rounds on a device."""
        return type(self).__name__

    def advance(self, state: DecodeState) -> None:
        """Do nothing: the drafter keeps no state."""

    def lag(self, state: DecodeState) -> list[int]:
        """Return zeros: catching up needs no forward pass."""
        return [0] * state.batch

    def invalidate(self, state: DecodeState) -> None:
        """Do nothing: the drafter has no cache that depends on weights."""
