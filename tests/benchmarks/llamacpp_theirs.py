"""The llama.cpp side of `tests.benchmarks.llamacpp`. It imports the package `xllamacpp` and nothing of specctl.

The first line of the input names the files to load. Each further line is a prompt as token ids. The answer is the text
as token ids, and the seconds reported by llama.cpp.
"""

import json
import os
import sys
import urllib.request

import xllamacpp

NGRAM = "COMMON_SPECULATIVE_TYPE_NGRAM_"
CONTEXT = 4096


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints to stdout
    asked = json.loads(sys.stdin.readline())
    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # waiting threads must not slow the other side
    params.n_ctx, params.n_parallel, params.cache_ram_mib = CONTEXT, 1, 0
    if asked["ngram"]:
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, NGRAM + asked["ngram"].upper())]
    server = xllamacpp.Server(params)
    print(json.dumps({"version": xllamacpp.__version__}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        request |= {"temperature": 0, "top_k": 1, "samplers": ["top_k"], "cache_prompt": False, "return_tokens": True}
        call = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(request).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(call) as reply:
            print(json.dumps(json.load(reply)), file=replies, flush=True)


main()
