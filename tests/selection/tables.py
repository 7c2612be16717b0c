"""Synthetic tables of specialist drafters with known acceptance rates, so that the best arm of every query is known."""

import numpy as np

from specctl.lab.recorded.trace import Table, Trace
from specctl.selection.game.losses import INNER, along_drafts, beyond_the_end


def trace_of(gamma, seed=0, query="q", domain="d", session=0):
    """A trace with hits drawn from gamma [N, T, K] and drafts accepted up to the first miss."""
    hit = (np.random.default_rng(seed).random(gamma.shape) < gamma).astype(np.uint8) * INNER
    accepted = (along_drafts(beyond_the_end(hit)) > 0).cumprod(axis=2).sum(axis=2)
    return Trace(
        query=query,
        domain=domain,
        accepted=accepted.astype(np.int16),
        drafted=np.full(accepted.shape, gamma.shape[2], np.int16),
        gamma=gamma.astype(np.float32),
        overlap=along_drafts(beyond_the_end(gamma.astype(np.float32))),
        hit=hit,
        ended=True,
        session=session,
    )


def specialists(queries, tokens, seed, N=7, K=8, good=0.9, bad=0.6, run=1):
    """Queries of N domains, `run` in a row per domain; arm i accepts with rate `good` in domain i, `bad` elsewhere."""
    generator = np.random.default_rng(seed)
    traces = []
    domain = 0
    for index in range(queries):
        if index % run == 0:
            domain = int(generator.integers(N))
        rate = np.full(N, bad)
        rate[domain] = good
        easy = generator.normal(0, 0.15, (1, tokens, 1))  # an easy token is easy for all arms
        own = generator.normal(0, 0.1, (N, tokens, 1))
        gamma = np.clip(rate[:, None, None] + easy + own - 0.01 * np.arange(K), 0, 1)
        traces.append(trace_of(gamma, int(generator.integers(2**31)), f"q{index}", f"d{domain}", index // run))
    return table_of(traces)


def table_of(traces):
    N, _, K = traces[0].gamma.shape
    return Table([f"arm{i}" for i in range(N)], K, traces, np.full(N, 0.002), np.full(N + 1, 0.01), np.full(N, K))
