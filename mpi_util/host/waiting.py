"""How a process waits: it tests, spins for some tens of microseconds, then sleeps until it is woken or a pause is over.

docs/architecture.md says why, and who wakes it. Measured: nine ranks that waited in MPI made a 1 s update take 76 s
(MPICH). A pipe wakes as fast as an eventfd, in 2 us, which the kernel does not open as /proc/<pid>/fd/<n>.
"""

import contextlib
import math
import os
import select
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SPIN_S = 50e-6
MPI_SPIN_S = 1e-3  # without wake-ups: a message to another machine and back takes 50 us, the shortest sleep as much
SPIN_TESTS = 8  # at least: MPI may show only at the second test what has come, and on a full machine one takes long
PAUSE_S = 1e-3  # longest sleep without wake-ups in a short wait, as only a test finds what has come; least one with
WOKEN_PAUSE_S = 100e-3  # longest sleep of a rank that will be woken
LATENESS = 1 / 8  # a pause is at most this share of the time waited so far
_SHORT_S = 10e-3  # the watchdog is not asked about a shorter wait
# Longer waits may end as much later: a test takes MPI some 20 us, and 1,000 of them a second 2 % of a core.
LONG_PAUSE_S, LONG_LATENESS = 10e-3, 1 / 100


class WakePipe:
    """The pipe by which others wake this process; and how this one wakes others by theirs."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()  # select cannot watch descriptors from 1024 on
        self._poll.register(self.read_fd, select.POLLIN)

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)

    def sleep(self, seconds: float) -> bool:
        """Sleeps for `seconds`, or until it is woken; True if it was."""
        if woken := bool(self._poll.poll(seconds * 1e3)):
            os.read(self.read_fd, 1 << 16)
        return woken

    @staticmethod
    def open(pid: int, fd: int) -> int:
        """File descriptor by which to wake process `pid`. OSError if it cannot be reached."""
        return os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    @staticmethod
    def wake(fd: int) -> None:
        """Wakes the owner of the pipe. A full one means that it was woken already; a closed one, that it has ended."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(fd, b"!")


def wait_until(
    test: Callable[[], T | None], sleep: Callable[[float], bool] | None = None,
    watchdog: Any = None, by_mpi: bool = True, awaited: Any = None,
) -> T:  # fmt: skip
    """Calls `test` until it gives something other than None or False, and returns that.

    Args:
        test: a non-blocking question, such as `request.Test` or `comm.improbe`.
        sleep: sleeps for that many seconds, or until woken (then True); None: time.sleep.
        by_mpi: True if completion depends on MPI's progress, so that no wake-up will arrive.
        watchdog: the process's `Watchdog` (ranks/watchdog.py), which is called if the wait lasts.
        awaited: passed to it.
    """
    if result := test():
        return result
    start = spun_from = time.perf_counter()
    tests, due = 1, _SHORT_S if watchdog else math.inf
    try:
        while not (result := test()):
            now = time.perf_counter()
            waited = now - start
            if waited > due:
                due = watchdog.due(waited, awaited)
            tests += 1
            if now - spun_from < (MPI_SPIN_S if by_mpi else SPIN_S) or tests < SPIN_TESTS:
                os.sched_yield()
                continue
            longest = max(PAUSE_S, min(LONG_PAUSE_S, waited * LONG_LATENESS)) if by_mpi else WOKEN_PAUSE_S
            pause = min(longest, waited * LATENESS if by_mpi else max(PAUSE_S, waited * LATENESS))
            if (sleep or time.sleep)(pause):
                spun_from, tests = time.perf_counter(), 0
        return result
    finally:
        if due > _SHORT_S and watchdog:
            watchdog.over()
