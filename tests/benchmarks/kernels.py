"""Times of the attention, verification and distillation kernels against a few lines of eager PyTorch.

    python -m tests.benchmarks.kernels [--batches 1,8] [--vocabularies 32000,128000] [--drafted 8] [--repeats 30]

The floor of a kernel is the time to read its logits, or its keys and values, once.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl import kernels
from specctl.decoding.device import graphs
from specctl.decoding.models.loading import pick_device
from specctl.decoding.timing import WARM_UP, bandwidth, medians, synchronise
from specctl.kernels.distill import Teacher, linear_distill

HIDDEN, TRAINED_ROWS = 256, 1024  # sizes of the loss benchmark on a CPU
CUDA_HIDDEN, CUDA_TRAINED_ROWS = 4096, 8192  # the same on a GPU, as for an 8B target
TEMPERATURE = 0.8
DRAFTERS = (1, 4)  # numbers of drafters that are scored in one call
CONTEXTS = (4096, 32768)  # slots that a step attends to
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 8  # of an 8B target; several layers in turn, as one would stay in L2
MAX_CACHE_BYTES = 2**35  # largest KV cache in bytes
FLUSH_BYTES = 2**28  # bytes written before a call, to flush the L2 cache: five times the size of an H100's
GRAPH_KERNELS = {
    "attention",
    "argmax + walk_tree",
    "row_params + accept_chain",
    "expand_topk",
}  # others wait for the host


Case = tuple[str, str, Callable[[], object], Callable[[], object], int]
"""(kernel, size, ours, eager, bytes that must be read)."""


def timed(
    kernel: str, ours: Callable[[], object], eager: Callable[[], object], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of both functions.

    On a GPU the L2 cache could hold the data of a small batch, and launching takes the host longer than most kernels
    run. So the cache is flushed before each call, and launches are replayed from a graph, if it can be captured.
    """
    functions = {"ours": ours, "eager": eager}
    if device.type == "cpu":
        return medians(functions, repeats, device)
    if kernel in GRAPH_KERNELS:
        functions = {name: graphs.replay_of(run, device) for name, run in functions.items()}
    return cold_medians(functions, repeats, device)


def cold_medians(functions: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each function on a GPU with a cold L2 cache. GPU events after the flush measure the time, so
    the host's launch time does not count."""
    cache = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + WARM_UP):
        for name, function in functions.items():
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            started.record(torch.cuda.current_stream(device))
            function()
            ended.record(torch.cuda.current_stream(device))
            synchronise(device)
            if repeat >= WARM_UP:
                seconds[name].append(started.elapsed_time(ended) / 1000)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _peak(work: Callable[[], object], device: torch.device) -> int:
    """Peak device memory of a call in bytes, beyond the memory allocated before."""
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device) - held


def cases(batches: list[int], vocabularies: list[int], drafted: int, device: torch.device) -> Iterator[Case]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16
    if device.type == "cuda":  # on a CPU our attention is PyTorch's, with a mask
        for batch, context in itertools.product(batches, CONTEXTS):
            if batch * context * LAYERS * _slot(dtype) <= MAX_CACHE_BYTES:
                for rows in (1, drafted + 1):
                    yield attention(device, dtype, batch, rows, context)
    for vocabulary in vocabularies:
        for batch in batches:
            size = f"B {batch}, T {drafted}, V {vocabulary}"
            shape = (batch, drafted + 1, vocabulary)
            p = 3 * torch.randn(shape, generator=generator, device=device, dtype=dtype)
            q = p[:, :-1] + torch.randn(p[:, :-1].shape, generator=generator, device=device, dtype=dtype)
            tokens = q.argmax(-1)
            read = p.numel() * p.element_size()
            yield "argmax + walk_tree", size, *_greedy(p, tokens), read
            yield "row_params + accept_chain", size, *_feedback(p, q, tokens, 0), 2 * read
            for count in DRAFTERS:
                work = _feedback(p, q, tokens, count)
                yield f"the same + panorama, N {count}", size, *work, (2 + count) * read
            yield "expand_topk", size, *_expand(q.flatten(0, 1)), read
        yield _loss(device, vocabulary, generator)


def _slot(dtype: torch.dtype) -> int:
    """Bytes of a slot's keys and values in one layer."""
    return 2 * KV_HEADS * HEAD_DIM * dtype.itemsize


def attention(device: torch.device, dtype: torch.dtype, batch: int, rows: int, context: int) -> Case:
    """Case of an attention step: `rows` rows after `context` slots per sequence, against PyTorch's with a mask."""
    span = context + rows
    store = torch.randn(LAYERS, batch, span, 2 * KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
    q = torch.randn(batch, rows, HEADS, HEAD_DIM, device=device, dtype=dtype)
    base = torch.full((batch,), context, device=device)
    ancestry = kernels.Ancestry(base, rows)
    allowed = ancestry.allowed(rows, span)[:, None]
    mask = torch.zeros(allowed.shape, device=device, dtype=dtype).masked_fill_(~allowed, float("-inf"))
    layers = itertools.cycle(store)

    def eager() -> Tensor:
        keys, values = next(layers).transpose(1, 2).chunk(2, 1)
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True)

    def ours() -> Tensor:
        return kernels.attention(q, next(layers), ancestry, span, HEAD_DIM**-0.5)

    return "attention", f"B {batch}, T {rows}, context {context}", ours, eager, batch * span * _slot(dtype)


def _greedy(p: Tensor, tokens: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    batch, drafted = tokens.shape
    parents = torch.arange(-1, drafted - 1, device=p.device).expand(batch, -1)

    def ours() -> object:
        return kernels.walk_tree(kernels.argmax(p), tokens, parents)

    def eager() -> object:
        drawn = p.float().argmax(-1)
        accepted = (drawn[:, :-1] == tokens).long().cumprod(1).sum(1)
        return accepted, drawn.gather(1, accepted[:, None])

    return ours, eager


def _feedback(p: Tensor, q: Tensor, tokens: Tensor, count: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Case of the ratio rule, with acceptance, divergences and agreement of `count` drafters, the active one included.

    The chain is drawn from q. With `count` 0 it is the rule alone.
    """
    (batch, drafted), device = tokens.shape, p.device
    u = torch.rand(batch, drafted + 1, device=device)
    counts = torch.full((batch,), drafted, device=device)
    x = torch.cat((tokens, tokens[:, -1:]), 1).flatten()
    others = [F.pad(q.roll(n, 1), (0, 0, 0, 1)).flatten(0, 1) for n in range(count)]  # one row per target row
    place = torch.arange(batch, device=device)

    def parameters(logits: Tensor) -> kernels.Rows:
        flat = logits.flatten(0, 1)
        ones = torch.ones(len(flat), device=device)
        return kernels.row_params(flat, TEMPERATURE * ones, torch.zeros_like(ones, dtype=torch.int64), ones)

    proposal = parameters(q)  # not timed: a drafter that sampled has them already

    def ours() -> object:
        rows = parameters(p)
        verdict = kernels.accept_chain(rows, proposal, tokens, counts, u[:, :-1], u)
        return verdict, kernels.drafter_feedback(rows, [kernels.DraftRows(d) for d in others], x) if others else None

    def eager() -> object:
        target, draft = (p.float() / TEMPERATURE).softmax(-1), (q.float() / TEMPERATURE).softmax(-1)
        at = tokens[..., None]
        ratio = target[:, :-1].gather(2, at)[..., 0] / draft.gather(2, at)[..., 0]
        accepted = (u[:, :-1] < ratio).long().cumprod(1).sum(1)
        residual = (target[place, accepted] - F.pad(draft, (0, 0, 0, 1))[place, accepted]).clamp_min(0)
        verdict = accepted, torch.multinomial(residual, 1)
        return verdict, [_statistics(target.flatten(0, 1), logits, x) for logits in others]

    return ours, eager


def _statistics(target: Tensor, logits: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Statistics of `drafter_feedback` for one drafter, formula by formula."""
    draft = logits.float().softmax(-1)
    log_p, log_q = target.clamp_min(1e-9).log(), draft.clamp_min(1e-9).log()
    return (
        torch.minimum(target, draft).sum(-1),
        (target - draft).clamp_min(0).sum(-1),
        (target * (log_p - log_q)).sum(-1),
        -log_q.gather(1, x[:, None]),
        (draft * (log_q - log_p)).sum(-1),
        -(target * log_p).sum(-1),
        target.gather(1, x[:, None]),
        draft.gather(1, x[:, None]),
        draft.argmax(-1) == target.argmax(-1),
    )


def _expand(logits: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    return lambda: kernels.expand_topk(logits, 8), lambda: logits.float().log_softmax(-1).topk(8, -1)


# Outside of inference mode: DeepSpeed, if loaded, replaces F.linear, and its version saves inputs for backward.
@torch.inference_mode(False)
def _loss(device: torch.device, vocabulary: int, generator: torch.Generator) -> Case:
    hidden, rows = (HIDDEN, TRAINED_ROWS) if device.type == "cpu" else (CUDA_HIDDEN, CUDA_TRAINED_ROWS)
    x = torch.randn(rows, hidden, generator=generator, device=device).requires_grad_()
    head = (0.02 * torch.randn(vocabulary, hidden, generator=generator, device=device)).requires_grad_()
    teacher = Teacher(x.detach().bfloat16(), head.detach().bfloat16())
    at, share = torch.arange(rows, device=device), torch.ones(rows, device=device)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def run(loss: Callable[[], Tensor]) -> None:
        x.grad = head.grad = None
        with torch.autocast(device.type, torch.bfloat16):
            total = loss()
        total.backward()

    def eager() -> Tensor:
        p = F.linear(teacher.rows, head.detach()).float().softmax(-1)
        return -(p * F.linear(x, head).float().log_softmax(-1)).sum()

    def ours() -> Tensor:
        return linear_distill(x, head, None, teacher, at, share, "soft_ce")[0]

    return "linear_distill", f"T {rows}, H {hidden}, Vd {vocabulary}", lambda: run(ours), lambda: run(eager), 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batches", "1,8"), ("vocabularies", "32000,128000")):
        parser.add_argument(f"--{name}", type=lambda text: [*map(int, text.split(","))], default=default)
    for name, number in (("drafted", 8), ("repeats", 30)):
        parser.add_argument(f"--{name}", type=int, default=number)
    options, device = parser.parse_args(), pick_device("auto")
    speed = bandwidth(device)
    print(f"{kernels.backend(device.type)} on {device}, {torch.get_num_threads()} threads")
    with torch.inference_mode():
        for kernel, size, ours, eager, read in cases(options.batches, options.vocabularies, options.drafted, device):
            seconds = timed(kernel, ours, eager, options.repeats, device)
            ratio, floor = seconds["eager"] / seconds["ours"], f", floor {1000 * read / speed:.3f} ms" if read else ""
            if device.type == "cuda":
                floor += f", {_peak(ours, device) / max(_peak(eager, device), 1):.2f} of its memory"
            print(f"{kernel:32} {size:28} {1000 * seconds['ours']:9.3f} ms, eager / ours {ratio:.2f}{floor}")


if __name__ == "__main__":
    main()
