"""Device-side rounds (decoding/device/rounds.py) of a hybrid: the trees of head and text drafter, joined."""

from torch import Tensor

from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.protocols import DeviceDraft
from specctl.decoding.records import DraftTree
from specctl.decoding.state import DecodeState
from specctl.drafters.text.device_rounds import union


class HybridRounds(DeviceDraft):
    """Rounds in which the head drafts on the device, and the text drafter on the host before the round starts."""

    reads_text = True

    def __init__(self, head: DeviceDraft, text: DeviceDraft):
        self.head, self.text = head, text
        self.depth = max(head.depth, text.depth)
        self.reach = head.reach + text.reach - 1  # one root
        self.carried = [*head.carried, *text.carried]

    def load(self, state: DecodeState) -> None:
        self.head.load(state)
        self.text.load(state)
        self.host_seconds = self.text.host_seconds

    def fits(self, state: DecodeState) -> bool:
        return self.head.fits(state) and self.text.fits(state)

    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        drafts = self.head.propose(sequences, span), self.text.propose(sequences, span)
        return union(*drafts, levels=self.head.depth)

    def advance(self, sequences: DeviceBatch, before: Tensor, span: int) -> None:
        self.head.advance(sequences, before, span)
        self.text.advance(sequences, before, span)

    def store(self, state: DecodeState) -> None:
        self.head.store(state)
        self.text.store(state)
