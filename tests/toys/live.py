"""A server whose drafter can be exchanged while it runs, and that says of every text what became of its drafts."""

import dataclasses
from pathlib import Path

from tests.toys.engine import FakeEngine, Session, Workers


class LiveEngine(FakeEngine):
    """A `FakeEngine` that drafts with what was published last; its workers load by `vllm_worker._load`.

    Attributes:
        started: directory of the drafter that it was started with.
        histograms: of accepted tokens, by version; of others `histogram`.
    """

    def __init__(self, target, started, engine="vllm"):
        super().__init__(target.tokenizer, engine, model="builtin")
        self.started, self.histogram, self.histograms = Path(started), [2, 1, 1], {}
        self.admin = Workers(started, vocab_size=target.vocab_size) if engine == "vllm" else Session(started)

    @property
    def version(self):
        """The version that it drafts with."""
        if isinstance(self.admin, Session):
            return self.admin.version
        return self.admin.ranks[0].drafter_loaded()["version"]

    def restart(self):
        """Draft with the first drafter again."""
        del self.admin.ranks[0]._specctl_running

    def tamper(self, version, **change):
        """Draft with something else under a version."""
        worker = self.admin.ranks[0]
        worker._specctl_running = dataclasses.replace(worker._specctl_running, version=version, **change)

    def generated(self, body):
        kept, self.histogram = self.histogram, self.histograms.get(self.version, self.histogram)
        try:
            return super().generated(body)
        finally:
            self.histogram = kept
