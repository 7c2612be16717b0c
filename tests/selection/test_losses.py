"""Expected lengths compared with enumeration, and the known bias of the estimators."""

from itertools import product

import numpy as np
import pytest

from specctl.lab.recorded.recorder import Drafted
from specctl.selection.game.losses import (
    INNER,
    LEAF,
    along_drafts,
    beyond_the_end,
    expected_length,
    length_loss,
    per_second,
    realised_length,
    with_failures,
)


def length_by_enumeration(gamma, t):
    """E[committed] of a draft at token t: the sum over all patterns of acceptances of probability times leading run."""
    K = gamma.shape[1]
    mean = 0.0
    for pattern in product([0, 1], repeat=K):
        chance = 1.0
        for j, accepted in enumerate(pattern):
            chance *= gamma[t + j, j] if accepted else 1 - gamma[t + j, j]
        run = pattern.index(0) if 0 in pattern else K
        mean += chance * (run + 1)
    return mean


@pytest.mark.parametrize(("N", "M", "K"), [(1, 1, 1), (2, 3, 1), (3, 4, 3), (2, 1, 4)])
def test_expected_length_is_the_mean_over_all_acceptances(N, M, K):
    """A wrong diagonal (depth j read at token t instead of t + j − 1) gives other numbers."""
    gamma = np.random.default_rng(N + M + K).random((N, M + K - 1, K))
    wanted = [[length_by_enumeration(gamma[i], t) for i in range(N)] for t in range(M)]
    assert expected_length(gamma) == pytest.approx(np.array(wanted))


def test_the_loss_spans_the_unit_interval():
    never, always = np.zeros((1, 3, 3)), np.ones((1, 3, 3))
    assert length_loss(never)[0, 0] == pytest.approx(0.75), "plain decoding commits 1 of K + 1"
    assert length_loss(always)[0, 0] == 0


def test_nothing_is_accepted_beyond_the_end():
    along = along_drafts(beyond_the_end(np.ones((1, 2, 3))))
    assert along.tolist() == [[[1, 1, 0], [1, 0, 0]]]


@pytest.mark.parametrize(("K", "wanted", "true"), [(2, 1.75, 2.0), (5, 2.5, 3.5), (8, 3.25, 5.0)])
def test_the_product_is_biased_and_the_realised_form_is_not(K, wanted, true):
    """The first token is a or b with ½ each; q = a. Afterwards q is right after a and wrong after b."""
    product_form, realised = [], []
    for first_is_a in (True, False):
        gamma = np.full((1, K, K), float(first_is_a))
        gamma[0, 0] = 0.5
        hit = np.full((1, K, K), float(first_is_a)) * INNER
        product_form.append(expected_length(gamma)[0, 0])
        realised.append(realised_length(hit)[0, 0])
    assert np.mean(product_form) == pytest.approx(wanted)
    assert np.mean(realised) == pytest.approx(true)


def test_losses_per_second_by_hand():
    """Arm 0 has twice the length of arm 1 and three times its cost: 3/3 against 1.5/1, of at most 4/1."""
    gamma = np.zeros((2, 3, 3))
    gamma[0, [0, 1], [0, 1]] = 1.0  # AL = 3
    gamma[1, 0, 0] = 0.5  # AL = 1.5
    losses = length_loss(gamma)
    assert losses == pytest.approx(np.array([[1 - 3 / 4, 1 - 1.5 / 4]]))
    found = per_second(losses, (0.03, 0.01), step=0.01)
    assert found == pytest.approx(np.array([[1 - 1 / 4, 1 - 1.5 / 4]]))
    assert per_second(losses, (0.02, 0.02), step=0.02) == pytest.approx(losses), "rounds that cost a plain step"
    assert per_second(losses, (0.01, 0.01), step=0.02) == pytest.approx(losses), "at least a plain step"


def test_losses_with_failures_by_hand():
    losses = np.array([[0.2, 0.2, 0.2, 0.2]])
    assert with_failures(losses, [1, 1, 0.5, 0]) == pytest.approx(np.array([[0.2, 0.2, 0.6, 1.0]]))


@pytest.mark.parametrize("children", [1, 2, 3])
def test_the_realised_length_of_a_tree_with_leaves_is_unbiased(children):
    """Enumerates all texts of three tokens over three symbols: a chain 0 → 1 → 2 with runners-up as leaves. If leaves
    counted as inner nodes, the mean would exceed the tokens that such drafts commit."""
    first, K = [0, 1, 2], 3
    kept = [(token + rank) % 3 for token in first for rank in range(children)]
    parents = [-1] * children + [0] * children + [children] * children
    tree = Drafted(kept, parents, K, 0.0)
    law = np.random.default_rng(children).dirichlet(np.ones(3), (3, 4))  # [depth, token before it, token]
    estimate = truth = longest = 0.0
    for text in product(range(3), repeat=K):
        before = [3, *text[:-1]]
        chance = np.prod([law[k, before[k], token] for k, token in enumerate(text)])
        rank = [(token - first[k]) % 3 for k, token in enumerate(text)]
        hit = np.zeros((1, K, K))
        hit[0] = np.diag([INNER if r == 0 else LEAF if r < children else 0 for r in rank])
        estimate += chance * realised_length(hit)[0, 0]
        longest += chance * realised_length(np.where(hit, INNER, 0))[0, 0]
        truth += chance * (1 + tree.accepted(text))
    assert estimate == pytest.approx(truth)
    assert (longest > truth + 0.05) == (children > 1), "the length if leaves had children"
