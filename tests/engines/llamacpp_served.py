"""Run by the interpreter of an environment with xllamacpp: llama.cpp's HTTP server on loopback.

argv: the target's file; and optionally a drafter's file (- for drafts from the text), llama.cpp's name of the method,
and the number of draft tokens. The first line of stdout is the server's address; the server stops when its stdin is
closed. SPECCTL_PORT is its port, and SPECCTL_SLOTS the number of its slots.
"""

import os
import sys

import xllamacpp

METHOD = "COMMON_SPECULATIVE_TYPE_"


def main() -> None:
    target, *drafter = sys.argv[1:]
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints to stdout
    params = xllamacpp.CommonParams()
    params.model.path = target
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    slots = int(os.environ.get("SPECCTL_SLOTS", "1"))
    params.n_ctx, params.n_parallel, params.cache_ram_mib = 1024 * slots, slots, 0
    params.port = int(os.environ.get("SPECCTL_PORT", params.port))
    params.endpoint_metrics = True
    whole = xllamacpp.ggml_type.GGML_TYPE_F32  # rounding to fp16, the default, could change the argmax
    params.cache_type_k = params.cache_type_v = whole
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if drafter:
        file, method, tokens = drafter
        kind = METHOD + method.upper().replace("-", "_")
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
        draft = params.speculative.draft
        draft.n_max = int(tokens)
        if file != "-":
            draft.mparams.path = file
        draft.cache_type_k = draft.cache_type_v = whole
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, file=said, flush=True)
    sys.stdin.read()


main()
