"""What the tests of all families share."""

import pytest

from specctl.decoding.models.linear import DraftLinear
from tests.drafters.documents import documents


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    """Drafting is compared with training, number by number: weights that were never bf16 are not rounded for a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftLinear, "rough", False)
        yield


@pytest.fixture(scope="session")
def target(shallow):
    """Three of the ten layers: these tests compare two computations, and any texts serve for that."""
    return shallow


@pytest.fixture(scope="module")
def examples(target, prompts):
    """Two documents of different lengths, so that packing and padding are exercised."""
    return documents(target, prompts, (9, 14))
