"""The C++ layer step and candidate search agree with PyTorch, up to int8 and bf16 rounding."""

import functools

import pytest
import torch

from specctl import kernels
from specctl.decoding.models.native import PRODUCTS
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.drafters.eagle.drafter import FAMILY as eagle
from specctl.drafters.eagle3.drafter import FAMILY as eagle3
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.lora import Adapter
from specctl.drafters.mtp.drafter import FAMILY as mtp
from specctl.drafters.tree import TreeShape
from specctl.kernels import native
from specctl.recipe import DraftingRecipe, TrainRecipe
from tests.drafters.heads import disturbed
from tests.drafters.test_eagle3 import forced
from tests.drafters.test_eagle31 import SHAPE, eagle31
from tests.toys import mtp as toys
from tests.toys.decoding import decode

pytestmark = pytest.mark.skipif(native.library() is None, reason="no AVX2, or no C++ compiler")
TREE = TreeShape(depth=4, width=3, nodes=9, children=2, stop_below=0.0)


@pytest.fixture(scope="module")
def targets():
    return [load_target("builtin", device="cpu", dtype=dtype) for dtype in ("bf16", "fp32")]


def build_eagle(target):
    torch.manual_seed(1)
    return disturbed(eagle.build(TrainRecipe(), target, lambda count: list(range(count))))


BUILT = {
    "eagle3": (eagle31, eagle3),
    "eagle3, the state of the layer": (lambda target: eagle31(target, norm_output=False, fc_norm=True), eagle3),
    "eagle3, normed residual": (lambda target: eagle31(target, norm_before_residual=True, norm_output=True), eagle3),
    "eagle3, two layers": (lambda target: eagle31(target, norm_output=True, num_layers=2), eagle3),
    "eagle": (build_eagle, eagle),
    "mtp": (lambda target: toys.head(target), mtp),
    "mtp, norms of queries and keys": (lambda target: toys.head(target, "qwen", qk_norm=True, bias=True), mtp),
}


@pytest.fixture(params=BUILT)
def three(request, targets):
    """Return the bf16 drafter with C++, the bf16 drafter with PyTorch alone, and the fp32 drafter."""
    build, family = BUILT[request.param]
    head = build(targets[1]).to(torch.bfloat16).float()
    made = [family.make_drafter(head, target, DraftingRecipe()) for target in (targets[0], *targets)]
    without(made[1])
    return made


def without(drafter):
    """Disable the C++ step of a drafter."""
    layers = [drafter, *drafter.upper]
    drafter._native = tuple(getattr(layer, name) for layer in layers for name in PRODUCTS), None
    drafter.head.int8 = None


def test_the_cpp_step_is_as_exact_as_pytorch(three, targets, prompts):
    """Compare the logits of four drafting steps after one forward pass over a prompt."""
    committed = decode(targets[1], [prompts[0]], sampling=GREEDY, max_new_tokens=7, seeds=[0])[0]
    text = committed.prompt_ids + committed.output_ids
    text, following = text[:-6], text[-6:]
    with torch.inference_mode():
        ours, theirs, exact = (
            torch.stack([logits.float() for logits in forced(drafter, target, text, following)])
            for drafter, target in zip(three, (targets[0], *targets), strict=True)
        )
    assert three[0]._native[1] is not None and three[1]._native[1] is None and three[2]._native[1] is None
    for step, (mine, usual, right) in enumerate(zip(ours, theirs, exact, strict=True)):
        off, off_usual = ((one - right).norm() / right.norm() for one in (mine, usual))
        assert off < 1.5 * off_usual + 0.01 and off < 0.06, step


HOW = {"sampling": GREEDY, "max_new_tokens": 20, "seeds": [0] * 3}


@pytest.fixture(scope="module")
def plain(targets, prompts):
    """Return `plain(slots)`, which gives the outputs of plain decoding with that many texts at once."""
    return functools.cache(lambda slots: [one.output_ids for one in decode(targets[0], prompts, slots=slots, **HOW)])


SHAPES = {"chains": (SHAPE, 3), "trees": (TREE, 3), "a tree": (TREE, 1)}


@pytest.mark.parametrize(
    ("three", "shape", "slots"),
    [
        pytest.param(
            name, *how, id=f"{name}-{kind}", marks=() if name == "eagle3" or kind == "trees" else pytest.mark.slow
        )
        for name in BUILT
        for kind, how in SHAPES.items()
    ],
    indirect=["three"],
)
def test_the_cpp_step_accepts_as_many_tokens_as_pytorch(three, targets, prompts, plain, shape, slots):
    """Trees, several texts and a growing cache; drafts may differ in near ties only."""
    found = []
    for drafter in three[:2]:
        drafter.shape = shape
        found.append(decode(targets[0], prompts, drafter=drafter, slots=slots, **HOW))
    for done in found:
        assert [one.output_ids for one in done] == plain(slots)
    passes = [sum(one.target_passes for one in done) for done in found]
    assert abs(passes[0] - passes[1]) <= 0.1 * passes[1] + 1


@pytest.mark.parametrize("outputs", [16, 33, 2047])
@pytest.mark.parametrize("int8", [False, True])
def test_candidates_equal_the_top_k_of_the_logits(outputs, int8):
    generator = torch.Generator().manual_seed(outputs)
    weight, x = (torch.randn(n, 96, generator=generator).bfloat16() for n in (outputs, 13))
    bias = torch.randn(outputs, generator=generator).bfloat16()
    product = native.NativeProduct(weight, bias, native.library(), int8)
    for rows in (1, 2, 13):
        for count in (1, 3, 16):
            logits, gains, index = product.candidates(x[:rows], count)
            assert torch.equal(logits.bfloat16(), product(x[:rows]))
            expected, places = kernels.reference.expand_topk(logits, count)
            assert torch.equal(index, places)
            torch.testing.assert_close(gains, expected, atol=1e-5, rtol=1e-5)


def test_candidates_break_ties_by_index_and_skip_nan():
    weight = torch.ones(40, 16).bfloat16()
    weight[[3, 20, 39]] = 2
    bias = torch.zeros(40)
    bias[20] = torch.nan
    product = native.NativeProduct(weight, bias, native.library())
    _, gains, index = product.candidates(torch.ones(1, 16).bfloat16(), 4)
    assert index.tolist() == [[3, 39, 0, 1]]
    sound = torch.full((39,), 16.0)
    sound[[3, 38]] = 32
    torch.testing.assert_close(gains[0, 0], sound.log_softmax(0)[3], atol=1e-5, rtol=0)


def test_adapters_and_short_windows_use_pytorch(targets, prompts):
    target = targets[0]
    head = eagle31(target, sliding_window=64)
    drafter = Eagle3Drafter(head, target, SHAPE)
    pair = torch.randn(4, 2 * target.hidden_size), torch.randn(target.model.heads * target.model.head_dim, 4) / 50
    adapted = drafter.adapted(Adapter({"midlayer.self_attn.q_proj": pair}))
    long = [*prompts[0], *prompts[1], *prompts[0], *prompts[1]]
    ran = [ran_in_cpp(target, one, prompt) for one in (drafter, adapted) for prompt in (prompts[0][:8], long)]
    assert ran == [{True}, {False}, {False}, {False}]


def ran_in_cpp(target, drafter, prompt):
    """Return whether the layer ran in C++ in each step; also check that the text is the target's."""
    steps, step = [], drafter._native_step

    def spy(cache, plan):
        steps.append(step(cache, plan))
        return steps[-1]

    drafter._native_step = spy
    options = {"sampling": GREEDY, "max_new_tokens": 30, "seeds": [0]}
    drafted, plain = (decode(target, [prompt], drafter=one, **options)[0].output_ids for one in (drafter, None))
    assert drafted == plain
    del drafter._native_step
    return {one is not None for one in steps}
