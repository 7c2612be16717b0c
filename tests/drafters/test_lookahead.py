"""Lookahead decoding: the window follows the target's predictions, real or given by a function."""

import copy

import pytest

from specctl.decoding.controllers import Fixed, NoDraft, PerSequence
from specctl.decoding.records import topology
from specctl.decoding.sampling import GREEDY
from specctl.drafters.hybrid.costs import Costs
from specctl.drafters.pool import hybrid
from specctl.drafters.text.lookahead import LookaheadDrafter, Window
from specctl.drafters.tree import DepthLimited
from specctl.errors import UsageError
from specctl.selection.arms import Arm, DraftAll
from tests.lossless.drafters import constant
from tests.toys.decoding import decode


class Watched(LookaheadDrafter):
    """A drafter that records, per round, the text, the paths of the columns, and the tokens added to the columns."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rounds = []

    def read_verdict(self, state, draft, verdict):
        windows = state.memory[self].rows
        trees = zip(windows, draft.tokens.tolist(), draft.parents.tolist(), strict=True)
        asked = [window.asked[: len(copy.copy(window).ends(tokens, parents))] for window, tokens, parents in trees]
        before = [[list(column) for column in window.columns] for window in windows]
        super().read_verdict(state, draft, verdict)
        for row, window, paths, columns in zip(state.rows, windows, asked, before, strict=True):
            moved = window.columns[: len(paths)]
            assert [column[:-1] for column in moved] == [column[1:] for column in columns[: len(paths)]]
            assert window.columns[len(paths) :] == columns[len(paths) :]
            self.rounds.append((list(row.ids), paths, [column[-1] for column in moved]))


def assert_predicted(target, rounds):
    """Check that each column grew by the target's greedy token after the text and the column's path."""
    told = [(text + path, token) for text, paths, found in rounds for path, token in zip(paths, found, strict=True)]
    assert told
    asked = [ids for ids, _ in told]
    answers = decode(target, asked, sampling=GREEDY, max_new_tokens=1, seeds=[0] * len(asked))
    assert [token for _, token in told] == [one.output_ids[0] for one in answers]


def test_columns_grow_by_the_target_predictions(target, prompts):
    drafter = Watched()
    decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=30, seeds=[0], drafter=drafter)
    assert [len(paths) for _, paths, _ in drafter.rounds[:2]] == [7, 7]
    assert isinstance(drafter, DepthLimited) and drafter.depth == 9  # the longest path below
    for _, paths, _ in drafter.rounds[:2]:
        assert [len(path) for path in paths] == [3, 4, 5, 6, 7, 8, 9]  # level 0 up to the column, and three more levels
        assert len({path[0] for path in paths[1:]}) == 1  # all share level 0
    assert_predicted(target, drafter.rounds[:3])


@pytest.mark.parametrize("wrapped", ["batch", "per sequence", "all at once"])
def test_columns_grow_in_drafts_shared_with_other_drafters(target, prompts, wrapped):
    """A union of trees renumbers the nodes of the window. The window does not move where another drafter drafts."""
    drafter = Watched(columns=3)
    whole = {
        "batch": drafter,
        "per sequence": PerSequence([NoDraft(), drafter, constant([7, 7])]),
        "all at once": DraftAll([Arm("other", constant([5, 6])), Arm("lookahead", drafter)]),
    }[wrapped]
    options = {"sampling": GREEDY, "max_new_tokens": 8, "seeds": [0] * 3, "share_rows": False}
    decode(target, prompts, controller=Fixed(whole), **options)
    rounds = drafter.rounds[:6]
    if wrapped == "per sequence":
        assert [bool(found) for _, _, found in rounds] == [False, True, False] * 2
        rounds = [one for one in rounds if one[2]]
    assert_predicted(target, rounds)


def play(window, ids, token_at, rounds):
    """Decode a text with a known token per position; return the number of tokens gained per round."""
    gained = []
    for _ in range(rounds):
        window.read(ids)
        tokens, parents = window.draft(ids[-1], 50, 62, chain=False)
        depths, _ = topology(parents)
        ends = window.ends(tokens, parents)
        window.go_on([token_at(len(ids) + (depths[node] if node >= 0 else 0)) for node in ends])
        children = {link: node for node, link in enumerate(zip(parents, tokens, strict=True))}
        node, before = -1, len(ids)
        while node is not None:
            ids.append(token_at(len(ids)))
            node = children.get((node, ids[-1]))
        gained.append(len(ids) - before)
    return gained


def numbers(position):
    """A text that never repeats."""
    return (position * 7919 + 13) % 1009


def test_a_full_column_holds_the_n_gram_of_its_position():
    """After as many rounds as a column has levels, its n-gram is right and is drafted at its position."""
    assert play(Window(4, 7, 7), [3, 800, 41, 977, 500, 12], numbers, 12) == [1, 1, 1, 4, 1, 4, 1, 1, 1, 4, 1, 4]


def test_without_target_predictions_nothing_is_accepted(monkeypatch):
    monkeypatch.setattr(Window, "go_on", lambda self, predicted: None)
    assert set(play(Window(4, 7, 7), [3, 800, 41, 977, 500, 12], numbers, 12)) == {1}


@pytest.mark.parametrize(("room", "budget", "columns"), [(50, 62, 7), (5, 62, 3), (50, 30, 3), (50, 7, 1), (2, 62, 0)])
def test_drafts_fit_the_room_and_the_budget(room, budget, columns):
    window = Window(4, 7, 7)
    ids = [i % 5 for i in range(40)] + [2, 2, 4, 1] * 3 + [3]
    window.read(ids)
    tokens, parents = window.draft(3, room, budget, chain=False)
    depths, _ = topology(parents)
    assert len(tokens) == len(parents) <= budget and max(depths) <= room
    assert len({*zip(parents, tokens, strict=True)}) == len(tokens)  # no duplicate path
    assert len(window.asked) == columns == len(window.ends(tokens, parents))
    assert tokens[: min(room, 4)] == [4, 2, 2, 4][:room] and not window.asked  # the newest n-gram comes first


def test_the_pool_keeps_the_newest_n_grams():
    window = Window(2, 1, 3)
    for gram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7], [1, 8, 9]):
        window.keep(gram)
    assert window.newest(1) == [(8, 9), (6, 7), (2, 3)]
    assert window.newest(5) == []


def test_scores_use_only_earlier_n_grams(target, prompts):
    """The pool already contains later n-grams, which the score of a position must ignore."""
    drafter, scores = LookaheadDrafter(columns=1, candidates=2), []

    def watch(state, draft, verdict):
        text = state.rows[0].ids
        (score,) = drafter.score(state, [range(2, len(text))])
        scores.append((text[:], score.tokens[0].tolist(), score.children))

    repeating = [prompts[0][:6] * 3]
    decode(target, repeating, sampling=GREEDY, max_new_tokens=2, seeds=[0], drafter=constant([1]), on_round=watch)
    text, found, children = scores[0]
    assert children == (2, 2, 2, 2)
    for position, told in zip(range(2, len(text)), found, strict=True):
        followers = [
            text[end - 3]
            for end in range(4, position)
            if text[end - 4] == text[position - 1]  # the n-gram text[end − 4 … end] ended before this position
        ]
        newest = list(dict.fromkeys(followers[::-1]))
        assert [token for token in told if token >= 0] == newest[:2] or len(newest) > 2
        assert told[0] == (newest[0] if newest else -1)


def test_lookahead_cannot_be_part_of_a_hybrid():
    with pytest.raises(UsageError, match="lookahead is not a text drafter"):
        hybrid("none+lookahead", NoDraft(), LookaheadDrafter(), Costs((1.0,), 1.0, 1.0))
