"""Watch over the ranks from the process that the user started: pass on output and signals, leave nothing behind.

The ranks are grandchildren. Their launcher reaps them, reports one status for all and may name the wrong one: hydra
prints the id of a rank that it killed itself, and ors all statuses together. So the parent watches the ranks itself. In
the job's folder each rank k

- writes rank-<k>, JSON {"pid": int, "shm": [names of the files in /dev/shm to be removed at the end]};
- opens the FIFO alive-<k> for writing and keeps it open;
- writes failed-<k>, JSON {"status": int, "reason": "one line", "time": time.time(), "in_order": bool, "told": bool},
  before it ends on its own account; in_order (default false): all ranks have agreed to end, and need no help; told
  (default false): it has printed the reason itself, in a line of its own;
- writes ended-<k> when it ends in order: hydra sometimes overlooks a rank that exits with status 0 before MPI_Finalize.

The FIFOs show which rank died first. The kernel closes a dying process's files before it reports its death, and hydra,
which sees a socket close, may kill the others in between: on a busy 2-core machine the order of pidfd events was wrong
in 25 of 80 kills, that of the FIFOs in none.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import LaunchError
from . import reap
from .banners import STDERR, STDOUT, Stream
from .verdict import Evidence, Verdict, describe_signal, failed_record, judge

_LOOK_EARLY_S = 0.05  # between two looks at the job's folder, until all ranks have registered
_LOOK_S = 0.5
_LAUNCHER_PATIENCE_S = 1.5  # a launcher that has not ended the job so long after it broke is not going to
_DRAIN_S = 1.0
_SAME_SIGNAL_S = 0.3  # `timeout` and some shells send a signal to the process and again to its group
# The job is known by its folder; Open MPI 5 and 4 keep their session's files there, so that these go with it.
_FOLDER_VARIABLES = (reap.JOB_VARIABLE, "PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _StopError(Exception):
    """The job is to be ended at once. Its argument: the verdict, or None where the evidence has to be weighed."""


class Job:
    """One launcher with its ranks, from start to end."""

    def __init__(self, n_ranks: int):
        self.folder = tempfile.mkdtemp(prefix="mpi_util-")
        self._evidence = Evidence(n_ranks, Path(self.folder))
        self._selector = selectors.DefaultSelector()
        self._streams: list[Stream] = []
        self._unregistered = set(range(n_ranks))
        self._helpers: set[int] = set()  # the launcher and its helper processes
        self.saved = ""  # at the end, what the ranks wrote in saved-0 (restarts.saved)
        self._descriptors: list[int] = []
        # rank -> (wait status or None, pidfd), in the order in which the ranks ended
        self._ended: dict[int, tuple[int | None, int]] = {}
        try:
            self._open_fifos()
        except OSError as error:
            self._close()
            limit = "; `ulimit -n` is the number of files that a process may open" * (error.errno == errno.EMFILE)
            raise LaunchError(f"cannot start {n_ranks} ranks: {error.strerror}{limit}") from None
        self._signals = -1  # becomes readable when one has come
        self._signalled_at: float | None = None
        self._broken_at = math.inf  # when something went wrong, at which the launcher is to end the job

    def run(self, command: list[str], environment: dict[str, str], stdin: int | IO[Any] | None = None) -> Verdict:
        """Starts the launcher; returns when nothing of the job is left: no process, no folder, no shared memory.

        Args: environment: of launcher and ranks; the job's folder is added to it. stdin: as for subprocess.Popen.
        """
        guard = subprocess.Popen(  # noqa: S603  # this interpreter, and nothing of the user's folder or environment
            [sys.executable, "-I", "-S", reap.__file__, self.folder],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != reap.JOB_VARIABLE},  # if this is a rank's
        )  # fmt: skip
        try:
            with self._selector, self._signals_caught():
                # in a session of its own: a terminal's Ctrl-C does not reach it, and the parent forwards it in order
                self._launcher = subprocess.Popen(  # noqa: S603  # the user's own command line once more
                    command, env=environment | dict.fromkeys(_FOLDER_VARIABLES, self.folder), stdin=stdin,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                )  # fmt: skip
                return self._supervise()
        finally:
            self._close()
            guard.communicate(reap.ALL_IS_WELL)

    def _close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        reap.end_job(self.folder)

    def _supervise(self) -> Verdict:
        pipes = (self._launcher.stdout, STDOUT), (self._launcher.stderr, STDERR)
        self._streams = [Stream(pipe, target) for pipe, target in pipes if pipe]
        for stream in self._streams:
            stream.start()
        self._helpers.add(self._launcher.pid)
        self._watch(self._launcher.pid, lambda _: None)
        try:
            while self._launcher.poll() is None:
                self._step()
            self._step(wait=False)
        except _StopError as stop:
            (self._evidence.decided,) = stop.args
        reap.kill_processes(self.folder)
        self._evidence.launcher_code = self._launcher.wait()
        self._drain()
        with contextlib.suppress(OSError):
            self.saved = (self._evidence.folder / "saved-0").read_text()
        self._evidence.deaths = self._deaths()
        self._evidence.banners = "".join(stream.filter.banners for stream in self._streams)
        return judge(self._evidence)

    def _step(self, wait: bool = True) -> None:
        """Waits for an event and handles it."""
        pause = _LOOK_EARLY_S if self._unregistered else _LOOK_S
        for key, _ in self._selector.select(pause if wait else 0):
            key.data()
        self._register_ranks()
        record = failed_record(self._evidence.folder)
        if record and record.get("in_order"):
            return
        if record:
            self._mark_broken()
        if any(stream.stalls for stream in self._streams):  # the launcher cannot end before its output is read
            self._broken_at = max(self._broken_at, time.monotonic())
        if time.monotonic() - self._broken_at > _LAUNCHER_PATIENCE_S:
            self._evidence.given_up = True
            raise _StopError(None)

    def _open_fifos(self) -> None:
        """Opens each rank's FIFO, which reaches its end when the rank, its only writer, ends."""
        for rank in range(self._evidence.n_ranks):
            path = self._evidence.folder / f"alive-{rank}"
            os.mkfifo(path, 0o600)
            fifo = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self._at_end(fifo, functools.partial(self._ended.setdefault, rank, (None, -1)))

    def _register_ranks(self) -> None:
        """Watches the ranks that have recorded their process id, and the launcher's helpers that started them."""
        for rank in list(self._unregistered):
            pid = reap.read_record(self._evidence.folder / f"rank-{rank}").get("pid")
            belongs = isinstance(pid, int) and reap.belongs(pid, self.folder)
            if not isinstance(pid, int) or (not belongs and reap.is_alive(pid)):
                continue  # it has not come, or is just changing from the shell to the program
            self._unregistered.remove(rank)
            if pid == self._launcher.pid:
                continue
            if not belongs:
                self._record_death(rank, pid)
                continue
            self._watch(pid, functools.partial(self._record_death, rank, pid))
            parent = reap.stat_field(pid, reap.STAT_PARENT)
            if parent and parent not in self._helpers:
                self._helpers.add(parent)
                self._watch(parent, functools.partial(self._record_helper, parent))

    def _watch(self, pid: int, on_death: Callable[[int], None]) -> None:
        """Calls on_death(pidfd) when the process ends; never where there is no pidfd (Linux before 5.3)."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return
        self._at_end(pidfd, functools.partial(on_death, pidfd))

    def _at_end(self, descriptor: int, call: Callable[[], object]) -> None:
        """Calls when the descriptor, a FIFO or pidfd, says that its process has ended."""

        def ended() -> None:
            self._selector.unregister(descriptor)
            call()

        self._descriptors.append(descriptor)
        self._selector.register(descriptor, selectors.EVENT_READ, ended)

    def _record_death(self, rank: int, pid: int, pidfd: int = -1) -> None:
        """Records that a rank has ended, and how, if that can be known."""
        status = reap.exit_status(pid, pidfd)
        self._ended[rank] = status, pidfd
        if not status and (self._evidence.folder / f"ended-{rank}").exists():
            return
        if self._broken_at == math.inf and not status:
            self._evidence.overlooked = rank
        self._mark_broken()
        if "shm" not in reap.read_record(self._evidence.folder / f"rank-{rank}"):
            self._broken_at = -math.inf  # above mpi_fork: the launcher waits for its MPI_Init, for ever

    def _record_helper(self, pid: int, pidfd: int) -> None:
        """Records that a helper process of the launcher has ended, and how. When it is killed, its ranks end too."""
        self._evidence.helper_code = os.waitstatus_to_exitcode(reap.exit_status(pid, pidfd) or 0)
        self._mark_broken()

    def _deaths(self) -> list[tuple[int, int | None]]:
        """The ranks in the order in which they ended, each with its exit code if it is known."""
        deaths = []
        for rank, (status, pidfd) in self._ended.items():
            status = reap.reaped_exit_status(pidfd) if status is None else status
            deaths.append((rank, None if status is None else os.waitstatus_to_exitcode(status)))
        return deaths

    def _mark_broken(self) -> None:
        self._broken_at = min(self._broken_at, time.monotonic())

    def _drain(self) -> None:
        """Waits for what is still in the pipes, as long as a reader of our output takes, but for a signal."""
        deadline, hurried = time.monotonic() + _DRAIN_S, self._evidence.decided is not None
        for stream in self._streams:
            stream.deadline = deadline
        while alive := [stream for stream in self._streams if stream.is_alive()]:
            hurried = self._signal_came_late() or hurried
            if hurried and time.monotonic() > deadline:
                break
            alive[0].join(_LOOK_EARLY_S)
        self._signal_came_late()

    def _signal_came_late(self) -> bool:
        """Notes a signal that came too late for rank 0."""
        late = 0
        with contextlib.suppress(OSError):  # none has come, or this is not the main thread
            late = max(set(os.read(self._signals, 64)) & set(_SIGNALS), default=0)
        self._evidence.forwarded = self._evidence.forwarded or late
        return late > 0

    @contextlib.contextmanager
    def _signals_caught(self) -> Iterator[None]:
        """Within it, signals wake the selector. Only the main thread may catch them; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._signals, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors += [self._signals, writer]
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        previous_fd = signal.set_wakeup_fd(writer)
        # One that is ignored stays ignored: nohup, and background jobs of a script.
        caught = [signum for signum in _SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
        previous = {signum: signal.signal(signum, lambda *_: None) for signum in caught}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(previous_fd)

    def _on_signals(self) -> None:
        """The first signal goes to rank 0, which ends the program in order; a second one ends everything now.

        A terminal that closes sends SIGHUP, sometimes twice: it is neither a first nor a second one.
        """
        for signum in os.read(self._signals, 64):
            if signum not in _SIGNALS:
                continue
            now, first = time.monotonic(), not self._evidence.forwarded
            if signum == signal.SIGHUP and not first:
                continue
            if self._signalled_at is not None and now - self._signalled_at < _SAME_SIGNAL_S:
                continue
            root = reap.read_record(self._evidence.folder / "rank-0")
            ready = "shm" in root and reap.belongs(root["pid"], self.folder)
            if self._signalled_at is not None or not ready:
                line = f"mpi_util: {describe_signal(signum)}; all {self._evidence.n_ranks} ranks were stopped"
                raise _StopError(Verdict(128 + signum, line))
            self._signalled_at = None if signum == signal.SIGHUP else now
            self._evidence.forwarded = self._evidence.forwarded or signum
            with contextlib.suppress(ProcessLookupError):
                os.kill(root["pid"], signum)
