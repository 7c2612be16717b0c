"""Linear layers with weights packed for the CPU, and vocabulary heads that keep fp32 sums."""

import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from specctl.decoding.models import linear
from specctl.decoding.models.linear import LARGEST, ROUNDED, DraftLinear, Linear, VocabularyHead, fits_half
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import load_target
from tests.decoding.test_device_round import small_lm
from tests.toys.decoding import decode

packs = pytest.mark.skipif(not linear._half_computes(), reason="this torch has no fp16 products on this CPU")


def weights(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Random weights that are exact in bf16, with the standard deviation usual in language models."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator).mul_(0.02).bfloat16().float()


@packs
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 48)], ids=["", "bias"])
@pytest.mark.parametrize("threaded", [linear.THREADED, 1], ids=["", "for several threads"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (33,), (2, 3), (0,)])
def test_packed_weights_give_the_products_of_the_weights(monkeypatch, bias, threaded, shape):
    """Catches rounded weights, a bias that is added twice, and wrong rows beyond the kernel's block of rows."""
    monkeypatch.setattr(linear, "THREADED", threaded)
    weight = weights(48, 40)
    product = Linear(weight, bias)
    assert product.packed
    x = torch.randn(*shape, 40, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(product(x), F.linear(x, weight, bias), rtol=0, atol=1e-6)


@packs
@pytest.mark.parametrize(("threads", "rows", "shared"), [(1, 64, False), (2, 63, False), (2, 64, True)])
def test_many_rows_use_several_threads(monkeypatch, threads, rows, shared):
    """The fp16 call for few rows always computes with one thread. The other call packs its weights when it is first
    used, because packing takes most of the time of loading."""
    weight = weights(48, 40)
    monkeypatch.setattr(linear, "THREADED", 8 * weight.numel())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = torch.randn(rows, 40, generator=torch.Generator().manual_seed(1))
    with torch.profiler.profile() as profile:
        product = Linear(weight)
        for _ in range(2):
            torch.testing.assert_close(product(x), F.linear(x, weight), rtol=0, atol=1e-6)
    asked = Counter(event.name for event in profile.events())
    assert asked["quantized::linear_dynamic_fp16"] == 2 * shared
    assert asked["quantized::linear_prepack_fp16"] == shared


@packs
def test_weights_that_are_inexact_in_fp16_are_not_packed():
    """A target must have exactly its weights, so weights trained in fp32 stay unpacked. Drafters may be rounded."""
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) * 0.02
    exact, rough = Linear(weight), DraftLinear(weight)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    assert not exact.packed and torch.equal(exact(x), F.linear(x, weight))
    assert rough.packed and 0 < (rough(x) - F.linear(x, weight)).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("value", "exact", "rough"),
    [
        (0.0123291015625, True, True),  # bf16
        (2.0**-24, True, True),
        (1.3 * 2.0**-24, True, True),  # below fp16's resolution: the error is less than `ROUNDED`
        (0.01234, False, True),
        (LARGEST, True, True),
        (2 * LARGEST, False, False),
        (float("nan"), False, False),
        (float("inf"), False, False),
    ],
)
def test_weights_fit_fp16_within_its_range_and_resolution(monkeypatch, value, exact, rough):
    monkeypatch.setattr(linear, "PART", 64 * 8)
    weight = weights(70, 8)
    weight[66, 3] = value  # after the rows that are checked first
    assert (fits_half(weight, rough=False), fits_half(weight, rough=True)) == (exact, rough)
    if exact:
        assert (weight.half() - weight).abs().max() <= ROUNDED


def test_without_fp16_products_torch_multiplies(monkeypatch):
    """A torch without these calls, or another processor, must decode, too."""
    monkeypatch.delattr(torch, "fbgemm_pack_gemm_matrix_fp16", raising=False)
    linear._half_computes.cache_clear()
    try:
        weight = weights(16, 16)
        product = Linear(weight)
        x = torch.ones(1, 16)
        assert not product.packed and torch.equal(product(x), F.linear(x, weight))
    finally:
        linear._half_computes.cache_clear()


@packs
def test_packing_gives_no_warning():
    """Torch marks these calls as deprecated; that warning would tell a user nothing."""
    linear._half_computes()
    with warnings.catch_warnings(action="error"):
        Linear(weights(16, 16))(torch.ones(1, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_on_a_gpu_are_in_fp32(monkeypatch, dtype, bias):
    """Checked with fake tensors, without a GPU."""
    monkeypatch.setattr(linear, "_keeps_sums", lambda device, dtype: device.type == "cuda")
    with FakeTensorMode():
        how = dict(device="cuda", dtype=dtype)
        head = VocabularyHead(torch.empty(16, 8, **how), torch.empty(16, **how) if bias else None)
        for shape in ((), (3,), (2, 3)):
            logits = head(torch.empty(*shape, 8, **how))
            assert logits.dtype == torch.float32 and logits.shape == (*shape, 16)


def _missing(*args, **options):
    raise TypeError("mm() got an unexpected keyword argument 'out_dtype'")


PRODUCTS = {
    "kept": lambda x, y, out_dtype, mm=torch.mm: mm(x.to(out_dtype), y.to(out_dtype)),
    "rounded": lambda x, y, out_dtype, mm=torch.mm: mm(x, y).to(out_dtype),
    "missing": _missing,
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_keeps_sums_tests_the_product_of_a_gpu(monkeypatch, product):
    """With a simulated GPU: logits are in fp32 if torch has such products and they are not rounded."""
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *args, device, **options: full(*args, **options))
    monkeypatch.setattr(torch, "mm", PRODUCTS[product])
    asked = linear._keeps_sums.__wrapped__
    for dtype in (torch.bfloat16, torch.float16):
        assert asked(torch.device("cuda"), dtype) == (product == "kept")
    assert not asked(torch.device("cpu"), torch.bfloat16) and not asked(torch.device("cuda"), torch.float32)


@pytest.fixture
def sums(monkeypatch):
    """Let the CPU keep fp32 sums of half-precision products, as a GPU does."""
    monkeypatch.setattr(linear, "_packed", lambda *_: None)
    monkeypatch.setattr(linear, "_keeps_sums", lambda device, dtype: dtype == torch.bfloat16)
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y, out_dtype: product(x.to(out_dtype), y.to(out_dtype)))


def test_the_vocabulary_head_keeps_differences_below_bf16(sums):
    weight = torch.tensor([[16.0, 4.0], [16.0, 4.03125]]).bfloat16()
    x = torch.ones(1, 2).bfloat16()
    assert Linear(weight)(x).unique().numel() == 1, "negative control"
    assert VocabularyHead(weight, torch.tensor([1.0, 1.0]).bfloat16())(x).tolist() == [[21.0, 21.03125]]


def test_a_cpu_rounds_logits_to_bf16():
    """A product with fp32 sums takes 1.1 to 1.4 times as long there."""
    weight = weights(48, 40).bfloat16()
    x = torch.randn(3, 40).bfloat16()
    assert torch.equal(VocabularyHead(weight)(x), Linear(weight)(x))


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_speculative_text_with_fp32_logits_equals_plain_decoding(sums, tiny_directory, proposal):
    """Bit for bit in exact mode: the target's distributions are in fp32, the drafter's in bf16."""
    target = load_target(tiny_directory("qwen3"), device="cpu", dtype="bf16")
    drafter = small_lm(target, proposal)
    drafter.model.head = Linear(drafter.model.head.weight)
    how = dict(sampling=Sampling(0.8, 40, 0.9), max_new_tokens=12, seeds=[1, 2], exact=True)
    kinds, step = set(), target.step

    def watched(*args):
        said = step(*args)
        kinds.add(said[0].dtype)
        return said

    target.step = watched
    texts = [decode(target, [[5, 9, 30], [8, 4]], drafter=who, **how) for who in (None, drafter)]
    assert kinds == {torch.float32} and texts[1][0].drafted > 0
    if proposal == "deterministic":
        assert [text.output_ids for text in texts[0]] == [text.output_ids for text in texts[1]]
