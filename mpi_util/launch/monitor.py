"""Watches the ranks of a job on one machine from outside: who has come, who has died, and in which order.

Runs in the waiting parent; on each other host of a job, in that host's agent (cluster/agent.py).

The ranks are children of the launcher, not of this process. The launcher reaps them, reports one status for all and may
name the wrong rank: hydra prints the id of a rank that it killed itself, and ors all statuses together. So this file
looks for itself. In the job's folder each rank k

- writes rank-<k>, JSON {"pid": int, "shm": [paths of MPI's files, to be removed at the end]};
- writes session-<id>, when the leader of its session began, if that is a process of the job;
- opens the FIFO alive-<k>, writes a byte, so that this process looks at once, and keeps it open;
- writes failed-<k>, a `Failure` as JSON, before it ends on its own account;
- writes ended-<k> when it ends in order: hydra sometimes overlooks a rank that exits with status 0 before MPI_Finalize;
- writes saved-<k>: what the next start gets (fork.py).

The FIFOs show which rank died first (see runner.py): on a busy 2-core machine the order of pidfd events was wrong in 25
of 80 kills, that of the FIFOs in none.
"""

import contextlib
import fcntl
import functools
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..host import reap
from .verdict import Death

_LOOK_S = 0.5  # between two looks at the job's folder
_GUARD_PAUSE_S = 1.0
# The job is known by its folder; Open MPI 5 and 4 keep their session's files there, so that these go with it.
FOLDER_VARIABLES = (reap.JOB_VARIABLE, "PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")


class ProcessMonitor:
    """The processes of a job, all on this machine. `cluster.monitor.ClusterMonitor` is the same for several machines.

    Args: folder: of the job; it is made. ranks: those that will be on this machine. on_death: called with each death.
    """

    refused = 0  # a signal for which a rank was not ready; 0: none

    def __init__(self, folder: Path, ranks: Iterable[int], on_death: Callable[[Death], object]):
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.selector = selectors.DefaultSelector()  # others may add descriptors, with a function as data: see `step`
        self.hosts = dict[int, str]()  # of each rank, if several machines take part
        self.lost = dict[str, str]()  # hosts that cannot be reached any more, and why
        self._on_death = on_death
        self._unregistered = set(ranks)
        self._watched: set[int] = set()  # processes
        self._descriptors: list[int] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._guarded_until = -math.inf  # before this time no other guard is started
        # systemd's cleaner of /tmp leaves a locked folder alone
        self._descriptors.append(lock := os.open(folder, os.O_RDONLY))
        fcntl.flock(lock, fcntl.LOCK_SH)
        self._keep_guard()
        for rank in self._unregistered:  # each FIFO reaches its end when the rank, its only writer, ends
            path = folder / f"alive-{rank}"
            os.mkfifo(path, 0o600)
            self._call_at_end(os.open(path, os.O_RDONLY | os.O_NONBLOCK), functools.partial(self._died, rank))

    def options(self, family: str) -> list[str]:
        """What this kind of launcher is given so that it starts the ranks where they belong."""
        return ["-launcher", "fork"] * (family in ("MPICH", "Intel MPI"))  # not Slurm's, which may be missing

    def step(self, wait: bool = True) -> None:
        """Waits for an event, for half a second at most, and handles it."""
        for key, _ in self.selector.select(_LOOK_S if wait else 0):
            key.data()
        self._keep_guard()
        self._register()

    def signal(self, rank: int, signum: int) -> None:
        """Sends a signal to a rank; sets `refused` if the rank cannot handle one yet, or has ended."""
        record = self.record(rank)
        if "shm" in record and reap.belongs(record["pid"], str(self.folder)):
            reap.send(record["pid"], signum)
        else:
            self.refused = signum

    def pause(self) -> None:
        """Ctrl-Z: all processes of the job stop with this one, and continue with it (`fg`)."""
        stopped = reap.job_processes(str(self.folder), stop=True)
        for pid in stopped:  # Open MPI's launcher, stopped last, may have passed on the SIGCONT of the last pause
            reap.send(pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for pid in stopped:
            reap.send(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends what is left of the job; what has happened until then is reported."""
        self.step(wait=False)
        reap.kill_processes(str(self.folder))

    def close(self) -> None:
        """Ends what is left of the job on this machine, and removes what it leaves behind."""
        self.selector.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        reap.end_job(str(self.folder))
        if self._guard:
            self._guard.kill()  # it may be stopped
            self._guard.communicate()  # closes its pipe, and waits

    def record(self, rank: int) -> dict[str, Any]:
        return reap.read_record(self.folder / f"rank-{rank}")

    def others(self) -> list[int]:
        """Processes of the job that are neither ranks nor the launcher's."""
        return [pid for pid in reap.job_processes(str(self.folder)) if pid not in self._watched]

    def watch(self, pid: int, on_end: Callable[[int], object]) -> None:
        """Calls on_end(pidfd) when the process ends; never where there is no pidfd (Linux before 5.3)."""
        if pid not in self._watched and pid != os.getpid():
            self._watched.add(pid)
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(pid)
                self._call_at_end(pidfd, functools.partial(on_end, pidfd))

    def _keep_guard(self) -> None:
        """Starts the guard, and another one when it is killed; while the system refuses one, the job runs without."""
        now = time.monotonic()
        if now < self._guarded_until or (self._guard and self._guard.poll() is None):
            return
        self._guarded_until = now + _GUARD_PAUSE_S
        with contextlib.suppress(OSError):
            self._guard = reap.guard(str(self.folder))

    def _register(self) -> None:
        """Watches the ranks that have recorded their process id, and the launcher's helpers that started them."""
        for rank in list(self._unregistered):
            pid = int(self.record(rank).get("pid", 0))
            belongs = pid and reap.belongs(pid, str(self.folder))
            if not pid or (not belongs and reap.is_alive(pid)):
                continue  # it has not come, or is just changing from the shell to the program
            self._unregistered.remove(rank)
            if belongs:
                helper = reap.stat_field(pid, reap.STAT_PARENT) or pid
                self.watch(pid, functools.partial(self._died, rank, pid))
                self.watch(helper, functools.partial(self._died, -1, helper))
            else:
                self._died(rank, pid)

    def _call_at_end(self, descriptor: int, call: Callable[[], object]) -> None:
        """Calls when the descriptor, a FIFO or pidfd, says that its process has ended; closes it at the end."""

        def ended() -> None:
            with contextlib.suppress(OSError):  # of a pidfd
                if os.read(descriptor, 1):
                    return  # the rank has come
            self.selector.unregister(descriptor)
            call()

        self._descriptors.append(descriptor)
        self.selector.register(descriptor, selectors.EVENT_READ, ended)

    def _died(self, rank: int, pid: int = 0, pidfd: int = -1) -> None:
        """Reports a death. Args: pid: 0 if only the rank's FIFO has closed."""
        self._on_death(Death(rank, reap.exit_code(pid, pidfd) if pid else None, pid > 0, time.time()))
