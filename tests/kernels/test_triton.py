"""The Triton backend: shared tests in its interpreter, and compilation for absent GPUs."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
SHARED = [
    "test_attention.py",
    "test_layers.py",
    "test_parity.py",
    "test_rows.py",
    "test_spans.py",
    "test_triton_attention.py",
    "test_triton_rows.py",
    "test_uniform.py",
    "test_verify.py",
    "test_drafter_feedback.py",
    "test_distill.py",
    "test_self_check.py",
    "../decoding/test_attention_kernel.py",
]


def run(*argv, **environment):
    """Run a separate process, because Triton reads TRITON_INTERPRET when it is imported."""
    command = [sys.executable, *argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE)


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_triton_passes_the_shared_tests_in_its_interpreter(marked):
    """`-k triton` selects the tests by backend name; if none match, pytest exits with 5."""
    selected = "-k", "triton", "-m", marked
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *selected, *SHARED, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Promise:
    """Required occupancy per multiprocessor, and whether 16-byte loads are required. Spilling is never allowed."""

    resident: int
    wide: bool = False


TILES = 16, 32, 64, 128  # rows of attention


KERNELS = {  # kernels that read rows need wide loads; several resident programs hide latency
    "_uniform_kernel": Promise(8),
    "_argmax_kernel": Promise(8, wide=True),
    "_first_kernel": Promise(8),
    "_blocks_kernel": Promise(4, wide=True),
    "_gather_kernel": Promise(2, wide=True),
    "_rows_kernel": Promise(2, wide=True),
    "_sample_kernel": Promise(8),
    "_tiles_kernel": Promise(3, wide=True),
    "_merge_kernel": Promise(8),
    "_walk_kernel": Promise(8),
    "_accept_kernel": Promise(8),
    "_excess_kernel": Promise(3, wide=True),
    "_next_kernel": Promise(8),
    "_distill_kernel": Promise(1, wide=True),
    "_normalise_kernel": Promise(2, wide=True),
    "_drafter_feedback_kernel": Promise(1, wide=True),
    **{f"_attend_kernel {rows}": Promise(2, wide=True) for rows in (*TILES[:3], *(f"{n} paged" for n in TILES[:3]))},
    **{f"_attend_kernel {rows}": Promise(1, wide=True) for rows in (TILES[3], f"{TILES[3]} paged")},
    "_combine_kernel": Promise(3, wide=True),
    "_span_kernel": Promise(2, wide=True),
    "_span_rows_kernel": Promise(2, wide=True),
    "_span_slots_kernel": Promise(2, wide=True),
    "_add_norm_kernel": Promise(2, wide=True),
    "_gate_kernel": Promise(8, wide=True),
    "_rope_kernel": Promise(8, wide=True),
}
HALVES = {
    f"_attend_kernel {rows}{kind}" for rows in TILES[1:] for kind in ("", " paged")
} | {  # fp32 has small tiles only, or none
    "_span_kernel",
    "_span_rows_kernel",
    "_span_slots_kernel",
}
REGISTERS, SHARED_MEMORY = 2**16, {80: 164, 90: 228}  # per multiprocessor; KiB by capability
OTHER = os.environ.get("OTHER_TRITON")  # directory where `pip install --no-deps --target` has put another version
LAYOUTS = [  # vocabulary, row stride, dtype; fp64 and unaligned rows have no requirements
    (128256, 128256, "bfloat16"),
    (128256, 128256, "float32"),
    (50257, 50257, "bfloat16"),
    (5000, 5008, "float64"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "directory", [None, pytest.param(OTHER, marks=pytest.mark.skipif(not OTHER, reason="no other"))]
)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def test_every_kernel_compiles(layout, capability, directory, tmp_path):
    """The compiler refuses code that the interpreter accepts: changing types in a loop, Python objects, bad shapes.

    It also catches spilled registers, low occupancy and narrow loads, which are right but several times slower.
    OTHER_TRITON names a second Triton to compile with.
    """
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    if directory:
        environment["PYTHONPATH"] = directory
    done = run(str(HERE / "compile_triton.py"), *map(str, layout), str(capability), **environment)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    _, stride, dtype = layout
    assert {row["kernel"] for row in rows} == KERNELS.keys() - (HALVES if dtype == "float32" else set())
    if dtype != "float64" and stride % 16 == 0:
        broken = [reason for row in rows for reason in shortcomings(row, capability)]
        assert not broken, "\n".join(broken)


@pytest.mark.slow
def test_vocabularies_share_compiled_code(tmp_path):
    """A constant V would recompile every kernel, for seconds at first use. Negative control: an odd V loads
    differently."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    codes = []
    for vocabulary in ("128256", "129280", "128257"):
        done = run(str(HERE / "compile_triton.py"), vocabulary, vocabulary, "bfloat16", "90", **environment)
        assert done.returncode == 0, done.stderr
        codes.append([json.loads(line)["code"] for line in done.stdout.splitlines()])
    assert codes[0] == codes[1] != codes[2]


def shortcomings(row, capability):
    """Yield each requirement that compiled code misses."""
    promise = KERNELS[row["kernel"]]
    registers = promise.resident * row["threads"] * -(-row["registers"] // 8) * 8
    shared = promise.resident * (row["shared"] + 1024)  # every program also needs 1 KiB of its own
    if row["stack"]:
        yield f"registers lie in memory: {row}"
    if registers > REGISTERS or shared > 1024 * SHARED_MEMORY[capability]:
        yield f"less than {promise.resident} programs at once: {row}"
    if promise.wide and not row["gathers"] and "128" not in row["loads"]:
        yield f"no load of 16 bytes: {row}"


def test_missed_requirements_are_noticed():
    fine = {"kernel": "_blocks_kernel", "registers": 64, "stack": 0, "threads": 128, "shared": 0}
    fine |= {"gathers": False, "loads": {"128": 4}}
    assert not list(shortcomings(fine, 90))
    for fault in ({"stack": 8}, {"registers": 129}, {"shared": 2**16}, {"loads": {"16": 32}}):
        assert len(list(shortcomings(fine | fault, 90))) == 1
