"""Drafts and scores of `suffix`, with and without a store, equal those computed from scratch in every round."""

import pytest
import torch

from specctl.decoding.sampling import GREEDY
from specctl.drafters.retrieval.datastore import Datastore
from specctl.drafters.text.automaton import Match, SuffixAutomaton
from specctl.drafters.text.suffix import Suffix, SuffixText
from specctl.drafters.text.text_tree import TextTreeShape, first_level, grow
from tests.toys.decoding import decode

DEPTH, NODES, CHILDREN = 6, 9, 3


def scratch(ids, corpus, shape):
    """Return the tree after `ids`, from an automaton built from `ids` alone."""
    automaton = SuffixAutomaton()
    automaton.extend(ids)
    places = [Match.of(automaton)]
    return grow(places if corpus is None else [*places, corpus.find(ids, DEPTH)], shape)


class Watched(Suffix):
    """A drafter that checks every draft and score against a computation from scratch, and the room left."""

    def __init__(self, corpus=None):
        super().__init__(DEPTH, NODES, CHILDREN, corpus)
        self.rounds, self.idle, self.widths = 0, 0, set()

    def propose(self, state, budget):
        budget = min(budget, 4 + self.rounds % 9)  # sometimes less than the drafter wants
        draft = super().propose(state, budget)
        assert draft.rows is None and draft.size <= budget
        for row, tokens, parents in zip(state.rows, draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            room = row.limit - len(row.ids) - 1 if row.stop is None else 0
            count = sum(parent >= -1 for parent in parents)
            shape = TextTreeShape(max(0, min(DEPTH, room)), min(NODES, budget), CHILDREN)
            assert (tokens[:count], parents[:count]) == scratch(row.ids, self.corpus, shape)[:2]
            self.idle += row.stop is not None
        self.rounds += 1
        self._check_scores(state)
        return draft

    def _check_scores(self, state):
        """Score spans that continue the last ones, step back, or are empty."""
        shape = TextTreeShape(DEPTH, NODES, CHILDREN)
        first = 2 if self.rounds % 3 == 0 else 6
        spans = [range(max(2, len(row.ids) - first), len(row.ids) - (i == 1) * 1) for i, row in enumerate(state.rows)]
        spans[-1] = range(0)
        for row, span, score in zip(state.rows, spans, self.score(state, spans, depths=2), strict=True):
            assert score.positions == span and score.logits is None
            assert score.tokens.dtype == torch.long and score.tokens.shape[:2] == (1, len(span))
            for position, children in zip(span, score.tokens[0].tolist(), strict=True):
                expected = first_level(scratch(row.ids[:position], self.corpus, shape))
                assert children == expected + [-1] * (len(children) - len(expected))
                self.widths.add(len(expected))


@pytest.mark.parametrize("with_store", [False, True], ids=["text", "text and store"])
def test_drafts_and_scores_in_a_batch_equal_those_from_scratch(target, prompts, with_store):
    """A ragged, shrinking batch with finished texts that keep their slots for some rounds."""
    repeating = [prompt + prompt[-9:] for prompt in prompts] * 2
    options = dict(sampling=GREEDY, max_new_tokens=[20, 2, 12, 14, 9, 20], seeds=[0] * 6)
    corpus = None
    if with_store:
        plain = decode(target, repeating[:3], sampling=GREEDY, max_new_tokens=12, seeds=[0] * 3)
        corpus = Datastore.of([one.prompt_ids[-4:] + one.output_ids for one in plain])
    drafter = Watched(corpus)
    found = decode(target, repeating, drafter=drafter, **options)
    assert sum(one.accepted for one in found) > 0
    assert drafter.idle > 0 and len(drafter.widths) > 2


def test_exact_mode_drafts_chains_only(target, prompts):
    shapes = []

    def watch(state, draft, verdict):
        shapes.append((draft.chain, draft.size))

    repeating = prompts[1] + prompts[1][:40]
    options = dict(sampling=GREEDY, max_new_tokens=24, seeds=[0])
    drafter = Suffix(children=4, nodes=30)
    decode(target, [repeating], drafter=drafter, exact=True, on_round=watch, **options)
    assert all(chain and size <= 7 for chain, size in shapes)
    assert max(size for _, size in shapes) > 1
    shapes.clear()
    decode(target, [repeating], drafter=drafter, on_round=watch, **options)
    assert not all(chain for chain, _ in shapes)


def test_scoring_an_earlier_position_restarts_the_automaton():
    text, ids = SuffixText(), [1, 2, 1, 2, 3, 1]
    for end in (4, 6, 2, 2, 5):
        assert text.before(end, ids).size == end
    text.automaton.extend(ids)
    assert text.before(3, ids).size == 3 and text.automaton.size == 6
