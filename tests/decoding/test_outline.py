"""Models of which only the shapes matter draw no random weights: that took two fifths of the time to build them."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from specctl.decoding.models.ends import model_on_meta
from specctl.decoding.models.loading import builtin_path, load_config
from specctl.decoding.models.outline import NoRandomValues, on_meta
from specctl.decoding.models.supported import check_headers


class Drawn(TorchDispatchMode):
    """A context. `names` are the operations inside that draw random values."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(word in str(function) for word in ("uniform", "normal", "rand")):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def linear():
    return nn.Linear(8, 8), nn.Embedding(8, 8)


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), lambda: torch.device("cpu")])
def test_a_draw_is_seen(context):
    with Drawn() as drawn, context():
        linear()
    assert len(drawn.names) == 3, "a matrix, a bias and an embedding"


@pytest.mark.parametrize("context", [on_meta, NoRandomValues])
def test_new_modules_draw_nothing(context):
    with Drawn() as drawn, context():
        matrix, embedding = linear()
    assert not drawn.names and matrix.weight.shape == embedding.weight.shape == (8, 8)
    assert matrix.weight.is_meta == (context is on_meta)


def test_a_target_is_checked_without_random_values():
    config = load_config("builtin")
    with Drawn() as drawn:
        model = model_on_meta(config)
        check_headers("target builtin", builtin_path(), config)
    assert not drawn.names and all(weight.is_meta for weight in model.parameters())
