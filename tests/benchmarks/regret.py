"""Regret of a live learner and what bounds it: python -m tests.benchmarks.regret --algo opt-eagle3 --init D …

The options are those of `specctl online`, with one rule and one seed, which runs with them. With w_t the weights that
chunk t was decoded with, f_t its loss and g_t the gradient of f_t at w_t (Theorem 1 of OnlineSpec), printed are

    static regret    Σ f_t(w_t) − Σ f_t(u), u the best of w_1 … w_{T+1} for all chunks together
    dynamic regret   Σ f_t(w_t) − Σ f_t(u_t), u_t the best of them for chunk t
    path length P_T  Σ ‖u_t − u_{t−1}‖, in lengths of the mean update
    δ_T              Σ ‖g_t − g_{t−1}‖², as a share of Σ ‖g_t‖²: below 1 the last gradient is a better hint than none

The best weights are looked for among those that the learner went through, so both regrets are lower bounds.
"""

import sys
from itertools import pairwise
from statistics import fmean

import torch

from specctl.adaptation.updates.ensemble import Ensemble


class Visited:
    """The chunks that were learnt from, with the weights before each and after the last one."""

    def __init__(self) -> None:
        self.chunks: list[list] = []
        self.weights: list[torch.Tensor] = []
        learn, visited = Ensemble.learn, self

        def watched(learner, chunk, held=()):
            vector = learner.play()
            chunk = list(chunk)
            visited.chunks.append(chunk)
            visited.weights.append(vector.clone())
            outcome = learn(learner, chunk, held)
            visited.objective, visited.last = learner._objective, learner.play().clone()
            return outcome

        Ensemble.learn = watched

    def losses(self) -> torch.Tensor:
        """[T, T + 1] f_t of every w."""
        rows = [[float(self.objective.losses([w], chunk)) for w in (*self.weights, self.last)] for chunk in self.chunks]
        return torch.tensor(rows)

    def gradient(self, t: int) -> torch.Tensor:
        """g_t [P]."""
        parts = [self.objective.gradient(self.weights[t], self.objective.prepare(batch), 0) for batch in self.chunks[t]]
        return sum(part for _, _, part in parts) / sum(weight for _, weight, _ in parts)


def main() -> None:
    from specctl.cli.main import app

    visited = Visited()
    try:
        app(["online", *sys.argv[1:]])
    except SystemExit as end:
        if end.code:
            raise
    show(visited)


def show(visited: Visited) -> None:
    f, T = visited.losses(), len(visited.chunks)
    w, played, best = [*visited.weights, visited.last], f.diagonal(), f.argmin(1).tolist()
    moves = [float((after - before).norm()) for before, after in pairwise(w)]
    path = sum(float((w[after] - w[before]).norm()) for before, after in pairwise(best))
    g = [visited.gradient(t) for t in range(T)]
    delta = sum(float((after - before).square().sum()) for before, after in pairwise(g))
    length = sum(float(one.square().sum()) for one in g[1:])
    static, dynamic = f.mean(0).min(), f.min(1).values.mean()
    print(f"{T} chunks learnt from; a chunk's loss {played.mean():.3f}, with the first weights {f[:, 0].mean():.3f}")
    print(f"regret a chunk: static {played.mean() - static:+.3f}, dynamic {played.mean() - dynamic:+.3f}")
    print(f"path length {path / fmean(moves):.1f} mean updates, delta_T {delta / length:.2f} of the squared gradients")


if __name__ == "__main__":
    main()
