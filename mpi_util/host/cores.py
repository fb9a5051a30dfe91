"""How many cores this process may use."""

import os
from pathlib import Path

from ..errors import UsageError


def usable_cores() -> int:
    """How many cores this process may use, at least 1: its affinity, its cgroup's CPU quota, MPI_UTIL_CORES.

    Raises:
        UsageError: MPI_UTIL_CORES is not a number.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, _cgroup_quota_cores(), _asked_for())))


def _asked_for() -> float:
    """What MPI_UTIL_CORES says; inf without it."""
    text = os.environ.get("MPI_UTIL_CORES") or "inf"
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"MPI_UTIL_CORES is the number of cores that the job may use; got {text!r}") from None


def _cgroup_quota_cores(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the smallest quota on the way from this process's cgroup up to the root, in cores; inf without one."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return float("inf")
    quotas = [float("inf")]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            quotas.append(_quota_v1(folder) if controllers else _quota_v2(folder))
            if folder == top:
                break
    return min(quotas)


def _quota_v2(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return float("inf")
    return quota / period if quota > 0 else float("inf")
