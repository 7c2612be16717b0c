"""Losses whose iterates can be written down: f(w) = ½ Σ (w − c)², so that the gradient is w − c."""

import pytest
import torch
from torch import nn

from specctl.adaptation.updates.objective import Objective
from specctl.adaptation.updates.registry import make_learner
from specctl.recipe import LearnerRecipe


class Quadratic(nn.Module):
    """A batch is (c [P], number of tokens); the loss of every token is f."""

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
    """(objective, learner) on quadratic losses, by SGD at η = 0.5 unless told otherwise."""
    objective = Objective(Quadratic(start), run, seed)
    plain = {"optimizer": "sgd", "lr": 0.5, "clip": 0.0, "epochs": 1, "dropout": 0.0}
    return objective, make_learner(objective, LearnerRecipe(**plain | options), objective.start())


def chunk(*centres, tokens=3):
    """One batch per centre."""
    return [(torch.tensor(centre, dtype=torch.float32), tokens) for centre in centres]


@pytest.fixture
def quadratic():
    return make


@pytest.fixture
def played():
    """The vector that a learner plays."""

    return lambda learner: learner.play()


@pytest.fixture(name="chunk")
def chunk_fixture():
    return chunk


@pytest.fixture(scope="session")
def target(shallow):
    """Three of the ten layers: these tests compare two computations, and any texts serve for that."""
    return shallow
