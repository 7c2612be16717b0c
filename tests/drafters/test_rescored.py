"""Rescored drafts: candidates of independent heads, reordered by the n-grams of a datastore."""

import itertools

import pytest

from specctl.decoding.controllers import NoDraft
from specctl.decoding.sampling import GREEDY
from specctl.drafters.hybrid.rescored import EXPONENT, UNSEEN, LatticePosition, Rescored
from specctl.drafters.pool import load_family, rescored
from specctl.drafters.retrieval.datastore import Datastore
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.drafters.text.text_tree import TextTreeShape, grow
from specctl.errors import UsageError
from specctl.recipe import DraftingRecipe, TrainRecipe
from tests.toys.decoding import decode, whole

STORE = Datastore.of([[1, 2, 3, 9], [1, 2, 4, 9], [1, 2, 3, 8], [5, 6, 7, 7]])
ODDS = [[0.5, 0.4], [0.6, 0.3], [0.2, 0.1]]
TOKENS = [[5, 2], [6, 3], [7, 9]]


def conditional(ids, depth):
    """Return the probability of each candidate at a depth after a text, from the counts of the store."""
    seen = {found.token: found.probability for found in STORE.find(ids, 1).followers(64)}
    scores = [p * max(seen.get(t, 0.0), UNSEEN) ** EXPONENT for p, t in zip(ODDS[depth], TOKENS[depth], strict=True)]
    return {t: score * sum(ODDS[depth]) / sum(scores) for t, score in zip(TOKENS[depth], scores, strict=True)}


def test_a_draft_has_the_best_paths_under_both_models():
    """Compare with all paths of the lattice. The heads prefer 5, 6, 7; after 1, the store prefers 2, 3, 9."""
    found = grow([LatticePosition(STORE, ODDS, TOKENS, [0, 1])], TextTreeShape(3, 7, 2))
    joint = {(): 1.0}
    for depth in range(3):
        for path, token in itertools.product([p for p in joint if len(p) == depth], TOKENS[depth]):
            joint[*path, token] = joint[path] * conditional([0, 1, *path], depth)[token]
    del joint[()]
    paths = []
    for node, parent in enumerate(found.parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), found.tokens[node]))
    assert set(paths) == set(sorted(joint, key=lambda path: -joint[path])[:7])
    assert paths[0] == (2,) and (2, 3, 9) in paths


def test_one_child_per_node_makes_a_chain():
    found = grow([LatticePosition(STORE, ODDS, TOKENS, [0, 1])], TextTreeShape(3, 7, 1))
    assert (found.tokens, found.parents) == ([2, 3, 9], [-1, 0, 1])


def test_an_unknown_context_keeps_the_head_probabilities():
    followers = LatticePosition(STORE, ODDS, TOKENS, [77]).followers(2)
    assert [(one.token, round(one.probability, 9)) for one in followers] == [(5, 0.5), (2, 0.4)]


@pytest.fixture(scope="module")
def head(target):
    family = load_family("medusa")
    module = family.build(TrainRecipe(arch="medusa"), target, lambda size: list(range(size)))
    return family.make_drafter(module, target, DraftingRecipe())


def test_the_lattice_holds_the_candidates_of_every_head(target, prompts, head):
    seen = []

    def watch(state, draft, verdict):
        logprob, tokens = head.lattice(state, 5)
        for k in range(head.shape.depth):
            best = head.logits(k, head.last(state), None).log_softmax(-1).topk(5)
            assert tokens[:, k].tolist() == best.indices.tolist()
            assert logprob[0, k].tolist() == pytest.approx(best.values[0].tolist())
        seen.append(tokens.shape)

    decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=4, seeds=[0], drafter=head, on_round=watch)
    assert seen[0] == (1, head.shape.depth, 5)


def test_a_store_with_the_text_corrects_the_heads(target, prompts, head):
    """Untrained heads predict one token at all depths; the store moves tokens of the text to the front."""
    options = {"sampling": GREEDY, "max_new_tokens": 24, "seeds": [0] * len(prompts)}
    texts = whole(decode(target, prompts, **options))
    alone = decode(target, prompts, drafter=head, **options)
    found = decode(target, prompts, drafter=Rescored(head, Datastore.of(texts)), **options)
    assert whole(found) == texts
    assert sum(one.target_passes for one in found) < sum(one.target_passes for one in alone)


def test_scores_are_the_first_level_of_a_draft(target, prompts, head):
    drafter = Rescored(head, STORE)
    drafts = []

    class Kept(Rescored):
        def propose(self, state, budget):
            draft = super().propose(state, budget)
            level = [t for t, p in zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True) if p == -1]
            drafts.append((len(state.rows[0].ids), level))
            return draft

    def compare(state, draft, verdict):
        position, level = drafts[-1]
        (score,) = drafter.score(state, [range(position, position + 1)])
        assert score.tokens[0, 0].tolist()[: len(level)] == level

    decode(
        target, prompts[:1], sampling=GREEDY, max_new_tokens=9, seeds=[0], drafter=Kept(head, STORE), on_round=compare
    )
    assert len(drafts) > 3


@pytest.mark.parametrize("parts", ["no head", "no store", "lookup"])
def test_unsuitable_parts_are_refused(head, parts):
    store = Suffix(corpus=STORE)
    given = {"no head": (NoDraft(), store), "no store": (head, Suffix()), "lookup": (head, Lookup())}[parts]
    with pytest.raises(UsageError, match=r"a\+b: drafting.rescore needs a medusa head and a datastore"):
        rescored("a+b", *given)
