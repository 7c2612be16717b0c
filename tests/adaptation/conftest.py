"""Quadratic losses with iterates that can be computed by hand: f(w) = ½ Σ (w − c)², with gradient w − c."""

import pytest
import torch
from torch import nn

from specctl.adaptation.updates.objective import Objective
from specctl.adaptation.updates.registry import make_learner
from specctl.recipe import LearnerRecipe


class Quadratic(nn.Module):
    """A module with f as the loss of every token. A batch is (c [P], number of tokens)."""

    def __init__(self, start):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float32))

    def forward(self, batch):
        centre, tokens = batch
        loss = 0.5 * (self.w - centre).square().sum()
        return tokens * loss, torch.tensor(float(tokens))


def run(module, batch):
    return module(batch)


def make(start, seed=0, **options):
    """Return (objective, learner) on quadratic losses, by default with SGD at η = 0.5."""
    objective = Objective(Quadratic(start), run, seed)
    plain = {"optimizer": "sgd", "lr": 0.5, "clip": 0.0, "epochs": 1, "dropout": 0.0}
    return objective, make_learner(objective, LearnerRecipe(**plain | options), objective.start())


def chunk(*centres, tokens=3):
    """Return one batch per center."""
    return [(torch.tensor(centre, dtype=torch.float32), tokens) for centre in centres]


@pytest.fixture
def quadratic():
    return make


@pytest.fixture
def played():
    """Return the vector that a learner plays."""

    return lambda learner: learner.play()


@pytest.fixture(name="chunk")
def chunk_fixture():
    return chunk


@pytest.fixture(scope="session")
def target(shallow):
    """The target with three of its ten layers, which is enough to compare two computations."""
    return shallow
