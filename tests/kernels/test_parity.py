"""Every backend agrees with the reference, on logits that have caused errors before, in every working dtype.

fp32 results may differ by rounding, so a token is checked against the fp64 distribution: it must be possible, and its
uniform must lie in its interval within 1e-5. In fp64 the backends must agree exactly.
"""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.kernels import DraftRows, reference

ROWS = 4


def examples(n):
    """Settings with n examples, or n / 40 in Triton's interpreter, which takes milliseconds per program."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return settings(max_examples=max(2, n // 40) if interpreted else n, deadline=None)


@st.composite
def logit_rows(draw, nan=True):
    """Logits [ROWS, V], peaked or flat, with −inf, ties and (if `nan`) NaN; every row has a finite logit."""
    vocabulary = draw(st.sampled_from([1, 2, 31, 33, 257, 1000, 8193]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(ROWS, vocabulary, generator=generator) * draw(st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    if draw(st.booleans()):  # few distinct values give ties everywhere
        x = x.round()
    holes = torch.rand(ROWS, vocabulary, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.99]))
    x = torch.where(holes, draw(st.sampled_from([-torch.inf, torch.nan] if nan else [-torch.inf])), x)
    x[torch.arange(ROWS), torch.randint(vocabulary, (ROWS,), generator=generator)] = 1.0
    x = x.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    layout = draw(st.sampled_from(["packed", "rows apart", "columns apart"]))
    if layout == "rows apart":
        return torch.stack((x, x + 1), 1)[:, 0]
    return torch.stack((x, x + 1), 2)[..., 0] if layout == "columns apart" else x


@st.composite
def filters(draw):
    """Draw temperature, top-k and top-p for each row."""

    def each(*values):
        return torch.tensor(draw(st.lists(st.sampled_from(values), min_size=ROWS, max_size=ROWS)))

    return each(0.0, 0.3, 0.7, 1.0, 2.0), each(0, 0, 1, 2, 50, 10**6), each(1.0, 1.0, 0.95, 0.5, 0.0)


def random_uniforms(seed, *shape):
    """Return uniforms [shape], some at the ends of [0, 1)."""
    u = torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    u.view(-1)[:1] = (0.0, 1 - 2.0**-24, 0.5)[seed % 3]
    return u


def same_cut(x, temperature, top_k, top_p, ours, spec):
    """Return [ROWS] bool: whether cuts agree. A different cut must have a mass of top_p within rounding."""
    agree = ours.cut == spec.cut
    unfiltered = reference.row_params(x.double(), temperature.double(), top_k, torch.ones_like(top_p))
    scores = x.float() * spec.inv_temp[:, None]
    above = scores >= torch.maximum(ours.cut, spec.cut)[:, None]
    mass = torch.where(above, reference.probabilities(unfiltered), 0.0).sum(-1)
    assert (agree | ((mass - top_p).abs() < 1e-5)).all()
    return agree


def exact(rows):
    """Return p [ROWS, V] in fp64 over the tokens that the rows keep."""
    scores = rows.logits * rows.inv_temp[:, None]
    p = scores.double().masked_fill(~(scores >= rows.cut[:, None]), -torch.inf).softmax(-1)
    one_hot = torch.arange(p.shape[1]) == rows.greedy[:, None]
    return torch.where(rows.greedy[:, None] >= 0, one_hot.double(), p)


@given(x=logit_rows(), filter_rows=filters(), seed=st.integers(0, 2**20))
@examples(100)
def test_rows_and_samples_equal_the_reference(backend, x, filter_rows, seed):
    before = x.clone()
    spec = reference.row_params(x, *filter_rows)
    ours = backend.row_params(x, *filter_rows)
    assert torch.equal(backend.argmax(x), reference.argmax(x))
    assert torch.equal(ours.greedy, spec.greedy)
    assert torch.equal(ours.inv_temp, spec.inv_temp)
    same = same_cut(x, *filter_rows, ours, spec)
    torch.testing.assert_close(ours.lse[same], spec.lse[same], rtol=1e-6, atol=2e-6)
    sampled = same & (spec.greedy < 0)
    torch.testing.assert_close(ours.block_mass[sampled], spec.block_mass[sampled], rtol=1e-5, atol=1e-6)

    u = random_uniforms(seed, ROWS)
    token = backend.sample_rows(ours, u)
    p = exact(ours)
    chosen = p.gather(1, token[:, None])[:, 0]
    upper = p.cumsum(-1).gather(1, token[:, None])[:, 0]
    assert (chosen > 0).all()
    greedy = ours.greedy >= 0
    assert (greedy | ((upper - chosen - 1e-5 < u) & (u < upper + 1e-5))).all()
    assert torch.equal(token[greedy], ours.greedy[greedy])
    torch.testing.assert_close(x, before, equal_nan=True, rtol=0, atol=0)  # fp32 logits alias x.float()


@given(x=logit_rows(nan=False), filter_rows=filters(), seed=st.integers(0, 2**20))
@examples(40)
def test_fp64_samples_equal_the_reference(backend, x, filter_rows, seed):
    temperature, top_k, top_p = filter_rows
    u = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    exact = x.double(), temperature.double(), top_k, top_p.double()
    spec, ours = reference.row_params(*exact), backend.row_params(*exact)
    same = same_cut(*exact, ours, spec)
    assert torch.equal(backend.sample_rows(ours, u)[same], reference.sample_rows(spec, u)[same])


@given(x=logit_rows(), filter_rows=filters(), seed=st.integers(0, 2**20), row=st.integers(0, ROWS - 1))
@examples(50)
def test_a_row_does_not_depend_on_its_batch(backend, x, filter_rows, seed, row):
    """Bit for bit. This makes speculative text equal plain sampling, which verifies one row at a time."""
    u = random_uniforms(seed, ROWS)
    batch = backend.row_params(x, *filter_rows)
    alone = backend.row_params(x[row : row + 1].clone(), *(value[row : row + 1] for value in filter_rows))
    for name, ours in alone._asdict().items():
        if name != "block_mass" or alone.greedy[0] < 0:
            together = getattr(batch, name)[row : row + 1]
            torch.testing.assert_close(ours, together, rtol=0, atol=0, equal_nan=True, msg=name)
    assert backend.sample_rows(alone, u[row : row + 1]) == backend.sample_rows(batch, u)[row]


@st.composite
def chains(draw, dtype):
    """Draw a batch of chains: p and q logits [B·(n+1), V] and [B·n, V] with filters, tokens, count and uniforms."""
    batch, n = draw(st.sampled_from([(1, 0), (1, 1), (1, 5), (3, 4)]))
    vocabulary = draw(st.sampled_from([2, 33, 1000]))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(batch, n + 1, vocabulary, generator=generator, dtype=dtype) * draw(st.sampled_from([0.5, 3.0]))
    q = p[:, :n] + draw(st.sampled_from([0.0, 0.3, 3.0])) * torch.randn(batch, n, vocabulary, generator=generator)
    if draw(st.booleans()):  # disjoint supports
        p[..., ::2], q[..., 1::2] = -torch.inf, -torch.inf

    def rows(backend, x, temperature, top_p):
        x = x.flatten(0, 1)
        fill = x.new_full((len(x),), 1.0)
        return backend.row_params(x, fill * temperature, torch.zeros(len(x), dtype=torch.int64), fill * top_p)

    target = draw(st.sampled_from([0.0, 0.7, 1.0])), draw(st.sampled_from([1.0, 0.8]))
    draft = draw(st.sampled_from([0.0, 1.0])), 1.0
    count = torch.randint(0, n + 1, (batch,), generator=generator)
    u = [torch.rand(batch, n + extra, generator=generator, dtype=dtype) for extra in (0, 1)]
    q_rows = rows(reference, q, *draft)
    tokens = reference.sample_rows(q_rows, torch.rand(batch * n, generator=generator)).view(batch, n)
    if draw(st.booleans()):  # tokens that q never draws are legal
        tokens = torch.randint(vocabulary, (batch, n), generator=generator)
    return lambda backend: (rows(backend, p, *target), rows(backend, q, *draft), tokens, count, *u)


@pytest.mark.parametrize("rule", reference.RULES)
@given(chain=chains(torch.float64))
@examples(80)
def test_accept_chain_equals_the_reference_in_fp64(backend, rule, chain):
    expected = reference.accept_chain(*chain(reference), rule)
    for ours, spec in zip(backend.accept_chain(*chain(backend), rule), expected, strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, spec)


@given(chain=chains(torch.float32))
@examples(60)
def test_accept_chain_is_right_within_rounding_in_fp32(backend, chain):
    p, q, tokens, count, u_accept, u_next = chain(backend)
    accepted, bonus = backend.accept_chain(p, q, tokens, count, u_accept, u_next)
    batch, n = tokens.shape
    assert (accepted <= count).all()
    p_dense = reference.probabilities(p).view(batch, n + 1, -1)
    q_dense = reference.probabilities(q).view(batch, n, p_dense.shape[-1])
    for b in range(batch):
        for i in range(min(int(accepted[b]) + 1, int(count[b]))):
            slack = float(p_dense[b, i, tokens[b, i]] - u_accept[b, i] * q_dense[b, i, tokens[b, i]])
            assert slack > -1e-6 if i < accepted[b] else slack < 1e-6
        assert p_dense[b, accepted[b], bonus[b]] > 0
        if accepted[b] < count[b] and (p_dense[b, accepted[b]] - q_dense[b, accepted[b]]).max() > 1e-5:
            assert p_dense[b, accepted[b], bonus[b]] > q_dense[b, accepted[b], bonus[b]] - 1e-6


@st.composite
def trees(draw):
    """Random trees with padding and duplicates; children may be stored before their parents."""
    batch, n, vocabulary = draw(st.integers(1, 3)), draw(st.integers(0, 9)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens = torch.randint(vocabulary, (batch, n), generator=generator)
    drawn = torch.randint(vocabulary, (batch, n + 1), generator=generator)
    parents = torch.full((batch, n), -2)
    for row in parents:
        order = torch.randperm(n, generator=generator).tolist()
        for depth, node in enumerate(order[: int(torch.randint(n + 1, (), generator=generator))]):
            row[node] = [-1, *order[:depth]][int(torch.randint(depth + 1, (), generator=generator))]
    return drawn, tokens, parents


@given(tree=trees())
@examples(150)
def test_walk_tree_equals_the_reference(backend, tree):
    for ours, spec in zip(backend.walk_tree(*tree), reference.walk_tree(*tree), strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, spec)


@given(x=logit_rows(), k=st.integers(1, 9))
@examples(60)
def test_expand_topk_equals_the_reference(backend, x, k):
    k = min(k, x.shape[1])
    spec_logprob, spec_index = reference.expand_topk(x, k)
    logprob, index = backend.expand_topk(x, k)
    torch.testing.assert_close(logprob, spec_logprob, rtol=1e-5, atol=1e-5)
    assert torch.equal(index[:, 0], spec_index[:, 0]) or k > 1
    all_logprob = x.float().masked_fill(x.isnan(), -torch.inf).log_softmax(-1)
    torch.testing.assert_close(all_logprob.gather(1, index), logprob, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == k for row in index.tolist())


@st.composite
def drafters(draw, vocabulary):
    """Draw up to three drafters, with full or partial vocabularies in any order, and one or several dtypes."""
    drafts = []
    for _ in range(draw(st.integers(0, 3))):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        size = draw(st.sampled_from([1, (vocabulary + 1) // 2, vocabulary]))
        ids = torch.randperm(vocabulary, generator=generator)[:size]
        z = torch.randn(ROWS, size, generator=generator) * draw(st.sampled_from([0.5, 3.0, 30.0]))
        z = torch.where(torch.rand(z.shape, generator=generator) < draw(st.sampled_from([0.0, 0.5])), -torch.inf, z)
        z[draw(st.integers(0, ROWS - 1))] = draw(st.sampled_from([0.0, torch.nan]))
        inv_temp = draw(st.sampled_from([None, torch.linspace(0.5, 2, ROWS)]))
        own = size == vocabulary and draw(st.booleans())
        z = z.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))
        if draw(st.booleans()):  # strided columns
            z = torch.stack((z, z + 1), 2)[..., 0]
        drafts.append(DraftRows(z, None if own else ids, inv_temp))
    return drafts


@given(data=st.data(), x=logit_rows(), filter_rows=filters(), seed=st.integers(0, 2**20))
@examples(100)
def test_drafter_feedback_equals_the_reference(backend, data, x, filter_rows, seed):
    vocabulary = x.shape[1]
    x[data.draw(st.integers(0, ROWS - 1))] = data.draw(st.sampled_from([0.0, torch.nan]))
    drafts = data.draw(drafters(vocabulary))
    tokens = torch.randint(vocabulary, (ROWS,), generator=torch.Generator().manual_seed(seed))
    rows = reference.row_params(x, *filter_rows)
    for at in (slice(None), slice(1, 2)):
        part = reference.Rows(*(field[at] for field in rows))
        some = [
            d._replace(logits=d.logits[at], inv_temp=None if d.inv_temp is None else d.inv_temp[at]) for d in drafts
        ]
        spec, ours = (module.drafter_feedback(part, some, tokens[at]) for module in (reference, backend))
        for name, field in ours._asdict().items():
            assert field.dtype == torch.float32
            torch.testing.assert_close(field, getattr(spec, name), rtol=1e-4, atol=5e-5, equal_nan=True, msg=name)
