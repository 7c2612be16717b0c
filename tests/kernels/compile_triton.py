"""Compile every Triton kernel for a GPU that may be absent: V STRIDE DTYPE CAPABILITY. Prints one JSON line per kernel.

Run by test_triton in a separate process. Launches go through Triton's own binder, with arguments specialized as on a
GPU: aligned pointers, integers divisible by 16, and integers equal to 1. Kernels are compiled and not run.
"""

import hashlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specctl.kernels import PAGE, Ancestry, DraftRows, reference, triton_backend
from specctl.kernels.objectives import OBJECTIVES

VOCABULARY, STRIDE, DTYPE, CAPABILITY = (
    int(sys.argv[1]),
    int(sys.argv[2]),
    getattr(torch, sys.argv[3]),
    int(sys.argv[4]),
)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Absent:
    """The driver of an absent GPU."""

    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(kernel, *args, grid, warmup, **options):
    compiled = run(kernel, *args, grid=grid, warmup=True, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True)
    used = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage))
    loads = re.findall(r"\bld\.global\S*?\.(v\d\.)?b(\d+)", compiled.asm["ptx"])
    copies = re.findall(r"cp\.async\.\S+\s+\[[^]]*\], \[[^]]*\], 0x([0-9a-f]+)", compiled.asm["ptx"])
    widths = [int(bits) * int(vector[1:-1] or 1) if vector else int(bits) for vector, bits in loads]
    widths += [8 * int(size, 16) for size in copies]
    constants = dict(zip(kernel.arg_names, args, strict=False))
    variant = [str(constants["M"])] if "M" in constants else []
    variant += ["paged"] if constants.get("PAGE") else []
    row = {
        "kernel": " ".join((kernel.fn.__name__, *variant)),
        "registers": int(used["REG"]),
        "stack": int(used["STACK"]) + int(used["LOCAL"]),  # includes spilled registers
        "gathers": constants.get("MAPPED", False),
        "threads": 32 * compiled.metadata.num_warps,
        "shared": compiled.metadata.shared,
        "code": hashlib.sha256(compiled.asm["cubin"]).hexdigest(),
        "loads": {str(width): widths.count(width) for width in sorted(set(widths))},  # number of loads by width in bits
    }
    print(json.dumps(row))


run, JITFunction.run = JITFunction.run, compile_only
driver.set_active(Absent())
torch.Tensor.new_empty = lambda self, *size, **options: self.new_zeros(*size, **options)  # some become indices

count = 3
x = torch.zeros(count + 1, STRIDE, dtype=DTYPE)[:, :VOCABULARY]
ones, zeros = torch.ones(count + 1), torch.zeros(count + 1, dtype=torch.int64)
tree = torch.zeros(1, count, dtype=torch.int64)
triton_backend.uniform(zeros[:1], tree, 0)
triton_backend.argmax(x)
rows = triton_backend.row_params(x, ones, zeros, ones)
triton_backend.sample_rows(rows, ones)
triton_backend.expand_topk(x, 4)
triton_backend.walk_tree(zeros[None], tree, tree)
triton_backend.sample_tree(x[None], (ones[:1], zeros[:1], ones[:1]), ones[None], tree, tree)
for rule in reference.RULES:
    drafted = rows._replace(logits=x[:count], **{name: getattr(rows, name)[:count] for name in rows._fields[1:]})
    chain = rows, drafted, tree, torch.tensor([count]), ones[None, :count], ones[None]
    triton_backend.accept_chain(*chain, rule)
for objective in OBJECTIVES:
    teacher = zeros if objective == "ce" else x.float() if x.dtype == torch.bfloat16 else x
    triton_backend.distill_rows(x, teacher, ones, objective)
half = {torch.float64: torch.float16}.get(DTYPE, DTYPE)  # attention does not support fp64
HEADS, GROUPS, CONTEXT = 8, 4, 4096
for dim, steps in itertools.product((64, 96, 128), (1, 8, 16, 49)):
    store = torch.zeros(1, CONTEXT + steps, 2 * HEADS, dim, dtype=half)
    q = torch.zeros(1, steps, (GROUPS + 2) * HEADS, dim, dtype=half)[:, :, : GROUPS * HEADS]
    ancestry = Ancestry(torch.tensor([CONTEXT]), steps, torch.zeros(1, steps, dtype=torch.int64))
    triton_backend.attention(q, store, ancestry, CONTEXT + steps, 1.0)
    pages = torch.zeros(1, CONTEXT // PAGE + 1, dtype=torch.int64)
    triton_backend.attention(q, store[0, :CONTEXT], ancestry, CONTEXT + steps, 1.0, pages)
for hidden, inner, heads, dim, normed in ((4096, 14336, 32, 128, False), (5120, 25600, 64, 80, True)):
    residual, delta, weight = torch.zeros(2, hidden), torch.zeros(2, hidden, dtype=half), torch.zeros(hidden)
    triton_backend.add_rms_norm(residual, delta, weight, 1e-5)
    triton_backend.silu_and_mul(torch.zeros(2, 2 * inner, dtype=half))
    qkv, table = torch.zeros(2, heads + 2 * HEADS, dim, dtype=half), torch.zeros(64, dim, dtype=half)
    places, slots = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    norms = [weight[:dim].clone() if normed else None] * 2
    cached = torch.zeros(1, 64, 2 * HEADS, dim, dtype=half)
    triton_backend.rope_and_cache(qkv, table, table, places, slots, cached, *norms, 1e-5)
if half.itemsize == 2:  # fp32 uses PyTorch
    for dim, groups in itertools.product((64, 96, 128), (1, 4)):
        q, key = torch.zeros(count, HEADS, groups, dim, dtype=half), torch.zeros(CONTEXT, HEADS, dim, dtype=half)
        span = torch.zeros(2, count, dtype=torch.int32).unbind()
        flat = torch.zeros(q.shape[:3])
        triton_backend.span_attention(q, key, key, *span)
        triton_backend.span_attention_backward(q, key, key, q, flat, flat, *span)
for drafts in ([DraftRows(x)], [DraftRows(x)] * 8, [DraftRows(x), DraftRows(x, torch.arange(VOCABULARY), ones)]):
    triton_backend.drafter_feedback(rows, drafts, zeros)
