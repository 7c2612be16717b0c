"""The feedback statistics agree with their formulas in fp64, including edge cases."""

import math

import pytest
import torch

from specctl.kernels import DraftRows, probabilities, reference
from specctl.kernels.objectives import TINY

F64 = torch.float64


def rows_of(backend, x, temperature=1.0, top_k=0):
    fill = torch.ones(len(x), dtype=x.dtype)
    return backend.row_params(x, fill * temperature, torch.full((len(x),), top_k), fill)


def one_row(p, q, x):
    """Compute the statistics of two lists of probabilities over the same tokens in Python."""

    def log(value):
        return math.log(max(value, TINY))

    pairs = list(zip(p, q, strict=True))
    return {
        "accept": sum(min(a, b) for a, b in pairs),
        "p_minus_q": sum(max(a - b, 0.0) for a, b in pairs),
        "kl": sum(a * (log(a) - log(b)) for a, b in pairs),
        "ce": -log(q[x]),
        "reverse_kl": sum(b * (log(b) - log(a)) for a, b in pairs),
        "p_x": p[x],
        "q_x": q[x],
        "agree": float(p.index(max(p)) == q.index(max(q))),
    }


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 3), (0.0, 0)])
def test_statistics_equal_their_formulas(backend, temperature, top_k):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, generator=generator, dtype=F64) * 2
    whole, part = (torch.randn(5, size, generator=generator, dtype=F64) * 2 for size in (7, 4))
    ids, inv_temp = torch.tensor([6, 0, 3, 2]), torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0], dtype=F64)
    tokens = torch.tensor([6, 1, 2, 0, 5])
    p = rows_of(backend, x, temperature, top_k)
    statistics = backend.drafter_feedback(p, [DraftRows(whole), DraftRows(part, ids, inv_temp)], tokens)
    scattered = torch.zeros(5, 7, dtype=F64)
    scattered[:, ids] = (part * inv_temp[:, None]).softmax(-1)
    for n, q in enumerate((whole.softmax(-1), scattered)):
        for row, dense in enumerate(probabilities(p).tolist()):
            expected = one_row(dense, q[row].tolist(), int(tokens[row]))
            expected["support_miss"] = 0.0 if n == 0 else sum(dense[v] for v in range(7) if v not in ids.tolist())
            for name, value in expected.items():
                assert float(getattr(statistics, name)[n, row]) == pytest.approx(value, abs=1e-9), (name, n, row)
            entropy = -sum(a * math.log(a) for a in dense if a > 0)
            assert float(statistics.entropy[row]) == pytest.approx(entropy, abs=1e-9)


def test_a_drafter_equal_to_the_target_is_never_rejected(backend):
    """Negative control: another temperature is rejected sometimes."""
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(1), dtype=F64)
    best = x.argmax(-1)
    drafts = [DraftRows(x), DraftRows(x, torch.arange(300)), DraftRows(x, inv_temp=torch.full((3,), 2.0))]
    got = backend.drafter_feedback(rows_of(backend, x), drafts, best)
    torch.testing.assert_close(got.accept[:2], torch.ones(2, 3, dtype=F64))
    for field in (got.p_minus_q, got.kl, got.reverse_kl, got.support_miss):
        torch.testing.assert_close(field[:2], torch.zeros(2, 3, dtype=F64), atol=1e-12, rtol=0)
    assert torch.equal(got.agree, torch.ones(3, 3, dtype=F64))
    assert (got.accept[2] < 0.95).all() and (got.kl[2] > 0.01).all()


def test_disjoint_supports_give_finite_statistics(backend):
    x = torch.full((1, 4), -torch.inf)
    x[0, :2] = 0.0
    drafts = [DraftRows(torch.zeros(1, 2), torch.tensor([2, 3]))]
    got = backend.drafter_feedback(rows_of(backend, x), drafts, torch.tensor([0]))
    assert got.accept.item() == got.q_x.item() == got.agree.item() == 0
    assert got.support_miss.item() == got.p_minus_q.item() == 1
    expected = torch.tensor([-math.log(TINY), math.log(0.5 / TINY), math.log(0.5 / TINY), math.log(2)])
    torch.testing.assert_close(
        torch.stack([got.ce[0, 0], got.kl[0, 0], got.reverse_kl[0, 0], got.entropy[0]]), expected
    )


def test_invalid_rows_give_nan(backend):
    """A single NaN logit only removes its token; a row of NaN gives NaN for that drafter and row."""
    x, z = torch.zeros(3, 3), torch.zeros(3, 3)
    x[0], z[1], z[2, 2] = torch.nan, -torch.inf, torch.nan
    drafts = [DraftRows(z), DraftRows(torch.zeros(3, 3))]
    got = backend.drafter_feedback(rows_of(backend, x), drafts, torch.zeros(3).long())
    assert got.kl.isnan().tolist() == [[True, True, False], [True, False, False]]
    assert got.entropy.isnan().tolist() == [True, False, False]
    assert got.q_x[0, 2] == 0.5


def test_a_later_call_keeps_earlier_results(backend):
    """Results must not lie in reused buffers, for any later sizes and dtypes."""
    generator = torch.Generator().manual_seed(2)

    def call(rows, vocabulary, dtype):
        x = torch.randn(rows, vocabulary, generator=generator, dtype=dtype)
        p = rows_of(backend, x)
        tokens = backend.sample_rows(p, torch.rand(rows, generator=generator))
        u = torch.rand(1, rows, generator=generator)
        chain = backend.accept_chain(
            p, p.take(torch.arange(rows - 1)), tokens[None, :-1], torch.tensor([1]), u[:, 1:], u
        )
        return [*p, tokens, *chain, *backend.drafter_feedback(p, [DraftRows(x.roll(1, 0))], tokens)]

    first = call(3, 300, torch.float32)
    kept = [field.clone() for field in first]
    for rows, vocabulary, dtype in ((3, 300, torch.float32), (5, 700, torch.float64), (2, 40, torch.float32)):
        call(rows, vocabulary, dtype)
    for field, before in zip(first, kept, strict=True):
        assert torch.equal(field, before)


def test_empty_inputs_are_supported(backend):
    for count in (0, 2):
        rows = reference.row_params(
            torch.zeros(count, 4), torch.ones(count), torch.zeros(count).long(), torch.ones(count)
        )
        got = backend.drafter_feedback(rows, [], torch.zeros(count, dtype=torch.int64))
        assert got.kl.shape == (0, count) and got.entropy.shape == (count,)
        tokens = torch.zeros(count, dtype=torch.int64)
        got = backend.drafter_feedback(rows, [DraftRows(torch.zeros(count, 4))] * 2, tokens)
        assert got.accept.shape == (2, count)


@pytest.mark.parametrize("vocabulary", [4096, 5003])
def test_many_drafters_at_once(backend, vocabulary):
    """More drafters than fit in one tile, with and without draft vocabularies."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, vocabulary, generator=generator)
    tokens = torch.tensor([0, vocabulary - 1])
    p, drafts = rows_of(backend, x, 0.8, 500), []
    for n in range(8):
        z = (x + torch.randn(x.shape, generator=generator)).bfloat16()
        ids = torch.randperm(vocabulary, generator=generator)[: vocabulary // 2]
        drafts.append(DraftRows(z) if n % 2 else DraftRows(z[:, ids], ids))
    for some in (drafts, drafts[1::2]):
        ours, spec = (module.drafter_feedback(p, some, tokens) for module in (backend, reference))
        for name, field in ours._asdict().items():
            torch.testing.assert_close(field, getattr(spec, name), rtol=1e-4, atol=5e-5, msg=name)
