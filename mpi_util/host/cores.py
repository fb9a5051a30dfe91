"""How many cores this process may use, and how many threads for work that has them all; in any process."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import UsageError

_CORES, UPDATE_THREADS = "MPI_UTIL_CORES", "MPI_UTIL_UPDATE_THREADS"


def usable_cores() -> int:
    """How many cores this process may use, at least 1: its affinity, its cgroup's CPU quota, MPI_UTIL_CORES.

    Raises UsageError: MPI_UTIL_CORES is not a whole number of at least 1.
    """
    return max(1, int(min(core_limits().values())))


def core_limits() -> dict[str, float]:
    """What limits the cores of this process, each in cores, inf for no limit. UsageError as `usable_cores`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = _count(_CORES, "cores that the job may use")
    return {"affinity": cores, "cgroup quota": _cgroup_quota_cores(), _CORES: given or float("inf")}


def update_threads() -> int:
    """Threads for an update that has all cores: MPI_UTIL_UPDATE_THREADS (`mpi_fork(threads=...)`), else every core.

    The number decides where sums are cut, and so their last bits; a number that is set does not vary with the machine.

    Raises UsageError: MPI_UTIL_UPDATE_THREADS is not a whole number of at least 1.
    """
    return _count(UPDATE_THREADS, "threads that rank 0 updates with") or usable_cores()


def take_cores(others: Iterable[int]) -> None:
    """Lets this process run on the cores of `others` too, which sleep, though a launcher may have bound it."""
    with contextlib.suppress(OSError, AttributeError):
        cores = set(os.sched_getaffinity(0)).union(*map(os.sched_getaffinity, others))
        if cores != os.sched_getaffinity(0):
            for task in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(task), cores)


def _count(name: str, what: str) -> int:
    """The value of a variable that the user may set; 0: it is not set."""
    text = os.environ.get(name, "")
    if text and not (text.isdecimal() and len(text) < 10 and int(text)):
        raise UsageError(f"{name} is the number of {what}, a whole number of at least 1; got {text!r}")
    return int(text or 0)


def _cgroup_quota_cores(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """The smallest quota of this process's cgroup and those above it, in cores; inf without one."""
    quotas = [float("inf")]
    with contextlib.suppress(OSError):
        for line in proc.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            top = root / controllers
            group = top / path.lstrip("/")
            if not controllers or "cpu" in controllers.split(","):
                files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                quotas += [_quota(folder, files) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return min(quotas)


def _quota(folder: Path, files: tuple[str, ...]) -> float:
    """A quota in cores, from microseconds of CPU time in each period, as cgroups of version 1 or 2 give them."""
    try:
        quota, period = (int(number) for name in files for number in (folder / name).read_text().split())
    except (OSError, ValueError):  # ValueError: "max"
        return float("inf")
    return quota / period if quota > 0 else float("inf")
