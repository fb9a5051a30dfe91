"""Runs that take hours in the background of other work: a few at once, stopped in order, continued by the next call.

A run is a program with a folder, which it saves its state to and continues from. Ctrl-C, SIGTERM and SIGHUP are passed
to each once, as SIGTERM, and the call waits until they have saved. If the call itself is killed, the kernel sends them
SIGTERM; the next call waits for the last of them before it begins.
"""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

POLL_S = 0.5
LOCK_S = 60  # for runs of an earlier call to save
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1


@dataclass
class Job:
    """One run.

    Attributes:
        command: called when it begins, because a run that has begun is continued by another command.
        finished: called now and then; once it is true, the run is stopped. None: it ends by itself.
        environment: None: this process's.
    """

    name: str
    folder: Path
    command: Callable[[], Sequence[str]]
    finished: Callable[[], bool] | None = None
    environment: dict[str, str] | None = None

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass
class Outcome:
    """Names of the runs that failed, and whether a signal stopped the call: its number, or 0."""

    failed: list[str]
    stopped: int


@contextmanager
def locked(folder: Path) -> Iterator[IO]:
    """A file that this call and its runs hold while they use the folder. Ends the program if another call does."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        for waited in range(LOCK_S):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waited:
                    say(f"{folder} is in use by another call; waiting {LOCK_S} s for its runs to stop")
                time.sleep(1)
        else:
            sys.exit(f"{folder} is in use by another call; stop it, or give another --runs")
        yield file


def run_all(jobs: Sequence[Job], at_once: int, hours: float | None, lock: IO) -> Outcome:
    """Makes the runs in this order, `at_once` at the same time; after so many hours none begins.

    A second signal is passed on too, so that runs that take long to save end.

    Args:
        lock: of `locked`.
    """
    waiting, running, outcome, received = list(jobs), {}, Outcome([], 0), []
    last_start = time.monotonic() + 3600 * hours if hours is not None else float("inf")
    heeded = [signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {signum: signal.signal(signum, lambda signum, _: received.append(signum)) for signum in heeded}
    try:
        while True:
            if received:
                outcome.stopped = received[0]
                say(f"{signal.Signals(received[0]).name}: stopping {len(running)} runs, which save")
                received.clear()
                for process in running:
                    process.terminate()
            while waiting and len(running) < at_once and not outcome.stopped and time.monotonic() < last_start:
                job = waiting.pop(0)
                running[start(job, lock)] = job
            if not running:
                return outcome
            time.sleep(POLL_S)
            for process, job in list(running.items()):
                if process.poll() is None:
                    if job.finished and job.finished():
                        process.terminate()
                        process.wait()
                    else:
                        continue
                del running[process]
                if job.finished() if job.finished else process.returncode == 0:
                    say(f"{job.name}: complete")
                elif not outcome.stopped:
                    outcome.failed.append(job.name)
                    tail = "\n".join(job.log.read_text(errors="replace").splitlines()[-20:])
                    say(f"{job.name}: ended with status {process.returncode}; the end of {job.log}:\n{tail}")
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def start(job: Job, lock: IO) -> subprocess.Popen:
    """Starts a run in a session of its own, so that a Ctrl-C reaches it once, through `run_all`."""
    command, parent = list(job.command()), os.getpid()

    def with_its_parent() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    say(f"{job.name}: {'continues' if (job.folder / 'progress.txt').exists() else 'begins'}")
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with open(job.log, "a") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=job.environment,
            start_new_session=True,
            preexec_fn=with_its_parent,
            pass_fds=[lock.fileno()],
        )


def say(text: str) -> None:
    """Prints a line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
