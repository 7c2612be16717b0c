"""The target of these tests."""

import pytest


@pytest.fixture(scope="session")
def target(shallow):
    """A third of the layers: these tests compare what they compute, on whatever texts."""
    return shallow
