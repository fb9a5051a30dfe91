"""Watch over the ranks from the process that the user started: pass on output and signals, leave nothing behind.

The ranks are grandchildren. Their launcher reaps them, reports one status for all and may name the wrong one: hydra
prints the id of a rank that it killed itself, and ors all statuses together. So the parent watches the ranks itself. In
the job's folder each rank k

- writes rank-<k>, JSON {"pid": int, "shm": [names of the files in /dev/shm to be removed at the end]};
- opens the FIFO alive-<k> for writing and keeps it open;
- writes failed-<k>, a `verdict.Failure` as JSON, before it ends on its own account;
- writes ended-<k> when it ends in order: hydra sometimes overlooks a rank that exits with status 0 before MPI_Finalize.

The FIFOs show which rank died first. The kernel closes a dying process's files before it reports its death, and hydra,
which sees a socket close, may kill the others in between: on a busy 2-core machine the order of pidfd events was wrong
in 25 of 80 kills, that of the FIFOs in none.
"""

from __future__ import annotations

import contextlib
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

from . import reap
from .banners import STDERR, STDOUT, Stream
from .failure import print_line
from .verdict import Evidence, Verdict, describe_signal, failed_record, judge

_LOOK_EARLY_S = 0.05  # between two looks at the job's folder, until all ranks have registered
_LOOK_S = 0.5
_LAUNCHER_PATIENCE_S = 1.5  # a launcher that has not ended the job so long after it broke is not going to
_DRAIN_S = 1.0
_GUARD_PAUSE_S = 1.0
_SAME_SIGNAL_S = 0.3  # `timeout` and some shells send a signal to the process and again to its group
_NOTICE_S = 5.0  # after a signal, or the last rank's end, until the user learns why the job has not ended
# The job is known by its folder; Open MPI 5 and 4 keep their session's files there, so that these go with it.
_FOLDER_VARIABLES = (reap.JOB_VARIABLE, "PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job:
    """One launcher with its ranks, from start to end."""

    def __init__(self, n_ranks: int):
        self.folder = tempfile.mkdtemp(prefix="mpi_util-")
        self._evidence = Evidence(n_ranks, Path(self.folder))
        self._decided: Verdict | None = None  # when a signal ends the job at once
        self._selector = selectors.DefaultSelector()
        self._guard: subprocess.Popen[bytes] | None = None
        self._guarded_until = -math.inf  # before this time no other guard is started
        self._streams: list[Stream] = []
        self._unregistered = set(range(n_ranks))
        self._watched: set[int] = set()  # processes
        self.saved = ""  # at the end, what the ranks wrote in saved-0 (restarts.saved)
        self._descriptors: list[int] = []
        self._signals = -1  # becomes readable when one has come
        self._signalled_at = -math.inf  # the last SIGINT or SIGTERM
        self._notice_at = math.inf  # when to look whether rank 0 does what a signal asks for
        self._noticed = False
        self._kept_at = math.inf  # when to say what keeps the launcher, though all ranks have ended
        self._broken_at = math.inf  # when something went wrong, at which the launcher is to end the job

    def run(self, command: list[str], environment: dict[str, str], stdin: int | IO[Any] | None = None) -> Verdict:
        """Starts the launcher; returns when nothing of the job is left: no process, no folder, no shared memory.

        Args: environment: of launcher and ranks; the job's folder is added to it. stdin: as for subprocess.Popen.
        """
        try:
            self._keep_guard()
            self._open_fifos()
            with self._selector, self._signals_caught():
                # in a session of its own: a terminal's Ctrl-C does not reach it, and the parent forwards it in order
                self._launcher = subprocess.Popen(  # noqa: S603  # the user's own command line once more
                    command, env=environment | dict.fromkeys(_FOLDER_VARIABLES, self.folder), stdin=stdin,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                )  # fmt: skip
                return self._supervise()
        finally:
            self._close()

    def _close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        reap.end_job(self.folder)
        if self._guard:
            self._guard.kill()  # it may be stopped
            self._guard.wait()

    def _keep_guard(self) -> None:
        """Starts the guard, and another one when it is killed; the job goes on without while the system refuses it."""
        now = time.monotonic()
        if now < self._guarded_until or (self._guard and self._guard.poll() is None):
            return
        self._guarded_until = now + _GUARD_PAUSE_S
        with contextlib.suppress(OSError):
            self._guard = subprocess.Popen(  # noqa: S603  # this interpreter, nothing of the user's folder or environment
                [sys.executable, "-I", "-S", reap.__file__, self.folder],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != reap.JOB_VARIABLE},  # if a rank's
            )  # fmt: skip

    def _supervise(self) -> Verdict:
        evidence, launcher = self._evidence, self._launcher
        pipes = (launcher.stdout, STDOUT), (launcher.stderr, STDERR)
        self._streams = [Stream(pipe, target) for pipe, target in pipes if pipe]
        self._watch(launcher.pid, lambda _: None)
        while launcher.poll() is None and not self._decided and self._is_patient():
            self._step()
        self._step(wait=False)
        code = launcher.poll()
        evidence.launcher_code, evidence.given_up = code or 0, code is None
        reap.kill_processes(self.folder)
        launcher.wait()
        self._drain()
        with contextlib.suppress(OSError):
            self.saved = (evidence.folder / "saved-0").read_text()
        evidence.banners = "".join(stream.filter.banners for stream in self._streams)
        return self._decided or judge(evidence)

    def _is_patient(self) -> bool:
        """False when the launcher has had time enough to end a broken job."""
        if record := failed_record(self._evidence.folder):
            if record.in_order:
                return True
            self._mark_broken()
        if any(stream.stalls for stream in self._streams):  # the launcher cannot end before its output is read
            self._broken_at = max(self._broken_at, time.monotonic())
        return time.monotonic() - self._broken_at <= _LAUNCHER_PATIENCE_S

    def _step(self, wait: bool = True) -> None:
        """Waits for an event and handles it."""
        pause = _LOOK_EARLY_S if self._unregistered else _LOOK_S
        for key, _ in self._selector.select(pause if wait else 0):
            key.data()
        self._keep_guard()
        self._register_ranks()
        if time.monotonic() > self._notice_at:
            self._look_at_rank_0()
        if time.monotonic() > self._kept_at:
            self._look_at_others()

    def _open_fifos(self) -> None:
        """Opens each rank's FIFO, which reaches its end when the rank, its only writer, ends."""
        for rank in range(self._evidence.n_ranks):
            path = self._evidence.folder / f"alive-{rank}"
            os.mkfifo(path, 0o600)
            fifo = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self._at_end(fifo, functools.partial(self._evidence.deaths.setdefault, rank, None))

    def _register_ranks(self) -> None:
        """Watches the ranks that have recorded their process id, and the launcher's helpers that started them."""
        for rank in list(self._unregistered):
            pid = int(self._record(rank).get("pid", 0))
            belongs = pid and reap.belongs(pid, self.folder)
            if not pid or (not belongs and reap.is_alive(pid)):
                continue  # it has not come, or is just changing from the shell to the program
            self._unregistered.remove(rank)
            if belongs:
                helper = reap.stat_field(pid, reap.STAT_PARENT) or pid
                self._watch(pid, functools.partial(self._record_death, rank, pid))
                self._watch(helper, functools.partial(self._record_helper, helper))
            else:
                self._record_death(rank, pid)

    def _record(self, rank: int) -> dict[str, Any]:
        return reap.read_record(self._evidence.folder / f"rank-{rank}")

    def _watch(self, pid: int, on_death: Callable[[int], None]) -> None:
        """Calls on_death(pidfd) when the process ends; never where there is no pidfd (Linux before 5.3)."""
        if pid not in self._watched and pid != os.getpid():
            self._watched.add(pid)
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(pid)
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
        self._evidence.deaths[rank] = reap.exit_code(pid, pidfd)
        if len(self._evidence.deaths) == self._evidence.n_ranks:
            self._kept_at = time.monotonic() + _NOTICE_S
        if self._evidence.ended_in_order(rank):
            return
        self._mark_broken()
        if "shm" not in self._record(rank):
            self._broken_at = -math.inf  # above mpi_fork: the launcher waits for its MPI_Init, for ever

    def _record_helper(self, pid: int, pidfd: int) -> None:
        """The same of a helper process of the launcher. When it is killed, its ranks end too."""
        self._evidence.helper_code = reap.exit_code(pid, pidfd) or 0
        self._mark_broken()

    def _mark_broken(self) -> None:
        self._broken_at = min(self._broken_at, time.monotonic())

    def _drain(self) -> None:
        """Waits for what is still in the pipes, as long as a reader of our output takes, but for a signal."""
        deadline, hurried = time.monotonic() + _DRAIN_S, self._decided is not None
        for stream in self._streams:
            stream.deadline = deadline
        while True:
            if late := self._new_signals():  # too late for rank 0
                self._evidence.forwarded, hurried = self._evidence.forwarded or max(late), True
            alive = [stream for stream in self._streams if stream.is_alive()]
            if not alive or (hurried and time.monotonic() > deadline):
                return
            alive[0].join(_LOOK_EARLY_S)

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

    def _new_signals(self) -> list[int]:
        with contextlib.suppress(OSError):  # none has come, or this is not the main thread
            return [signum for signum in os.read(self._signals, 64) if signum in _SIGNALS]
        return []

    def _on_signals(self) -> None:
        """The first signal goes to rank 0, which ends the program in order; a second one ends everything now.

        A terminal that closes sends SIGHUP, sometimes twice: it is neither a first nor a second one.
        """
        for signum in self._new_signals():
            now, evidence, root = time.monotonic(), self._evidence, self._record(0)
            if (signum == signal.SIGHUP and evidence.forwarded) or now - self._signalled_at < _SAME_SIGNAL_S:
                continue
            ready = "shm" in root and reap.belongs(root["pid"], self.folder)
            if self._signalled_at > -math.inf or not ready:
                self._decided = self._decided or evidence.stopped_by(signum)
                return
            self._signalled_at = -math.inf if signum == signal.SIGHUP else now
            self._notice_at = min(self._notice_at, now + _NOTICE_S)
            evidence.forwarded = evidence.forwarded or signum
            with contextlib.suppress(ProcessLookupError):
                os.kill(root["pid"], signum)

    def _look_at_rank_0(self) -> None:
        """Some seconds after a signal. Rank 0 may work on for long, and then save; if it is stopped, it never will."""
        evidence, pid = self._evidence, self._record(0).get("pid", 0)
        if reap.is_stopped(pid):
            but = f", but rank 0 (process {pid}) is stopped and cannot end in order"
            self._decided = evidence.stopped_by(evidence.forwarded, but)
        elif not (self._noticed or 0 in evidence.deaths or any(stream.stalls for stream in self._streams)):
            self._noticed = True
            again = "a second signal ends" if self._signalled_at > -math.inf else "SIGTERM twice ends"
            print_line(
                f"mpi_util: rank 0 (process {pid}) has got {describe_signal(evidence.forwarded)} and works on; "
                f"{again} everything now"
            )

    def _look_at_others(self) -> None:
        """Some seconds after the last rank has ended. A launcher waits for all who have its pipes open."""
        if any(stream.stalls for stream in self._streams):
            return
        self._kept_at = math.inf
        others = [pid for pid in reap.job_processes(self.folder) if pid not in self._watched]
        named = ", ".join(f"{reap.name_of(pid)} (process {pid})" for pid in others)
        what = f"what they have started: {named}" if named else "their launcher, or a process that has their output"
        print_line(f"mpi_util: all ranks have ended; waiting for {what}; Ctrl-C ends it")
