"""Check the suffix array against sorting, and lookups against a scan of the documents."""

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.drafters.retrieval import datastore
from specctl.drafters.retrieval.datastore import (
    ESCAPE_MASS,
    LONGEST,
    SEPARATOR,
    Datastore,
    GrowingDatastore,
    flatten,
    suffix_array,
)
from specctl.drafters.text.text_tree import TextTreeShape, grow

DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=4)


def by_sorting(tokens):
    return sorted(range(len(tokens)), key=lambda at: (tokens[at : at + LONGEST], at))


@given(st.lists(st.integers(SEPARATOR, 2), min_size=1, max_size=80))
def test_suffix_array_is_sorted_suffixes(tokens):
    """With four symbols and long texts, many suffixes share more tokens than are compared."""
    assert suffix_array(torch.tensor(tokens, dtype=torch.int32)).tolist() == by_sorting(tokens)


@pytest.mark.parametrize("tokens", [[3], [7] * 5000, [1, 2] * 2500, list(range(5000, 0, -1))])
def test_suffix_array_of_adversarial_texts(tokens):
    array = suffix_array(torch.tensor(tokens, dtype=torch.int32))
    assert array.dtype == torch.int32
    assert array.tolist() == by_sorting(tokens)


@given(documents=DOCUMENTS, context=st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_lookup_finds_exactly_the_occurrences(documents, context):
    store = Datastore.of(documents)
    flat = store.tokens.tolist()
    found = [int(store.suffixes[place]) for place in store.occurrences(array("i", context))]
    assert sorted(found) == [at for at in range(len(flat)) if flat[at : at + len(context)] == context]


@given(documents=DOCUMENTS, ids=st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_no_draft_crosses_a_document(documents, ids):
    """Every path of the tree follows a suffix of the context inside one document."""
    tokens, parents, _ = grow([Datastore.of(documents).find(ids, 6)], TextTreeShape(depth=6, nodes=40, children=4))
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path, at = [tokens[at], *path], parents[at]
        drafted = [ids[-1], *path]
        assert any(document[at : at + len(drafted)] == drafted for document in documents for at in range(len(document)))


def test_counts_by_hand(monkeypatch):
    """The context 1 2 occurs three times: twice before 3, once at the end of a document."""
    monkeypatch.setattr(datastore, "ENOUGH", 1)
    found = Datastore.of([[1, 2, 3, 4], [9, 1, 2], [1, 2, 3, 5]]).find([8, 1, 2], 4)
    assert len(found.rows) == 3
    (three,) = found.followers(5)
    assert (three.token, three.probability) == (3, 2 / (3 + 2 * ESCAPE_MASS))
    four, five = three.next.followers(5)
    assert (four.token, five.token) == (4, 5)
    assert four.probability == five.probability == 1 / (2 + 2 * ESCAPE_MASS)
    assert four.next.followers(5) == []


def test_shorter_contexts_are_added_until_there_are_enough_matches(monkeypatch):
    """The shorter context 2 also occurs before 7; matches of the longer context are counted again."""
    store = Datastore.of([[1, 2, 3], [6, 2, 7]])
    monkeypatch.setattr(datastore, "ENOUGH", 1)
    assert [row[0] for row in store.find([1, 2], 1).rows] == [3]
    monkeypatch.setattr(datastore, "ENOUGH", 2)
    assert [row[0] for row in store.find([1, 2], 1).rows] == [3, 3, 7]


def test_a_frequent_context_is_sampled(monkeypatch):
    """A sample of 64 out of 5,000 occurrences keeps the shares: 3 follows in one fifth."""
    store = Datastore.of([[1, 3] if i % 5 == 0 else [1, 2] for i in range(5000)])
    found = store.find([1], 1)
    assert len(found.rows) == datastore.SAMPLE
    assert [(f.token, round(f.probability, 1)) for f in found.followers(2)] == [(2, 0.8), (3, 0.2)]


@pytest.mark.parametrize("documents", [[], [[]], [[4]]])
def test_nearly_empty_stores_find_nothing(documents):
    store = Datastore.of(documents)
    assert grow([store.find([4], 3)], TextTreeShape(3, 3, 3)) == ([], [], [])
    assert store.find([], 3).rows == []


def inside(found):
    """Return the continuations, cut at the end of their document."""
    return sorted(row[: row.index(SEPARATOR)] if SEPARATOR in row else row for row in found.rows)


@settings(deadline=None)  # sorting can be slow on a busy machine
@given(
    chunks=st.lists(DOCUMENTS, min_size=1, max_size=12),
    limit=st.integers(8, 400),
    ids=st.lists(st.integers(0, 2), min_size=1, max_size=20),
)
def test_a_growing_store_equals_a_store_of_its_newest_documents(chunks, limit, ids):
    """Documents stay whole and ordered, and the oldest are dropped.

    Lookups equal a suffix array over all documents kept, and a restored store has the same parts.
    """
    store, other, everything = GrowingDatastore(limit), GrowingDatastore(limit), []
    for chunk in chunks:
        store.add(chunk)
        everything += chunk
    kept = store.tokens.tolist()
    assert len(store) == len(kept) <= limit
    count = kept.count(SEPARATOR)
    assert kept == flatten(everything[len(everything) - count :]).tolist()
    if len(flatten(everything)) <= limit:
        assert count == len(everything)
    if 0 < len(kept) <= datastore.SAMPLE:  # small enough not to be sampled
        assert inside(store.find(ids, 4)) == inside(Datastore.of(everything[len(everything) - count :]).find(ids, 4))
    other.restore(store.state())
    assert [part.tokens.tolist() for part in other.parts] == [part.tokens.tolist() for part in store.parts]


def test_each_token_is_sorted_a_logarithmic_number_of_times(monkeypatch):
    """1,024 additions of one document leave at most ten parts, and sort no token more than eleven times."""
    sorted_tokens = []
    monkeypatch.setattr(datastore, "suffix_array", lambda tokens: sorted_tokens.append(len(tokens)) or tokens)
    store = GrowingDatastore(10**6)
    for n in range(1024):
        store.add([[n] * 7])
        assert len(store.parts) <= 10
    assert len(store) == 8 * 1024 and sum(sorted_tokens) <= 11 * len(store)


def test_a_document_larger_than_the_store_empties_it():
    store = GrowingDatastore(10)
    store.add([[1, 2, 3]])
    store.add([[4] * 20])
    assert len(store) == 0 and store.find([1], 3).rows == []
