"""Online suffix automaton of a growing text (Blumer et al. 1985, Theor. Comput. Sci. 40), with counts.

A state stands for all substrings that end at the same set of positions. Appending a token takes amortized O(1) time. A
text of n tokens has at most 2n−1 states and 3n−4 transitions.
"""

from __future__ import annotations

from itertools import islice

from specctl.drafters.text.text_tree import NextToken

# Escape mass (PPM) that each distinct follower adds to the denominator for tokens not seen yet, divided by the squared
# match length. If only one token has followed a match of 1 / 2 / 3 / 4 / more tokens, it is the next token in 20 / 61 /
# 68 / 66 / 92 % of the cases (sql, code and summarization together). With the same mass for all lengths, short matches
# in the text crowd out the datastore: 9 % fewer tokens per pass on code, 2 % on sql.
ESCAPE_MASS = 4.0


class SuffixAutomaton:
    """Index of all substrings of a text and of the tokens that followed each substring.

    The suffix link of the last state leads to the longest suffix that occurred before. A draft continues this match, so
    the match is up to date by construction and is never searched for.

    Counts follow the *update exclusion* of PPM (Moffat 1990). A token is counted for the longest match and for each
    shorter suffix, up to the first one that the token has followed before. Appending visits these states anyway;
    counting in all shorter ones as well would cost O(n) per token in repetitive text.
    """

    def __init__(self) -> None:
        self.length = [0]  # length of the longest substring of each state; state 0 is the empty substring
        self.link = [-1]  # state of the longest suffix that ends at more positions
        self.next: list[dict[int, int]] = [{}]
        self.count: list[dict[int, int]] = [{}]  # occurrences of each follower, in the order they were last seen
        self.total = [0]  # sum of `count` per state
        self.last = 0  # state of the whole text

    @property
    def size(self) -> int:
        """Number of tokens in the text."""
        return self.length[self.last]

    @property
    def match(self) -> int:
        """State of the longest suffix that occurred before, or state 0 if no suffix did."""
        return max(self.link[self.last], 0)

    def extend(self, ids: list[int], end: int | None = None) -> None:
        """Append the new tokens of `ids`, the whole text up to `end`."""
        for token in ids[self.size : end]:
            self._append(token)

    def _append(self, token: int) -> None:
        following, link, length = self.next, self.link, self.length
        new = self._state(length[self.last] + 1, 0)
        state = self.last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            self._count(state, token)
            state = link[state]
        if state >= 0:
            self._count(state, token)
            link[new] = self._ending(state, token)
        self.last = new

    def _ending(self, state: int, token: int) -> int:
        """Return the state with `state`'s longest substring plus `token` as its longest; split a state if necessary."""
        following, link, length = self.next, self.link, self.length
        found = following[state][token]
        if length[found] == length[state] + 1:
            return found
        clone = self._state(length[state] + 1, link[found])
        following[clone], self.count[clone] = dict(following[found]), dict(self.count[found])
        self.total[clone] = self.total[found]
        link[found] = clone
        while state >= 0 and following[state].get(token) == found:
            following[state][token] = clone
            state = link[state]
        return clone

    def _state(self, length: int, link: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.next.append({})
        self.count.append({})
        self.total.append(0)
        return len(self.length) - 1

    def _count(self, state: int, token: int) -> None:
        count = self.count[state]
        count[token] = count.pop(token, 0) + 1
        self.total[state] += 1


class Match:
    """Match of the last `length` tokens with a state of an automaton: a place from which a draft continues."""

    def __init__(self, automaton: SuffixAutomaton, state: int, length: int):
        self.automaton, self.state, self.length = automaton, state, length

    @classmethod
    def of(cls, automaton: SuffixAutomaton) -> Match:
        """Return the longest suffix of the text that occurred before."""
        return cls(automaton, automaton.match, automaton.length[automaton.match])

    def followers(self, limit: int) -> list[NextToken]:
        """The `limit` tokens that followed this match most recently, in O(limit) time however many there are.

        At the end of the text the draft continues from the text's own longest match, because the copied text is
        periodic there.
        """
        automaton, state, length = self.automaton, self.state, self.length
        if state == automaton.last:
            state = automaton.match
            length = automaton.length[state]
        if length == 0:
            return []
        count = automaton.count[state]
        weight = automaton.total[state] + ESCAPE_MASS / length**2 * len(count)
        return [
            NextToken(token, count[token] / weight, Match(automaton, automaton.next[state][token], length + 1))
            for token in islice(reversed(count), limit)
        ]
