"""An online suffix automaton of a growing text (Blumer et al. 1985, Theor. Comput. Sci. 40), with counts.

A state stands for the substrings that end at the same positions. Appending a token is amortised O(1), a text of n
tokens has at most 2n−1 states and 3n−4 transitions.
"""

from __future__ import annotations

from itertools import islice

from specctl.drafters.text.trie import Follower

# Set aside for each kind of follower seen, for those not seen yet (PPM), over the squared length of the match: the only
# token seen behind a match of 1 / 2 / 3 / 4 / more tokens is the next one in 20 / 61 / 68 / 66 / 92 % of the cases, on
# sql, code and summarization together. With one share for all lengths, short matches of the text crowd out a store: 9 %
# fewer tokens a pass of code, 2 % of sql.
UNSEEN = 4.0


class SuffixAutomaton:
    """All substrings of a text, and what followed each of them.

    The suffix link of the whole text's state is the longest suffix that stood in the text before: the match that a
    draft continues is kept up to date by construction and never searched for.

    Counts follow the *update exclusion* of PPM (Moffat 1990): a token is counted behind the longest match and behind
    each shorter suffix up to the first that knew the token. These are the states that appending visits anyway; counting
    in all shorter ones, too, would cost O(n) a token in repetitive text.
    """

    def __init__(self) -> None:
        self.length = [0]  # of the longest substring of each state; state 0 is the empty one
        self.link = [-1]  # state of the longest suffix that ends at more positions
        self.next: list[dict[int, int]] = [{}]
        self.count: list[dict[int, int]] = [{}]  # of each follower, in the order in which they were last seen
        self.total = [0]  # Σ count
        self.last = 0  # the whole text

    @property
    def size(self) -> int:
        """Tokens of the text."""
        return self.length[self.last]

    @property
    def match(self) -> int:
        """State of the longest suffix that occurred before (state 0 where none did)."""
        return max(self.link[self.last], 0)

    def extend(self, ids: list[int], end: int | None = None) -> None:
        """Append what is new in `ids`, the whole text up to `end`."""
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
        """The state that holds `state`'s longest substring and `token` as its longest: split off where need be."""
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
    """`length` tokens that led to a state of an automaton, as the place from which a draft reads on."""

    def __init__(self, automaton: SuffixAutomaton, state: int, length: int):
        self.automaton, self.state, self.length = automaton, state, length

    @classmethod
    def of(cls, automaton: SuffixAutomaton) -> Match:
        """The longest suffix of the text that occurred before."""
        return cls(automaton, automaton.match, automaton.length[automaton.match])

    def followers(self, limit: int) -> list[Follower]:
        """The `limit` tokens seen last behind this match, whatever their number: O(limit).

        At the end of the text it goes on behind the text's own match: there the text runs into its own copy.
        """
        automaton, state, length = self.automaton, self.state, self.length
        if state == automaton.last:
            state = automaton.match
            length = automaton.length[state]
        if length == 0:
            return []
        count = automaton.count[state]
        weight = automaton.total[state] + UNSEEN / length**2 * len(count)
        return [
            Follower(token, count[token] / weight, Match(automaton, automaton.next[state][token], length + 1))
            for token in islice(reversed(count), limit)
        ]
