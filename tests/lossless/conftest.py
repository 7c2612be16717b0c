"""The target of these tests."""

import pytest


@pytest.fixture(scope="session")
def target(shallow):
    """Three of the ten layers: these tests compare two computations on arbitrary texts."""
    return shallow
