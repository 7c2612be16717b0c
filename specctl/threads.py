"""How many threads a command computes with: as many as pay, of the cores that are really free.

Threads of a product wait for each other at its end, and PyTorch's wait by spinning. So a thread more costs what the
barriers take, which a small target does not earn back; and beside another busy process every barrier waits until the
scheduler has given the core back. (Passive waiting is no way out: it halves the speed where nothing else runs.)

Numbers are chosen once, when a command starts: sums of another number of threads round differently, and a run that is
resumed bit for bit goes on with the number that it began with.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from specctl import progress

ENOUGH_FLOPS = 40e6
"""FLOPs of a step for each thread. Measured: at 17e6 (the built-in target, one text) a second thread gains nothing."""
WATCHED_S = 0.25
"""Seconds in which others are watched before a command starts: 25 ticks of the kernel's clock on every core."""
ROOT = Path("/")


@dataclass(frozen=True)
class Facts:
    """Facts that a process finds about the cores around it.

    default: threads that PyTorch would take, by cores and affinity; or what a caller has set.
    allowed: CPUs that the process may be scheduled on.
    quota: seconds of CPU time that its control groups grant it in a second; inf = no limit.
    busy: seconds of CPU time that others take of the allowed CPUs in a second.
    processes: of this command on this machine, which share the cores.
    asked: the number that the user has asked for, or None.
    """

    default: int
    allowed: int
    quota: float = math.inf
    busy: float = 0.0
    processes: int = 1
    asked: int | None = None


def free(facts: Facts) -> int:
    """Threads that do not wait for a core; at least 1. What the user asks for wins.

    Several processes of one command keep each other busy while they start: there only quota and affinity count.
    """
    if facts.asked is not None:
        return facts.asked
    idle = facts.allowed - (round(facts.busy) if facts.processes == 1 else 0)
    cores = min(idle, facts.quota) / facts.processes
    return max(1, min(facts.default, int(cores)))


def paying(flops: float) -> int:
    """Threads that a step of so many FLOPs keeps busy between two barriers."""
    return 1 + int(flops / ENOUGH_FLOPS)


@contextmanager
def chosen(asked: int | None) -> Iterator[None]:
    """Compute with the threads that are free, or with `asked` (the recipe's), and afterwards with as many as before."""
    import torch

    global _asked
    before, outer = torch.get_num_threads(), _asked
    _asked = asked
    try:
        facts = read(before, asked)
        count = free(facts)
        if count < before and facts.asked is None:
            progress.log(f"{counted(count, 'thread')} of {before}: {why(facts)} (OMP_NUM_THREADS={before} takes all)")
        torch.set_num_threads(count)
        yield
    finally:
        _asked = outer
        torch.set_num_threads(before)


_asked: int | None = None  # by the recipe of the command that runs


@contextmanager
def suited(flops: float) -> Iterator[None]:
    """Compute with as many of the command's threads as steps of so many FLOPs pay for.

    Where one is within another only the inner one counts. A number that the user asked for stays as it is.
    """
    import torch

    global _available
    before, outer = torch.get_num_threads(), _available
    if _settled():
        yield
        return
    _available = outer or before
    torch.set_num_threads(min(_available, paying(flops)))
    try:
        yield
    finally:
        _available = outer
        torch.set_num_threads(before)


_available: int | None = None  # outside of the outermost `suited`


def keep(count: int | None) -> None:
    """Go on with the number of threads of a run that is continued, if it is known and the user asks for no other."""
    import torch

    if count and not _settled() and count != torch.get_num_threads():
        progress.log(f"goes on with {counted(count, 'thread')}, as it began: another number rounds differently")
        torch.set_num_threads(count)


def _settled() -> bool:
    """Whether the user has asked for a number, which then is that of everything."""
    return (_asked or asked_by(os.environ)) is not None


def read(default: int, asked: int | None = None, environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> Facts:
    """The facts of this process. Others are watched only where that can change the answer."""
    allowed = usable_cpus()
    asked = asked or asked_by(environ)
    processes = int(environ.get("LOCAL_WORLD_SIZE", 1))
    facts = Facts(default, len(allowed), quota(root), 0.0, processes, asked)
    if free(facts) == 1 or asked is not None or processes > 1:
        return facts
    others = Others(allowed, root)
    time.sleep(WATCHED_S)
    return Facts(default, len(allowed), facts.quota, others.busy() or 0.0)


def why(facts: Facts) -> str:
    """The reason for fewer threads than PyTorch would take, in words."""
    if facts.processes > 1:
        return f"{facts.processes} processes share the cores"
    if facts.quota < facts.allowed - round(facts.busy):
        return f"the container may use {facts.quota:g} cores"
    return f"others keep {facts.busy:.1f} of {counted(facts.allowed, 'core')} busy"


def counted(count: int, thing: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def asked_by(environ: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS, of whose list the first level counts; None without a number, which OpenMP ignores, too."""
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def cores(root: Path = ROOT) -> int:
    """Cores that this process may use, whoever else uses them: its affinity and quota can be narrower than the
    machine."""
    return max(1, int(min(len(usable_cpus()), quota(root))))


def usable_cpus() -> frozenset[int]:
    """CPUs that this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quota(root: Path = ROOT) -> float:
    """Cores' worth of CPU time that the tightest of the control groups around this process grants; inf = no limit."""
    return min((_limit(group) for group in _groups(root)), default=math.inf)


def _groups(root: Path) -> Iterator[Path]:
    """Directories of the control groups that limit this process' CPU time, v1 and v2, from its own up to the outermost
    that can be seen: a container sees its own group as the root, or nothing above its mount."""
    groups = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, place = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            groups["cgroup" if controllers else "cgroup2"] = PurePosixPath(place)
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        path = groups.get(kind)
        if path is None or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        shown, mount = left.split()[3:5]
        below = path.relative_to(shown) if path.is_relative_to(shown) and ".." not in path.parts else PurePosixPath()
        top = root / mount.lstrip("/")
        yield from (top.joinpath(*below.parts[:depth]) for depth in range(len(below.parts), -1, -1))


def _limit(group: Path) -> float:
    """Cores that one control group grants; inf without a limit, or where it cannot be read."""
    try:
        if (group / "cpu.max").exists():
            granted, period = (group / "cpu.max").read_text().split()
        else:
            granted, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(granted) / int(period) if int(granted) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # v2 writes "max"
        return math.inf


class Others:
    """The CPU time that other processes take from now on.

    Not the load average: it is of the last minute, in which the process itself, or the command before it, has worked.
    """

    def __init__(self, cpus: frozenset[int] | None = None, root: Path = ROOT):
        self._cpus, self._root = cpus or usable_cpus(), root
        self._since, self._all, self._own = time.monotonic(), self._taken(), _own_s()

    def busy(self) -> float | None:
        """Cores that they have kept busy, on average; None where the kernel does not tell."""
        taken, seconds = self._taken(), time.monotonic() - self._since
        if taken is None or self._all is None or seconds <= 0:
            return None
        return max(0.0, (taken - self._all - (_own_s() - self._own)) / seconds)

    def _taken(self) -> float | None:
        """Seconds that anybody has used of the CPUs. Niced processes make way, unless this one is niced, too."""
        nice = hasattr(os, "getpriority") and os.getpriority(os.PRIO_PROCESS, 0) > 0
        names, ticks = {f"cpu{number}" for number in self._cpus}, []
        for name, *fields in (line.split() for line in _lines(self._root / "proc/stat")):
            if name in names:
                user, niced, system, _, _, irq, softirq, stolen = map(int, fields[:8])
                ticks.append(user + system + irq + softirq + stolen + (niced if nice else 0))
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def _own_s() -> float:
    """CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        return []
