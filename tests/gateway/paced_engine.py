"""A fake vLLM process that emits tokens at a steady pace: `python paced_engine.py PORT TOKENS_PER_S`.

It uses little CPU, and restarts at once because it imports only the standard library. The first line of its output is
its address; port 0 picks a free port.
"""

import asyncio
import json
import sys

METRICS = {"speculative_decoding": {"acceptance_histogram": [4, 4], "num_draft_tokens": 8}}
PAGES = {
    "/v1/models": {"object": "list", "data": [{"id": "toy", "max_model_len": 4096}]},
    "/version": {"version": "0.32.0"},
    "/tokenize": {"tokens": [1, 2, 3]},
}
PROBED = {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -0.5}}, {"3": {"logprob": -0.25}}]}]}
HEAD = "HTTP/1.1 200 OK\r\ncontent-type: {}\r\n{}\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(document) -> bytes:
    return chunk(b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n")


class Paced:
    def __init__(self, tokens_per_s: float):
        self.gap_s = 1 / tokens_per_s if tokens_per_s else 0.0

    async def serve(self, reader, writer) -> None:
        """Answer the requests of one connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode().split("\r\n")
                sizes = [line.partition(":")[2] for line in lines if line.lower().startswith("content-length:")]
                body = await reader.readexactly(int(sizes[0])) if sizes else b""
                await self.answer(lines[0].split()[1], json.loads(body or b"{}"), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path: str, body: dict, writer) -> None:
        count = body.get("max_tokens", 16)
        if path in PAGES or "prompt_logprobs" in body:
            return self.whole(PAGES.get(path, PROBED), writer)
        usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
        if not body.get("stream"):
            await asyncio.sleep(count * self.gap_s)
            choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "x" * count}}
            return self.whole({"id": "x", "choices": [choice], "usage": usage, "metrics": METRICS}, writer)
        writer.write(HEAD.format("text/event-stream", "transfer-encoding: chunked").encode())
        due = asyncio.get_running_loop().time()
        for place in range(count):
            due += self.gap_s
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "length" if place == count - 1 else None}
            about = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "toy"}
            writer.write(event({**about, "choices": [choice]}))
            await writer.drain()
        if (body.get("stream_options") or {}).get("include_usage"):
            writer.write(event({"id": "x", "choices": [], "usage": usage, "metrics": METRICS}))
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def whole(self, document: dict, writer) -> None:
        data = json.dumps(document).encode()
        writer.write(HEAD.format("application/json", f"content-length: {len(data)}").encode() + data)


async def main() -> None:
    engine = Paced(float(sys.argv[2]))
    server = await asyncio.start_server(engine.serve, "127.0.0.1", int(sys.argv[1]), backlog=256)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
