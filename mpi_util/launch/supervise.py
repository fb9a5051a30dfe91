"""Runs one job: starts the launcher, passes on output and signals, leaves nothing behind. Runs in the waiting parent.

monitor.py sees the ranks, verdict.py says who failed; this file decides when the launcher has had time enough.
"""

import builtins
import contextlib
import math
import os
import secrets
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ..host import reap
from ..ranks.failure import SAME_SIGNAL_S, print_line
from ..ranks.identity import BEGAN_IN
from ..ranks.runner import STACK_SIGNAL
from ..ranks.state import state
from ..ranks.watchdog import Watchdog
from .banners import STDERR, STDOUT, OutputThread
from .monitor import FOLDER_VARIABLES, ProcessMonitor
from .verdict import Death, Evidence, Verdict, describe_signal, failed_record, judge

_LAUNCHER_PATIENCE_S, _SOON_S = 1.5, 0.5  # a launcher that takes longer to end a broken job is not going to
_DRAIN_S, _LOOK_S = 1.0, 0.05
_NOTICE_S = 5.0  # after a signal, or the last rank's end, until the user learns why the job has not ended
_ARRIVALS_LOOK_S, _ANSWER_S = 1.0, 0.5
_STAGES = "not started", "above mpi_fork", "in MPI_Init, or waiting there for others"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job:
    """One launcher with its ranks, from start to end.

    Args:
        environment: of launcher and ranks.
        open_monitor: ProcessMonitor, or what takes the same arguments and gives a monitor of several machines.
    """

    def __init__(
        self, n_ranks: int, environment: dict[str, str] | None = None,
        open_monitor: Callable[..., ProcessMonitor] = ProcessMonitor,
    ):  # fmt: skip
        self.folder = os.path.join(tempfile.gettempdir(), f"mpi_util-{secrets.token_hex(8)}")
        self.saved = ""  # at the end, what rank 0 wrote in saved-0 (ranks.records.saved)
        self._environment = (environment or {}) | dict.fromkeys(FOLDER_VARIABLES, self.folder)
        self._evidence = Evidence(n_ranks, Path(self.folder))
        try:
            self.monitor = open_monitor(Path(self.folder), range(n_ranks), self._died)
        except BaseException:
            reap.end_job(self.folder)
            raise
        self._evidence.hosts, self._evidence.lost = self.monitor.hosts, self.monitor.lost
        self._decided: Verdict | None = None  # when a signal ends the job at once
        self._outputs: list[OutputThread] = []
        self._signals = -1  # becomes readable when one has come
        self._signalled_at = -math.inf  # the last SIGINT or SIGTERM
        self._notice_at = math.inf  # when to look whether rank 0 does what a signal asks for
        self._kept_at = math.inf  # when to say what keeps the launcher, though all ranks have ended
        self._broken_at = math.inf  # when something went wrong, at which the launcher is to end the job

    def run(self, command: list[str], stdin: int | IO[Any] | None = None) -> Verdict:
        """Starts the launcher; returns when nothing of the job is left: no process, no folder, no shared memory."""
        with self._signals_caught():
            try:
                # in a session of its own: a terminal's Ctrl-C does not reach it, and the parent forwards it in order
                self._launcher = subprocess.Popen(  # noqa: S603  # the user's own command line once more
                    command, env=self._environment, stdin=stdin,
                    cwd=None if hasattr(builtins, "__IPYTHON__") else BEGAN_IN,  # %cd is above the program
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                )  # fmt: skip
                verdict = self._supervise()
            finally:
                self.monitor.close()
            return verdict._replace(cause="") if self._new_signals() else verdict  # the user ends it: no restart

    def _supervise(self) -> Verdict:
        evidence, launcher = self._evidence, self._launcher
        arrivals = Arrivals(evidence.n_ranks, self.monitor)
        for pipe, target in ((launcher.stdout, STDOUT), (launcher.stderr, STDERR)):
            self._outputs += [OutputThread(pipe, target)] if pipe else []
        self.monitor.watch(launcher.pid, lambda _: None)
        while launcher.poll() is None and not self._decided and self._is_patient():
            self._step()
            if why := arrivals.look():
                self._decided = Verdict(1, f"mpi_util: {why}; all {evidence.n_ranks} ranks were stopped")
        self._step(wait=False)
        code = launcher.poll()
        evidence.launcher_code, evidence.given_up = code or 0, code is None
        self.monitor.kill()
        self._look_at_monitor()
        launcher.wait()
        self._drain()
        with contextlib.suppress(OSError):
            self.saved = (evidence.folder / "saved-0").read_text()
        evidence.banners = "".join(output.filter.banners for output in self._outputs)
        return self._decided or judge(evidence)

    def _is_patient(self) -> bool:
        """False when the launcher has had time enough to end a broken job."""
        if record := failed_record(self._evidence.folder):
            if record.in_order:
                return True
            self._mark_broken()
        if any(output.stalls for output in self._outputs):  # the launcher cannot end before its output is read
            self._broken_at = max(self._broken_at, time.monotonic())
        return time.monotonic() - self._broken_at <= _LAUNCHER_PATIENCE_S

    def _step(self, wait: bool = True) -> None:
        self.monitor.step(wait)
        self._look_at_monitor()
        if time.monotonic() > self._notice_at:
            self._look_at_rank_0()
        if time.monotonic() > self._kept_at:
            self._look_at_others()

    def _look_at_monitor(self) -> None:
        if self.monitor.refused:
            self._decided = self._decided or self._evidence.stopped_by(self.monitor.refused)
        if self.monitor.lost:
            self._broken_at = -math.inf

    def _died(self, death: Death) -> None:
        """Records that a rank, or a helper process of the launcher, has ended, and how, if that can be known."""
        evidence, rank = self._evidence, death.rank
        if rank < 0:
            evidence.helper = min(evidence.helper, death, key=lambda each: each.time)
            if not all(map(evidence.ended_in_order, range(evidence.n_ranks))):  # else it ends because they have
                self._mark_broken()
            return
        evidence.died(death)
        if not death.certain:
            return
        if len(evidence.deaths) == evidence.n_ranks:
            self._kept_at = time.monotonic() + _NOTICE_S
        if evidence.ended_in_order(rank):
            return
        self._mark_broken()
        if "shm" not in self.monitor.record(rank):
            # above mpi_fork: the launcher ends soon, with the status, or waits for this rank's MPI_Init for ever
            self._broken_at = min(self._broken_at, time.monotonic() + _SOON_S - _LAUNCHER_PATIENCE_S)

    def _mark_broken(self) -> None:
        self._broken_at = min(self._broken_at, time.monotonic())

    def _drain(self) -> None:
        """Waits until all output is passed on, however slow its reader is; after a signal for a second at most."""
        deadline, hurried = time.monotonic() + _DRAIN_S, self._decided is not None
        for output in self._outputs:
            output.deadline = deadline
        while True:
            if late := self._new_signals():  # too late for rank 0
                self._evidence.forwarded, hurried = self._evidence.forwarded or max(late), True
            alive = [output for output in self._outputs if output.is_alive()]
            if not alive or (hurried and time.monotonic() > deadline):
                return
            alive[0].join(_LOOK_S)

    @contextlib.contextmanager
    def _signals_caught(self) -> Iterator[None]:
        """Within it, signals wake the selector. Only the main thread may catch them; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._signals, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.monitor.selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        previous_fd = signal.set_wakeup_fd(writer)
        # One that is ignored stays ignored: nohup, and background jobs of a script.
        caught = [signum for signum in (*_SIGNALS, signal.SIGTSTP) if signal.getsignal(signum) is not signal.SIG_IGN]
        previous = {signum: signal.signal(signum, lambda *_: None) for signum in caught}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(previous_fd)
            os.close(writer)
            os.close(self._signals)

    def _new_signals(self) -> list[int]:
        new = b""
        with contextlib.suppress(OSError):  # none has come, or this is not the main thread
            new = os.read(self._signals, 64)
        if signal.SIGTSTP in new and not self.monitor.hosts:  # others' agents would take this one for lost
            self.monitor.pause()
        return [signum for signum in new if signum in _SIGNALS]

    def _on_signals(self) -> None:
        """The first signal goes to rank 0, which ends the program in order; a second one (see StopRequest) ends all."""
        for signum in self._new_signals():
            now, evidence = time.monotonic(), self._evidence
            if (signum == signal.SIGHUP and evidence.forwarded) or now - self._signalled_at < SAME_SIGNAL_S:
                continue
            if self._signalled_at > -math.inf:
                self._decided = self._decided or evidence.stopped_by(signum)
                return
            self.monitor.signal(0, signum)
            self._signalled_at = -math.inf if signum == signal.SIGHUP else now
            self._notice_at = now + _NOTICE_S
            evidence.forwarded = evidence.forwarded or signum

    def _look_at_rank_0(self) -> None:
        """Some seconds after a signal: says that rank 0 works on; it may be stopped (`kill -STOP`), too."""
        evidence, pid = self._evidence, self.monitor.record(0).get("pid", 0)
        if not (0 in evidence.deaths or any(output.stalls for output in self._outputs)):
            self._notice_at = math.inf
            again = "a second signal ends" if self._signalled_at > -math.inf else "SIGTERM twice ends"
            what = f"has got {describe_signal(evidence.forwarded)} and works on"
            print_line(f"mpi_util: rank 0 (process {pid}) {what}; {again} everything now")

    def _look_at_others(self) -> None:
        """Some seconds after the last rank's end: says which processes, with its pipes open, the launcher waits for."""
        if any(output.stalls for output in self._outputs):
            return
        self._kept_at = math.inf
        named = ", ".join(f"{reap.name_of(pid)} (process {pid})" for pid in self.monitor.others())
        what = f"what they have started: {named}" if named else "their launcher, or a process that has their output"
        print_line(f"mpi_util: all ranks have ended; waiting for {what}; Ctrl-C ends it")


class Arrivals:
    """Watches that all ranks come to mpi_fork: until then no watchdog of theirs can run.

    A rank may hang above mpi_fork (an import from a network disk), be stopped, or hang in MPI_Init; the others wait.
    """

    def __init__(self, n_ranks: int, monitor: ProcessMonitor):
        self._folder, self._job, self._record = monitor.folder, str(monitor.folder), monitor.record
        self._waiting = set(range(n_ranks))  # those that have not come
        self._last_step = "mpi" if n_ranks > 1 else "shm"  # of a record; a single rank starts no MPI
        self._looked_at, self._waited = time.monotonic(), 0.0  # without the time for which this process was stopped
        self._due = state(Watchdog).after_s or float("inf")

    def look(self) -> str:
        """To be called often. Returns: why the job ends, where the watchdog is to end it; else ""."""
        now = time.monotonic()
        if not self._waiting or now - self._looked_at < _ARRIVALS_LOOK_S:
            return ""
        self._waited += min(now - self._looked_at, 2 * _ARRIVALS_LOOK_S)
        self._looked_at, waited = now, self._waited
        records = {rank: self._record(rank) for rank in self._waiting}
        self._waiting = {rank for rank, record in records.items() if self._last_step not in record}
        if not self._waiting or waited < self._due:
            return ""
        return self._report(waited, {rank: records[rank] for rank in sorted(self._waiting)})

    def _report(self, waited: float, records: dict[int, dict[str, Any]]) -> str:
        self._due = 2 * waited
        stages = {rank: bool(record) + ("shm" in record) for rank, record in records.items()}
        missing = {rank: records[rank] for rank, stage in stages.items() if stage == min(stages.values())}
        own = [record["pid"] for record in missing.values() if record and reap.belongs(record["pid"], self._job)]
        stopped = [f"process {pid} is stopped, `kill -CONT {pid}` continues it" for pid in filter(reap.is_stopped, own)]
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        what = "; ".join([f"{names}: {_STAGES[min(stages.values())]}", *stopped])
        if state(Watchdog).kill:
            return f"the watchdog ends the job after {waited:.3g} s: {what}"
        head = f"mpi_util: after {waited:.3g} s not all ranks have come: {what}. This is a report, not an error."
        then = f"The next one is due after {self._due:.3g} s (MPI_UTIL_WATCHDOG; 0: never)"
        print_line("\n".join([f"{head} {then}", *self._stacks(missing)]))
        return ""

    def _stacks(self, records: dict[int, dict[str, Any]]) -> list[str]:
        """What Python is doing in these ranks, where it answers."""
        for record in filter(None, records.values()):
            if reap.belongs(record["pid"], self._job) and reap.catches(record["pid"], STACK_SIGNAL):
                reap.send(record["pid"], STACK_SIGNAL)
        time.sleep(_ANSWER_S)
        found = []
        for rank in records:
            path = self._folder / f"stack-{rank}"
            if path.exists() and (text := path.read_text(errors="replace").rstrip()):
                found.append(f"stack of rank {rank}:\n{text}")
                os.truncate(path, 0)
        return found
