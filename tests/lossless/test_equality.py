"""Speculative text equals the text of plain decoding, token for token, with every drafter.

Greedy in fp32 for all drafters; at temperature 1 with equal seeds for all deterministic ones, bit for bit in `exact`
mode. Texts can be compared for equality because the target is trained: fp32 noise (1e-5) meets no tie.
"""

import functools

import pytest
import torch

from specctl import kernels
from specctl.decoding.cache import RECOMPUTE, CatchUp
from specctl.decoding.controllers import NoDraft
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.target import load_target
from specctl.drafters import pool
from specctl.drafters.eagle import drafter as eagle
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.eagle3.head import Eagle3Config, Eagle3Head
from specctl.drafters.hybrid.costs import ROWS, Costs
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.hybrid.rescored import Rescored
from specctl.drafters.hybrid.weighed import WeighedText
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from specctl.drafters.lm.model import AcceptanceHead
from specctl.drafters.mtp.drafter import MtpDrafter
from specctl.drafters.retrieval.datastore import Datastore
from specctl.drafters.text.lookahead import LookaheadDrafter
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.drafters.tree import TreeShape
from specctl.recipe import DraftingRecipe, TrainRecipe
from tests.lossless.drafters import Rotate, Scripted, bushes, constant, full_tree, own_weights, perfect, ragged
from tests.toys import mtp
from tests.toys.decoding import decode, plain_answers, whole

NEW = 20
HOT = Sampling(1.0, 0, 1.0)
FILTERED = Sampling(0.8, 40, 0.9)
SEEDS = [11, 12, 13]
TAPS = (1, 2, 3)


EAGLE31 = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "sliding_window": 64}


def random_eagle3(target, shape, **options):
    torch.manual_seed(0)
    config = Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=target.vocab_size,
        draft_vocab_size=500,
        taps=TAPS,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=2048,
        **options,
    )
    head = Eagle3Head(config, 3 * torch.arange(500))
    return Eagle3Drafter(head, target, shape)


def random_eagle(target, shape):
    torch.manual_seed(0)
    return eagle.EagleDrafter(eagle.FAMILY.build(TrainRecipe(arch="eagle"), target, None), target, shape)


def random_mtp(target, shape, layout="mimo", **options):
    return MtpDrafter(mtp.head(target, layout, **options), target, shape)


def random_heads(name, target, **drafting):
    """Heads initialized from the target's own, which are right now and then."""
    torch.manual_seed(0)
    module = pool.load_family(name).build(TrainRecipe(arch=name), target, lambda size: list(range(size)))
    return pool.load_family(name).make_drafter(
        module, target, DraftingRecipe(stop_below=0.0, keep_above=0.0, **drafting)
    )


WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"], "num_layers": 2}
DFLASH2 = {"conv_kernel_size": 2, "selector_rank": 8}


def random_block(target, parts=None, **drafting):
    """A block-parallel head with slots that read the target's features and depend on each other at random: through a
    Markov head, or through the modules in `parts`."""
    recipe = TrainRecipe(arch="dflash", drafter={"block_size": 5, "num_layers": 1, **(parts or {})})
    torch.manual_seed(0)
    module = pool.load_family("dflash").build(recipe, target, lambda size: list(range(size)))
    for name, parameter in module.named_parameters():
        if "_conv" in name or name in ("markov_head.markov_w2.weight", "candidate_selector.successor_codebook"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    return pool.load_family("dflash").make_drafter(
        module, target, DraftingRecipe(stop_below=0.0, keep_above=0.0, **drafting)
    )


CHEAP = Costs(tuple(1 + 0.001 * rows for rows in ROWS), first=0.001, level=0.001)


@pytest.fixture(scope="module")
def plain(target, prompts):
    """`plain(sampling)`: the texts of plain decoding, one prompt at a time."""
    return plain_answers(target, prompts, SEEDS, NEW)


DRAFTERS = {
    "empty": lambda target, texts: constant([]),
    "garbage": lambda target, texts: constant([4000, 17, 17, 3999, 5]),
    "eos only": lambda target, texts: constant([next(iter(target.eos_ids))] * 4),
    "perfect": lambda target, texts: perfect(texts),
    "longest": lambda target, texts: perfect(texts, depth=63),
    "ragged": lambda target, texts: ragged(texts, 0, target.vocab_size),
    "trees": lambda target, texts: bushes(texts, 0, target.vocab_size),
    "full trees": lambda target, texts: full_tree(texts),
    "lookup": lambda target, texts: Lookup(),
    "suffix": lambda target, texts: Suffix(),
    "lookahead": lambda target, texts: LookaheadDrafter(),
    "retrieval": lambda target, texts: Suffix(corpus=Datastore.of(misprinted(text) for text in texts)),
    "weighed retrieval": lambda target, texts: WeighedText(
        Suffix(corpus=Datastore.of(misprinted(text) for text in texts)), CHEAP
    ),
    "lm": lambda target, texts: LMDrafter(own_weights(target, 0.1), target, ChainShape(4, 0.1, False)),
    "lm itself": lambda target, texts: LMDrafter(own_weights(target), target, ChainShape(5, 0.0, False)),
    "eagle": lambda target, texts: random_eagle(target, TreeShape(4, 2, 8, 2, 0.0)),
    "eagle3 chain": lambda target, texts: random_eagle3(target, TreeShape(4, 1, 4, 1, 0.0)),
    "dflash chain": lambda target, texts: random_block(target, width=1, children=1),
    "dflash tree": lambda target, texts: random_block(target, width=2, nodes=9, children=2),
    "dflash2 chain": lambda target, texts: random_block(target, DFLASH2, width=1, children=1),
    "dflash2 tree": lambda target, texts: random_block(target, DFLASH2, width=2, nodes=9, children=2),
    "dflash windows": lambda target, texts: random_block(target, WINDOWS, width=2, nodes=9, children=2),
    "peagle chain": lambda target, texts: random_heads("peagle", target, width=1, children=1),
    "peagle tree": lambda target, texts: random_heads("peagle", target, width=2, nodes=9, children=2),
    "hydra": lambda target, texts: random_heads("hydra", target),
    "hydra tree": lambda target, texts: random_heads("hydra", target, width=3, nodes=20, children=3),
    "medusa": lambda target, texts: random_heads("medusa", target),
    "medusa tree": lambda target, texts: random_heads("medusa", target, width=3, nodes=20, children=3),
    "rescored chain": lambda target, texts: rescored_heads(target, texts, width=1, children=1),
    "rescored tree": lambda target, texts: rescored_heads(target, texts, width=3, nodes=20, children=3),
    "lm with acceptance": lambda target, texts: LMDrafter(unsure(target, 0.1), target, ChainShape(5, 0.3, False)),
    "eagle3 tree": lambda target, texts: random_eagle3(target, TreeShape(3, 2, 7, 2, 0.0)),
    "eagle3.1 chain": lambda target, texts: random_eagle3(target, TreeShape(4, 1, 4, 1, 0.0), **EAGLE31),
    "eagle3.1 tree": lambda target, texts: random_eagle3(target, TreeShape(3, 2, 7, 2, 0.0), **EAGLE31),
    "eagle3 of two layers": lambda target, texts: random_eagle3(target, TreeShape(4, 1, 4, 1, 0.0), num_layers=2),
    "eagle3 tree of two layers": lambda target, texts: random_eagle3(target, TreeShape(3, 2, 7, 2, 0.0), num_layers=2),
    "mtp chain": lambda target, texts: random_mtp(target, TreeShape(4, 1, 4, 1, 0.0), bias=True),
    "mtp tree": lambda target, texts: random_mtp(target, TreeShape(3, 2, 7, 2, 0.0), "qwen", qk_norm=True),
    "lm + lookup": lambda target, texts: hybrid(
        LMDrafter(own_weights(target, 0.1), target, ChainShape(4, 0.1, False)), Lookup()
    ),
    "eagle3 + suffix": lambda target, texts: hybrid(random_eagle3(target, TreeShape(4, 2, 7, 2, 0.0)), Suffix()),
    "mtp + suffix": lambda target, texts: hybrid(random_mtp(target, TreeShape(4, 2, 7, 2, 0.0)), Suffix()),
    "dflash + lookup": lambda target, texts: hybrid(random_block(target, width=2, nodes=9, children=2), Lookup()),
    "hydra + retrieval": lambda target, texts: hybrid(
        random_heads("hydra", target), Suffix(corpus=Datastore.of(misprinted(text) for text in texts))
    ),
}


def rescored_heads(target, texts, **drafting):
    """Heads with candidates ordered by texts that nearly equal the coming ones."""
    return Rescored(random_heads("medusa", target, **drafting), Datastore.of(misprinted(text) for text in texts))


def unsure(target, noise):
    """The target itself with noise, and with an acceptance head that ends drafts at random."""
    torch.manual_seed(1)
    module = own_weights(target, noise)
    module.confidence_head = AcceptanceHead(target.hidden_size)
    module.confidence_head.out.weight.data *= 20
    return module


def hybrid(head, text):
    """A hybrid with a very cheap head, which is therefore always used, and cheap rows."""
    return Hybrid(head, text, CHEAP)


def misprinted(text):
    """Every ninth token is changed: drafts from this text are long, and wrong in the middle."""
    return [token + 1 if at % 9 == 8 else token for at, token in enumerate(text)]


ONE_OF_EACH = ["ragged", "trees", "lookup", "suffix", "retrieval", "lm", "eagle", "eagle3 tree", "eagle3.1 tree"]
ONE_OF_EACH += [
    *("lookahead", "rescored tree", "lm with acceptance"),
    *("dflash2 tree", "peagle tree", "hydra tree", "medusa tree", "mtp tree", "eagle3 tree of two layers"),
    *("lm + lookup", "dflash + lookup"),
]
"""One drafter per kind of drafter memory, which does not depend on the shape of drafts."""


@pytest.fixture(params=DRAFTERS)
def make(request):
    return DRAFTERS[request.param]


@pytest.mark.parametrize("samplings", [[GREEDY] * 3, [FILTERED, HOT, FILTERED]], ids=["greedy", "filtered and hot"])
def test_batched_speculative_text_equals_single_plain_text(target, prompts, plain, make, samplings):
    """Prompts and limits of different lengths in one batch, so that rows finish and are dropped while others
    continue."""
    expected = [plain(sampling)[i] for i, sampling in enumerate(samplings)]
    limits = [NEW, 3, NEW - 9]
    found = decode(
        target, prompts, sampling=samplings, max_new_tokens=limits, seeds=SEEDS, drafter=make(target, whole(expected))
    )
    assert [one.output_ids for one in found] == [
        one.output_ids[:limit] for one, limit in zip(expected, limits, strict=True)
    ]
    for one in found:
        assert_counts(one)


@pytest.mark.parametrize(
    "make",
    [pytest.param(name, marks=() if name in ONE_OF_EACH else pytest.mark.slow) for name in DRAFTERS],
    indirect=True,
)
def test_reused_slots_give_equal_texts_and_passes(target, prompts, plain, make):
    """Two slots for four texts: the cache, features, draws and drafter memory of a slot belong to its new text.

    Each text needs as many passes as in a batch of all four. If a drafter continued the old text, only acceptance would
    show it.
    """
    expected = plain(HOT)
    order, limits = [0, 1, 2, 0], [NEW - 8, 3, NEW - 11, NEW - 12]
    texts = whole(expected)
    drafters = [make(target, [texts[i] for i in order]) for _ in range(2)]
    scripted = isinstance(drafters[0], Scripted)  # scripts share one random stream among rows, so passes differ
    found = [
        decode(
            target,
            [prompts[i] for i in order],
            sampling=HOT,
            max_new_tokens=limits,
            seeds=[SEEDS[i] for i in order],
            drafter=drafter,
            slots=slots,
            share_rows=False,  # or drafts would depend on the size of the batch
        )
        for drafter, slots in zip(drafters, (2,) if scripted else (2, None), strict=False)
    ]
    assert [one.output_ids for one in found[0]] == [
        expected[i].output_ids[:limit] for i, limit in zip(order, limits, strict=True)
    ]
    if not scripted:
        assert [one.target_passes for one in found[0]] == [one.target_passes for one in found[1]]
    for one in found[0]:
        assert_counts(one)


def assert_counts(one):
    """Every pass commits its accepted tokens and one more token, unless the sequence ended before that one."""
    assert one.decoded_tokens - one.accepted - one.target_passes in ((0, -1) if one.target_passes else (0,))
    assert sum(one.accepted_by_depth) == one.accepted
    assert sum(one.offered_by_depth) == one.accepted + one.rejections
    assert all(a <= o for a, o in zip(one.accepted_by_depth, one.offered_by_depth, strict=True))
    assert one.offered_by_depth == sorted(one.offered_by_depth, reverse=True)
    assert one.accepted <= one.drafted


EXACTLY = ["lookup", "suffix", "retrieval", "ragged", "perfect", "eagle3 chain", "eagle3.1 chain", "dflash chain"]
EXACTLY += [
    "lookahead",
    "rescored tree",
    "peagle chain",
    "hydra",
    "eagle3 + suffix",
    "mtp chain",
    "eagle3 of two layers",
]


@pytest.fixture(scope="module")
def exactly(target, prompts):
    """`exactly(dtype)`: the target, and the texts of plain decoding in exact mode at temperature 1."""

    @functools.cache
    def make(dtype):
        here = target if dtype == "fp32" else load_target(target.name, device="cpu", dtype="bf16")
        return here, [decode(here, [prompts[i]], seeds=[SEEDS[i]], **EXACT)[0] for i in range(2)]

    return make


EXACT = {"sampling": HOT, "max_new_tokens": NEW, "exact": True}


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "bf16") for kind in EXACTLY), ("ragged", "fp32")])
def test_exact_mode_equals_plain_text_at_temperature_one(exactly, prompts, kind, dtype):
    """Chains in fixed shapes are bitwise equal, also in bf16, where batched and single plain decoding would otherwise
    differ."""
    here, expected = exactly(dtype)
    for prompt, seed, plain in zip(prompts, SEEDS, expected, strict=False):
        drafter = DRAFTERS[kind](here, whole([plain]))
        assert decode(here, [prompt], seeds=[seed], drafter=drafter, **EXACT)[0].output_ids == plain.output_ids


def test_a_perfect_drafter_is_accepted_whole(target, prompts, plain):
    """Otherwise equality could hold just because everything is rejected."""
    for name, depth in (("perfect", 7), ("lm itself", 5)):
        drafter = DRAFTERS[name](target, whole(plain(GREEDY)))
        for one in decode(target, prompts, sampling=GREEDY, max_new_tokens=NEW, seeds=SEEDS, drafter=drafter):
            assert one.rejections == 0
            assert one.target_passes == -(-one.decoded_tokens // (depth + 1))


@pytest.mark.parametrize("catch_up", [RECOMPUTE, CatchUp(2, 3)])
def test_switching_drafters_every_round_keeps_the_text(target, prompts, plain, catch_up):
    """Each drafter is idle while others commit tokens. A stale cache would only lower its acceptance, so this checks
    that the target's own weights are always accepted, unless catching up skips most of the text."""
    texts = whole(plain(GREEDY))
    names = ["lm itself", "trees", "empty", "eagle3 tree", "lookup", "lm + lookup", "retrieval", "garbage", "lm itself"]
    controller = Rotate([DRAFTERS[name](target, texts) for name in names])
    own = [d for d in controller.drafters if isinstance(d, LMDrafter)]
    accepted = []

    def watch(state, draft, verdict):
        if controller.drafters[controller.round % len(names)] in own:
            accepted.append(all(stop != "rejected" for stop in verdict.stops))

    found = decode(
        target,
        prompts,
        sampling=GREEDY,
        max_new_tokens=NEW,
        seeds=SEEDS,
        controller=controller,
        taps=TAPS,
        catch_up=catch_up,
        on_round=watch,
    )
    assert whole(found) == texts
    assert accepted and all(accepted) == (catch_up is RECOMPUTE)


class Learning(Rotate):
    """Plays its drafters one after another for two rounds each, and keeps the last: like weights that improve."""

    def choose(self, state):
        self.round += 1
        return self.drafters[min((self.round - 1) // 2, len(self.drafters) - 1)]


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_weights_may_change_between_rounds(target, prompts, plain, sampling):
    """A cache of old weights would only lower acceptance, so this checks that the target's own weights are always
    accepted."""
    noises = [1.0, 0.1, 0.0]
    controller = Learning([LMDrafter(own_weights(target, n), target, ChainShape(2, 0.0, False)) for n in noises])
    accepted = {0: [], 1: [], 2: []}

    def watch(state, draft, verdict):
        accepted[min((controller.round - 1) // 2, 2)].append(all(stop != "rejected" for stop in verdict.stops))

    found = decode(
        target, prompts, sampling=sampling, max_new_tokens=NEW, seeds=SEEDS, controller=controller, on_round=watch
    )
    assert whole(found) == whole(plain(sampling))
    assert not all(accepted[0])
    assert accepted[2] and (sampling is HOT or all(accepted[2]))


@pytest.mark.parametrize("name", ["perfect", "trees", "lookup", "retrieval", "lm itself"])
def test_an_end_of_sequence_inside_a_draft_ends_the_text(target, prompts, plain, name, monkeypatch):
    """Neither the tokens nor the counts may include the rest of the draft."""
    texts = whole(plain(GREEDY))
    end = {text[len(prompt) + 5] for text, prompt in zip(texts, prompts, strict=True)}
    monkeypatch.setattr(target, "eos_ids", frozenset(end))
    found = decode(
        target, prompts, sampling=GREEDY, max_new_tokens=NEW, seeds=SEEDS, drafter=DRAFTERS[name](target, texts)
    )
    for one, text, prompt in zip(found, texts, prompts, strict=True):
        answer = text[len(prompt) :]
        stop = next(i for i, token in enumerate(answer) if token in end)
        assert one.output_ids == answer[: stop + 1] and one.stop == "eos"
        assert one.accepted <= one.decoded_tokens
        assert_counts(one)


def test_a_shrinking_batch_keeps_the_texts(target, prompts, plain):
    """When sequences leave the batch, caches, seeds and drafter memory must follow."""
    texts = whole(plain(HOT))
    batch, seeds, limits = prompts * 2, SEEDS * 2, [2, 11, 4, 6, 9, 13]
    sizes = set()
    for name in (
        *("lookup", "retrieval", "lm", "trees", "eagle3 tree", "dflash tree", "dflash2 tree", "peagle tree"),
        *("hydra tree", "medusa", "eagle3 + suffix"),
    ):
        found = decode(
            target,
            batch,
            sampling=HOT,
            max_new_tokens=limits,
            seeds=seeds,
            drafter=DRAFTERS[name](target, texts * 2),
            on_round=lambda state, draft, verdict: sizes.add(state.batch),
        )
        for i, one in enumerate(found):
            answer = texts[i % 3][len(batch[i]) :]
            assert one.output_ids == answer[: limits[i]], name
    assert len(sizes) > 2


def test_each_sequence_has_its_own_sampling(target, prompts, plain):
    """`distill` mixes temperatures in one batch."""
    samplings = [GREEDY, HOT, FILTERED]
    expected = [plain(sampling)[i].output_ids for i, sampling in enumerate(samplings)]
    for drafter in (NoDraft(), Lookup()):
        found = decode(target, prompts, sampling=samplings, max_new_tokens=NEW, seeds=SEEDS, drafter=drafter)
        assert [one.output_ids for one in found] == expected


@pytest.mark.parametrize(("noise", "rule"), [(0.0, "token"), (0.1, "token"), (0.0, "block"), (0.1, "block")])
def test_the_ratio_rule_in_a_ragged_batch_rejects_nothing_if_q_equals_p(target, prompts, noise, rule):
    """tests/lossless/test_law.py checks its distribution; this checks a whole ragged batch and its counts."""
    drafter = LMDrafter(own_weights(target, noise), target, ChainShape(4, 0.05, True, rule))
    seen = []

    def watch(state, draft, verdict):
        seen.append(draft.rows is not None)

    found = decode(
        target,
        prompts,
        sampling=[HOT, FILTERED, GREEDY],
        max_new_tokens=[NEW, 10, NEW],
        seeds=SEEDS,
        drafter=drafter,
        on_round=watch,
    )
    assert seen[0]
    for one, limit in zip(found, [NEW, 10, NEW], strict=True):
        assert len(one.output_ids) == limit or one.stop == "eos"
        assert_counts(one)
    rejections = sum(one.rejections for one in found)
    assert rejections == 0 if noise == 0 else rejections > 0
    assert sum(one.accepted for one in found) > 0


@pytest.fixture(scope="module")
def long(target, prompts):
    """(prompts, options, texts) of a batch in which the first text ends long before the others. Texts end only by
    length."""
    batch, limits = [prompts[0] * 12, *([prompts[2]] * 4)], [2, 90, 90, 90, 90]
    options = {"sampling": HOT, "max_new_tokens": limits, "seeds": [1, 2, 3, 4, 5]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "eos_ids", frozenset())
        return batch, options, whole(decode(target, batch, **options))


@pytest.mark.parametrize("name", ["lm itself", "eagle3 tree", "dflash tree", "peagle tree", "hydra", "mtp tree"])
def test_an_idle_drafter_catches_up_in_a_batch_with_finished_rows(target, long, name, monkeypatch):
    """A finished sequence with a long prompt stays in the batch while the others outgrow the spare room of a cache."""
    monkeypatch.setattr(target, "eos_ids", frozenset())
    batch, options, expected = long
    sleeper = DRAFTERS[name](target, expected)
    controller = Rotate([constant([])] + [sleeper] + [constant([])] * 75)
    sizes = []
    found = decode(
        target,
        batch,
        controller=controller,
        taps=sleeper.taps,
        on_round=lambda state, draft, verdict: sizes.append(state.batch),
        **options,
    )
    assert whole(found) == expected
    assert sizes[78] == 5


true_walk = kernels.reference.walk_tree


def broken_walk(drawn, tokens, parents):
    """Accept the first draft token regardless of the target's draw."""
    path, count, bonus = true_walk(drawn, tokens, parents)
    if not tokens.shape[1]:
        return path, count, bonus
    first = parents[:, 0] == -1
    path[:, 0] = torch.where(first, 0, path[:, 0])
    return path, torch.where(first, count.clamp(min=1), count), bonus


def broken_bonus(drawn, tokens, parents):
    """Take the bonus token from the root instead of the last node."""
    path, count, _ = true_walk(drawn, tokens, parents)
    return path, count, drawn[:, 0]


@pytest.mark.parametrize("walk", [broken_walk, broken_bonus])
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_negative_control_a_broken_rule_changes_the_text(target, prompts, plain, monkeypatch, walk, sampling):
    monkeypatch.setattr(kernels, "walk_tree", walk)
    monkeypatch.setattr(kernels.reference, "walk_tree", walk)  # for `sample_tree` of the reference
    monkeypatch.setattr(kernels, "sample_tree", kernels.reference.sample_tree)
    texts = whole(plain(sampling))
    found = decode(
        target, prompts, sampling=sampling, max_new_tokens=NEW, seeds=SEEDS, drafter=ragged(texts, 0, target.vocab_size)
    )
    assert whole(found) != texts


def test_negative_control_uniforms_of_another_position_change_the_text(target, prompts, plain, monkeypatch):
    """The text stays correctly distributed, but differs from plain decoding."""
    texts = whole(plain(HOT))
    draw = kernels.uniform
    monkeypatch.setattr(kernels, "uniform", lambda seed, position, stream: draw(seed, position + 1, stream))
    found = decode(target, prompts, sampling=HOT, max_new_tokens=NEW, seeds=SEEDS, drafter=constant([5]))
    assert whole(found) != texts
