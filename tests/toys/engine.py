"""A server that answers by the schemas of vLLM or SGLang, and fails as servers do. It writes what a hash of the request
says, so whoever was asked last, and how often, shows nowhere but in `asked`."""

from __future__ import annotations

import hashlib
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("busy", "error", "reset", "half", "slow")
SLOW_S = 0.4


class FakeEngine:
    """A context manager; `url` is its address.

    Attributes:
        asked: how often each prompt (as a tuple of ids) was asked for, whatever became of it.
        faults: called with the number of a request for a text, gives the fault that it meets, or None. Besides those in
            `FAULTS`: "html", "short", "foreign", "cut", "refused", "denied",
            and of streams "torn".
        histogram: of accepted tokens, what every text says of its drafts; empty where there are none.
        scraped: gives the page of metrics; None where there is none.
        shift: added to the log probabilities of prompts: other weights.
        most: the most requests that were there at once.
    """

    def __init__(self, tokenizer, engine="vllm", *, model="toy", faults=lambda number: None, seconds=0.0, port=0):
        self.tokenizer, self.engine, self.model, self.faults, self.seconds = tokenizer, engine, model, faults, seconds
        self.asked: Counter = Counter()
        self.keys: list[str | None] = []
        self.number = self.there = self.most = 0
        self.shift, self.context, self.pages = 0.0, 512, {}
        self.histogram: list[int] = []
        self.scraped = None
        self.gone = False  # every connection breaks
        self.page: str | None = None  # instead of tokens
        self.posts = {}  # by path: of a body, (status, content)
        self.lock = threading.Lock()
        self.server = _Quiet(("127.0.0.1", port), lambda *args: _Handler(self, *args))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def text(self, ids, limit, temperature, seed):
        """(output ids, stop): of a greedy text whatever the seed."""
        key = json.dumps([ids, temperature, seed if temperature else 0]).encode()
        draw = random.Random(hashlib.sha256(key).digest())
        length = draw.randint(1, 20)
        if length >= limit:
            return [draw.randrange(5, 250) for _ in range(limit)], "length"
        return [draw.randrange(5, 250) for _ in range(length - 1)] + [self.tokenizer.eos_token_id], "stop"

    def models(self):
        return {"object": "list", "data": [{"id": self.model, "max_model_len": self.context}]}

    def generated(self, body):
        """What `body` is answered with."""
        if self.engine == "vllm":
            ids, limit, temperature, seed = (body.get(key) for key in ("prompt", "max_tokens", "temperature", "seed"))
            if "prompt_logprobs" in body:
                rows = [None] + [{str(token): {"logprob": -token / 1000 + self.shift}} for token in ids[1:]]
                return {"choices": [{"prompt_logprobs": rows, "token_ids": [1], "finish_reason": "length"}]}
            out, stop = self.text(ids, limit, temperature, seed)
            choice = {"token_ids": out, "prompt_token_ids": ids, "finish_reason": stop, "text": "…"}
            said = {"acceptance_histogram": self.histogram, "num_draft_tokens": 3 * sum(self.histogram)}
            return {"choices": [choice]} | ({"metrics": {"speculative_decoding": said}} if self.histogram else {})
        ids, sampling = body["input_ids"], body["sampling_params"]
        if body.get("return_logprob"):
            rows = [[-token / 1000 + self.shift, token, None] for token in ids]
            return {"output_ids": [1], "meta_info": {"input_token_logprobs": rows}}
        out, stop = self.text(ids, sampling["max_new_tokens"], sampling["temperature"], sampling.get("sampling_seed"))
        reason = {"type": stop} | ({"matched": out[-1]} if stop == "stop" else {})
        about = {"finish_reason": reason, "prompt_tokens": len(ids), "completion_tokens": len(out)}
        if self.histogram:
            rounds = sum(self.histogram)
            about |= {"spec_correct_drafts_histogram": self.histogram, "spec_verify_ct": rounds}
            about |= {"spec_num_proposed_drafts": 3 * rounds}
        return {"output_ids": out, "meta_info": about, "text": "…"}


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, *_):
        """Whoever asked is gone: some tests kill them."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, engine, *args):
        self.engine = engine
        super().__init__(*args)

    def log_message(self, *_):
        pass

    def send(self, status, content, kind="application/json", headers=(), keep=None):
        """`keep`: how much of the content is sent before the connection ends."""
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[:keep])
        self.close_connection = keep is not None

    def do_GET(self):
        engine = self.engine
        version = {"vllm": "/version", "sglang": "/server_info"}.get(engine.engine, "/info")
        pages = {"/v1/models": engine.models(), version: {"version": "0.32.0"}} | engine.pages
        if self.path == "/metrics" and engine.scraped is not None:
            return self.send(200, engine.scraped(), "text/plain")
        if self.path not in pages:
            return self.send(404, {"detail": "Not Found"})
        page = pages[self.path]
        self.send(200, page, "text/html" if isinstance(page, str) else "application/json")

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def do_POST(self):
        if self.engine.gone:
            return self.reset()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine = self.engine
        if self.path == "/tokenize" and engine.page is not None:
            return self.send(200, engine.page, "text/html")
        if self.path == "/tokenize":
            return self.send(200, {"tokens": engine.tokenizer.encode(body["prompt"], add_special_tokens=False)})
        if self.path in engine.posts:
            return self.send(*engine.posts[self.path](body))
        if self.path != ("/v1/completions" if engine.engine == "vllm" else "/generate"):
            return self.send(404, {"detail": "Not Found"})
        answer = engine.generated(body)
        if "prompt_logprobs" in body or body.get("return_logprob"):
            return self.send(200, answer)
        with engine.lock:
            engine.asked[tuple(body.get("prompt") or body["input_ids"])] += 1
            engine.number += 1
            number = engine.number
            engine.there += 1
            engine.most = max(engine.most, engine.there)
            engine.keys.append(self.headers.get("Authorization"))
        try:
            time.sleep(engine.seconds)
            self.fail_or_answer(engine.faults(number), answer, body.get("stream"))
        finally:
            with engine.lock:
                engine.there -= 1

    def fail_or_answer(self, fault, answer, stream):
        if fault == "busy":
            self.send(429, {"error": {"message": "too many requests"}}, headers=[("Retry-After", "0.05")])
        elif fault == "error":
            self.send(500, "Internal Server Error", "text/plain")
        elif fault == "reset":
            self.reset()
        elif fault == "half":
            self.send(200, answer, keep=20)
        elif fault == "html":
            self.send(200, "<html>Please log in</html>", "text/html")
        elif fault == "refused":
            self.send(400, {"error": {"message": "This model's maximum context length is 512 tokens."}})
        elif fault == "denied":
            self.send(401, {"error": "Unauthorized"})
        else:
            choice = answer["choices"][0] if "choices" in answer else answer
            ids = "token_ids" if "choices" in answer else "output_ids"
            if fault == "slow":
                time.sleep(SLOW_S)
            elif fault == "short":
                choice[ids] = []
            elif fault == "foreign":
                choice[ids] = [10**6] * len(choice[ids])
            elif fault == "cut" and "choices" in answer:
                choice["prompt_token_ids"] = choice["prompt_token_ids"][1:]
            elif fault == "cut":
                answer["meta_info"]["prompt_tokens"] -= 1
            if stream:
                return self.stream(answer, broken=fault == "torn")
            self.send(200, answer)

    def stream(self, answer, broken):
        """Two tokens a piece, as each engine cuts its answers."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        choice = answer["choices"][0] if "choices" in answer else None
        ids = choice["token_ids"] if choice else answer["output_ids"]
        ends = range(2, len(ids) + 2, 2)
        for end in ends:
            last = end >= len(ids)
            if choice:
                given = {"prompt_token_ids": choice["prompt_token_ids"] if end == 2 else None}
                given |= {"token_ids": ids[end - 2 : end], "finish_reason": choice["finish_reason"] if last else None}
                piece = {"choices": [given | {"text": "a\u2028b\x85"}]}  # which no line ends with, for JSON
            else:
                about = answer["meta_info"] | ({} if last else {"finish_reason": None})
                piece = {"output_ids": ids[:end], "meta_info": about | {"completion_tokens": len(ids[:end])}}
            if broken and last:
                self.wfile.write(b'data: {"choi')
                return
            self.wfile.write(f"data: {json.dumps(piece, ensure_ascii=False)}\n\n".encode())
            self.wfile.flush()
        if choice:
            usage = {"choices": [], "usage": {}} | {key: value for key, value in answer.items() if key == "metrics"}
            self.wfile.write(f"data: {json.dumps(usage)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
