"""Tests with a `backend` argument run on every backend; for Triton in a separate process (test_triton)."""

import os
from collections import Counter

import pytest

from specctl.kernels import cpu, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        backends = {"reference": reference, "cpu": cpu}
        if INTERPRETED:
            from specctl.kernels import triton_backend

            backends = {"triton": triton_backend}
        metafunc.parametrize("backend", backends.values(), ids=backends.keys())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark five of six cases as slow under Triton's interpreter, which takes a hundred times as long as compiled
    code."""
    if not INTERPRETED:
        return
    cases = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if cases[name] % 6:
            item.add_marker(pytest.mark.slow)
        cases[name] += 1


@pytest.fixture(scope="session", autouse=True)
def device_functions_prepared_once():
    """Let Triton's interpreter patch each device function once.

    It patches the language at every call of a device function, which takes longer than the function itself.
    """
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    prepared = set()

    def call(self, *args, **kwargs):
        if self.fn not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield


@pytest.fixture(scope="session")
def products_of_bf16():
    """Give products float inputs: Triton's interpreter stores bf16 as integers and would multiply those."""
    if not INTERPRETED:
        yield
        return
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, interpreter_builder

    multiply = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *others):
        wide = (interpreter_builder.cast_impl(x, float32) if x.dtype.scalar == bfloat16 else x for x in (a, b))
        return multiply(self, *wide, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield
