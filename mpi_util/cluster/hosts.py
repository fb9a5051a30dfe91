"""On which hosts a job's ranks run: as the caller says, or MPI_UTIL_HOSTS, or Slurm's allocation.

Runs in the process that calls `mpi_fork` or `nslots`.
"""

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import HostError, LaunchError
from ..launch.verdict import Death
from ..ranks.failure import print_line
from ..ranks.records import RESTARTS
from .monitor import ClusterMonitor

_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::(\d+)|\s+slots\s*=\s*(\d+)(?:\s+max[-_]slots\s*=\s*\d+)?)?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # Slurm's `4(x2),3`: 4, 4, 3
_SCONTROL_S = 30.0


class Hosts(NamedTuple):
    """The hosts of a job, in the order of its ranks."""

    slots: dict[str, int]  # how many ranks each has room for; {}: only this machine is used
    asked: bool = True  # the caller has named them, so a single rank runs there too
    # what runs a command on a host; the host's name and the command are appended
    shell: tuple[str, ...] = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
    team: int = 1  # ranks that lie on one host, together

    def in_teams(self, k: int) -> "Hosts":
        """The same with room for whole teams of `k` ranks alone, where any host has room for one."""
        whole = {name: slots - slots % k for name, slots in self.slots.items() if slots >= k}
        return self._replace(slots=whole, team=k) if whole else self

    def ranks_by_host(self, n: int) -> dict[str, list[int]]:
        """The ranks of each host: its slots are filled in order; more ranks than slots are spread in proportion."""
        rooms = [*itertools.accumulate(self.slots.values(), initial=0)]
        ends = [min(n, max(room, n // self.team * room // rooms[-1] * self.team)) for room in rooms]
        return {name: [*range(*pair)] for name, pair in zip(self.slots, itertools.pairwise(ends)) if pair[0] < pair[1]}

    def open_monitor(
        self, find: "Callable[[], Hosts]", environment: dict[str, str], script: str, folder: Path, ranks: Sequence[int],
        on_death: Callable[[Death], object],
    ) -> ClusterMonitor:  # fmt: skip
        """A monitor of a job on these hosts; at a restart on those that `find` gives, but for those that fail."""
        restart = environment[RESTARTS] != "0"
        hosts = find() if restart else self
        while True:
            by_host = hosts.ranks_by_host(len(ranks))
            try:
                return ClusterMonitor(folder, by_host, on_death, hosts.shell, environment, script)
            except HostError as error:
                left = {name: slots for name, slots in hosts.slots.items() if name not in error.hosts}
                if not restart or not left:
                    raise
                for name, what in error.hosts.items():
                    print_line(f"mpi_util: restarting without host {name}: {what}")
                hosts = hosts._replace(slots=left)


def find(hosts: str | None, hostfile: str | os.PathLike[str] | None) -> Hosts:
    """Those of mpi_fork's arguments, else MPI_UTIL_HOSTS, else Slurm. LaunchError: what names them cannot be read."""
    if hosts is not None and hostfile is not None:
        raise LaunchError("mpi_fork: hosts= and hostfile= exclude each other; leave one out")
    if hostfile is not None:
        try:
            lines = [line.partition("#")[0].strip() for line in Path(hostfile).read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"the hostfile cannot be read: {error}") from None
        return Hosts(_slots([*filter(None, lines)], f"{hostfile}"))
    if hosts is None and not os.environ.get("MPI_UTIL_HOSTS"):
        return _of_slurm()
    what, text = ("MPI_UTIL_HOSTS", os.environ["MPI_UTIL_HOSTS"]) if hosts is None else ("hosts", hosts)
    return Hosts(_slots(text.split(","), what))


def _slots(texts: list[str], where: str) -> dict[str, int]:
    slots: dict[str, int] = {}
    for text in texts:
        if not (match := _HOST.fullmatch(text.strip())) or (count := int(match[2] or match[3] or 1)) < 1:
            user = "; a user's name belongs in ~/.ssh/config" if "@" in text else ""
            raise LaunchError(f"{where}: {text.strip()!r} is no host; write `name` or `name:ranks`{user}")
        slots[match[1]] = slots.get(match[1], 0) + count
    if not slots:
        raise LaunchError(f"{where}: it names no host")
    return slots


def _of_slurm() -> Hosts:
    """Slurm's allocation, in a batch script or `salloc`; its own tasks are started by srun."""
    names, tasks = os.environ.get("SLURM_JOB_NODELIST", ""), os.environ.get("SLURM_TASKS_PER_NODE", "")
    if os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1" or not names or not shutil.which("srun"):
        return Hosts({})
    command = ["scontrol", "show", "hostnames", names]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_S, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"Slurm does not say which hosts it has given: {error}") from None
    counts = [int(n) for n, times in _TASKS.findall(tasks) for _ in range(int(times or 1))]
    hosts = answer.stdout.split()
    options = "--overlap --nodes=1 --ntasks=1 --mpi=none --quiet --unbuffered --export=ALL --nodelist"
    return Hosts(dict(zip(hosts, counts + [1] * len(hosts))), False, ("srun", *options.split()))
