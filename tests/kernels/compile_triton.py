"""Compile every Triton kernel for a GPU that need not be there: V DTYPE CAPABILITY. Prints the kernels' names.

Run by test_triton in a process of its own. A launch compiles for the arguments it is given and computes nothing.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from specctl.kernels import DraftRows, reference, triton_backend
from specctl.kernels.objectives import OBJECTIVES

TYPES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32"}
VOCABULARY, DTYPE, CAPABILITY = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])


def compile_only(kernel, *args, grid, warmup, **options):
    signature, constants = {}, {}
    for parameter, value in zip(kernel.params, args, strict=True):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    print(kernel.fn.__name__)


JITFunction.run = compile_only
torch.Tensor.new_empty = lambda self, *size, **options: self.new_zeros(*size, **options)  # results that are used as ids

count = 3
x = torch.zeros(count + 1, VOCABULARY, dtype=DTYPE)
ones, zeros = torch.ones(count + 1), torch.zeros(count + 1, dtype=torch.int64)
tree = torch.zeros(1, count, dtype=torch.int64)
triton_backend.uniform(zeros[:1], tree, 0)
triton_backend.argmax(x)
rows = triton_backend.row_params(x, ones, zeros, ones)
triton_backend.sample_rows(rows, ones)
triton_backend.expand_topk(x, 4)
triton_backend.walk_tree(zeros[None], tree, tree)
for rule in reference.RULES:
    chain = rows, rows.take(torch.arange(count)), tree, torch.tensor([count]), ones[None, :count], ones[None]
    triton_backend.accept_chain(*chain, rule)
for objective in OBJECTIVES:
    triton_backend.distill_rows(x, zeros if objective == "ce" else x.float(), ones, objective)
triton_backend.panorama(rows, [DraftRows(x), DraftRows(x, torch.arange(VOCABULARY), ones)], zeros)
