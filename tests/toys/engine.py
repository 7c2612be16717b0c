"""A server with the API of vLLM, SGLang or llama.cpp that fails like real servers.

Its text is a hash of the request, so it does not depend on the order or number of requests.
"""

import base64
import hashlib
import io
import json
import pickle
import random
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from specctl.engines.vllm_worker import DrafterSwap

FAULTS = ("busy", "error", "reset", "half", "slow")
SLOW_S = 0.4


class FakeEngine:
    """A context manager; `url` is its address.

    Attributes:
        asked: number of requests per prompt (a tuple of ids), failed ones included.
        faults: number of a text request → its fault, or None. Besides `FAULTS`: "html", "short", "foreign", "cut",
            "refused", "denied", and for streams "torn".
        histogram: accepted tokens per round, reported with every text; empty for a server without a drafter.
        scraped: returns the page of metrics, or None for a server without that page.
        adapters: names of further models, which have adapters; requests for any other name then get vLLM's status 404.
        shift: added to the log probabilities of prompts, as if the weights were different.
        most: the largest number of concurrent requests.
        admin: handles administration: `Workers`, `Session` or `Corpora`, or None for a server without it.
        posted: administrative requests: methods of vLLM's workers, and paths of SGLang.
        breaks: such a name → its fault, or None: "error", "reset", "denied", "gone" (the answer is lost), or a
            dictionary as the answer.
    """

    def __init__(self, tokenizer, engine="vllm", *, model="toy", faults=lambda number: None, seconds=0.0, port=0):
        self.tokenizer, self.engine, self.model, self.faults, self.seconds = tokenizer, engine, model, faults, seconds
        self.asked: Counter = Counter()
        self.keys: list[str | None] = []
        self.number = self.there = self.most = 0
        self.shift, self.context, self.slots, self.pages = 0.0, 512, 64, {}
        self.histogram: list[int] = []
        self.adapters: list[str] = []
        self.cached: int | None = None  # prompt tokens that SGLang reports as cached
        self.blank, self.end = " ", "\n"  # in the events of streams
        self.scraped = None
        self.gone = False  # every connection breaks
        self.page: str | None = None  # returned instead of tokens
        self.admin, self.posted, self.breaks = None, [], lambda name: None
        self.lock = threading.Lock()
        self.server = _Quiet(("127.0.0.1", port), lambda *args: _Handler(self, *args))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def locked(self):
        """Its address with a password."""
        return self.url.replace("://", "://me:HUSH@")

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def text(self, ids, limit, temperature, seed):
        """(output ids, stop reason); greedy text does not depend on the seed."""
        key = json.dumps([ids, temperature, seed if temperature else 0]).encode()
        draw = random.Random(hashlib.sha256(key).digest())
        length = draw.randint(1, 20)
        if length >= limit:
            return [draw.randrange(5, 250) for _ in range(limit)], "length"
        return [draw.randrange(5, 250) for _ in range(length - 1)] + [self.tokenizer.eos_token_id], "stop"

    def event(self, data):
        return f"data:{self.blank}{data}{2 * self.end}".encode()

    def models(self):
        if self.engine == "llama.cpp":
            return {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "llamacpp"}]}
        adapters = [{"id": name, "parent": self.model} for name in self.adapters]
        return {"object": "list", "data": [{"id": self.model, "max_model_len": self.context}, *adapters]}

    def generated(self, body):
        """The answer to the request `body`."""
        if self.engine == "vllm":
            ids, limit, temperature, seed = (body.get(key) for key in ("prompt", "max_tokens", "temperature", "seed"))
            if "prompt_logprobs" in body:
                rows = [None] + [{str(token): {"logprob": -token / 1000 + self.shift}} for token in ids[1:]]
                return {"choices": [{"prompt_logprobs": rows, "token_ids": [1], "finish_reason": "length"}]}
            out, stop = self.text(ids, limit, temperature, seed)
            choice = {"token_ids": out, "prompt_token_ids": ids, "finish_reason": stop, "text": "…"}
            said = {"acceptance_histogram": self.histogram, "num_draft_tokens": 3 * sum(self.histogram)}
            usage = {"usage": {"prompt_tokens": len(ids), "completion_tokens": len(out)}}
            return (
                {"choices": [choice]} | usage | ({"metrics": {"speculative_decoding": said}} if self.histogram else {})
            )
        if self.engine == "llama.cpp":
            return self.completion(body)
        ids, sampling = body["input_ids"], body["sampling_params"]
        if body.get("return_logprob"):
            rows = [[-token / 1000 + self.shift, token, None] for token in ids]
            return {"output_ids": [1], "meta_info": {"input_token_logprobs": rows}}
        out, stop = self.text(ids, sampling["max_new_tokens"], sampling["temperature"], sampling.get("sampling_seed"))
        reason = {"type": stop} | ({"matched": out[-1]} if stop == "stop" else {})
        about = {"finish_reason": reason, "prompt_tokens": len(ids), "completion_tokens": len(out)}
        about |= {} if self.cached is None else {"cached_tokens": self.cached}
        if self.histogram:
            rounds = sum(self.histogram)
            about |= {"spec_correct_drafts_histogram": self.histogram, "spec_verify_ct": rounds}
            about |= {"spec_num_proposed_drafts": 3 * rounds}
        return {"output_ids": out, "meta_info": about, "text": "…"}

    def completion(self, body):
        """llama-server's answer to `/completion`, as recorded from a real server, without keys that the client
        ignores."""
        ids = body["prompt"]
        if "n_probs" in body:
            likely = [{"id": token, "token": "…", "logprob": -token / 1000 + self.shift} for token in ids]
            return {"tokens": [], "completion_probabilities": [{"id": ids[0], "top_logprobs": likely}]}
        assert body["return_tokens"] and body["samplers"] == ["temperature", "top_k", "top_p"]
        limit = min(body["n_predict"], self.context - len(ids))
        out, stop = self.text(ids, limit, body["temperature"], body["seed"])
        accepted = sum(k * count for k, count in enumerate(self.histogram))
        timings = {"cache_n": 0, "prompt_n": len(ids), "predicted_n": len(out)}
        if self.histogram:
            timings["predicted_n"] = 1 + sum(self.histogram) + accepted
            timings |= {"draft_n": 3 * sum(self.histogram), "draft_n_accepted": accepted}
        return {
            "index": 0,
            "content": "…",
            "tokens": out,
            "stop": True,
            "stop_type": {"stop": "eos", "length": "limit"}[stop],
            "truncated": stop == "length" and limit < body["n_predict"],
            "tokens_predicted": len(out),
            "tokens_evaluated": len(ids),
            "timings": timings,
        }


class Workers:
    """vLLM's `/collective_rpc`: specctl's real extension on every rank; only the loading of weights is fake."""

    def __init__(self, directory, *, method="eagle3", ranks=1, extension=True, vocab_size=64):
        self.ranks = [_Worker(directory, method, vocab_size) for _ in range(ranks)]
        self.extension = extension

    def answer(self, path, body):
        """(status, document)."""
        name, arguments = body["method"], body.get("args", [])
        if path != "/collective_rpc" or not self.extension:
            words = (
                f"Call to collective_rpc method failed: Worker failed with error ''Worker' has no attribute '{name}''"
            )
            return 500, {"error": {"message": words, "code": 500}}
        return 200, {"results": [getattr(rank, name)(*arguments) for rank in self.ranks]}


class _Worker(DrafterSwap):
    def __init__(self, directory, method, vocab_size):
        shape = json.loads((Path(directory) / "config.json").read_text()) if directory else {}
        draft = SimpleNamespace(model=str(directory), revision=None, hf_config=SimpleNamespace(**shape))
        speculative = SimpleNamespace(method=method, draft_model_config=draft) if directory else None
        target = SimpleNamespace(get_vocab_size=lambda: vocab_size)
        self.vllm_config = SimpleNamespace(speculative_config=speculative, model_config=target)

    def get_draft_model(self):
        return self


class Session:
    """SGLang's updates of draft weights, with errors for requests in the wrong order.

    Attributes:
        weights: name → tensor, of the last update.
    """

    def __init__(self, directory, *, algorithm="EAGLE3", ranks=1):
        self.info = {"version": "0.5.23", "tp_size": ranks, "speculative_algorithm": algorithm}
        self.info |= {"speculative_draft_model_path": directory and str(directory)}
        self.version, self.paused, self.open, self.weights = "default", False, False, {}

    def answer(self, path, body):
        """(status, document)."""
        step = getattr(self, path.strip("/"), None)
        if step is None:
            return 404, {"detail": "Not Found"}
        wrong = step(**body)
        document = {"success": wrong is None, "message": wrong or "Success"}
        return 400 if wrong else 200, document

    def pause_generation(self, mode="abort"):
        self.paused = mode == "in_place"
        return None if self.paused else "running requests were aborted"

    def continue_generation(self):
        self.paused = False

    def begin_weight_update(self, selector):
        if self.open or not self.paused or selector != "draft":
            return "a weight update is already open" if self.open else "not paused, or not of the draft"
        self.open = True

    def update_weights_from_tensor(self, serialized_named_tensors, selector, weight_version, flush_cache):
        if not self.open or selector != "draft" or flush_cache or len(serialized_named_tensors) != self.info["tp_size"]:
            return "begin_weight_update comes first, for the draft; a cache in use cannot be flushed"
        for part in serialized_named_tensors:
            self.weights |= dict(_Allowed(io.BytesIO(base64.b64decode(part, validate=True))).load())
        self.version = weight_version

    def end_weight_update(self):
        if not self.open:
            return "end_weight_update without begin_weight_update"
        self.open = False


class Corpora:
    """SGLang's external corpora over HTTP, as texts or as a file on the server.

    Attributes:
        texts: corpus → its texts.
        counts: corpus → its number of tokens.
    """

    def __init__(self, tokenizer, *, algorithm="NGRAM", budget=8, most=10_000):
        self.tokenizer, self.most, self.texts, self.counts = tokenizer, most, {}, {}
        self.info = {"version": "0.5.23", "tp_size": 1, "speculative_algorithm": algorithm}
        self.info |= {"speculative_ngram_external_sam_budget": budget}
        self.info |= {"speculative_ngram_external_corpus_max_tokens": most}

    @property
    def pages(self):
        return {
            "/server_info": self.info,
            "/list_external_corpora": {"success": True, "corpus_token_counts": self.counts, "message": ""},
        }

    def answer(self, path, body):
        """(status, document)."""
        step = {"/add_external_corpus": self.add, "/remove_external_corpus": self.remove}.get(path)
        if step is None:
            return 404, {"detail": "Not Found"}
        document = step(**body)
        return 200 if document["success"] else 400, document

    def add(self, corpus_id="", file_path=None, documents=None, token_chunks=None):
        failed = {"success": False, "corpus_id": "", "loaded_token_count": 0}
        if self.info["speculative_algorithm"] != "NGRAM":
            return failed | {"message": "Ngram speculative decoding is not enabled."}
        if file_path is None and documents is None:
            return failed | {"message": "Either file_path or documents must be provided."}
        if corpus_id in self.texts:
            return failed | {"message": f"External corpus '{corpus_id}' already exists."}
        kept, total = [], 0
        for text in documents:
            size = len(self.tokenizer.encode(text, add_special_tokens=False)) + bool(kept)
            if total + size > self.most:
                break
            kept, total = [*kept, text], total + size
        if total > self.most - sum(self.counts.values()):
            return failed | {"message": "External corpus exceeds the remaining token budget."}
        self.texts[corpus_id], self.counts[corpus_id] = kept, total
        message = f"Loaded corpus '{corpus_id}' with {total} tokens."
        message += f" (truncated: exceeded {self.most} token limit)" if kept != documents else ""
        return {"success": True, "corpus_id": corpus_id, "message": message, "loaded_token_count": total}

    def remove(self, corpus_id):
        if self.texts.pop(corpus_id, None) is None:
            return {"success": False, "message": f"no corpus {corpus_id}"}
        del self.counts[corpus_id]
        return {"success": True, "message": f"Removed corpus '{corpus_id}'."}


class _Allowed(pickle.Unpickler):
    """Allows the classes that SGLang's reader of pickles allows for tensors."""

    def find_class(self, module, name):
        if not f"{module}.".startswith(("builtins.", "collections.", "torch.", "multiprocessing.reduction.")):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, *_):
        """Ignore broken connections: some tests kill their clients."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # send an answer without waiting for the client's confirmation of its headers

    def __init__(self, engine, *args):
        self.engine = engine
        super().__init__(*args)

    def log_message(self, *_):
        pass

    def send(self, status, content, kind="application/json", headers=(), keep=None):
        """`keep`: number of bytes of the content that are sent before the connection ends."""
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
        pages = {"/v1/models": engine.models(), version: {"version": "0.32.0"}}
        if engine.engine == "llama.cpp":
            told = {"n_ctx": engine.context, "params": {}}
            pages["/props"] = {"default_generation_settings": told, "total_slots": engine.slots, "build_info": "b11549"}
        pages |= engine.pages
        if isinstance(engine.admin, Session):
            pages |= {version: engine.admin.info, "/model_info": {"weight_version": engine.admin.version}}
        if isinstance(engine.admin, Corpora):
            pages |= engine.admin.pages
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
        if engine.admin is not None and "prompt" not in body and "input_ids" not in body:
            return self.administer(body)
        if self.path == "/tokenize" and engine.page is not None:
            return self.send(200, engine.page, "text/html")
        if self.path == "/tokenize":
            words = body["content" if engine.engine == "llama.cpp" else "prompt"]
            return self.send(200, {"tokens": engine.tokenizer.encode(words, add_special_tokens=False)})
        if self.path != {"vllm": "/v1/completions", "llama.cpp": "/completion"}.get(engine.engine, "/generate"):
            return self.send(404, {"detail": "Not Found"})
        if engine.adapters and (body.get("model") or engine.model) not in (engine.model, *engine.adapters):
            words = f"The model `{body.get('model')}` does not exist."
            return self.send(404, {"error": {"message": words, "type": "NotFoundError", "param": "model", "code": 404}})
        answer = engine.generated(body)
        if {"prompt_logprobs", "return_logprob", "n_probs"} & body.keys():
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

    def administer(self, body):
        engine, name = self.engine, body.get("method", self.path)
        engine.posted.append(name)
        engine.keys.append(self.headers.get("Authorization"))
        fault = engine.breaks(name)
        if fault == "reset":
            return self.reset()
        if fault == "denied":
            return self.send(401, {"error": "Unauthorized"})
        if fault == "error":
            return self.send(500, "Internal Server Error", "text/plain")
        status, document = engine.admin.answer(self.path, body)
        if fault == "gone":
            return self.reset()
        self.send(status, fault or document)

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
            ids = next(name for name in ("token_ids", "output_ids", "tokens") if name in choice)
            if fault == "slow":
                time.sleep(SLOW_S)
            elif fault == "short":
                choice[ids] = []
            elif fault == "foreign":
                choice[ids] = [10**6] * len(choice[ids])
            elif fault == "cut" and "choices" in answer:
                choice["prompt_token_ids"] = choice["prompt_token_ids"][1:]
            elif fault == "cut" and ids == "tokens":
                answer["tokens_evaluated"] -= 1
            elif fault == "cut":
                answer["meta_info"]["prompt_tokens"] -= 1
            if stream:
                return self.stream(answer, broken=fault == "torn")
            self.send(200, answer)

    def stream(self, answer, broken):
        """Stream two tokens per piece, in the engine's format."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        choice = answer["choices"][0] if "choices" in answer else None
        plain = "tokens" in answer
        ids = choice["token_ids"] if choice else answer["tokens" if plain else "output_ids"]
        ends = range(2, len(ids) + 2, 2)
        for end in ends:
            last = end >= len(ids)
            if choice:
                given = {"prompt_token_ids": choice["prompt_token_ids"] if end == 2 else None}
                given |= {"token_ids": ids[end - 2 : end], "finish_reason": choice["finish_reason"] if last else None}
                piece = {"choices": [given | {"text": "a\u2028b\x85"}]}  # JSON allows these unescaped
            elif plain:
                piece = {"index": 0, "content": "…", "tokens": ids[end - 2 : end], "stop": False}
            else:
                about = answer["meta_info"] | ({} if last else {"finish_reason": None})
                piece = {"output_ids": ids[:end], "meta_info": about | {"completion_tokens": len(ids[:end])}}
            if broken and last:
                self.wfile.write(b'data: {"choi')
                return
            self.wfile.write(self.engine.event(json.dumps(piece, ensure_ascii=False)))
            self.wfile.flush()
        if choice:
            usage = {"choices": []} | {key: answer[key] for key in ("usage", "metrics") if key in answer}
            self.wfile.write(self.engine.event(json.dumps(usage)))
        if plain:
            return self.wfile.write(self.engine.event(json.dumps(answer | {"content": "", "tokens": []})))
        self.wfile.write(self.engine.event("[DONE]"))


def versions(client):
    """The version of each server's drafter; None is the drafter of the server's start."""
    return [one.version for one in client.loaded()]
