"""A datastore saved as a drafter directory loads unchanged, and invalid tensors are refused."""

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


def test_a_saved_store_loads_as_a_suffix_drafter(target, tmp_path):
    drafter = load_drafter(write(tmp_path / "d", target), target, DraftingRecipe(depth=3, nodes=5, children=2))
    assert isinstance(drafter, Suffix) and drafter.taps == ()
    assert (drafter.depth, drafter.nodes, drafter.children) == (3, 5, 2)
    assert drafter.corpus.find([2], 1).rows == [[3]]


def test_only_the_end_of_the_prompt_is_stored():
    """The first response token is found after it; earlier prompt tokens would never be drafted."""
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
def test_tensors_that_are_not_a_store_are_refused(target, tmp_path, changed):
    """Otherwise a lookup would fail in the middle of a text or read past the end of the store."""
    with pytest.raises(CheckpointError, match="do not match"):
        load_drafter(write(tmp_path / "d", target, **changed), target, DraftingRecipe())


def test_a_missing_tensor_is_refused():
    with pytest.raises(CheckpointError, match="do not match"):
        retrieval.restore({}, {"tokens": torch.tensor([1, SEPARATOR], dtype=torch.int32)})
