"""A server with an exchangeable drafter, which reports the accepted drafts of every text."""

import dataclasses
from pathlib import Path

from tests.toys.engine import FakeEngine, Session, Workers


class LiveEngine(FakeEngine):
    """A `FakeEngine` that drafts with the drafter published last; its workers load with `vllm_worker._load`.

    Attributes:
        started: directory of the first drafter.
        histograms: version → histogram of accepted tokens; `histogram` is for other versions.
    """

    def __init__(self, target, started, engine="vllm"):
        super().__init__(target.tokenizer, engine, model="builtin")
        self.started, self.histogram, self.histograms = Path(started), [2, 1, 1], {}
        self.admin = Workers(started, vocab_size=target.vocab_size) if engine == "vllm" else Session(started)

    @property
    def version(self):
        """The version of the current drafter."""
        if isinstance(self.admin, Session):
            return self.admin.version
        return self.admin.ranks[0].drafter_loaded()["version"]

    def restart(self):
        """Return to the first drafter."""
        del self.admin.ranks[0]._specctl_running

    def tamper(self, version, **change):
        """Change the version or the attributes of the running drafter."""
        worker = self.admin.ranks[0]
        worker._specctl_running = dataclasses.replace(worker._specctl_running, version=version, **change)

    def generated(self, body):
        kept, self.histogram = self.histogram, self.histograms.get(self.version, self.histogram)
        try:
            return super().generated(body)
        finally:
            self.histogram = kept
