"""Programs that a worker starts, in its process: any (`solver`), or one that serves an environment (`Process`)."""

import contextlib
import itertools
import math
import os
import re
import secrets
import shlex
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

from ..collectives.channel import Kept
from ..errors import SimulatorError, UsageError, whole_number
from ..host import reap
from ..launch.launcher import ENVIRONMENT, find_launcher
from ..ranks.identity import FOR_RANKS, Role, rank
from ..ranks.state import state
from .team import Request
from .wire import ADDRESS, Wire

_MARK = "MPI_UTIL_SIMULATOR"  # variable by which the processes of one program are known
_GUARDED = "MPI_UTIL_GUARDED"  # and those of all programs of one process
# what says to a program that it is this rank, which job's, or which step's of Slurm
_NOT_FOR_IT = re.compile(
    rf"{FOR_RANKS.pattern}|(HYDRA|MPIEXEC)_|MPI_UTIL_(?!(JOB|RANK_PID)$)|SLURM_(?!JOB|CONF|CLUSTER)"
)
# launchers start its ranks here, more than cores too, and bind none: Open MPI's would bind those of each to core 0
_HERE = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user", "PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE"}
_HERE |= {f"{mpi}_MCA_{choice}": "^slurm" for mpi in ("OMPI", "PRTE") for choice in ("plm", "ras")}
_HERE |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
_HERE |= {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMPI_MCA_mpi_yield_when_idle": "1"}
# MPICH 5 changes its way of a broadcast after some, on ranks with threads alone: a program in C and one in Python,
# which share COMM_WORLD, would wait for each other for ever
_HERE |= {"MPIR_CVAR_POSIX_NUM_COLLS_THRESHOLD": "2147483647"}
_LAST_LINES, _LAST_BYTES, _MOST_KEPT_BYTES = 10, 4096, 64 << 20
_IDLE_S = 0.02  # without a call, after which it is paused; longer than between two steps of a rollout
_STUCK_S, _LAST_WORDS_S, _END_S = 30, 1.0, 5.0

Path_ = str | os.PathLike[str] | None
numbers = itertools.count(1)  # of the programs that this process has started


def solver(command: str | Sequence[str], nprocs: int | None = None, *, cwd: Path_ = None, log_dir: Path_ = None) -> Any:
    """Starts a program, such as an MPI solver, and does not wait for it. Not collective.

    It gets this worker's share of the cores, and no variables of mpi_fork and MPI. All that it starts ends with this
    rank at the latest, or when nothing refers to what is returned.

    Args:
        command: words, or one string. cwd: its folder. log_dir: a folder for what it prints, worker-0-simulator-1.txt.
        nprocs: number of its ranks, by this job's MPI. None: the command as it is, as `mpirun -np 4 x` of another MPI.

    Returns: a subprocess.Popen, of which terminate, kill and send_signal are for all its processes. Besides: `pause()`
        (SIGSTOP), `resume()`, and `tail()`, the last lines that it has printed.

    Raises: UsageError: it cannot be started. LaunchError: with `nprocs`: there is no launcher.
    """
    return Solver(command, nprocs, cwd, log_dir)


class Solver(subprocess.Popen[bytes]):
    """As `solver` returns it. Args: more: variables."""

    def __init__(self, command: str | Sequence[str], nprocs: int | None, cwd: Path_, log_dir: Path_, **more: str):
        self._paused, self._mark, self.log_dir = list[int](), secrets.token_hex(8), log_dir
        path = Path(log_dir or "/", f"worker-{rank()}-simulator-{next(numbers)}.txt")
        own = {name: value for name, value in os.environ.items() if not _NOT_FOR_IT.match(name)}
        try:
            words = shlex.split(command) if isinstance(command, str) else [os.fspath(word) for word in command]
            if nprocs is not None:
                family, launcher = find_launcher()
                words = [launcher, "-n", str(whole_number("solver: nprocs", nprocs, 1)), *family.flags.split(), *words]
            self.command = shlex.join(words)
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self.log: Any = open(os.open(path, flags, 0o600), "ab+") if log_dir else tempfile.TemporaryFile("ab+")  # noqa: SIM115
            self._start = os.fstat(self.log.fileno()).st_size  # after what an earlier run has left in it
            super().__init__(
                words, cwd=cwd, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT,
                env=ENVIRONMENT | _HERE | own | {_MARK: self._mark, _GUARDED: state(_guard)[0]} | more,
                start_new_session=True, preexec_fn=_take_cores,
            )  # fmt: skip
        except (OSError, ValueError, TypeError, IndexError, subprocess.SubprocessError) as error:
            raise UsageError(f"{command} cannot be started: {error}") from None
        Finalize(self, reap.kill_processes, (self._mark, _MARK), exitpriority=0)  # not in a process that this one forks

    def pause(self) -> None:
        """Stops all its processes: an MPI program that waits does so busily."""
        self._paused += reap.job_processes(self._mark, True, _MARK)

    def resume(self) -> None:
        """Continues what `pause` has stopped."""
        while self._paused:
            reap.send(self._paused.pop(), signal.SIGCONT)

    def send_signal(self, sig: int) -> None:
        """Sends a signal to all its processes, to the first one even if it shows no environment, as of `env -i`."""
        for pid in {*[self.pid] * (self.poll() is None), *reap.job_processes(self._mark, variable=_MARK)}:
            reap.send(pid, sig)
        self.resume()

    def kill(self) -> None:
        """Kills all that it has started, and waits for it."""
        reap.kill_processes(self._mark, _MARK)
        super().kill()
        self.wait()

    def tail(self) -> str:
        """The last lines that it has printed."""
        size = os.fstat(fd := self.log.fileno()).st_size
        text = os.pread(fd, _LAST_BYTES, max(min(self._start, size), size - _LAST_BYTES)).decode(errors="replace")
        return "\n".join([line for line in text.splitlines() if re.search(r"\w", line)][-_LAST_LINES:])


def _guard() -> tuple[str, Any]:
    """The mark of this process's programs, and what ends them if it is killed; in a job its parent, or guard, does."""
    mark = secrets.token_hex(8)
    return mark, None if state(Role).job else reap.guard(mark, _GUARDED)


def _take_cores() -> None:
    """In the new process: it gets this worker's cores of those that the workers of its machine share."""
    cores, channel = sorted(os.sched_getaffinity(0)), state(Kept).world
    machine, mine = (channel.machine, channel.rank) if channel else ([0], 0)
    here = [k for k, lowest in enumerate(machine) if lowest == machine[mine]]
    first, last = (i * len(cores) // len(here) for i in (here.index(mine), here.index(mine) + 1))
    os.sched_setaffinity(0, cores[first:last] or cores[first % len(cores) :][:1])


class Process:
    """A program that serves one environment. Args: as of `simulator`."""

    def __init__(self, command: str | Sequence[str], limit: float | None, pause: bool, cwd: Path_, log_dir: Path_):
        name, mine, its = (secrets.token_hex(16) for _ in range(3))
        self.make_env, self._calls, self.idle_since, self.turn, self.ended = None, 0, math.inf, threading.Lock(), ""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")  # an abstract one: it leaves no file
            listener.listen()
            self.solver = Solver(command, None, cwd, log_dir, **{ADDRESS: f"{name} {its} {mine}"})
            self._name = f"the simulator of worker {rank()} ({self.solver.command:.200})"
            self._wire = self._accepted(listener, mine, its, limit)
        threading.Thread(target=_look_after, args=(weakref.ref(self), pause), daemon=True).start()

    def _accepted(self, listener: socket.socket, mine: str, its: str, limit: float | None) -> Wire:
        """The first connection that shows its half of the key."""
        began = time.monotonic()
        while True:
            if wait([listener], _IDLE_S):
                sock, _ = listener.accept()
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # it may stop within a message
                    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _STUCK_S, 0))
                with contextlib.suppress(OSError, EOFError):
                    return Wire(sock, mine, its)
            elif self.solver.poll() is not None:
                self._fail("has ended", "its start")
            elif limit and time.monotonic() - began > limit:
                self._fail(f"was not done after {limit:g} s, and was ended", "its start", 0.0)

    def call(self, request: Request, limit: float | None = None) -> Any:
        """Makes a call there. Returns: its result. Args: limit: seconds until it is ended."""
        if self.ended:
            raise SimulatorError(f"{self.ended}\nit cannot be called any more")
        with self.turn:
            self._calls, self.idle_since = self._calls + 1, math.inf
            self.solver.resume()
        number, answer, rest = 0, "", list[Any]()
        try:
            self._wire.send(self._calls, request)
            while number != self._calls:  # else left by a call that was interrupted
                if not wait([self._wire.connection], limit):
                    self._fail(f"was not done after {limit:g} s, and was ended", request.doing, 0.0)
                number, (answer, *rest) = self._wire.receive()
        except (EOFError, OSError):
            self._fail("has ended", request.doing)
        finally:
            if request.name == "close":
                self.ended = self.ended or f"{self._name} was closed"
                self._wire.connection.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.solver.wait(_END_S)
                self.solver.kill()  # and what it has left behind
            self.idle_since = time.monotonic()
        if answer == "result":
            return rest[0]
        if (request.what, rest[0]) == ("get", "AttributeError"):
            raise AttributeError(request.name)
        raise SimulatorError(f"{self._name} failed in {request.doing}:{_set_off(rest[1])}")

    def _fail(self, what: str, doing: str, patience_s: float = _LAST_WORDS_S) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.solver.wait(patience_s)
            what += f" with status {code}" if code >= 0 else f" by signal {-code}"
        self.solver.kill()
        self.ended = f"{self._name} {what}, in {doing}; it said last:{_set_off(self.solver.tail() or '(nothing)')}"
        raise SimulatorError(self.ended)


def _set_off(text: str) -> str:
    return f" {text}" if "\n" not in text else "\n  " + text.replace("\n", "\n  ")


def _look_after(process: "weakref.ref[Process]", pause: bool) -> None:
    """Until it has ended: pauses it when it has not been called for a while."""
    while (here := process()) and not here.ended:
        if not here.solver.log_dir and os.fstat(here.solver.log.fileno()).st_size > _MOST_KEPT_BYTES:
            here.solver.log.truncate(0)
        with here.turn:
            if pause and not here.ended and time.monotonic() - here.idle_since > _IDLE_S:
                here.idle_since = math.inf
                here.solver.pause()
        del here
        time.sleep(_IDLE_S)
