"""`solver`: a program that a worker starts, such as a solver with an MPI of its own; in the worker's process."""

import contextlib
import ctypes  # noqa: F401  # die_with_parent, between fork and exec, must not import it
import functools
import itertools
import os
import re
import secrets
import shlex
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..collectives.channel import Kept
from ..errors import UsageError, whole_number
from ..host import reap
from ..launch.launcher import ENVIRONMENT, find_launcher
from ..ranks.identity import FOR_RANKS, rank
from ..ranks.state import state

_MARK = "MPI_UTIL_SIMULATOR"  # variable by which the processes of one program are known
# Variables for the ranks of this job, and of the step of Slurm that they are, which are not for another MPI program
_NOT_FOR_IT = re.compile(
    rf"{FOR_RANKS.pattern}|(HYDRA|MPI4PY|MPIEXEC|MPIR)_|MPI_UTIL_(?!(JOB|RANK_PID)$)"
    r"|SLURM_(STEP|PROCID|LOCALID|NODEID|TASK|NTASKS|NPROCS|GTIDS|SRUN|CPU_BIND|LAUNCH|UMASK|PMI)"
)
# Defaults of launchers for a program on this machine, beside others, on cores that it has been given
_LOCAL = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user", "PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE"}
_LOCAL |= {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMPI_MCA_hwloc_base_binding_policy": "none"}
_LOCAL |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_plm": "^slurm", "PRTE_MCA_ras": "^slurm"}
_LOCAL |= {"OMPI_MCA_plm": "^slurm", "OMPI_MCA_ras": "^slurm"}
_LAST_LINES, _LAST_BYTES = 10, 4096
_MOST_KEPT_BYTES = 64 << 20  # of output without a `log_dir`


class _Started:
    def __init__(self) -> None:
        self.numbers = itertools.count(1)


def solver(
    command: str | Sequence[str], nprocs: int | None = None, *, cwd: str | os.PathLike[str] | None = None,
    log_dir: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None,
) -> "Solver":  # fmt: skip
    """Starts a program, such as an MPI solver, from any rank, and does not wait for it. Not collective.

    It has this worker's share of the machine's cores, on which it is bound no further, and none of the variables of
    mpi_fork and MPI. It ends, with all processes that it has started, at the latest with this rank, or when nothing
    refers to what is returned.

    Args:
        command: words, or one string.
        nprocs: so many ranks, by the launcher of this job's MPI; None: the command as it is, such as `mpirun -np 4 x`.
        cwd, env: its folder; more environment variables.
        log_dir: folder for a file worker-K-simulator-N.txt with what it prints. None: only the last lines are kept.

    Returns: a subprocess.Popen whose `terminate` and `kill` are for all of its processes, with `pause`, `resume`, and
        `tail`, the last lines of its output.

    Raises: UsageError: it cannot be started. LaunchError: `nprocs` is given, and there is no launcher.
    """
    words = shlex.split(command) if isinstance(command, str) else [os.fspath(word) for word in command]
    more = dict(env or {})
    if nprocs is not None:
        family, launcher = find_launcher()
        n = str(whole_number("solver: nprocs", nprocs, 1))
        words = [launcher, "-n", n, *family.options(False, False), *words]
        more = {name: os.environ[name] for name in os.environ if name.startswith("MPI4PY_")} | more
    return Solver(words, cwd, log_dir, more)


class Solver(subprocess.Popen[bytes]):
    """As `solver` returns it."""

    def __init__(
        self, words: list[str], cwd: str | os.PathLike[str] | None, log_dir: str | os.PathLike[str] | None,
        more: Mapping[str, str],
    ):  # fmt: skip
        self.paused, self._mark = False, secrets.token_hex(8)
        self._bounded = log_dir is None
        number = next(state(_Started).numbers)
        if log_dir is not None:
            os.makedirs(log_dir, exist_ok=True)
            self.log: Any = open(Path(log_dir, f"worker-{rank()}-simulator-{number}.txt"), "ab+")  # noqa: SIM115
        else:
            self.log = tempfile.TemporaryFile("ab+")  # noqa: SIM115
        own = {name: value for name, value in os.environ.items() if not _NOT_FOR_IT.match(name)}
        try:
            super().__init__(
                words, cwd=cwd, env=ENVIRONMENT | _LOCAL | own | {_MARK: self._mark} | dict(more),
                stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=functools.partial(_begin, _share()),  # noqa: PLW1509
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError, IndexError) as error:
            raise UsageError(f"{shlex.join(words)} cannot be started: {error}") from None
        weakref.finalize(self, reap.kill_processes, self._mark, _MARK)

    def pause(self) -> None:
        """Stops its processes, which then need no core: an MPI program that waits busily does."""
        self.paused = True
        for pid in self._processes():
            reap.send(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continues what `pause` has stopped."""
        if self.paused:
            for pid in self._processes():
                reap.send(pid, signal.SIGCONT)
            self.paused = False

    def send_signal(self, sig: int) -> None:
        """Sends a signal to all of its processes."""
        for pid in self._processes():
            reap.send(pid, sig)
        self.resume()

    def kill(self) -> None:
        """Kills all that it has started."""
        reap.kill_processes(self._mark, _MARK)
        self.wait()

    def tail(self) -> str:
        """The last lines that it has printed."""
        size = os.fstat(fd := self.log.fileno()).st_size
        text = os.pread(fd, _LAST_BYTES, max(0, size - _LAST_BYTES)).decode(errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def bound_log(self) -> None:
        """Empties a long log that no one has asked for."""
        if self._bounded and os.fstat(self.log.fileno()).st_size > _MOST_KEPT_BYTES:
            os.ftruncate(self.log.fileno(), 0)

    def _processes(self) -> list[int]:
        """It and its descendants, as far as the kernel knows: what is in them may end, and start, meanwhile."""
        found = [self.pid] if self.poll() is None else []
        for pid in found:
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        return found


def _begin(cores: set[int]) -> None:
    """In the new process, before the program."""
    reap.die_with_parent()
    os.sched_setaffinity(0, cores)


def _share() -> set[int]:
    """This worker's cores: the workers of a machine share them, in order."""
    cores, channel = sorted(os.sched_getaffinity(0)), state(Kept).world
    machine = channel.machine if channel else [0]
    here = [k for k, lowest in enumerate(machine) if lowest == machine[rank() if channel else 0]]
    i, n = here.index(rank() if channel else 0), len(here)
    return {*cores[i * len(cores) // n : (i + 1) * len(cores) // n]} or {cores[i % len(cores)]}
