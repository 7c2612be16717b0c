"""A head that no engine can read: the start of its training says so, and other heads are not named."""

import re

import pytest

from specctl.decoding.models.loading import DTYPES, load_config
from specctl.recipe import DrafterRecipe, TrainRecipe
from specctl.runs import Run
from specctl.training import loop
from specctl.training.readers import unread
from specctl.training.target_outline import Outline
from tests.training.small import recipe

SAYS = "no engine will read this head: the head "


def reason(config, arch, **drafter):
    module = Outline.of(config, DTYPES["bf16"]).drafter(TrainRecipe(arch=arch, drafter=DrafterRecipe(**drafter)))
    return unread(arch, module, "a target that is never read", config)


@pytest.mark.parametrize("arch", ["eagle3", "peagle", "dflash", "eagle", "hydra", "medusa", "lm"])
def test_heads_that_engines_read_are_not_reported(arch):
    assert reason(load_config("builtin"), arch) is None


@pytest.mark.parametrize(
    ("arch", "drafter", "because"),
    [
        ("eagle3", {"taps": [0, 1, 2]}, r"taps hidden_states \[0, 1, 2\]"),
        ("peagle", {"taps": [4, 2, 3]}, r"taps hidden_states \[4, 2, 3\]"),
        ("dflash", {"taps": [2, 10]}, r"taps hidden_states \[2, 10\]"),
        ("dflash", {"selector_rank": 8}, "has a candidate selector but no convolutions"),
    ],
)
def test_a_head_that_no_engine_reads_is_reported(arch, drafter, because):
    said = reason(load_config("builtin"), arch, **drafter)
    assert re.match(re.escape(SAYS) + because, said)


def test_the_start_of_a_training_says_it(distilled, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    loop.make_trainer(recipe(distilled, tmp_path, drafter=DrafterRecipe(taps=[0, 1, 2])), Run(tmp_path / "run"))
    assert f"warning: {SAYS}" in capsys.readouterr().err


@pytest.mark.parametrize("layers", [1, 2])
def test_targets_of_one_or_two_layers_have_taps(layers):
    """The same state was tapped twice, which was refused with the advice to leave out the taps."""
    config = load_config("builtin")
    config.num_hidden_layers = layers
    assert reason(config, "eagle3").startswith(SAYS)
