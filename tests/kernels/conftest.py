"""Tests that take a `backend` run on every one; Triton's in a process of its own (test_triton)."""

import os

from specctl.kernels import cpu, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        backends = {"reference": reference, "cpu": cpu}
        if INTERPRETED:
            from specctl.kernels import triton_backend

            backends = {"triton": triton_backend}
        metafunc.parametrize("backend", backends.values(), ids=backends.keys())
