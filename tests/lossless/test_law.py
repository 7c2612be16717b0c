"""Exact distributions by enumeration: text committed by any verification rule has the target's distribution, to 1e-12.

The verdict is a piecewise constant function of its uniforms. The tests enumerate every draft and every box between the
breakpoints of the uniforms in fp64. The verdict is computed near two corners and in the middle of each box; these must
agree, or a breakpoint is missing. The boxes are weighted by volume. Rounds that commit fewer than three tokens are
completed from the target. Probabilities of target and drafter are computed here, independently of the kernels.
"""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from specctl.decoding.records import PADDING, DraftTree
from specctl.decoding.sampling import ACCEPT, TARGET
from specctl.decoding.verify import judge
from specctl.kernels import cpu, reference

BACKENDS = pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
RULES = pytest.mark.parametrize("rule", reference.RULES)
F64 = torch.float64
EXACT = 1e-12


@dataclass(frozen=True)
class Model:
    """Next-token logits after every prefix shorter than three tokens, by_length[k] is [V]·(k + 1), and sampling
    filters."""

    by_length: tuple[torch.Tensor, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def rows(self, backend, logits):
        return backend.row_params(logits, *self.filters(len(logits)))

    def filters(self, count):
        """Temperature, top-k and top-p of `count` rows or sequences."""
        fill = torch.ones(count, dtype=F64)
        return fill * self.temperature, (fill * self.top_k).long(), fill * self.top_p

    def probabilities(self, length):
        """p(next | prefix of `length`), [V]·(length + 1), by sorting and summing in Python."""
        logits = self.by_length[length]
        rows = [self._filtered(row) for row in logits.reshape(-1, logits.shape[-1]).tolist()]
        return torch.tensor(rows, dtype=F64).view(logits.shape)

    def _filtered(self, row):
        if self.temperature == 0:
            best = max(range(len(row)), key=lambda v: (row[v], -v))
            return [float(v == best) for v in range(len(row))]
        weight = (torch.tensor(row, dtype=F64) / self.temperature).softmax(-1).tolist()
        order = sorted(range(len(row)), key=lambda v: -weight[v])
        if self.top_k:
            order = order[: self.top_k]
        if self.top_p < 1:
            total, reached, kept = sum(weight[v] for v in order), 0.0, 0
            while reached < self.top_p * total:
                reached += weight[order[kept]]
                kept += 1
            order = order[:kept]
        total = sum(weight[v] for v in order)
        return [weight[v] / total if v in order else 0.0 for v in range(len(row))]

    def law(self):
        """The distribution of the first three tokens [V, V, V]."""
        first, second, third = (self.probabilities(k) for k in range(3))
        return first[:, None, None] * second[:, :, None] * third


def random_model(seed, vocabulary=3, scale=1.5, holes=(), **filters):
    generator = torch.Generator().manual_seed(seed)
    by_length = []
    for length in range(3):
        logits = torch.randn([vocabulary] * (length + 1), generator=generator, dtype=F64) * scale
        logits[..., list(holes)] = -torch.inf
        by_length.append(logits)
    return Model(tuple(by_length), **filters)


def complete(target, prefix, mass):
    """Distribute `mass` [N] of committed prefixes [N, k <= 3] (padded with −1) over three tokens with the target."""
    second, third = target.probabilities(1), target.probabilities(2)
    vocabulary = len(second)
    law = torch.zeros([vocabulary] * 3, dtype=F64)
    for tokens, weight in zip(prefix.tolist(), mass.tolist(), strict=True):
        a, b, c = [*tokens, -1, -1][:3]
        if b < 0:
            law[a] += weight * second[a][:, None] * third[a]
        elif c < 0:
            law[a, b] += weight * third[a, b]
        else:
            law[a, b, c] += weight
    return law


def boxes(breakpoints):
    """Boxes of the unit cube cut at `breakpoints`, one list per dimension. Returns three points per box (near the lower
    corner, the middle, near the upper corner) [N, D], and each volume [N]."""
    axes = []
    for cuts in breakpoints:
        edges = torch.tensor(sorted({0.0, 1.0, *(float(cut) for cut in cuts if 0 < cut < 1)}), dtype=F64)
        keep = edges.diff() > 1e-14  # equal breakpoints, computed in two ways
        axes.append(torch.stack([edges[:-1][keep], edges[1:][keep]], -1))
    grid = torch.stack([torch.stack(box) for box in itertools.product(*axes)])
    lower, upper = grid[..., 0], grid[..., 1]
    points = [lower + share * (upper - lower) for share in (1e-9, 0.5, 1 - 1e-9)]
    return points, (upper - lower).prod(-1)


def constant(function, points):
    """The value of `function` on each box, after checking that all its points agree."""
    values = [function(at) for at in points]
    for value in values[1:]:
        assert torch.equal(value, values[0]), "the verdict changes inside a box: a breakpoint is missing"
    return values[0]


# --- sampled chains: token rule, block rule ---------------------------------------------------------------------------


def thresholds(rule, p, q, tokens, count):
    """Breakpoints of the verdict on two `tokens`: acceptance thresholds, and residuals after 0 and 1 tokens.

    `p`, `q`: the rows [V] after 0 and 1 tokens. The block rule is Sun et al. 2025, Algorithm 2 and eq. 4, as printed.
    """
    ratio = [float(p[i][x] / q[i][x]) if q[i][x] > 0 else float(p[i][x] > 0) for i, x in enumerate(tokens)]
    if rule == "token":
        return ratio, [(p[i] - q[i]).clamp(min=0) for i in range(2)]
    share = min(1.0, ratio[0])
    residual = (share * p[1] - q[1]).clamp(min=0)
    excess = float(residual.sum())
    first = share if count == 1 else excess / (excess + 1 - share) if excess + 1 - share > 0 else 1.0
    return [first, min(1.0, share * ratio[1])], [(p[0] - q[0]).clamp(min=0), residual]


def chain_law(backend, rule, target, drafter, count=2, drawn_from=None):
    """Draw two tokens from `drawn_from` (default: the drafter), and verify the first `count` as the drafter's.

    `count` may be a function of the first token.

    Returns the distribution of three tokens, and the mean number of accepted draft tokens.
    """
    p = [target.probabilities(k) for k in range(3)]
    q = [drafter.probabilities(k) for k in range(2)]
    proposal = [(drawn_from or drafter).probabilities(k) for k in range(2)]
    vocabulary = len(p[0])
    law, kept = torch.zeros([vocabulary] * 3, dtype=F64), 0.0
    for a, b in itertools.product(range(vocabulary), repeat=2):
        weight = float(proposal[0][a] * proposal[1][a, b])
        if weight == 0:
            continue
        p_rows, q_rows = [p[0], p[1][a], p[2][a, b]], [q[0], q[1][a]]
        size = count(a) if callable(count) else count
        accepting, residual = thresholds(rule, p_rows[:2], q_rows, (a, b), size)
        following = [torch.cat([cdf(p_rows[i]), cdf(residual[i])]) for i in range(2)]
        points, volume = boxes([*([cut] for cut in accepting), *following, cdf(p_rows[2])])
        n = len(volume)
        tokens = torch.tensor([a, b]).expand(n, 2)
        target_logits = torch.stack([target.by_length[0], target.by_length[1][a], target.by_length[2][a, b]])
        draft_logits = torch.stack([drafter.by_length[0], drafter.by_length[1][a]])
        p_batch = target.rows(backend, target_logits.repeat(n, 1))
        q_batch = drafter.rows(backend, draft_logits.repeat(n, 1))

        def verdict(u, p_batch=p_batch, q_batch=q_batch, tokens=tokens, size=size):
            counts = torch.full((len(tokens),), size)
            return torch.stack(backend.accept_chain(p_batch, q_batch, tokens, counts, u[:, :2], u[:, 2:], rule), -1)

        accepted, following_token = constant(verdict, points).unbind(-1)
        prefix = torch.cat([tokens, torch.full((n, 1), -1)], 1).masked_fill(torch.arange(3) > accepted[:, None], -1)
        prefix[torch.arange(n), accepted] = following_token
        law += complete(target, prefix, weight * volume)
        kept += weight * float((accepted * volume).sum())
    return law, kept


def cdf(weight):
    return weight.cumsum(-1) / weight.sum() if weight.sum() > 0 else weight


RATIO_CASES = {
    "plain": (random_model(1), random_model(2)),
    "equal": (random_model(3), random_model(3)),
    "far apart": (random_model(4, scale=4.0), random_model(5, scale=4.0)),
    "filtered target": (random_model(6, 4, temperature=0.7, top_p=0.8), random_model(7, 4)),
    "top-k target": (random_model(8, 4, top_k=2), random_model(9, 4, temperature=1.5)),
    "both filtered": (random_model(10, 4, top_p=0.6), random_model(11, 4, top_k=2, temperature=0.5)),
    "q misses a token": (random_model(12), random_model(13, holes=[0])),
    "p misses a token": (random_model(14, holes=[2]), random_model(15)),
    "disjoint supports": (random_model(16, 4, holes=[0, 1]), random_model(17, 4, holes=[2, 3])),
    "greedy target": (random_model(18, temperature=0.0), random_model(19)),
    "greedy drafter": (random_model(20), random_model(21, temperature=0.0)),
    "ties": (random_model(22, scale=0.0, temperature=0.0), random_model(23, scale=0.0)),
    "one token": (random_model(24, 1), random_model(25, 1)),
}


@BACKENDS
@pytest.mark.parametrize("case", RATIO_CASES)
def test_rules_for_sampled_chains_keep_the_targets_distribution(backend, case):
    """The block rule accepts at least as much as the token rule: equally much on one-hot drafts, more on others."""
    target, drafter = RATIO_CASES[case]
    kept = {}
    for rule in reference.RULES:
        law, kept[rule] = chain_law(backend, rule, target, drafter)
        assert (law - target.law()).abs().max() < EXACT
    assert kept["block"] >= kept["token"] - EXACT
    if case == "plain":
        assert kept["block"] > kept["token"] + 1e-3
    if case == "greedy drafter":
        assert abs(kept["block"] - kept["token"]) < EXACT


@BACKENDS
@RULES
@pytest.mark.parametrize("count", [0, 1])
def test_rules_for_padded_sampled_chains_keep_the_targets_distribution(backend, rule, count):
    target, drafter = RATIO_CASES["plain"]
    law, kept = chain_law(backend, rule, target, drafter, count)
    assert (law - target.law()).abs().max() < EXACT
    overlap = torch.minimum(target.probabilities(0), drafter.probabilities(0)).sum()
    assert abs(kept - count * float(overlap)) < EXACT  # the optimum for one token


class Loop:
    """Replaces a backend: the decoding loop's verdict on a sampled chain, with given uniforms."""

    row_params = staticmethod(cpu.row_params)

    @staticmethod
    def accept_chain(p, q, tokens, counts, u_accept, u_next, rule):
        parents = torch.where(torch.arange(2) < counts[:, None], torch.arange(2) - 1, PADDING)
        uniforms = {ACCEPT: u_accept, TARGET: u_next}
        draws = SimpleNamespace(
            rows=lambda logits: p,
            uniform=lambda positions, stream: uniforms[stream],
            uniform_of_round=lambda start, depths: u_accept,
        )
        positions = torch.arange(3).expand(len(tokens), -1)
        _, accepted, bonus = judge(draws, DraftTree(tokens, parents, q, rule=rule), p.logits, positions)
        return accepted, bonus


@RULES
@pytest.mark.parametrize("backend", [cpu, Loop])
@pytest.mark.parametrize("count", [2, lambda first: 1 if first == 1 else 2], ids=["fixed", "by the first token"])
def test_chains_ended_by_their_own_tokens_keep_the_targets_distribution(backend, rule, count):
    """Also through the loop. Catches a rule that is not passed on: both rules would accept equally much."""
    target, drafter = RATIO_CASES["plain"]
    law, kept = chain_law(backend, rule, target, drafter, count)
    assert (law - target.law()).abs().max() < EXACT
    other = next(name for name in reference.RULES if name != rule)
    more = kept - chain_law(cpu, other, target, drafter, count)[1]
    assert (more > 1e-4) == (rule == "block")


@BACKENDS
@RULES
def test_rules_for_six_tokens_keep_the_targets_distribution(backend, rule):
    target, drafter = random_model(26, 6, holes=[1]), random_model(27, 6, top_k=1)
    assert (chain_law(backend, rule, target, drafter)[0] - target.law()).abs().max() < EXACT


@BACKENDS
@RULES
def test_control_wrong_q_is_detected(backend, rule):
    """The drafter reports its temperature-1 row but draws at temperature 0.5, which was a real bug."""
    target, drafter = RATIO_CASES["plain"]
    sharper = Model(drafter.by_length, temperature=0.5)
    law, _ = chain_law(backend, rule, target, drafter, drawn_from=sharper)
    assert (law - target.law()).abs().max() > 1e-3


@BACKENDS
@pytest.mark.parametrize("shared", [None, "draft", "accept"])
def test_control_shared_uniform_is_detected(backend, shared):
    """A chain of one token. If the residual draw reuses the uniform of the draft or of acceptance, the distribution of
    the first token is wrong. With separate uniforms the integration gives p."""
    target, drafter = random_model(28), random_model(29)
    p, q = target.probabilities(0), drafter.probabilities(0)
    cuts = torch.cat([cdf(q), cdf((p - q).clamp(min=0)), p / q])
    points, volume = boxes([cuts] * 3)  # draft, accept, next
    n = len(volume)
    p_rows = target.rows(backend, target.by_length[0].expand(2 * n, -1))
    q_rows = drafter.rows(backend, drafter.by_length[0].expand(n, -1))

    def first_token(u):
        u_draft, u_accept, u_next = u.unbind(-1)
        u_next = {None: u_next, "draft": u_draft, "accept": u_accept}[shared]
        token = backend.sample_rows(q_rows, u_draft)[:, None]
        u_next = u_next[:, None].expand(n, 2)
        ones = torch.ones(n, dtype=torch.int64)
        accepted, following = backend.accept_chain(p_rows, q_rows, token, ones, u_accept[:, None], u_next)
        return torch.where(accepted > 0, token[:, 0], following)

    law = torch.zeros(3, dtype=F64).index_add(0, constant(first_token, points), volume)
    assert (law - p).abs().max() < EXACT if shared is None else (law - p).abs().max() > 1e-3


# --- match rule -----------------------------------------------------------------------------------------------------

TREES = {  # (tokens, parents); tokens of a vocabulary of 3
    "empty": ([], []),
    "chain": ([1, 2], [-1, 0]),
    "full first level": ([0, 1, 2], [-1, -1, -1]),
    "two levels": ([2, 0, 1, 0, 1], [-1, -1, 0, 0, 1]),
    "duplicate siblings": ([1, 1, 0, 2], [-1, -1, 1, 0]),
    "child before its parent": ([2, 1, 0], [1, -1, 0]),
    "padding": ([0, 1, 0], [-1, -2, -2]),
    "complete": ([0, 1, 2] + [0, 1, 2] * 3, [-1] * 3 + [0] * 3 + [1] * 3 + [2] * 3),
}
MATCH_TARGETS = {
    "plain": random_model(40),
    "filtered": random_model(41, temperature=0.8, top_p=0.7),
    "missing token": random_model(42, holes=[1]),
    "greedy": random_model(43, temperature=0.0),
    "ties, greedy": random_model(44, scale=0.0, temperature=0.0),
}


def match_verdict(backend, target, tokens, parents, u):
    """Committed tokens [N, 3] (padded with −1) of one round with the uniforms `u` [N, 3], one per position."""
    prefixes = [path_to(node, tokens, parents) for node in range(-1, len(tokens))]
    logits = torch.stack([target.by_length[min(len(prefix), 2)][tuple(prefix[:2])] for prefix in prefixes])
    depth = torch.tensor([min(len(prefix), 2) for prefix in prefixes])
    n = len(u)
    tree = [torch.tensor(row, dtype=torch.int64).expand(n, -1) for row in (tokens, parents)]
    path, accepted, bonus = backend.sample_tree(logits.expand(n, -1, -1), target.filters(n), u[:, depth], *tree)
    committed = torch.full((n, 4), -1)
    if tokens:
        committed[:, : path.shape[1]] = torch.where(path >= 0, tree[0].gather(1, path.clamp(min=0)), -1)[:, :4]
    committed[torch.arange(n), accepted] = bonus
    return committed[:, :3]


def path_to(node, tokens, parents):
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def plain_text(backend, target, u):
    """Three tokens [N, 3] of plain sampling with the same uniforms."""
    first = backend.sample_rows(target.rows(backend, target.by_length[0].expand(len(u), -1)), u[:, 0])
    second = backend.sample_rows(target.rows(backend, target.by_length[1][first]), u[:, 1])
    third = backend.sample_rows(target.rows(backend, target.by_length[2][first, second]), u[:, 2])
    return torch.stack([first, second, third], -1)


@BACKENDS
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("case", MATCH_TARGETS)
def test_match_rule_keeps_the_targets_distribution_and_text(backend, case, shape):
    target = MATCH_TARGETS[case]
    points, volume = boxes([target.probabilities(k).cumsum(-1).flatten() for k in range(3)])
    committed = constant(lambda u: match_verdict(backend, target, *TREES[shape], u), points)
    assert (complete(target, committed, volume) - target.law()).abs().max() < EXACT
    # Stronger than an equal distribution: the committed tokens equal plain sampling's.
    plain = plain_text(backend, target, points[1])
    assert torch.equal(committed, torch.where(committed >= 0, plain, -1))


@BACKENDS
def test_control_drawing_at_the_wrong_node_is_detected(backend):
    """Rows shifted by one node (an off-by-one in the gather) give plausible text with a wrong distribution."""
    target = MATCH_TARGETS["plain"]
    shifted = Model((target.by_length[0], target.by_length[1].roll(1, 0), target.by_length[2]))
    cuts = [model.probabilities(k).cumsum(-1).flatten() for model in (target, shifted) for k in range(3)]
    points, volume = boxes([torch.cat([cuts[k], cuts[k + 3]]) for k in range(3)])
    committed = constant(lambda u: match_verdict(backend, shifted, *TREES["two levels"], u), points)
    assert (complete(target, committed, volume) - target.law()).abs().max() > 1e-3
