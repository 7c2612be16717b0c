"""Fixtures shared by the tests of all drafter families."""

import pytest

from specctl.decoding.models.linear import DraftLinear
from tests.drafters.documents import documents


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    """Keep draft weights unrounded on CPU, so that drafting and training logits can be compared closely."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftLinear, "rough", False)
        yield


@pytest.fixture(scope="session")
def target(shallow):
    """The target with three of its ten layers, which is enough to compare two computations."""
    return shallow


@pytest.fixture(scope="module")
def examples(target, prompts):
    """Two documents of different lengths, so that packing and padding are exercised."""
    return documents(target, prompts, (9, 14))
