"""Tests do not depend on chance, on earlier tests, or on the speed of the machine. `conftest.py` sets the seeds."""

import random
import zlib

import httpx
import hypothesis
import numpy as np
import pytest
import torch


def draws():
    return random.random(), np.random.random(), torch.rand(()).item()


def seeded(name):
    """The first draws after `name`'s seed."""
    seed = zlib.crc32(name.encode())
    third = torch.rand((), generator=torch.Generator().manual_seed(seed)).item()
    return random.Random(seed).random(), np.random.RandomState(seed).random(), third


@pytest.fixture
def drawn():
    return draws()


def test_fixtures_and_tests_draw_the_same_numbers_in_every_run(drawn):
    """A test of a drawn head passed or failed by the tests before it in its process."""
    assert drawn == seeded("drawn") != seeded("test") == draws()


def test_examples_are_the_same_in_every_run_and_may_take_their_time():
    """A busy machine took more than Hypothesis' 200 milliseconds."""
    settings = hypothesis.settings()
    assert settings.derandomize and settings.deadline is None
    assert hypothesis.HealthCheck.too_slow in settings.suppress_health_check


def test_requests_wait_longer_than_httpx_does():
    """On a busy machine a process took more than httpx's five seconds to answer."""
    with httpx.Client() as http:
        assert {*http.timeout.as_dict().values()} == {180.0}
