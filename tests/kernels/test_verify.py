"""The verification rules, case by case; tests/lossless checks their distribution."""

import pytest
import torch

from specctl.kernels import reference
from tests.kernels.conftest import INTERPRETED


@pytest.mark.parametrize(
    ("drawn", "tokens", "parents", "path", "bonus"),
    [
        pytest.param([7], [], [], [], 7, id="empty"),
        pytest.param([5, 6, 7], [5, 6], [-1, 0], [0, 1], 7, id="chain accepted"),
        pytest.param([5, 9, 7], [5, 6], [-1, 0], [0, -1], 9, id="chain cut"),
        pytest.param([6, 0, 3, 4], [5, 6, 3], [-1, -1, 1], [1, 2, -1], 4, id="second branch"),
        pytest.param([5, 1, 2, 3], [5, 5, 1], [-1, -1, 1], [0, -1, -1], 1, id="lowest of equal siblings"),
        pytest.param([5, 8, 6], [6, 5], [1, -1], [1, 0], 8, id="child stored before its parent"),
        pytest.param([0, 4, 4], [0, 0], [-2, -2], [-1, -1], 0, id="padding is not a child of the root"),
    ],
)
def test_walk_tree_by_hand(backend, drawn, tokens, parents, path, bonus):
    walked = backend.walk_tree(*(torch.tensor([row], dtype=torch.int64) for row in (drawn, tokens, parents)))
    accepted = sum(node >= 0 for node in path)
    assert [field.tolist() for field in walked] == [[path], [accepted], [bonus]]


@pytest.mark.parametrize("vocabulary", [7, 256, 600])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (0.8, 6, 0.9), (0.0, 0, 1.0)]
)
def test_sample_tree(backend, vocabulary, temperature, top_k, top_p):
    """Equals sampling from all rows and then walking the tree."""
    generator = torch.Generator().manual_seed(vocabulary)
    batch, n = 3 if INTERPRETED else 40, 4  # Triton's interpreter takes a second per row with top-p
    logits = 2 * torch.randn(batch, n + 1, vocabulary, generator=generator, dtype=torch.float64)
    logits[0, 0, 1], logits[1] = torch.nan, -torch.inf
    logits[1, :, 3] = 0.0
    u = torch.rand(batch, n + 1, generator=generator, dtype=torch.float64)
    fill = torch.ones(batch, dtype=torch.float64)
    filters = fill * temperature, (fill * top_k).long(), fill * top_p
    rows = reference.row_params(logits.flatten(0, 1), *(field.repeat_interleave(n + 1) for field in filters))
    drawn = reference.sample_rows(rows, u.flatten()).view(batch, n + 1)
    tokens = torch.stack((drawn[:, 0], (drawn[:, 0] + 1) % vocabulary, drawn[:, 1], drawn[:, 3]), 1)
    tokens[2] = -5  # nothing is accepted
    parents = torch.tensor([[-1, -1, 0, 2]]).repeat(batch, 1)
    expected = reference.walk_tree(drawn, tokens, parents)
    assert expected[1].max() == 3
    for ours, spec in zip(backend.sample_tree(logits, filters, u, tokens, parents), expected, strict=True):
        assert torch.equal(ours, spec)


def rows_of(backend, probabilities, temperature=1.0):
    x = torch.tensor(probabilities, dtype=torch.float64).log()
    fill = torch.ones(len(x), dtype=torch.float64)
    return backend.row_params(x, fill * temperature, torch.zeros(len(x), dtype=torch.int64), fill)


def accept(backend, p, q, tokens, u_accept, u_next, count=None, target=1.0, draft=1.0, rule="token"):
    n = len(tokens)
    q_rows = rows_of(backend, q, draft) if q else rows_of(backend, p[:1]).take(torch.tensor([], dtype=torch.int64))
    accepted, bonus = backend.accept_chain(
        rows_of(backend, p, target),
        q_rows,
        torch.tensor([tokens], dtype=torch.int64),
        torch.tensor([n if count is None else count]),
        torch.tensor([u_accept], dtype=torch.float64),
        torch.tensor([u_next], dtype=torch.float64),
        rule,
    )
    return accepted.item(), bonus.item()


HALF, LEFT, RIGHT = [0.5, 0.5], [0.8, 0.2], [0.2, 0.8]


def test_token_rule_by_hand(backend):
    assert accept(backend, [HALF], [], [], [], [0.6]) == (0, 1)  # nothing drafted: plain sampling
    # accepted below p/q = 0.5/0.8, rejected above; the residual (0.5 − 0.8, 0.5 − 0.2) has token 1 only
    assert accept(backend, [HALF, LEFT], [LEFT], [0], [0.62], [0.0, 0.9]) == (1, 1)
    assert accept(backend, [HALF, LEFT], [LEFT], [0], [0.63], [0.0, 0.9]) == (0, 1)
    # each position has its own uniforms; the first rejection ends the chain, although the third would be accepted
    p, q = [HALF] * 4, [HALF, LEFT, RIGHT]
    assert accept(backend, p, q, [1, 0, 0], [0.99, 0.7, 0.1], [0.0, 0.0, 0.0, 0.0]) == (1, 1)
    # padding is not verified: the next token comes from p at `count`, not from a residual
    assert accept(backend, p, q, [1, 0, 0], [0.99, 0.0, 0.0], [0.9, 0.1, 0.9, 0.9], count=1) == (1, 0)


def test_token_rule_with_zero_probabilities(backend):
    one, other = [1.0, 0.0], [0.0, 1.0]
    assert accept(backend, [HALF, HALF], [one], [1], [0.99], [0.0, 0.0]) == (1, 0)  # q(x) = 0 < p(x): accepted
    assert accept(backend, [one, HALF], [one], [1], [0.0], [0.99, 0.0]) == (0, 0)  # p(x) = q(x) = 0: rejected, p again
    assert accept(backend, [one, HALF], [other], [1], [0.0], [0.99, 0.0]) == (0, 0)  # disjoint supports
    assert accept(backend, [HALF, HALF], [HALF], [1], [1 - 2**-24], [0.9, 0.1]) == (1, 0)  # p = q always accepted


def test_token_rule_with_greedy_rows(backend):
    """A greedy p accepts its argmax only, the lowest id on a tie. A greedy q is one-hot."""
    for token, result in ((0, (1, 0)), (1, (0, 0))):
        assert accept(backend, [HALF, HALF], [LEFT], [token], [0.5], [0.9, 0.9], target=0.0) == result
    assert accept(backend, [RIGHT, HALF], [LEFT], [0], [0.19], [0.0, 0.9], draft=0.0) == (1, 1)
    assert accept(backend, [RIGHT, HALF], [LEFT], [0], [0.21], [0.0, 0.9], draft=0.0) == (0, 1)


def test_block_rule_by_hand(backend):
    def block(*args, **kwargs):
        return accept(backend, *args, rule="block", **kwargs)

    assert block([HALF], [], [], [], [0.6]) == (0, 1)  # nothing drafted: plain sampling
    # share_1 = 0.5/0.8 = 0.625 and p = q afterwards: the excess is 0, h_1 = 0; share_2 = 0.625 · 0.2/0.5 = 0.25 = h_2
    p, q = [HALF, LEFT, HALF], [LEFT, LEFT]
    p[1], q[1] = [0.2, 0.8], HALF
    assert block(p, q, [0, 0], [0.99, 0.24], [0.9, 0.9, 0.9]) == (2, 1)  # h_1 does not matter once h_2 accepts
    # after x_1: 0.625 · (0.2, 0.8) − 0.5 = (−, 0) leaves nothing to draw, so no draft may end there
    assert block(p, q, [0, 0], [0.0, 0.26], [0.0, 0.9, 0.9]) == (0, 1)
    # for one token both rules are equal
    assert block([HALF, LEFT], [LEFT], [0], [0.62], [0.0, 0.9]) == (1, 1)
    assert block([HALF, LEFT], [LEFT], [0], [0.63], [0.0, 0.9]) == (0, 1)
    # x_2 compensates for x_1: 0.625 · 0.8/0.5 = 1, where the token rule stops at u_1 = 0.7
    p[1] = [0.8, 0.2]
    assert block(p, q, [0, 0], [0.7, 0.99], [0.9, 0.9, 0.9]) == (2, 1)
    assert accept(backend, p, q, [0, 0], [0.7, 0.99], [0.9, 0.9, 0.9]) == (0, 1)
    # padding is not verified: after x_1 the next token comes from p
    assert block(p, q, [0, 0], [0.6, 0.0], [0.9, 0.7, 0.9], count=1) == (1, 0)


def test_block_rule_with_zero_probabilities_and_greedy_rows(backend):
    one, other = [1.0, 0.0], [0.0, 1.0]
    rule = {"rule": "block"}
    assert accept(backend, [HALF, HALF], [one], [1], [0.99], [0.0, 0.0], **rule) == (1, 0)  # q(x) = 0 < p(x): accepted
    assert accept(backend, [one, HALF], [one], [1], [0.0], [0.99, 0.0], **rule) == (0, 0)  # p(x) = q(x) = 0: rejected
    assert accept(backend, [one, HALF], [other], [1], [0.0], [0.99, 0.0], **rule) == (0, 0)  # disjoint supports
    same = [HALF, LEFT, RIGHT]
    assert accept(backend, same, same[:2], [1, 0], [0.999, 0.999], [0.9, 0.9, 0.1], **rule) == (2, 0)  # p = q: all
    for token, result in ((0, (1, 0)), (1, (0, 0))):
        assert accept(backend, [HALF, HALF], [LEFT], [token], [0.5], [0.9, 0.9], target=0.0, **rule) == result
    assert accept(backend, [RIGHT, HALF], [LEFT], [0], [0.19], [0.0, 0.9], draft=0.0, **rule) == (1, 1)
    assert accept(backend, [RIGHT, HALF], [LEFT], [0], [0.21], [0.0, 0.9], draft=0.0, **rule) == (0, 1)


def test_an_unknown_rule_is_refused(backend):
    with pytest.raises(ValueError, match="'chain' is not an acceptance rule; valid: token, block"):
        accept(backend, [HALF], [], [], [], [0.6], rule="chain")


@pytest.mark.parametrize("rule", reference.RULES)
def test_a_verdict_does_not_depend_on_the_batch(backend, rule):
    generator = torch.Generator().manual_seed(0)
    batch, n, vocabulary = 5, 3, 1000
    x = torch.randn(batch, n + 1, vocabulary, generator=generator)
    y = x[:, :n] + 0.5 * torch.randn(batch, n, vocabulary, generator=generator)

    def rows(logits):
        logits = logits.reshape(-1, vocabulary)
        fill = torch.ones(len(logits))
        return backend.row_params(logits, fill, torch.zeros(len(logits), dtype=torch.int64), fill)

    tokens = backend.sample_rows(rows(y), torch.rand(batch * n, generator=generator)).view(batch, n)
    count = torch.tensor([3, 0, 3, 2, 3])
    u_accept, u_next = (torch.rand(batch, n + extra, generator=generator) for extra in (0, 1))
    together = backend.accept_chain(rows(x), rows(y), tokens, count, u_accept, u_next, rule)
    for b in range(batch):
        one = slice(b, b + 1)
        u = u_accept[one], u_next[one]
        alone = backend.accept_chain(rows(x[one]), rows(y[one]), tokens[one], count[one], *u, rule)
        assert [int(field) for field in alone] == [int(field[b]) for field in together]


def test_expand_topk_drops_nan_and_breaks_the_top_tie_by_id(backend):
    logprob, index = backend.expand_topk(torch.tensor([[0.0, torch.nan, 2.0, 2.0]]), 1)
    assert index.tolist() == [[2]]
    torch.testing.assert_close(logprob, torch.tensor([[0.0, 2.0, 2.0]]).log_softmax(-1)[:, 1:2])
    assert reference.expand_topk(torch.zeros(1, 5), 3)[1].tolist() == [[0, 1, 2]]
