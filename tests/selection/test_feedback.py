"""Scores of every drafter equal the drafts that the drafter makes at each token."""

import numpy as np
import pytest
import torch

from specctl import kernels
from specctl.decoding.protocols import Controller
from specctl.decoding.records import Request
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.state import DecodeState
from specctl.drafters import pool
from specctl.drafters.eagle3 import drafter as eagle3
from specctl.drafters.eagle3.head import Eagle3Head
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from specctl.drafters.mtp.drafter import MtpDrafter
from specctl.drafters.retrieval.datastore import Datastore
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.drafters.tree import TreeShape
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe
from specctl.selection import feedback
from specctl.selection.feedback import Scorer
from specctl.selection.game.losses import LEAF, beyond_the_end, realised_length
from tests.conftest import even_costs
from tests.lossless.drafters import own_weights, ragged
from tests.toys import mtp
from tests.toys.decoding import decode

DEPTH = 5
SEED = 3
WARM = Sampling(0.5, 20, 0.9)


def head(target, seed, vocabulary=512):
    torch.manual_seed(seed)
    architecture = eagle3.FAMILY.architecture(DrafterRecipe(vocab_size=vocabulary), target)
    made = Eagle3Head(architecture, torch.randperm(target.vocab_size)[:vocabulary].sort().values)
    made.initialise(target)
    return made


def table(target, drafters, prompt, output, depth, sampling, **options):
    return feedback.table(Scorer(target, drafters, depth), prompt, output, sampling, **options)


def trained(target, name, drafting, **options):
    recipe = TrainRecipe(arch=name, drafter=DrafterRecipe(**options))
    torch.manual_seed(0)
    module = pool.load_family(name).build(recipe, target, lambda size: list(range(1, 1 + 2 * size, 2)))
    for parameter in module.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return pool.load_family(name).make_drafter(module.eval(), target, drafting)


@pytest.fixture(scope="module")
def drafters(target, prompts):
    """One or two drafters per family; their shapes prune nothing."""
    chain = DraftingRecipe(stop_below=0.0, children=1, nodes=4, width=1, depth=4)
    own = own_weights(target, 0.3)
    texts = decode(target, prompts, sampling=GREEDY, max_new_tokens=12, seeds=[0] * 3)
    store = Datastore.of([one.prompt_ids[-4:] + one.output_ids for one in texts])
    return {
        "eagle3": eagle3.Eagle3Drafter(head(target, 1, 3000), target, TreeShape(4, 1, 4, 1, 0.0)),
        "eagle": trained(target, "eagle", chain),
        "mtp": MtpDrafter(mtp.head(target), target, TreeShape(4, 1, 4, 1, 0.0)),
        "dflash": trained(target, "dflash", chain, block_size=4, num_layers=1, markov_rank=8),
        "peagle": trained(target, "peagle", chain, num_layers=2),
        "hydra": trained(target, "hydra", chain, draft_heads=3),
        "medusa": trained(target, "medusa", chain, draft_heads=3, vocab_size=2000),
        "lm": LMDrafter(own, target, ChainShape(5, 0.0, False)),
        "sampled": LMDrafter(own, target, ChainShape(3, 0.0, True)),
        "lookup": Lookup(4),
        "suffix": Suffix(depth=4, nodes=60, children=3),
        "retrieval": Suffix(depth=3, nodes=60, children=2, corpus=store),
    }


@pytest.fixture(scope="module", params=[GREEDY, WARM], ids=["greedy", "sampled"])
def text(request, target, prompts):
    """A repetitive text, so that drafters without weights have drafts."""
    prompt = prompts[1] + prompts[1][-30:]
    found = decode(target, [prompt], sampling=request.param, max_new_tokens=11, seeds=[SEED])[0]
    return request.param, prompt, found.output_ids


def standing(target, ids, taps, sampling):
    """A decoding state with `ids` committed."""
    state = DecodeState(target, taps=taps, spare=63)
    state.assign_slots([state.sequence(Request(ids[:-1], sampling, 41, SEED))])
    _, _, tapped = target.prefill([ids[:-1]], state.cache, taps)
    state.begin([0], ids[-1:], tapped)
    return state


@torch.inference_mode()
def drafts(target, drafter, ids, first, sampling):
    """For every n ≥ first the tree drafted after `ids[:n]`, as {path of tokens: children}."""
    found = {}
    for n in range(first, len(ids)):
        state = standing(target, ids[:n], drafter.taps, sampling)
        tree = drafter.propose(state, 60)
        paths, behind = {-1: ()}, {}
        for node, (token, parent) in enumerate(zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True)):
            paths[node] = (*paths[parent], token)
            behind.setdefault(paths[parent], []).append(token)
        found[n] = behind, tree.rows
    return found


@torch.inference_mode()
def law(target, ids, sampling):
    """p of the token at every position from 1 on, [len − 1, V]."""
    cache = target.model.new_cache(1, len(ids))
    _, hidden, _ = target.prefill([ids[:-1]], cache)
    logits = target.model.logits(hidden[0])
    count = torch.ones(len(logits))
    rows = kernels.row_params(
        logits, sampling.temperature * count, (sampling.top_k * count).long(), sampling.top_p * count
    )
    return kernels.probabilities(rows)


def test_gamma_and_hit_describe_the_drafters_real_drafts(target, drafters, text):
    """At every position and depth that a draft reaches along the committed text. Catches an off-by-one in depths or
    positions, draft vocabulary ids mistaken for the target's, and a missing sampling filter."""
    sampling, prompt, output = text
    ids = prompt + output
    names = list(drafters)
    found = table(target, list(drafters.values()), prompt, output, DEPTH, sampling, seed=SEED)
    assert found.gamma.shape == (len(names), len(output) - 1, DEPTH) == found.hit.shape
    smooth = sampling if sampling.temperature else Sampling(1.0, 0, 1.0)
    p = law(target, ids, smooth)
    first, compared, hits = len(prompt) + 1, dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for n, name in enumerate(names):
        for start, (behind, rows) in drafts(target, drafters[name], ids, first, sampling).items():
            for k in range(min(DEPTH, len(ids) - start)):
                path, at = tuple(ids[start : start + k]), start + k - first
                children = behind.get(path, [])
                hit = ids[start + k] in children
                assert bool(found.hit[n, at, k]) == hit, (name, start, k)
                if rows is None:
                    gamma = p[start + k - 1, children].sum()
                else:
                    q = kernels.probabilities(rows)
                    gamma = torch.minimum(p[start + k - 1], q[k]).sum() if k < len(q) else 0.0
                assert found.gamma[n, at, k] == pytest.approx(float(gamma), abs=2e-4), (name, start, k)
                compared[name] += 1
                hits[name] += hit
                if not hit or name in ("suffix", "retrieval"):  # they match only at the root
                    break
    assert min(compared.values()) >= len(output) - 1
    assert sum(hits.values()) > 20 and max(compared.values()) > len(output)


@pytest.mark.parametrize("sampling", [pytest.param(GREEDY, marks=pytest.mark.slow), WARM], ids=["greedy", "sampled"])
def test_realised_lengths_equal_the_accepted_lengths_of_real_drafts(target, drafters, prompts, sampling):
    """At every start, for chains, chains with runners-up as leaves, and static trees of few nodes. Hits that do not
    mark leaves made drafts too long: they counted tokens after a runner-up."""
    heads = {name: drafters[name] for name in ("eagle3", "hydra", "medusa", "lookup")}
    heads["leaves"] = eagle3.Eagle3Drafter(head(target, 1, 3000), target, TreeShape(4, 1, 60, 15, 0.0))
    few = DraftingRecipe(stop_below=0.0, keep_above=0.0, children=3, nodes=6, width=1, depth=3)
    heads["static"] = trained(target, "hydra", few, draft_heads=3)
    prompt = prompts[1] + prompts[1][-30:]
    output = decode(target, [prompt], sampling=sampling, max_new_tokens=24, seeds=[SEED])[0].output_ids
    ids, first = prompt + output, len(prompt) + 1
    found = table(target, list(heads.values()), prompt, output, DEPTH, sampling, seed=SEED)
    lengths = realised_length(beyond_the_end(found.hit.astype(float)))
    leaves = 0
    for n, drafter in enumerate(heads.values()):
        for start, (behind, _) in drafts(target, drafter, ids, first, sampling).items():
            path = ()
            while start + len(path) < len(ids) and ids[start + len(path)] in behind.get(path, []):
                path = (*path, ids[start + len(path)])
            assert lengths[start - first, n] == 1 + len(path), (list(heads)[n], start)
        leaves += int((found.hit[n] == LEAF).sum())
    assert leaves > 0


def test_scores_are_zero_where_no_draft_could_reach(target, drafters, text):
    """Depth k at token t needs a draft that began t − k + 1 tokens in, and no draft is deeper than its shape."""
    sampling, prompt, output = text
    names = list(drafters)
    found = table(target, list(drafters.values()), prompt, output, DEPTH, sampling, seed=SEED)
    late = np.arange(DEPTH) > np.arange(len(output) - 1)[:, None]
    for array in (found.gamma, found.hit):
        assert (array[:, late] == 0).all()
        assert (array[names.index("hydra"), :, 3:] == 0).all() and (array[names.index("sampled"), :, 3:] == 0).all()
    assert (found.gamma[names.index("lm"), 3:, 3] > 0).any()


def test_the_accepted_length_of_a_chain_is_its_run_of_hits(target, drafters, text):
    """The accepted tokens of each round equal the hits along the diagonal that begins at that round."""
    sampling, prompt, output = text
    lengths = []

    def count(state, draft, verdict):
        lengths.append((len(state.rows[0].ids) - len(verdict.committed[0]) - len(prompt), len(verdict.paths[0])))

    options = dict(sampling=sampling, max_new_tokens=len(output), seeds=[SEED])
    for name in ("eagle3", "lm", "lookup"):
        lengths.clear()
        one = decode(target, [prompt], drafter=drafters[name], on_round=count, **options)[0]
        assert one.output_ids == output
        hit = table(target, [drafters[name]], prompt, output, DEPTH, sampling).hit[0]
        for stood, accepted in lengths[:-1]:  # the last draft ends at the limit
            run = 0
            while run < DEPTH and stood - 1 + run < len(hit) and hit[stood - 1 + run, run]:
                run += 1
            assert run == accepted, (name, stood)


class Watch(Controller):
    """Play one drafter and score all: every second round up to `per_round` tokens of a text, and the rest at its end.
    Neighbouring slots take turns, so that some texts have nothing to score when others have."""

    def __init__(self, drafter, scorer, per_round):
        self.drafter, self.scorer, self.per_round = drafter, scorer, per_round
        self.found, self.rounds = {}, 0

    def choose(self, state):
        return self.drafter

    def observe(self, state, result):
        self.scorer.keep(state, result.verdict, range(state.batch))
        self.rounds += 1
        counts = [
            count if row.stop is not None else min(count, self.per_round if (self.rounds + b) % 2 else 0)
            for b, (count, row) in enumerate(zip(self.scorer.pending(state), state.rows, strict=True))
        ]
        before = self.scorer.pending(state)
        for row, count, part in zip(state.rows, counts, self.scorer.score(state, counts), strict=True):
            assert part.gamma.shape[1] == count
            self.found.setdefault(row.index, []).append(part)
        after = self.scorer.pending(state)
        assert [a - b for a, b in zip(before, after, strict=True)] == counts


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_scores_of_a_live_batch_equal_scores_of_whole_texts(target, prompts, drafters, sampling):
    """Rounds of any length, texts that end early, slots that are filled again and dropped: every decoded token of every
    text is scored once, in order, against its own rows."""
    seeds, limits = [SEED, 1, 2, 5, 9], [16, 2, 11, 7, 1]
    asked = [*prompts, prompts[0], prompts[1]]
    plain = decode(target, asked, sampling=sampling, max_new_tokens=limits, seeds=seeds)
    texts = [one.prompt_ids + one.output_ids for one in plain]
    some = [drafters[name] for name in ("eagle3", "medusa", "sampled", "lookup", "suffix")]
    some.append(Hybrid(some[0], drafters["lookup"], even_costs(target, some[0], "")))
    taps = tuple(sorted({tap for drafter in some for tap in drafter.taps}))
    watch = Watch(ragged(texts, 1, target.vocab_size), Scorer(target, some, 3), 4)
    found = decode(
        target, asked, sampling=sampling, max_new_tokens=limits, seeds=seeds, slots=3, controller=watch, taps=taps
    )
    assert [one.output_ids for one in found] == [one.output_ids for one in plain]
    for one, seed in zip(found, seeds, strict=True):
        whole = table(target, some, one.prompt_ids, one.output_ids, 3, sampling, seed=seed)
        parts = watch.found.get(one.index, [])
        for field in ("gamma", "hit"):
            joined = np.concatenate([getattr(part, field) for part in parts], 1) if parts else np.zeros((6, 0, 3))
            np.testing.assert_allclose(joined, getattr(whole, field), atol=5e-4)
    assert not any(watch.scorer.failures)


def test_a_prompt_of_one_token_is_scored(target, drafters):
    """Drafts that would begin before the text are left out."""
    some = list(drafters.values())
    output = decode(target, [[5]], sampling=GREEDY, max_new_tokens=7, seeds=[0])[0].output_ids
    deep = table(target, some, [5], output, 9, GREEDY)
    shallow = table(target, some, [5], output, 2, GREEDY)
    np.testing.assert_allclose(deep.gamma[:, :, :2], shallow.gamma, atol=2e-4)
    assert np.isfinite(deep.gamma).all()


def test_nan_of_one_drafter_stays_in_its_own_scores(target, drafters, prompts):
    made = head(target, 1, 3000)
    made.lm_head.weight.data[7] = float("nan")
    broken = eagle3.Eagle3Drafter(made, target, TreeShape(4, 1, 4, 1, 0.0))
    output = decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=6, seeds=[0])[0].output_ids
    found = table(target, [drafters["eagle3"], broken, drafters["lookup"]], prompts[0], output, 1, GREEDY)
    assert np.isnan(found.gamma[1]).all() and not found.hit[1].any()
    alone = table(target, [drafters["eagle3"], drafters["lookup"]], prompts[0], output, 1, GREEDY)
    np.testing.assert_allclose(found.gamma[[0, 2]], alone.gamma, atol=1e-5)


def test_a_text_of_one_token_has_no_scores(target, drafters, prompts):
    """Its only token comes from the prefill."""
    found = table(target, [drafters["eagle3"]], prompts[0], [9], DEPTH, GREEDY)
    assert found.gamma.shape == found.hit.shape == (1, 0, DEPTH)
