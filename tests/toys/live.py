"""A server whose drafter can be exchanged while it runs, as vLLM with our worker extension, or SGLang, lets it be."""

import base64
import pickle
from pathlib import Path

from specctl.engines import vllm_worker
from tests.toys.engine import FakeEngine


class LiveEngine(FakeEngine):
    """A `FakeEngine` that drafts with what was published last.

    Attributes:
        started: directory of the drafter that it was started with.
        histograms: of accepted tokens, by version; of others `histogram`.
        log: (version, directory or tensors) of all that was published.
        broken: words with which the next publications fail.
    """

    def __init__(self, tokenizer, started, engine="vllm", **options):
        super().__init__(tokenizer, engine, **options)
        self.started, self.version, self.log, self.steps = Path(started), None, [], []
        self.histogram, self.histograms, self.broken = [2, 1, 1], {}, None
        if engine == "vllm":
            self.posts = {"/collective_rpc": self.rpc}
        else:
            self.pages["/model_info"] = {"weight_version": "default"}
            names = ("pause_generation", "begin_weight_update", "end_weight_update", "continue_generation")
            self.posts = {f"/{name}": self.step(name) for name in names}
            self.posts["/update_weights_from_tensor"] = self.update

    def generated(self, body):
        kept, self.histogram = self.histogram, self.histograms.get(self.version, self.histogram)
        try:
            return super().generated(body)
        finally:
            self.histogram = kept

    def take(self, version, what):
        self.version = version
        self.log.append((version, what))

    def rpc(self, body):
        if body["method"] == "published_drafter":
            fingerprint = vllm_worker.fingerprint(Path(self.log[-1][1])) if self.log else None
            return 200, {"results": [{"version": self.version, "fingerprint": fingerprint}]}
        directory, version = body["args"]
        try:
            problem = self.broken or vllm_worker.difference(
                vllm_worker.outline(self.started), vllm_worker.outline(Path(directory))
            )
        except OSError as error:
            problem = str(error)
        if problem:
            return 200, {"results": [{"error": problem}]}
        self.take(version, directory)
        return 200, {"results": [{"version": version, "fingerprint": "f", "seconds": 0.1}]}

    def step(self, name):
        def taken(body):
            self.steps.append((name, body))
            return 200, {"success": True, "message": "Success"}

        return taken

    def update(self, body):
        self.steps.append(("update", {key: body[key] for key in ("selector", "flush_cache", "weight_version")}))
        if self.broken:
            return 400, {"success": False, "message": self.broken}
        self.pages["/model_info"] = {"weight_version": body["weight_version"]}
        (payload,) = body["serialized_named_tensors"]
        self.take(body["weight_version"], dict(pickle.loads(base64.b64decode(payload))))
        return 200, {"success": True, "message": "Success"}
