"""Device rounds give the texts and counts of host rounds, with every drafter, every batch size and every end of a text.

No test needs a GPU: SPECCTL_GRAPHS=eager runs device rounds on any machine, and the fixture `graphs_on` replaces CUDA
graphs.
"""

import copy
import gc
import time
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from specctl import kernels
from specctl.decoding import attention, host_runner
from specctl.decoding import plan as plans
from specctl.decoding.cache import KVCache
from specctl.decoding.controllers import PerSequence
from specctl.decoding.device import graphs
from specctl.decoding.device import rounds as device_round
from specctl.decoding.device.device_batch import ancestors
from specctl.decoding.models import linear
from specctl.decoding.models.loading import load_model
from specctl.decoding.paged import PagedCache
from specctl.decoding.plan import plan_at, plan_rows
from specctl.decoding.records import PADDING, DraftTree, topology
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.state import PerText
from specctl.drafters import pool
from specctl.drafters.dflash import drafter as dflash
from specctl.drafters.dflash.drafter import BlockDrafter
from specctl.drafters.dflash.head import BlockHead
from specctl.drafters.eagle.drafter import FAMILY as eagle
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.eagle3.head import Eagle3Config, Eagle3Head
from specctl.drafters.hybrid.costs import ROWS, Costs
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.lm.drafter import FAMILY as lm
from specctl.drafters.lm.model import LM
from specctl.drafters.mtp.drafter import MtpDrafter
from specctl.drafters.peagle.drafter import FAMILY as peagle
from specctl.drafters.peagle.drafter import PEagleDrafter
from specctl.drafters.peagle.head import PEagleHead
from specctl.drafters.text.device_rounds import union
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.drafters.tree import TreeShape
from specctl.kernels import reference, self_check
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe
from tests.conftest import SIZES, write_tiny
from tests.toys import decoding, mtp
from tests.toys.decoding import WORDS, engine_for, target_of_few_words

HOT = Sampling(1.0, 0, 1.0)
FILTERED = Sampling(0.8, 40, 0.9)
PROMPTS = [[5, 9, 300, 12, 7, 7, 41], [88, 4], [17, 230, 17, 230, 17], [1], [600, 20]]
NEW = [16, 9, 12, 5, 22]
EOS_BIAS = -2.0  # in some texts soon, in one after a while, in others never
MIXED = [HOT, FILTERED, HOT, GREEDY, HOT]
SHAPES = {
    "chain": TreeShape(depth=4, width=1, nodes=4, children=1, stop_below=0.0),
    "comb": TreeShape(depth=4, width=1, nodes=12, children=4, stop_below=0.0),
    "tree": TreeShape(depth=4, width=5, nodes=20, children=4, stop_below=0.0),
    "wide": TreeShape(depth=3, width=8, nodes=62, children=6, stop_below=0.0),  # fewer children than places for them
}
"""No shape stops early: a device round cannot."""


@pytest.fixture(scope="module")
def tiny(tiny_directory):
    """A target that writes only seven words, one of them the end of a text, so that random drafts are often right."""
    return target_of_few_words(tiny_directory("qwen3"), end_bias=EOS_BIAS)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Such a target with windows, a rotary table for each type of layers, and four norms in a layer."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = SIZES | {"head_dim": 16, "sliding_window": 64, "layer_types": kinds}
    directory = write_tiny(tmp_path_factory.mktemp("gemma3"), "Gemma3TextConfig", sizes)
    return target_of_few_words(directory, end_bias=EOS_BIAS)


def decode(target, prompts=PROMPTS, **more):
    count = len(prompts)
    options = dict(max_new_tokens=NEW[:count], seeds=[1, 2, 3, 4, 5][:count], share_rows=False) | more
    return [replace(one, prefill_s=0, decode_s=0, replays=0) for one in decoding.decode(target, prompts, **options)]


EAGLE31 = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "sliding_window": 64}
PAPER = {"fc_norm": True, "norm_output": True}


def eagle3(target, shape, words=WORDS, num_heads=4, **options):
    """A random head."""
    torch.manual_seed(0)
    config = Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=64,
        num_heads=num_heads,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=target.vocab_size,
        draft_vocab_size=len(words),
        taps=(1, 2, 3),
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=256,
        **options,
    )
    return Eagle3Drafter(Eagle3Head(config, torch.tensor(words)), target, shape)


def eagle1(target, shape):
    drafter = eagle.make_drafter(eagle.build(TrainRecipe(), target, None), target, DraftingRecipe())
    drafter.shape, drafter.head.bias = shape, target.model.head.bias
    return drafter


def own_layer(target, shape, layout, **options):
    drafter = MtpDrafter(mtp.head(target, layout, **options), target, shape)
    drafter.head.bias = target.model.head.bias
    return drafter


def small_lm(target, proposal):
    """The target's own weights plus noise."""
    model = load_model(target.name, device=target.device, dtype=torch.float32)
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data += 0.3 * weight.std(correction=0) * torch.randn_like(weight)
    drafter = lm.make_drafter(LM(model), target, DraftingRecipe(depth=4, stop_below=0.0, proposal=proposal))
    drafter.model.head.bias = target.model.head.bias
    return drafter


def depth_heads(target, family, shape, words=WORDS):
    """Heads that start from the target, plus noise: their blocks start at zero."""
    own = pool.load_family(family)
    torch.manual_seed(0)
    recipe = TrainRecipe(arch=family, drafter=DrafterRecipe(draft_heads=4, vocab_size=words and len(words)))
    module = own.build(recipe, target, lambda size: words)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    drafter = own.make_drafter(module.eval(), target, DraftingRecipe(**vars(shape)))
    if drafter.ids is None:
        for head in drafter.heads:
            head.bias = target.model.head.bias
    return drafter


def block(target, shape, words=WORDS, **sizes):
    """A random block head. The noise gives every part an effect: a Markov head starts at zero."""
    form = dflash.FAMILY.architecture(DrafterRecipe(vocab_size=words and len(words), block_size=5, **sizes), target)
    torch.manual_seed(0)
    head = BlockHead(form, words and torch.tensor(words))
    head.initialise(target)
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    drafter = BlockDrafter(head, target, shape)
    if words is None:
        drafter.head.bias = target.model.head.bias
    return drafter


def parallel_eagle(target, shape, **sizes):
    """A random head. The noise gives its masks an effect: they start at zero."""
    recipe = TrainRecipe(arch="peagle", ttt_steps=4, drafter=DrafterRecipe(vocab_size=len(WORDS), **sizes))
    torch.manual_seed(0)
    head = PEagleHead(peagle.architecture(recipe.drafter, target, recipe.ttt_steps), torch.tensor(WORDS))
    head.initialise(target)
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return PEagleDrafter(head, target, shape)


MIXED_LAYERS = ["sliding_attention", "full_attention"]
MADE = {
    "plain": lambda target: None,
    **{f"eagle3 {name}": lambda target, shape=shape: eagle3(target, shape) for name, shape in SHAPES.items()},
    "eagle3.1": lambda target: eagle3(target, SHAPES["tree"], **EAGLE31),
    "eagle3.1 as in its paper": lambda target: eagle3(target, SHAPES["chain"], **PAPER),
    "eagle3 chain of two layers": lambda target: eagle3(target, SHAPES["chain"], num_layers=2),
    "eagle3 tree of three layers": lambda target: eagle3(target, SHAPES["tree"], **EAGLE31, num_layers=3),
    "eagle": lambda target: eagle1(target, SHAPES["tree"]),
    "mtp chain": lambda target: own_layer(target, SHAPES["chain"], "mimo", bias=True),
    "mtp tree": lambda target: own_layer(target, SHAPES["tree"], "qwen", qk_norm=True),
    "medusa chain": lambda target: depth_heads(target, "medusa", SHAPES["chain"]),
    "medusa tree": lambda target: depth_heads(target, "medusa", SHAPES["tree"]),
    "medusa of all words": lambda target: depth_heads(target, "medusa", SHAPES["comb"], None),
    "hydra chain": lambda target: depth_heads(target, "hydra", SHAPES["chain"]),
    "hydra tree": lambda target: depth_heads(target, "hydra", SHAPES["tree"]),
    "dflash chain": lambda target: block(target, SHAPES["chain"], markov_rank=0),
    "dflash tree": lambda target: block(target, SHAPES["tree"], markov_rank=0),
    "dflash with a Markov head": lambda target: block(target, SHAPES["tree"]),
    "dflash of all words": lambda target: block(target, SHAPES["wide"], None),
    "dflash 2": lambda target: block(target, SHAPES["chain"], conv_kernel_size=2, selector_rank=8),
    "dflash windows": lambda target: block(target, SHAPES["chain"], sliding_window=64),
    "dflash mixed": lambda target: block(
        target, SHAPES["tree"], sliding_window=64, layer_types=MIXED_LAYERS, markov_rank=0
    ),
    "dflash causal": lambda target: block(target, SHAPES["chain"], is_causal=True),
    "peagle chain": lambda target: parallel_eagle(target, SHAPES["chain"]),
    "peagle tree": lambda target: parallel_eagle(target, SHAPES["tree"], num_layers=2),
    "lookup": lambda target: Lookup(),
    "suffix": lambda target: Suffix(nodes=4),
    "lm": lambda target: small_lm(target, "deterministic"),
    "lm sampled": lambda target: small_lm(target, "sampled"),
}


EACH = ["plain", "eagle3 tree", "medusa tree", "hydra tree", "dflash with a Markov head", "peagle tree", "suffix", "lm"]
"""One drafter for every kind of round."""


@pytest.fixture(scope="module")
def drafters(tiny):
    """Drafters by name. Their weights are not packed for the CPU: packed weights take no fake tensors."""
    made = {}

    def make(name):
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(linear, "_packed", lambda *_: None)
                made[name] = MADE[name](tiny)
        return made[name]

    return make


@pytest.fixture
def on_device(monkeypatch):
    """A function. After its call, rounds run on the device; the test fails if no round does."""
    rounds = []

    def start():
        monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
        whole = device_round.DeviceRounds.round
        monkeypatch.setattr(device_round.DeviceRounds, "round", lambda *args: (rounds.append(args[1]), whole(*args)))

    yield start
    assert rounds


@pytest.mark.parametrize(
    ("name", "sampling", "slots"),
    [*((name, MIXED, 2) for name in MADE), *((name, GREEDY, 1) for name in ("plain", "eagle3 tree", "lm"))],
    ids=[*(f"{name}-mixed" for name in MADE), "plain-greedy", "eagle3 tree-greedy", "lm-greedy"],
)
def test_same_texts_and_counts(tiny, drafters, on_device, name, sampling, slots):
    """One or two texts at a time. The next text takes the place of an ended text. Ends and limits fall inside
    drafts."""
    how = dict(sampling=sampling, drafter=drafters(name), slots=slots)
    host = decode(tiny, **how)
    on_device()
    assert decode(tiny, **how) == host


@pytest.mark.parametrize("ignoring", [{0, 3}, {0, 1, 2, 3, 4}], ids=["two", "all"])
@pytest.mark.parametrize("name", ["plain", "eagle3 tree"])
def test_texts_that_ignore_ends(tiny, drafters, on_device, name, ignoring):
    """They go on to their limits, and the others end where they did."""
    asked = decoding.requests(PROMPTS, sampling=HOT, max_new_tokens=NEW, seeds=[1, 2, 3, 4, 5])

    def lengths(ignoring):
        engine, ended = engine_for(tiny, drafters(name), share_rows=False), {}
        for n, request in enumerate(asked):
            engine.add(replace(request, ignores_eos=n in ignoring))
        while engine.busy:
            ended |= {event.id: event.ended.output_ids for event in engine.step() if event.ended}
        return ended

    short, host = lengths(set()), lengths(ignoring)
    assert any(len(short[n]) < NEW[n] for n in ignoring)
    for n, ids in host.items():
        assert ids == short[n] if n not in ignoring else len(ids) == NEW[n] and ids[: len(short[n])] == short[n]
    on_device()
    assert lengths(ignoring) == host


@pytest.mark.parametrize("head", ["eagle3 tree", "medusa tree", "peagle tree"])
@pytest.mark.parametrize("text", ["lookup", "suffix"])
def test_hybrids_on_the_device(tiny, drafters, graphs_on, monkeypatch, head, text):
    """A hybrid gives the texts of plain decoding, in no more target steps than either of its drafters alone."""
    free = Costs(tuple(1.0 for _ in ROWS), first=0.0, level=0.0)
    together = Hybrid(drafters(head), drafters(text), free)
    assert together.fixed_shape
    how = dict(sampling=MIXED, slots=2)
    plain = decode(tiny, **how)
    graphs_on()
    steps = {}
    for name, drafter in {"both": together, head: drafters(head), text: drafters(text)}.items():
        with warnings.catch_warnings(action="error"):
            found = decode(tiny, drafter=drafter, **how)
        assert [one.output_ids for one in found] == [one.output_ids for one in plain]
        assert any(one.ahead for one in found)
        steps[name] = sum(one.target_passes for one in found)
    assert steps["both"] <= min(steps[head], steps[text])


def paths(tokens, parents):
    """Token paths from the root to every node of a tree."""
    found = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append(None if parent == PADDING else ((found[parent] if parent >= 0 else ()) + (token,)))
    return found


def test_union_of_trees():
    """The union has every path of the two trees once, parents first; random trees with few words share many paths."""
    torch.manual_seed(0)

    def tree(nodes):
        tokens, parents = [], []
        while len(tokens) < nodes:
            parent, token = int(torch.randint(-1, max(len(tokens), 1), ())), int(torch.randint(0, 3, ()))
            parent = min(parent, len(tokens) - 1)
            if (parent, token) in zip(parents, tokens, strict=True):  # siblings have different tokens
                tokens, parents = [*tokens, 0], [*parents, PADDING]
            else:
                tokens, parents = [*tokens, token], [*parents, parent]
        for node, parent in enumerate(parents):  # no children of padding
            if parent >= 0 and parents[parent] == PADDING:
                parents[node] = PADDING
        return tokens, parents

    for first_nodes, second_nodes in ((1, 1), (6, 4), (12, 9), (9, 12)):
        firsts, seconds = ([tree(nodes) for _ in range(40)] for nodes in (first_nodes, second_nodes))
        parts = [DraftTree(*(torch.tensor(part) for part in zip(*trees, strict=True))) for trees in (firsts, seconds)]
        levels = max(len(path) for first in firsts for path in paths(*first) if path)
        joined = union(*parts, levels=levels)
        for first, second, tokens, parents in zip(
            firsts, seconds, joined.tokens.tolist(), joined.parents.tolist(), strict=True
        ):
            found = [path for path in paths(tokens, parents) if path]
            assert len(found) == len(set(found))
            assert set(found) == {path for path in paths(*first) + paths(*second) if path}
            assert all(parent < node for node, parent in enumerate(parents))


def test_a_round_with_a_text_draft_counts_the_drafting(tiny, drafters, on_device, monkeypatch):
    """The host drafts while the device waits: the seconds of a round must include both."""
    seconds, drafted = [], []
    propose = Suffix.propose

    def slow(self, state, budget):
        drafted.append(1)
        time.sleep(0.01)
        return propose(self, state, budget)

    monkeypatch.setattr(Suffix, "propose", slow)
    on_device()
    engine = engine_for(tiny, drafters("suffix"))
    engine.on_round = lambda state, result: seconds.append(result.seconds)
    decode(tiny, PROMPTS[:1], sampling=GREEDY, engine=engine)
    assert len(seconds) == len(drafted) and min(seconds) > 0.01


@pytest.mark.parametrize("name", [*EACH, "eagle3 chain", "eagle3.1", "dflash 2", "dflash mixed", "lm sampled"])
def test_lengths_and_ancestors_instead_of_masks(tiny, drafters, on_device, monkeypatch, name):
    """With the attention kernel and fused layers, host and device give the same texts and make no mask. On the device,
    all rounds have one span."""
    how = dict(sampling=MIXED, drafter=drafters(name), slots=2)
    expected = decode(tiny, **how)
    monkeypatch.setenv("SPECCTL_LAYERS", "fused")
    monkeypatch.setenv("SPECCTL_ATTENTION", "kernel")
    monkeypatch.setattr(plans, "additive_mask", lambda *args: pytest.fail("a mask is made"))
    assert decode(tiny, **how) == expected
    whole, spans = device_round.DeviceRounds.round, set()
    monkeypatch.setattr(
        device_round.DeviceRounds,
        "round",
        lambda self, span: (spans.add(span == self.state.capacity), whole(self, span)),
    )
    on_device()
    assert decode(tiny, **how) == expected
    assert spans == {True}


@pytest.mark.parametrize("unknown", ["target", "drafter"])
def test_heads_that_the_kernel_does_not_know_make_masks_alone(tiny, on_device, monkeypatch, unknown):
    """The other model keeps the kernel, and rounds read all slots only if the target uses the kernel."""
    drafter = eagle3(tiny, SHAPES["tree"], num_heads=8)
    heads = {"target": tiny.model.heads, "drafter": 8}
    how = dict(prompts=PROMPTS[:2], sampling=GREEDY, drafter=drafter)
    expected, asked = decode(tiny, **how), set()

    def op(q, *rest):
        if q.shape[2] == heads[unknown]:
            raise ValueError("no such heads")
        asked.add(q.shape[2])
        return reference.attention(q, *rest)

    for module in (attention, plans):
        monkeypatch.setattr(module, "by_kernel", lambda device: True)
    monkeypatch.setattr(kernels, "attention", op)
    self_check.passes.cache_clear()
    span_of, spans = device_round.DeviceRounds._span, set()
    monkeypatch.setattr(
        device_round.DeviceRounds,
        "_span",
        lambda self: (spans.add(span_of(self) == self.state.capacity), span_of(self))[1],
    )
    monkeypatch.setattr(graphs, "STEP", 16)
    on_device()
    try:
        with pytest.warns(UserWarning, match="fails: no such heads") as told:
            assert decode(tiny, **how) == expected
    finally:
        self_check.passes.cache_clear()
    assert len(told) == 1 and asked == {*heads.values()} - {heads[unknown]}
    assert (False in spans) == (unknown == "target")


WINDOWED = {
    "eagle3 chain": lambda target, window: eagle3(target, SHAPES["chain"], **EAGLE31 | {"sliding_window": window}),
    "eagle3 tree": lambda target, window: eagle3(
        target, SHAPES["tree"], **EAGLE31 | {"sliding_window": window, "num_layers": 2}
    ),
    "peagle": lambda target, window: parallel_eagle(target, SHAPES["tree"], sliding_window=window, num_layers=2),
    "dflash": lambda target, window: block(target, SHAPES["chain"], sliding_window=window),
    "dflash mixed": lambda target, window: block(
        target, SHAPES["tree"], sliding_window=window, layer_types=window and MIXED_LAYERS, is_causal=False
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_that_texts_grow_out_of(tiny, on_device, name):
    """Host and device drop the same tokens from the window: the counts would show a difference."""
    prompts = [[5 + i % 50 for i in range(size)] for size in (90, 55, 62)]
    how = dict(prompts=prompts, sampling=GREEDY, max_new_tokens=[16] * 3, seeds=[1, 2, 3])
    window, drafts = WINDOWED[name](tiny, 64), []
    for drafter in (window, WINDOWED[name](tiny, None)):
        drafts.append([])
        decode(
            tiny, drafter=drafter, **how,
            on_round=lambda state, draft, verdict: drafts[-1].append(draft.tokens.tolist()),
        )  # fmt: skip
    assert drafts[0] != drafts[1], "negative control: nothing is out of sight"
    host = decode(tiny, drafter=window, **how)
    on_device()
    assert decode(tiny, drafter=window, **how) == host


@pytest.mark.parametrize("name", [*EACH[1:], "eagle3 chain", "medusa chain", "peagle chain"])
def test_drafts_grow_where_the_batch_shrinks(tiny, drafters, monkeypatch, name):
    """The sequences of a batch share the rows of a step: on the device too, the batch size sets the draft depth."""
    monkeypatch.setattr("specctl.decoding.verify.SHARED_ROWS", {"cpu": 9})
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    whole, depths = device_round.DeviceRounds.round, set()
    monkeypatch.setattr(
        device_round.DeviceRounds,
        "round",
        lambda self, span: (depths.add((self.state.batch, self.draft.depth)), whole(self, span)),
    )
    found = decode(tiny, sampling=MIXED, drafter=drafters(name), slots=3, share_rows=True)
    assert {(3, 2)} < depths <= {(3, 2), (2, 3), (1, 4)}
    assert [one.output_ids for one in found] == [one.output_ids for one in decode(tiny, sampling=MIXED)]


@pytest.mark.parametrize("name", [name for name in EACH if name not in ("plain", "lm")])
def test_a_drafter_reads_its_own_states_among_others(tiny, drafters, on_device, monkeypatch, name):
    """The engine keeps the states of more layers than the drafter reads. The drafter picks its own without a question
    to the host."""
    how = dict(sampling=MIXED, drafter=drafters(name), slots=2)
    alone, how["taps"] = decode(tiny, **how), tuple(range(tiny.num_layers + 1))
    on_device()
    assert decode(tiny, **how) == alone
    rounds = loaded(tiny, drafters(name), MIXED, monkeypatch, taps=how["taps"])
    with torch.inference_mode(), NoHost(monkeypatch):
        rounds.round(rounds.state.capacity)


@pytest.mark.parametrize("mode", ["0", "eager"])
def test_trees_broader_than_a_step(tiny, drafters, monkeypatch, mode):
    """For all its levels, a head needs more slots after a text than the target's step. The last rounds run on the host,
    with a smaller batch, and no text fails at its end."""
    plain = [one.output_ids for one in decode(tiny, sampling=MIXED)]
    monkeypatch.setattr("specctl.decoding.verify.SHARED_ROWS", {"cpu": 93})
    monkeypatch.setenv("SPECCTL_GRAPHS", mode)
    whole, batches = device_round.DeviceRounds.round, set()
    monkeypatch.setattr(
        device_round.DeviceRounds, "round", lambda self, span: (batches.add(self.state.batch), whole(self, span))
    )
    drafter = eagle3(tiny, TreeShape(depth=6, width=16, nodes=62, children=6, stop_below=0.0))
    found = decode(tiny, sampling=MIXED, drafter=drafter, slots=3, share_rows=True)
    assert [one.output_ids for one in found] == plain
    assert batches == ({3, 2} if mode == "eager" else set())


@pytest.mark.parametrize("attention", ["sdpa", "kernel"])
def test_a_target_with_windows(windowed, on_device, monkeypatch, attention):
    """Texts grow out of the windows of some layers. A round can be captured, too."""
    monkeypatch.setenv("SPECCTL_ATTENTION", attention)
    monkeypatch.setenv("SPECCTL_LAYERS", "fused" if attention == "kernel" else "plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_packed", lambda *_: None)
        drafter = eagle3(windowed, SHAPES["tree"])
    prompts = [[5 + i % 50 for i in range(size)] for size in (90, 55, 62)]
    how = dict(prompts=prompts, sampling=MIXED[:3], max_new_tokens=[16] * 3, seeds=[1, 2, 3])
    host = decode(windowed, drafter=drafter, **how)
    assert [one.output_ids for one in host] == [one.output_ids for one in decode(windowed, drafter=None, **how)]
    on_device()
    assert decode(windowed, drafter=drafter, **how) == host
    rounds = loaded(windowed, drafter, how.pop("sampling"), monkeypatch, **how)
    with torch.inference_mode(), NoHost(monkeypatch):
        rounds.round(rounds.state.capacity)


class NoHost:
    """A context in which tensors have no values. An operation raises if it reads a value, makes a tensor from host data
    or gives a shape that depends on data. Fake tensors find most of these operations; the patches below find the
    operations that do not reach the dispatcher."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch

    def __enter__(self):
        def refuse(*args, **kwargs):
            raise RuntimeError("the host is asked")

        self.context = self.patch.context()
        patch = self.context.__enter__()
        for name in ("tolist", "numpy", "cpu", "cuda"):
            patch.setattr(torch.Tensor, name, refuse)
        for name in ("tensor", "as_tensor", "from_numpy"):
            patch.setattr(torch, name, refuse)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode.__enter__()

    def __exit__(self, *error):
        self.mode.__exit__(*error)
        return self.context.__exit__(*error)


class Stopped(Exception):
    pass


def loaded(target, drafter, sampling, monkeypatch, **options):
    """The rounds of a batch, after the first round. They use the reference kernels, as a GPU without Triton does: the
    CPU kernels may read values on the host."""
    monkeypatch.setenv("SPECCTL_KERNELS", "reference")
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    found = []

    def launch(rounds):
        launched(rounds)
        found.append(rounds)
        raise Stopped

    launched = device_round.DeviceRounds._launch
    monkeypatch.setattr(device_round.DeviceRounds, "_launch", launch)
    with pytest.raises(Stopped):
        decode(target, sampling=sampling, drafter=drafter, **options)
    found[0].report = lambda state, result: None  # the engine has been abandoned
    return found[0]


@pytest.mark.parametrize(
    ("name", "sampling", "attention", "keeps"),
    [
        *((name, MIXED, "sdpa", False) for name in [*EACH, "eagle3 chain", "lm sampled"]),
        *((name, GREEDY, "sdpa", False) for name in ("plain", "medusa chain", "dflash 2")),
        *((name, MIXED, "kernel", True) for name in ("plain", "eagle3 tree", "dflash with a Markov head", "lm")),
        *((name, GREEDY, "kernel", True) for name in ("dflash 2", "dflash windows")),
    ],
)
def test_a_round_can_be_captured(tiny, drafters, monkeypatch, name, sampling, attention, keeps):
    monkeypatch.setenv("SPECCTL_ATTENTION", attention)
    monkeypatch.setenv("SPECCTL_LAYERS", "fused" if attention == "kernel" else "plain")
    rounds = loaded(tiny, drafters(name), sampling, monkeypatch, keeps_hidden=keeps)
    with torch.inference_mode(), NoHost(monkeypatch):
        rounds.round(rounds.state.capacity)


@pytest.mark.parametrize("name", ["eagle3 tree", "lm sampled", "plain"])
def test_verification_reads_little_back(tiny, drafters, monkeypatch, name):
    """A host round reads three tensors: the parents, the committed tokens, and whether the draft is usable. Every read
    waits for a GPU."""
    verify, read, reads = host_runner.verify, torch.Tensor.tolist, []

    def counted(*args):
        count = []
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", lambda tensor: (count.append(tensor), read(tensor))[1])
            verdict = verify(*args)
        reads.append(len(count))
        return verdict

    monkeypatch.setenv("SPECCTL_GRAPHS", "0")
    monkeypatch.setenv("SPECCTL_KERNELS", "reference")
    monkeypatch.setattr(host_runner, "verify", counted)
    decode(tiny, sampling=MIXED, drafter=drafters(name))
    assert max(reads) == 3


@pytest.fixture
def elsewhere(monkeypatch):
    """`elsewhere(rounds)` runs a copy of a round on the meta device. An operation that mixes its tensors with CPU
    tensors raises; on the CPU itself such a mix would go unseen."""
    mode, meta = FakeTensorMode(), torch.device("meta")

    def moved(tensor, memo):
        with mode:
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=meta)
        return memo.setdefault(id(tensor), like)

    def run(rounds):
        with monkeypatch.context() as patch:
            for kind in (torch.Tensor, torch.nn.Parameter):
                patch.setattr(kind, "__deepcopy__", moved)
            patch.setitem(copy._deepcopy_dispatch, torch.device, lambda device, memo: meta)
            there = copy.deepcopy(rounds)
        with torch.inference_mode(), mode:
            there.round(there.state.capacity)

    return run


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "sdpa") for name in [*EACH, "dflash tree", "dflash 2", "dflash mixed", "lm sampled"]),
        *((name, "kernel") for name in ("plain", "eagle3 tree", "dflash with a Markov head", "lm")),
    ],
)
def test_a_round_stays_on_its_device(tiny, drafters, elsewhere, monkeypatch, name, attention):
    monkeypatch.setenv("SPECCTL_ATTENTION", attention)
    elsewhere(loaded(tiny, drafters(name), MIXED, monkeypatch))


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_negative_control_a_tensor_of_another_device_is_seen(tiny, drafters, elsewhere, monkeypatch, place):
    rounds = loaded(tiny, drafters("plain"), GREEDY, monkeypatch)
    rounds.draft.advance = lambda sequences, before, span: before + torch.arange(1, device=place)
    with pytest.raises(RuntimeError, match="same device") if place == "cpu" else nullcontext():
        elsewhere(rounds)


@pytest.mark.parametrize(
    "ask",
    [
        lambda length: length.amax().item(),
        lambda length: length.tolist(),
        lambda length: bool((length > 3).all()),
        lambda length: length.nonzero(),
        lambda length: length[length > 3],
        lambda length: range(length[0]),
        lambda length: length + torch.tensor([1]),
    ],
)
def test_negative_control_a_question_to_the_host_is_seen(tiny, drafters, monkeypatch, ask):
    rounds = loaded(tiny, drafters("eagle3 tree"), GREEDY, monkeypatch)
    monkeypatch.setattr(rounds.draft, "advance", lambda sequences, before, span: ask(sequences.length))
    with pytest.raises(Exception), torch.inference_mode(), NoHost(monkeypatch):  # noqa: B017
        rounds.round(rounds.state.capacity)


@pytest.fixture
def graphs_on(monkeypatch):
    """A function that lets rounds capture graphs as on a GPU. To replay a graph calls `replay(run)` with the captured
    round. Returns the list of captured rounds."""
    captured = []

    def install(replay=lambda run: run()):
        def capture(run, side, pool):
            captured.append(run)
            return SimpleNamespace(replay=lambda: replay(run), pool=lambda: "pool")

        monkeypatch.setattr(graphs, "may_capture", lambda device, shape: (device, shape) not in graphs._refused)
        monkeypatch.setattr(graphs, "capture", capture)
        monkeypatch.setattr(graphs, "_refused", set())
        return captured

    return install


@pytest.mark.parametrize("name", [*EACH, "lm sampled"])
def test_graphs_play_the_rounds(tiny, drafters, graphs_on, monkeypatch, name):
    """Graphs are captured after some rounds, and again when the batch shrinks. The round before a capture runs
    twice."""
    how = dict(sampling=MIXED, drafter=drafters(name))
    monkeypatch.setenv("SPECCTL_GRAPHS", "0")
    host = decode(tiny, **how)
    monkeypatch.delenv("SPECCTL_GRAPHS")
    captured = graphs_on()
    with warnings.catch_warnings(action="error"):
        assert decode(tiny, **how) == host
    assert captured


@pytest.mark.parametrize("name", ["plain", "eagle3 chain", "eagle3 tree"])
def test_ended_texts_may_write_in_any_order(tiny, drafters, graphs_on, monkeypatch, name):
    """Three of eight texts end before the graph is captured. Their rows all write to the page of rows without a text,
    so their content differs from run to run. This difference must not count against the graph."""
    monkeypatch.setenv("SPECCTL_KV", "paged")
    monkeypatch.setenv("SPECCTL_ATTENTION", "kernel")  # PyTorch's reads that page as zeros
    monkeypatch.setattr(tiny, "_pool", None)
    torch.manual_seed(0)

    def write(cache, layer, pairs, plan):
        slots = cache.slots(plan, len(pairs) // cache.batch).flatten()
        order = torch.randperm(len(slots))
        cache.rows[layer][slots[order]] = pairs[order]  # if several rows have one slot, the last row stays

    monkeypatch.setattr(PagedCache, "write", write)
    captured = graphs_on()
    prompts = [[5 + row, 9, 300 + row, 12, 7] for row in range(8)]
    how = dict(sampling=HOT, seeds=[*range(8)], max_new_tokens=[2, 3, 2, *[30] * 5], share_rows=False)
    with warnings.catch_warnings(action="error"):
        texts = decoding.decode(tiny, prompts, drafter=drafters(name), **how)
    assert captured and texts[-1].replays > 0
    monkeypatch.setenv("SPECCTL_KV", "contiguous")
    plain = decoding.decode(tiny, prompts, **how)
    assert [text.output_ids for text in texts] == [text.output_ids for text in plain]


@pytest.mark.parametrize("name", [*EACH, "lm sampled"])
def test_graphs_live_longer_than_a_call(tiny, drafters, graphs_on, monkeypatch, name):
    """If texts are decoded one after another, only the first text captures a graph. Another drafter and another batch
    size have graphs of their own."""
    drafter, how = drafters(name), {"sampling": HOT, "max_new_tokens": 20}
    ask = [[prompt] for prompt in ([5, 9, 300], [88, 4, 7], [17, 230, 17])]
    monkeypatch.setenv("SPECCTL_GRAPHS", "0")
    host = [decode(tiny, one, drafter=drafter, **how) for one in ask]
    monkeypatch.delenv("SPECCTL_GRAPHS")
    captured, engine = graphs_on(), engine_for(tiny, drafter)
    for one, wanted in zip(ask, host, strict=True):
        assert decode(tiny, one, engine=engine, **how) == wanted
    assert len(captured) == 1
    decode(tiny, [prompt for (prompt,) in ask], engine=engine, **how)
    assert len(captured) > 1
    other, before = engine_for(tiny, drafters("eagle3 chain")), len(captured)
    for one in ask[:2]:
        decode(tiny, one, engine=other, **how)
    assert len(captured) == before + 1


def test_a_room_that_has_no_place_for_a_text_is_made_larger(tiny, drafters, graphs_on, monkeypatch):
    drafter, how = drafters("eagle3 tree"), {"sampling": GREEDY, "max_new_tokens": 8}
    monkeypatch.setenv("SPECCTL_GRAPHS", "0")
    long = [[7, 40, 41] * 60]
    host = [decode(tiny, one, drafter=drafter, **how) for one in ([PROMPTS[0]], long, [PROMPTS[0]])]
    monkeypatch.delenv("SPECCTL_GRAPHS")
    graphs_on()
    engine = engine_for(tiny, drafter)
    assert [decode(tiny, one, engine=engine, **how) for one in ([PROMPTS[0]], long, [PROMPTS[0]])] == host


def test_memory_that_has_moved_is_not_read_where_it_was(tiny, drafters, graphs_on, monkeypatch):
    """After `invalidate`, a drafter has new keys and values, and captures new graphs."""
    drafter, how = drafters("eagle3 tree"), {"sampling": GREEDY, "max_new_tokens": 20}
    captured, engine = graphs_on(), engine_for(tiny, drafter, slots=1)
    first = decode(tiny, PROMPTS, engine=engine, **how)
    drafter.invalidate(engine.state)
    before = len(captured)
    assert decode(tiny, PROMPTS, engine=engine, **how) == first
    assert len(captured) > before


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("memory", ["paged", "contiguous"])
def test_graphs_stay_while_the_batch_shrinks_and_grows(tiny, drafters, graphs_on, monkeypatch, name, memory):
    """A batch size captured its graphs again whenever the batch returned to this size: with eight texts at a time,
    rounds took four times as long as their graphs."""
    monkeypatch.setenv("SPECCTL_KV", memory)
    monkeypatch.setattr(tiny, "_pool", None)
    prompts = [[5 + row, 9, 300 + row, 12, 7] for row in range(9)]
    how = dict(sampling=HOT, seeds=[*range(9)], max_new_tokens=[24, 8, 30, 8, 24, 16, 30, 30, 12])
    monkeypatch.setenv("SPECCTL_GRAPHS", "0")
    host = [text.output_ids for text in decoding.decode(tiny, prompts, drafter=drafters(name), **how)]
    monkeypatch.delenv("SPECCTL_GRAPHS")
    monkeypatch.setattr(graphs, "WARM_UP", 0)
    captured, engine, places = graphs_on(), engine_for(tiny, drafters(name), slots=4), []
    for _ in range(2):
        assert [text.output_ids for text in decoding.decode(tiny, prompts, engine=engine, **how)] == host
        places.append((len(captured), addresses(engine)))
    assert {*engine.device.batches} >= {1, 4} and len(captured) > 1
    assert places[1] == places[0]


def test_a_graph_that_another_batch_size_has_spoiled_is_not_trusted(tiny, drafters, graphs_on, monkeypatch):
    """When a batch returns to the size of an earlier graph, the first replay is compared with a plain round."""
    prompts = [[5 + row, 9, 300 + row, 12, 7] for row in range(4)]
    how = dict(sampling=HOT, seeds=[*range(4)], max_new_tokens=[30, 30, 30, 12])
    monkeypatch.setattr(graphs, "WARM_UP", 0)
    monkeypatch.setenv("SPECCTL_GRAPHS", "0")
    host = [text.output_ids for text in decoding.decode(tiny, prompts, **how)]
    monkeypatch.delenv("SPECCTL_GRAPHS")
    spoiled = []
    graphs_on(lambda run: None if spoiled else run())
    engine = engine_for(tiny)
    assert [text.output_ids for text in decoding.decode(tiny, prompts, engine=engine, **how)] == host
    assert len(engine.device.batches) > 1
    spoiled.append(True)
    with pytest.warns(UserWarning, match="commits different tokens"):
        assert [text.output_ids for text in decoding.decode(tiny, prompts, engine=engine, **how)] == host


def test_a_drafter_that_fails_at_one_batch_size_runs_from_the_host_at_all(tiny, graphs_on, monkeypatch):
    """Graphs of other batch sizes were replayed after the failure, and the wrong size was refused."""
    prompts = [[5 + row, 9, 300 + row, 12, 7] for row in range(4)]
    how = dict(sampling=HOT, seeds=[*range(4)], max_new_tokens=[12, 30, 30, 30])
    monkeypatch.setattr(graphs, "WARM_UP", 0)
    graphs_on()
    engine = engine_for(tiny)
    decoding.decode(tiny, [[5, 9, 300]], engine=engine, sampling=HOT, seeds=[0], max_new_tokens=12)
    assert {batch for _, batch in engine.device.tracks} == {1}
    monkeypatch.setattr(graphs, "capture", raising)
    for request in decoding.requests(prompts, **how):
        engine.add(request)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        while not graphs._refused:
            engine.step()
    assert engine.state.batch == 4 and not engine.device.tracks
    assert {batch for _, (_, batch) in graphs._refused} == {4}
    while engine.busy:
        engine.step()


def test_graphs_of_all_drafters_are_checked_when_a_batch_size_comes_back(tiny, drafters, graphs_on, monkeypatch):
    """Only the first drafter at this size was checked."""
    graphs_on()
    engine = engine_for(tiny)
    for count in (4, 1):
        prompts = [[5 + row, 9, 300 + row, 12, 7] for row in range(count)]
        decoding.decode(tiny, prompts, engine=engine, sampling=HOT, seeds=[*range(count)], max_new_tokens=30)
    rounds = engine.device
    (first,) = [track for (_, batch), track in rounds.tracks.items() if batch == 4]
    other = rounds.tracks["another", 4] = device_round.Track(None, None, graphs.Graphs([], first.graphs.answer))
    other.graphs.graphs[256] = None
    decoding.decode(tiny, [[5, 9]] * 4, engine=engine, sampling=HOT, seeds=[0] * 4, max_new_tokens=9)
    assert other.graphs.unproven == {256}


def addresses(engine):
    """Addresses of the tensors that graphs read and that shrink and grow with the batch."""
    state = engine.state
    caches = [state.cache, *(memory.cache for memory in state.memory.values() if not isinstance(memory, PerText))]
    kept = [cache.captured_tensor.data_ptr() for cache in caches] + [cache._places.data_ptr() for cache in caches[1:]]
    return kept, None if state.features is None else state.features.data_ptr()


def test_a_shape_that_fails_leaves_the_others_their_graphs(monkeypatch):
    gpu, seven = torch.device("cuda", 7), ("Eagle3Drafter", 64)
    monkeypatch.setattr(graphs, "_refused", set())
    graphs.refuse(gpu, seven)
    assert not graphs.may_capture(gpu, seven)
    assert graphs.may_capture(gpu, ("Eagle3Drafter", 1)) and graphs.may_capture(torch.device("cuda", 6), seven)
    for batch in (1, 2):
        graphs.refuse(gpu, ("NoDraft", batch))
    assert not graphs.may_capture(gpu, ("NoDraft", 3)), "nothing works there"


def raising(*args):
    raise RuntimeError("first line\nCUDA error: operation not permitted when stream is capturing")


FAILURES = {
    "capture": lambda patch, install: (install(), patch.setattr(graphs, "capture", raising)),
    "replay": lambda patch, install: install(raising),
    "other tokens": lambda patch, install: install(lambda run: None),
    "the round itself": lambda patch, install: (install(), patch.setattr(device_round.DeviceRounds, "round", raising)),
}


@pytest.mark.parametrize("name", ["eagle3 tree", "lm"])  # one that reads kept states, one with a cache of its own
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_moves_rounds_back_to_the_host(tiny, drafters, graphs_on, monkeypatch, name, failure):
    """There is one warning, in the middle of a text too, and no further attempt."""
    how = dict(sampling=MIXED, drafter=drafters(name))
    host = decode(tiny, **how)
    FAILURES[failure](monkeypatch, graphs_on)
    with pytest.warns(UserWarning, match="without CUDA graphs") as noticed:
        assert decode(tiny, **how) == host
        assert decode(tiny, **how) == host
    assert len([one for one in noticed if "CUDA graphs" in str(one.message)]) == 1


@pytest.mark.parametrize("rounds", ["eager", None], ids=["without graphs", "graphs"])
def test_a_text_drafter_that_raises_fails_one_text(tiny, graphs_on, monkeypatch, rounds):
    """The error counted as a failure of CUDA graphs, and all later rounds with this drafter ran without graphs."""
    graphs_on()
    monkeypatch.delenv("SPECCTL_GRAPHS", raising=False)
    if rounds:
        monkeypatch.setenv("SPECCTL_GRAPHS", rounds)
    engine = engine_for(tiny, Raising())
    for request in decoding.requests([[40, 41], [600, 41], [44, 44]], sampling=GREEDY, max_new_tokens=9, seeds=[0] * 3):
        engine.add(request)
    ends = {}
    with warnings.catch_warnings(action="error"):
        while engine.busy:
            ends |= {event.id: event for event in engine.step() if event.ended}
    assert str(ends[1].error) == "I will not" and ends[1].ended.stop == "failed"
    assert [ends[n].ended.stop in ("eos", "length") for n in (0, 2)] == [True, True] and not graphs._refused


class Raising(Lookup):
    """Raises if a text has token 600."""

    def propose(self, state, budget):
        if any(600 in row.ids for row in state.rows if row.stop is None):
            raise RuntimeError("I will not")
        return super().propose(state, budget)


def test_a_batch_that_is_too_large_for_device_rounds_leaves_them_to_smaller_ones(tiny, drafters, monkeypatch):
    """In a large batch, a hybrid has no rows for a draft. Its engine never ran a round on the device again."""
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    monkeypatch.setattr("specctl.decoding.verify.SHARED_ROWS", {"cpu": 16, "cuda": 16})
    engine, ahead = engine_for(tiny, hybrid(drafters("eagle3 tree"))), []
    for count in (8, 1):
        prompts = [[5, 9, 300, 12, 7 + n] for n in range(count)]
        for request in decoding.requests(prompts, sampling=GREEDY, max_new_tokens=12, seeds=[0] * count):
            engine.add(request)
        while engine.busy:
            ahead += [event.ended.ahead for event in engine.step() if event.ended]
    assert ahead[-1] > 0


def test_an_ended_text_with_edited_logits_holds_no_other_on_the_host(tiny, monkeypatch):
    """Its row stays while most of the batch lives. All rounds until then were led by the host, as if it went on."""
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    engine = engine_for(tiny)
    for length, penalty in ((3, 1.2), *[(12, 1.0)] * 7):
        (request,) = decoding.requests([[5, 9]], sampling=GREEDY, max_new_tokens=length, seeds=[0])
        sampling = replace(GREEDY, repetition_penalty=penalty)
        engine.add(replace(request, sampling=sampling, ignores_eos=True))
    texts = {}
    while engine.busy:
        texts |= {event.id: event.ended for event in engine.step() if event.ended}
    assert texts[0].ahead == 0 and texts[0].rounds == 2
    assert (texts[7].rounds, texts[7].ahead) == (12, 10), "the last round is known one round late"


def test_min_p_of_an_ended_text_filters_no_other(tiny, monkeypatch):
    """A text that comes later takes the ended one's row, on the device."""
    late = replace(decoding.requests([[17, 3]], sampling=HOT, max_new_tokens=12, seeds=[9])[0], ignores_eos=True)
    (alone,) = decoding.decode_requests(engine_for(tiny), [late])
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    engine = engine_for(tiny)
    for length, min_p in ((3, 0.9), *[(20, 0.0)] * 7):
        sampling = replace(HOT, min_p=min_p)
        (request,) = decoding.requests([[5, 9]], sampling=sampling, max_new_tokens=length, seeds=[0])
        engine.add(replace(request, ignores_eos=True))
    for _ in range(6):
        engine.step()
    assert engine.device.tracks, "the rounds after the end of the first text run on the device"
    id, texts = engine.add(late), {}
    while engine.busy:
        texts |= {event.id: event.ended for event in engine.step() if event.ended}
    assert texts[id].output_ids == alone.output_ids


def hybrid(head):
    return Hybrid(head, Lookup(), Costs(tuple(1.0 for _ in ROWS), first=0.0, level=0.0))


def test_proposers_of_single_rounds_are_not_remembered(tiny, drafters, monkeypatch):
    """A controller makes a new proposer in every round with several arms; the engine held them until it was idle."""
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    engine = engine_for(tiny, drafters("eagle3 tree"))
    for request in decoding.requests([[5, 9]], sampling=GREEDY, max_new_tokens=12, seeds=[0]):
        engine.add(request)
    for _ in range(2):
        engine.step()
    assert not engine.device.supports(PerSequence([Lookup()])) and not engine.device.refused


def test_idle_engines_keep_no_large_caches(tiny, drafters, monkeypatch):
    """Caches of a draft model are as large as the target's, and the limit left them out."""
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    engine, sizes = engine_for(tiny, drafters("lm")), []
    for limit in (float("inf"), 0):
        for request in decoding.requests([[5, 9]], sampling=GREEDY, max_new_tokens=12, seeds=[0]):
            engine.add(request)
        while engine.busy:
            if not limit and engine.state.memory:
                sizes.append(engine.state.nbytes)
                monkeypatch.setattr("specctl.decoding.device.rounds.idle_bytes", lambda device: sizes[-1] - 1)
            engine.step()
        if limit:
            (memory,) = engine.state.memory.values()
            assert engine.state.nbytes >= engine.state.cache.nbytes + memory.cache.nbytes
    assert engine.state.nbytes == 0 and not engine.device.tracks


def test_the_end_is_known_one_round_late(tiny, drafters, on_device, monkeypatch):
    """The late round commits no token of the ended text, but tokens of the other texts."""
    how = dict(sampling=MIXED, drafter=drafters("eagle3 tree"), slots=2)
    host = decode(tiny, **how)
    late = []
    book = device_round.DeviceRounds._book

    def watched(self):
        ended = {row.index for row in self.state.rows if row.stop is not None}
        lengths = {row.index: len(row.ids) for row in self.state.rows}
        found = book(self)
        late.extend(index for index in ended if self.pending is not None)
        assert all(len(row.ids) == lengths[row.index] for row in self.state.rows if row.index in ended)
        assert all(len(row.ids) > lengths[row.index] for row in self.state.rows if row.index not in ended)
        return found

    on_device()
    monkeypatch.setattr(device_round.DeviceRounds, "_book", watched)
    assert decode(tiny, **how) == host
    assert late
    for one in host:
        assert not tiny.eos_ids & {*one.output_ids[:-1]}


def test_a_longer_text_elsewhere_does_not_pull_the_table_away(tiny, drafters):
    """A graph reads the rotary tables of the time of its capture: these tables live as long as the caches."""
    cache = tiny.model.new_cache(1, 64)
    tiny.model.new_cache(1, 640)
    assert cache.rope is not None and tiny.model.new_cache(1, 64).rope is not cache.rope


def test_rounds_go_with_their_stream(tiny, drafters, graphs_on, monkeypatch):
    """Caches and graphs are large: they must be freed without the garbage collector."""
    graphs_on()
    found = []
    load = device_round.DeviceRounds.load

    def watched(self, drafter):
        found.append(weakref.ref(self))
        return load(self, drafter)

    monkeypatch.setattr(device_round.DeviceRounds, "load", watched)
    gc.disable()
    try:
        texts = decoding.stream(
            tiny, PROMPTS, sampling=GREEDY, max_new_tokens=NEW, seeds=[0] * 5, drafter=drafters("lm")
        )
        next(texts)
        assert found[0]() is not None
        texts.close()
        assert found[0]() is None
    finally:
        gc.enable()


def test_places_that_only_the_device_knows():
    """The plan of a ragged tree step is the same from numbers and from tensors."""
    base, parents = [5, 0, 9], torch.tensor([[-1, -1, 0, 2], [-1, 0, 1, 2], [-1, 0, PADDING, PADDING]])
    found = ancestors(parents)
    trees = [topology(row) for row in parents.tolist()]
    masks = torch.tensor([bits for _, bits in trees])
    assert torch.equal(found, masks.unsqueeze(-1) >> torch.arange(4) & 1 > 0)
    depth = torch.tensor([depth for depth, _ in trees])
    options = dict(span=16, dtype=torch.float32)
    host = plan_rows(base, 4, device=torch.device("cpu"), visible=found, depth=depth, **options)
    device = plan_at(torch.tensor(base), found, depth, **options)
    assert torch.equal(device.mask, host.mask) and torch.equal(device.positions, host.positions)
    cache = KVCache(1, 3, 2, 16, 4, dtype=torch.float32, device="cpu")
    pairs = torch.randn(12, 4, 4)
    cache.write(0, pairs, host)
    expected = cache.store.clone()
    cache.store.zero_()
    cache.write(0, pairs, device)
    assert torch.equal(cache.store, expected)
    source = torch.tensor([[2, 3], [0, 1], [1, 1]])
    cache.compact_at(torch.tensor(base), source)
    for b, start in enumerate(base):
        assert torch.equal(cache.store[:, b, start + 1 : start + 3], expected[:, b, start + 1 + source[b]])


def test_spans_are_few_and_wide_enough():
    assert [graphs.span_for(n, 10_000) for n in (1, 256, 257, 1024, 1025, 2049, 8000)] == [
        *(256, 256, 512, 1024, 1280, 2560, 8192)
    ]
    assert graphs.span_for(300, 310) == 310
    for needed in range(1, 5000):
        span = graphs.span_for(needed, 10_000)
        assert needed <= span < max(needed + 256, 1.25 * needed + 1)
    assert len({graphs.span_for(n, 10**6) for n in range(1, 32_768)}) < 30
