"""The Triton backend: the tests of all backends in Triton's interpreter; its compiler for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
SHARED = [
    "test_parity.py",
    "test_rows.py",
    "test_uniform.py",
    "test_verify.py",
    "test_panorama.py",
    "test_distill.py",
    "test_trial.py",
]


def run(*argv, **environment):
    """A process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    command = [sys.executable, *argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE)


def test_backend_does_what_the_reference_says():
    """`-k triton` selects by the backend's name; were nothing selected, pytest would exit with 5."""
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton", *SHARED, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_kernel_compiles(capability, dtype, tmp_path):
    """The interpreter accepts what the compiler does not: changing types in a loop, Python objects, bad shapes."""
    arguments = "128256", dtype, str(capability)
    done = run(str(HERE / "compile_triton.py"), *arguments, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 15, done.stdout
