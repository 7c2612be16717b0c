"""The number of threads of a command follows from facts about the machine, read from Linux and container files."""

import math
import os
import subprocess
import sys
import threading

import pytest
import torch

from specctl import api, threads
from specctl.recipe import GenerateRecipe, ResourceRecipe
from specctl.threads import CpuFacts

CPU_LINE = "cpu{n} {user} {nice} {system} 1000 7 0 0 {stolen} 0 0\n"


@pytest.fixture
def count(monkeypatch):
    """Record PyTorch's thread counts, with no count requested by the environment."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    numbers = [8]
    real, own = torch.set_num_threads, threading.get_ident()

    def set_number(number):
        """Engines of earlier tests may still run in other threads."""
        numbers.append(number) if threading.get_ident() == own else real(number)

    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", set_number)
    return numbers


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (CpuFacts(2, 2), 2),
        (CpuFacts(2, 2, busy=0.3), 2),
        (CpuFacts(2, 2, busy=1.0), 1),  # a barrier would wait for the busy core
        (CpuFacts(2, 2, busy=4.8), 1),
        (CpuFacts(16, 16, busy=1.2), 15),
        (CpuFacts(8, 16), 8),  # PyTorch skips hyperthreads
        (CpuFacts(64, 64, quota=4.0), 4),  # a container that sees all cores of its host
        (CpuFacts(64, 64, quota=2.5), 2),  # a third thread would be stopped for half of every period
        (CpuFacts(64, 64, quota=0.5), 1),
        (CpuFacts(64, 64, quota=4.0, busy=30.0), 4),
        (CpuFacts(64, 64, quota=40.0, busy=30.0), 34),
        (CpuFacts(16, 16, processes=4), 4),
        (CpuFacts(16, 16, busy=15.0, processes=4), 4),  # the other processes are these four
        (CpuFacts(2, 2, processes=8), 1),
        (CpuFacts(2, 2, busy=2.0, quota=1.0, asked=2), 2),
        (CpuFacts(2, 2, asked=1), 1),
    ],
)
def test_free_threads_follow_from_the_facts(facts, expected):
    assert threads.free_threads(facts) == expected
    assert threads.reason_for_fewer(facts)


@pytest.mark.parametrize(
    ("weights", "texts", "expected"),
    [
        (8.5e6, 1, 1),  # the built-in target
        (8.5e6, 64, 28),  # distilled in batches
        (68e6, 1, 4),
        (1.2e9, 1, 61),
    ],
)
def test_useful_threads_grow_with_the_work(weights, texts, expected):
    """For a small target one thread decodes as fast as two, and much faster if the second core is busy."""
    assert threads.useful_threads(2 * weights * texts) == expected


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1(path, quota, period=100000):
    place = f"sys/fs/cgroup/cpu,cpuacct/{path}"
    return {f"{place}cpu.cfs_quota_us": f"{quota}\n", f"{place}cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),  # a container with its own namespace
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {}, math.inf),  # the root of a machine has no such file
        (
            "0::/user.slice/job/step\n",  # the tightest limit of all ancestors applies
            {
                "sys/fs/cgroup/user.slice/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/user.slice/job/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/user.slice/job/step/cpu.max": "max 100000\n",
                "sys/fs/cgroup/other/cpu.max": "10000 100000\n",
            },
            1.5,
        ),
        ("0::/../host\n", {"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),  # outside the visible tree
        ("4:cpu,cpuacct:/slurm/job\n", v1("slurm/job/", -1) | v1("slurm/", 50000, 25000), 2.0),
        ("4:cpu,cpuacct:/docker/abc\n3:cpuset:/x\n", v1("", 100000), 1.0),
        (  # `cpu` is a link to the directory, which has the controllers in another order
            "4:cpuacct,cpu:/job\n",
            {
                f"sys/fs/cgroup/cpu/job/cpu.cfs_{name}_us": value
                for name, value in (("quota", "200000"), ("period", "100000"))
            },
            2.0,
        ),
        ("4:cpu,cpuacct:/docker/abc\n0::/\n", v1("", -1), math.inf),
        ("3:cpuset:/x\n", {"sys/fs/cgroup/cpuset/x/cpu.max": "100000 100000\n"}, math.inf),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "nonsense\n"}, math.inf),
    ],
)
def test_the_quota_of_a_container(tmp_path, cgroup, files, expected):
    root = tree(tmp_path, {"proc/self/cgroup": cgroup, **files})
    assert threads.quota(root) == expected


def test_a_machine_without_control_groups_has_no_quota(tmp_path):
    assert threads.quota(tmp_path) == math.inf
    assert threads.OtherProcesses(frozenset({0}), tmp_path).busy() is None


def test_busy_counts_other_processes_on_the_allowed_cores(tmp_path, monkeypatch):
    """Over four seconds. Niced processes can be left out."""

    def stat(**more):
        rows = [{"n": n, "user": 100, "nice": 50, "system": 10, "stolen": 0} for n in range(3)]
        for key, ticks in more.items():
            rows[int(key[-1])][key[:-1]] += ticks
        return "cpu  1 2 3 4 5 6 7 8 9 10\n" + "".join(CPU_LINE.format(**row) for row in rows) + "intr 1 2 3\n"

    clock, own = [0.0], [0.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(threads.os, "times", lambda: (own[0], 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(threads.os, "sysconf", lambda _: 100)
    root = tree(tmp_path, {"proc/stat": stat()})
    others = threads.OtherProcesses(frozenset({0, 1}), root, niced=False)
    clock[0], own[0] = 4.0, 2.0
    tree(root, {"proc/stat": stat(user0=380, system1=200, stolen1=20, user2=400, nice1=100)})
    assert others.busy() == pytest.approx((3.8 + 2.2 - 2.0) / 4)
    others = threads.OtherProcesses(frozenset({0, 1}), root)
    clock[0] = 8.0
    tree(root, {"proc/stat": stat(user0=380, system1=200, stolen1=20, user2=400, nice1=300)})
    assert others.busy() == pytest.approx(2.0 / 4)


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("4,2", 4), ("", None), ("0", None), ("many", None)])
def test_the_thread_count_of_openmp_is_read(value, expected):
    assert threads.requested_threads({"OMP_NUM_THREADS": value}) == expected


def test_others_are_measured_only_if_it_matters(monkeypatch, tmp_path):
    monkeypatch.setattr(threads.time, "sleep", lambda _: pytest.fail("waited for nothing"))
    monkeypatch.setattr(threads, "usable_cpus", lambda: frozenset(range(4)))
    assert threads.read_cpu_facts(1, environ={}, root=tmp_path) == CpuFacts(1, 4)
    assert threads.read_cpu_facts(4, environ={"OMP_NUM_THREADS": "2"}, root=tmp_path) == CpuFacts(4, 4, asked=2)
    assert threads.read_cpu_facts(4, 3, environ={"OMP_NUM_THREADS": "2"}, root=tmp_path) == CpuFacts(4, 4, asked=3)
    assert threads.read_cpu_facts(4, environ={"LOCAL_WORLD_SIZE": "2"}, root=tmp_path) == CpuFacts(4, 4, processes=2)


def test_blocks_of_one_thread_do_not_change_those_of_another(count):
    """A server's engine and its other threads compute at the same time."""
    inside, leave = threading.Event(), threading.Event()

    def other():
        with threads.step_threads(20e6):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    with threads.step_threads(20e6):
        leave.set()
        thread.join()
        with threads.step_threads(9e9):
            assert count[-1] == 8


def test_a_command_uses_free_threads_and_its_steps_useful_ones(count, monkeypatch, capsys):
    """Prefill and batches use more threads than a single text; afterwards the count is restored."""
    monkeypatch.setattr(threads, "read_cpu_facts", lambda default, asked: CpuFacts(default, 8, busy=2.0, asked=asked))
    with threads.command_threads(None):
        assert count[-1] == 6
        with threads.step_threads(20e6):
            assert count[-1] == 1
            with threads.step_threads(150e6):
                assert count[-1] == 4
            with threads.step_threads(9e9):
                assert count[-1] == 6
            assert count[-1] == 1
        assert count[-1] == 6
    assert count[-1] == 8
    assert "6 threads of 8: other processes keep 2.0 of 8 cores busy" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["environment", "recipe"])
def test_a_requested_thread_count_always_wins(count, monkeypatch, by):
    if by == "environment":
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
    with threads.command_threads(8 if by == "recipe" else None):
        with threads.step_threads(1.0):
            assert count[-1] == 8
        threads.resume_threads(2)
        assert count[-1] == 8


def test_a_resumed_run_keeps_its_thread_count(count):
    threads.resume_threads(None)
    assert count == [8]
    threads.resume_threads(2)
    assert count[-1] == 2


def test_every_command_sets_and_restores_its_threads(count, monkeypatch, tmp_path):
    """Two commands in one Python process get separate counts."""
    monkeypatch.setattr(api, "FUNCTIONS", {"generate": "tests.test_threads:told"})
    recipe = GenerateRecipe(output_dir=tmp_path, resources=ResourceRecipe(threads=3))
    _, document = api.execute("generate", recipe)
    assert document["machine"]["threads"] == 3 and count[-1] == 8


def told(recipe, run):
    from dataclasses import make_dataclass

    return make_dataclass("Result", [])()


ON_ONE_CORE = """
import specctl, os, time, torch
torch.set_num_threads(2)
x = torch.ones(200_000)
def milliseconds():
    began = time.process_time()
    for _ in range(20):
        torch.add(x, x)
    return (time.process_time() - began) / 20 * 1000
milliseconds()
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
print(min(milliseconds() for _ in range(3)))
"""


def test_threads_sharing_a_core_yield_to_each_other():
    """With OpenMP's default, one thread spun and an addition took 15 ms."""
    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    child = subprocess.run([sys.executable, "-c", ON_ONE_CORE], env=environment, capture_output=True, text=True)
    assert float(child.stdout) < 4, child
