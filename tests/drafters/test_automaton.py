"""The suffix automaton agrees with a brute-force count of substrings and followers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.drafters.text.automaton import ESCAPE_MASS, Match, SuffixAutomaton

TEXT = st.lists(st.integers(0, 2), max_size=24)


def automaton_of(ids):
    automaton = SuffixAutomaton()
    automaton.extend(ids)
    return automaton


def ends(ids, gram):
    return [end for end in range(len(gram), len(ids) + 1) if ids[end - len(gram) : end] == gram]


def counted(ids):
    """Count followers by the definition of update exclusion.

    Returns {substring: {follower: count}} with the followers ordered by last occurrence.
    """
    counts = {}
    for at, token in enumerate(ids):
        before, known = ids[:at], None
        for size in range(at, -1, -1):
            gram = before[at - size :]
            if known is not None and ends(before, gram) != known:
                break  # longer substrings of this class knew the token and were counted last
            followers = counts.setdefault(tuple(gram), {})
            if token in followers:
                known = ends(before, gram)
            followers[token] = followers.pop(token, 0) + 1
    return counts


def strings(automaton):
    """Yield every substring with its state."""
    waiting = [((), 0)]
    while waiting:
        gram, state = waiting.pop()
        yield gram, state
        waiting += [((*gram, token), to) for token, to in automaton.next[state].items()]


@given(TEXT)
def test_substrings_followers_and_counts(ids):
    """Catches a clone without its counts and a transition that was not redirected."""
    automaton, expected = automaton_of(ids), counted(ids)
    found = dict(strings(automaton))
    assert set(found) == {tuple(ids[a:b]) for a in range(len(ids) + 1) for b in range(a, len(ids) + 1)}
    for gram, state in found.items():
        assert list(automaton.count[state].items()) == list(expected.get(gram, {}).items())
        assert automaton.total[state] == sum(automaton.count[state].values())


@given(TEXT)
def test_the_match_is_the_longest_suffix_seen_before(ids):
    automaton = automaton_of(ids)
    sizes = [size for size in range(len(ids)) if len(ends(ids, ids[len(ids) - size :])) > 1]
    assert automaton.length[automaton.match] == max(sizes, default=0)


@given(text=TEXT, cuts=st.lists(st.integers(0, 24), max_size=5))
def test_incremental_extension_equals_building_from_scratch(text, cuts):
    automaton = SuffixAutomaton()
    for cut in [*sorted(cuts), len(text)]:
        automaton.extend(text[:cut])
        automaton.extend(text, cut)  # no new tokens
        assert vars(automaton) == vars(automaton_of(text[:cut]))


def fibonacci(size):
    a, b = [0], [0, 1]
    while len(b) < size:
        a, b = b, b + a
    return b[:size]


ADVERSARIAL = {
    "equal tokens": [7] * 5000,
    "two in turn": [1, 2] * 2500,
    "most states": [1] + [2] * 4999,
    "fibonacci": fibonacci(5000),
    "one token with ever new followers": [token for i in range(2500) for token in (0, i + 1)],
    "all different": list(range(5000)),
}


@pytest.mark.parametrize("ids", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_memory_and_work_are_linear(ids, monkeypatch):
    """Work is the number of state visits; the number of transitions bounds the cost of copying them."""
    visits = 0
    count = SuffixAutomaton._count

    def counting(self, state, token):
        nonlocal visits
        visits += 1
        count(self, state, token)

    monkeypatch.setattr(SuffixAutomaton, "_count", counting)
    automaton = automaton_of(ids)
    assert len(automaton.length) <= 2 * len(ids) - 1 + 1
    assert sum(map(len, automaton.next)) <= 3 * len(ids) - 4
    assert visits <= 3 * len(ids)


@pytest.mark.parametrize("ids", [[], [5], [5, 6]])
def test_short_texts_have_no_match(ids):
    automaton = automaton_of(ids)
    assert automaton.match == 0
    assert Match.of(automaton).followers(3) == []


def test_followers_are_the_last_seen_with_their_shares():
    """Token 1 was followed by 2, 3, 2 and 4; the two most recent followers are requested."""
    automaton = automaton_of([1, 2, 1, 3, 1, 2, 1, 4, 9, 1])
    found = Match.of(automaton).followers(2)
    weight = 4 + 3 * ESCAPE_MASS
    assert [(follower.token, follower.probability) for follower in found] == [(4, 1 / weight), (2, 2 / weight)]


def test_a_longer_match_is_trusted_more():
    """Each drafted token extends the match, so the next token gets a smaller escape mass."""
    automaton = automaton_of([1, 2, 3, 4, 8, 1, 2])
    (three,) = Match.of(automaton).followers(1)
    (four,) = three.next.followers(1)
    assert (three.token, three.probability) == (3, 1 / (1 + ESCAPE_MASS / 4))
    assert (four.token, four.probability) == (4, 1 / (1 + ESCAPE_MASS / 9))


def test_a_periodic_text_is_continued_periodically():
    automaton = automaton_of([5, 6, 5, 6, 5])
    place, read = Match.of(automaton), []
    for _ in range(7):
        (follower,) = place.followers(1)
        read.append(follower.token)
        place = follower.next
    assert read == [6, 5, 6, 5, 6, 5, 6]
