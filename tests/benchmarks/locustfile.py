"""Load a running `specctl serve` with locust, in a separate environment.

    python -m venv /tmp/locust && /tmp/locust/bin/pip install locust
    specctl serve --drafter lookup --listen 127.0.0.1:8000
    /tmp/locust/bin/locust -f tests/benchmarks/locustfile.py --headless --host http://127.0.0.1:8000 \\
        --users 16 --spawn-rate 16 --run-time 60s

Users send one chat after another, streamed or not. The row `stream` has the time to the headers, `first event` and
`last event` the times to these events. Status 429 (no free slot) and a stream without its last event are failures.
"""

import json
import os
import time

from locust import FastHttpUser, constant, task

PATH = "/v1/chat/completions"
TOKENS = int(os.environ.get("TOKENS", "64"))


class ChatUser(FastHttpUser):
    """A client that waits for each answer."""

    wait_time = constant(0)
    number = 0

    def body(self, stream: bool) -> dict:
        ChatUser.number += 1
        messages = [{"role": "user", "content": f"List the names of table {ChatUser.number}."}]
        return {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "stream": stream}

    @task
    def whole(self) -> None:
        """Request a whole answer."""
        with self.client.post(PATH, json=self.body(False), name="whole", catch_response=True) as said:
            if said.status_code == 200 and not json.loads(said.text)["usage"]["completion_tokens"]:
                said.failure("no tokens")

    @task
    def stream(self) -> None:
        """Request a stream, and time its first event."""
        began, first, last = time.perf_counter(), None, b""
        with self.client.post(PATH, json=self.body(True), name="stream", catch_response=True, stream=True) as said:
            if said.status_code != 200:
                return
            for part in said.iter_content(64, decode_content=False):
                first = first or time.perf_counter()
                last = (last + part)[-20:]
            if not last.endswith(b"data: [DONE]\n\n"):
                said.failure("the stream has no end")
        if first is not None:
            events = self.environment.events.request
            known = {"response_length": 0, "exception": None, "context": {}}
            for name, at in (("first event", first), ("last event", time.perf_counter())):
                events.fire(request_type="POST", name=name, response_time=1000 * (at - began), **known)
