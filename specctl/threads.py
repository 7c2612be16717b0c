"""Number of threads that a command computes with: no more than pay off, and no more than there are free cores.

The threads of a matrix product wait for each other at its end, and PyTorch's threads wait by spinning. So each further
thread adds time at barriers, which a small target does not earn back. If another process is busy, every barrier waits
until the scheduler returns a core. Threads therefore spin for a short time only (`specctl/__init__.py`). Without
any spinning, an idle machine would run at half the speed.

The number is chosen once, when a command starts. With another number of threads sums round differently, so a run that
is resumed bit for bit continues with its first number.
"""

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from specctl import progress

FLOPS_PER_THREAD = 40e6
"""FLOPs of a step per thread. Measured: at 17e6 (the built-in target, one text) a second thread gains nothing."""
WATCH_SECONDS = 0.25
"""Seconds for which other processes are watched before a command starts: 25 ticks of the kernel clock per core."""
ROOT = Path("/")


@dataclass(frozen=True)
class CpuFacts:
    """Facts about the cores that a process may use.

    default: number of threads that PyTorch would use, by cores and affinity, or the number that a caller has set.
    allowed: number of CPUs on which the process may be scheduled.
    quota: CPU seconds per second that its control groups grant; inf = no limit.
    busy: CPU seconds per second that other processes use on the allowed CPUs.
    processes: number of processes of this command on this machine, which share the cores.
    asked: number of threads that the user asks for, or None.
    """

    default: int
    allowed: int
    quota: float = math.inf
    busy: float = 0.0
    processes: int = 1
    asked: int | None = None


def free_threads(facts: CpuFacts) -> int:
    """Return the number of threads that need not wait for a core, at least 1. The user's number wins.

    The processes of one command keep each other busy while they start, so for several only quota and affinity count.
    """
    if facts.asked is not None:
        return facts.asked
    idle = facts.allowed - (round(facts.busy) if facts.processes == 1 else 0)
    cores = min(idle, facts.quota) / facts.processes
    return max(1, min(facts.default, int(cores)))


def useful_threads(flops: float) -> int:
    return 1 + int(flops / FLOPS_PER_THREAD)


@contextmanager
def command_threads(asked: int | None) -> Iterator[None]:
    """Within the block compute with the free threads, or with the recipe's `asked`; then restore the number before."""
    import torch

    global _asked
    before, outer = torch.get_num_threads(), _asked
    _asked = asked
    try:
        facts = read_cpu_facts(before, asked)
        count = free_threads(facts)
        if count < before and facts.asked is None:
            reason = reason_for_fewer(facts)
            progress.log(f"using {counted(count, 'thread')} of {before}: {reason} (all: OMP_NUM_THREADS={before})")
        torch.set_num_threads(count)
        yield
    finally:
        _asked = outer
        torch.set_num_threads(before)


_asked: int | None = None  # number of threads that the recipe of the running command names


@contextmanager
def step_threads(flops: float) -> Iterator[None]:
    """Within the block compute with as many of the command's threads as steps of `flops` FLOPs keep busy.

    Of nested blocks only the innermost counts. A number that the user asked for does not change.
    """
    import torch

    before, outer = torch.get_num_threads(), getattr(_outermost, "available", None)
    if _settled():
        yield
        return
    _outermost.available = outer or before
    torch.set_num_threads(min(_outermost.available, useful_threads(flops)))
    try:
        yield
    finally:
        _outermost.available = outer
        torch.set_num_threads(before)


_outermost = threading.local()
"""`available` is the number of threads outside of the outermost `step_threads`, for each thread: so is PyTorch's
number."""


def resume_threads(count: int | None) -> None:
    """Use the number of threads of a resumed run, if it is known and the user asks for no number."""
    import torch

    if count and not _settled() and count != torch.get_num_threads():
        progress.log(f"continuing with {counted(count, 'thread')}, as before: another number would round differently")
        torch.set_num_threads(count)


def _settled() -> bool:
    """Whether the user has asked for a number of threads, which then holds for everything."""
    return (_asked or requested_threads(os.environ)) is not None


def processes_here(environ: Mapping[str, str]) -> int:
    """Number of processes that a launcher has started on this machine. torchrun and our Slurm scripts set
    LOCAL_WORLD_SIZE, deepspeed sets LOCAL_SIZE."""
    return int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or 1)


def read_cpu_facts(
    default: int, asked: int | None = None, environ: Mapping[str, str] = os.environ, root: Path = ROOT
) -> CpuFacts:
    """Collect the facts of this process. Other processes are watched only if that can change the result."""
    allowed = usable_cpus()
    asked = asked or requested_threads(environ)
    facts = CpuFacts(default, len(allowed), quota(root), 0.0, processes_here(environ), asked)
    if free_threads(facts) == 1 or asked is not None or facts.processes > 1:
        return facts
    others = OtherProcesses(allowed, root, niced=os.getpriority(os.PRIO_PROCESS, 0) > 0)
    time.sleep(WATCH_SECONDS)
    return replace(facts, busy=others.busy() or 0.0)


def reason_for_fewer(facts: CpuFacts) -> str:
    """Return the reason for fewer threads than PyTorch's default, in words."""
    if facts.processes > 1:
        return f"{facts.processes} processes share the cores"
    if facts.quota < facts.allowed - round(facts.busy):
        return f"the container may use {facts.quota:g} cores"
    return f"other processes keep {facts.busy:.1f} of {counted(facts.allowed, 'core')} busy"


def counted(count: float, thing: str) -> str:
    """Return a count with its noun: `1 thread`, `2,000 prompts`."""
    return f"{f'{count:,}' if isinstance(count, int) else f'{count:g}'} {thing}{'' if count == 1 else 's'}"


def requested_threads(environ: Mapping[str, str]) -> int | None:
    """Return the first number of the list in OMP_NUM_THREADS, or None if it is no number (OpenMP ignores that, too)."""
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def cores() -> int:
    """Return the number of cores that this process may use, busy or not.

    Its affinity and its quota can be narrower than the machine.
    """
    return max(1, int(min(len(usable_cpus()), quota())))


def usable_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quota(root: Path = ROOT) -> float:
    """Return the CPU time, in cores, that the tightest control group around this process grants; inf = no limit.

    Groups of version 2 are below /sys/fs/cgroup, groups of version 1 in the directory of their controllers. A container
    may see its own group as the root.
    """
    limits = [math.inf]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, place = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            parts = place.strip("/").split("/")
            for top in {controllers, "cpu"} if controllers else {""}:  # the directory can list them in another order
                group = root / "sys/fs/cgroup" / top
                limits += [_limit(group.joinpath(*parts[:depth])) for depth in range(len(parts) + 1)]
    return min(limits)


def _limit(group: Path) -> float:
    """Return the number of cores that one control group grants, inf if it has no limit or cannot be read."""
    try:
        if (group / "cpu.max").exists():
            granted, period = (group / "cpu.max").read_text().split()
        else:
            granted, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(granted) / int(period) if int(granted) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # v2 writes "max"
        return math.inf


class OtherProcesses:
    """Measures the CPU time that other processes use from construction on.

    The load average would not do: it covers the last minute, in which this process or the command before it has worked.

    Args:
        niced: count niced processes, too. They leave the cores to processes of normal priority, but not the caches and
            the memory.
    """

    def __init__(self, cpus: frozenset[int] | None = None, root: Path = ROOT, niced: bool = True):
        self._cpus, self._root, self._niced = cpus or usable_cpus(), root, niced
        self._since, self._all, self._own = time.monotonic(), self._taken(), _own_s()

    def busy(self) -> float | None:
        """Return how many cores they kept busy on average, or None if the kernel does not tell."""
        taken, seconds = self._taken(), time.monotonic() - self._since
        if taken is None or self._all is None or seconds <= 0:
            return None
        return max(0.0, (taken - self._all - (_own_s() - self._own)) / seconds)

    def _taken(self) -> float | None:
        """Return the CPU seconds of all processes."""
        names, ticks = {f"cpu{number}" for number in self._cpus}, []
        for name, *fields in (line.split() for line in _lines(self._root / "proc/stat")):
            if name in names:
                user, niced, system, _, _, irq, softirq, stolen = map(int, fields[:8])
                ticks.append(user + system + irq + softirq + stolen + (niced if self._niced else 0))
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def _own_s() -> float:
    """Return the CPU time of this process and of its ended children."""
    return sum(os.times()[:4])


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        return []
