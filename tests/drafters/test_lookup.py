"""Prompt lookup agrees with a search of the whole text in every round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.decoding.sampling import GREEDY
from specctl.drafters.pool import load_drafter
from specctl.drafters.text.lookup import Lookup, NGramIndex
from specctl.recipe import DraftingRecipe
from tests.toys.decoding import decode

TEXT = st.lists(st.integers(0, 3), max_size=40)


def searched(ids, count, longest=3, shortest=1):
    """The specification: find the last occurrence of the longest n-gram, then copy, reading the copied tokens too."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                copied = list(ids)
                for i in range(count):
                    copied.append(copied[end + i])
                return copied[len(ids) :]
    return []


@given(text=TEXT, cuts=st.lists(st.integers(0, 40), max_size=5), count=st.integers(0, 9))
def test_the_incremental_index_equals_a_search(text, cuts, count):
    """The text grows by pieces of any size, including empty ones."""
    index = NGramIndex()
    for cut in [*sorted(cuts), len(text)]:
        ids = text[:cut]
        index.extend(ids)
        assert index.continuation(ids, count) == (searched(ids, count) if count else [])


def test_the_latest_longest_match_wins():
    index = NGramIndex()
    ids = [1, 2, 3, 7, 1, 2, 3, 8, 3, 9, 1, 2, 3]
    index.extend(ids)
    assert index.continuation(ids, 2) == [8, 3]


def test_a_periodic_text_is_continued_periodically():
    index = NGramIndex()
    ids = [5, 6, 5, 6, 5]
    index.extend(ids)
    assert index.continuation(ids, 7) == [6, 5, 6, 5, 6, 5, 6]


def test_a_text_without_repetition_has_no_continuation():
    index = NGramIndex()
    index.extend([1, 2, 3])
    assert index.continuation([1, 2, 3], 7) == []


class Watched(Lookup):
    """A drafter that checks every draft against the specification and the remaining room."""

    def propose(self, state, budget):
        draft = super().propose(state, budget)
        assert draft.rows is None and draft.chain and draft.size <= min(budget, 7)
        for row, tokens, parents in zip(state.rows, draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            room = row.limit - len(row.ids) - 1 if row.stop is None else 0
            chain = [token for token, parent in zip(tokens, parents, strict=True) if parent >= -1]
            assert chain == searched(row.ids, min(7, budget, room))
        return draft


def test_drafts_in_a_batch_equal_a_search(target, prompts):
    """A ragged, shrinking batch with finished texts that keep their slots for some rounds."""
    repeating = [prompt + prompt[-9:] for prompt in prompts] * 2
    found = decode(
        target, repeating, sampling=GREEDY, max_new_tokens=[20, 3, 9, 14, 6, 20], seeds=[0] * 6, drafter=Watched()
    )
    assert sum(one.accepted for one in found) > 0


@pytest.mark.parametrize(
    ("options", "longest"),
    [({"depth": 5}, 5), ({"nodes": 3}, 3), ({"depth": 5, "nodes": 3}, 3), ({"depth": 2, "nodes": 3}, 2)],
)
def test_a_chain_has_at_most_depth_and_at_most_nodes_tokens(tiny, options, longest):
    sizes = []
    drafter = load_drafter("lookup", tiny, DraftingRecipe(**options))
    watch = {"on_round": lambda state, draft, verdict: sizes.append(draft.size)}
    decode(tiny, [[5, 9] * 12], drafter=drafter, sampling=GREEDY, max_new_tokens=24, seeds=[0], **watch)
    assert max(sizes) == longest
