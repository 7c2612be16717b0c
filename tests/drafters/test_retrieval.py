"""A store as a drafter directory: it comes back as it was, and what does not fit is said."""

import pytest
import torch

from specctl.drafters import checkpoint
from specctl.drafters.pool import load_drafter
from specctl.drafters.retrieval.datastore import LONGEST, SEPARATOR
from specctl.drafters.retrieval.drafter import FAMILY as retrieval
from specctl.drafters.text.suffix import Suffix
from specctl.errors import CheckpointError
from specctl.recipe import DraftingRecipe

PROMPT = list(range(100, 140))


def write(place, target, **changed):
    store = retrieval.collect([([*PROMPT, 1, 2, 3], len(PROMPT)), ([7, 8, 9], 1)])
    tensors = {**retrieval.tensors(store), **changed}
    config = retrieval.checkpoint_config(store, target.identity)
    return str(checkpoint.save(place, config=config, tensors=tensors, info={}))


def test_written_and_loaded(target, tmp_path):
    drafter = load_drafter(write(tmp_path / "d", target), target, DraftingRecipe(depth=3, nodes=5, children=2))
    assert isinstance(drafter, Suffix) and drafter.taps == ()
    assert (drafter.depth, drafter.nodes, drafter.children) == (3, 5, 2)
    assert drafter.corpus.find([2], 1).rows == [[3]]


def test_the_end_of_the_prompt_is_context():
    """The first response token is found behind it; the rest of the prompt would never be drafted."""
    store = retrieval.collect([([*PROMPT, 1, 2, 3], len(PROMPT)), ([7, 8, 9], 1)])
    assert store.tokens.tolist() == [*PROMPT[-LONGEST:], 1, 2, 3, SEPARATOR, 7, 8, 9, SEPARATOR]
    assert store.find(PROMPT, 2).rows[0] == [1, 2]


@pytest.mark.parametrize(
    "changed",
    [
        {"suffixes": torch.zeros(3, dtype=torch.int32)},
        {"suffixes": torch.full((24,), 24, dtype=torch.int32)},
        {"suffixes": torch.full((24,), -1, dtype=torch.int32)},
        {"tokens": torch.zeros(24, dtype=torch.int32)},
        {"tokens": torch.zeros(24, dtype=torch.int64)},
        {"tokens": torch.zeros(0, dtype=torch.int32), "suffixes": torch.zeros(0, dtype=torch.int32)},
    ],
)
def test_tensors_that_are_no_store(target, tmp_path, changed):
    """A lookup would fail in the middle of a text, or read beyond its end."""
    with pytest.raises(CheckpointError, match="do not match"):
        load_drafter(write(tmp_path / "d", target, **changed), target, DraftingRecipe())


def test_a_missing_tensor():
    with pytest.raises(CheckpointError, match="do not match"):
        retrieval.restore({}, {"tokens": torch.tensor([1, SEPARATOR], dtype=torch.int32)})
