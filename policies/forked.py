"""Runs a function in a child made by fork, on another core. Two threads of NumPy calls share Python's lock instead.

The child has the caller's memory as it was, needs no messages for its input, and is gone after one call: there is
nothing to start, to keep in step, or to be left behind.
"""

import ctypes
import os
import signal
import warnings
from collections.abc import Callable

import numpy as np

from policies.mlp import aligned

LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # the child ends when the parent is killed
STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class Forked:
    """A place for the `size` float64 numbers that a child returns."""

    def __init__(self, size: int):
        self._room = aligned((size,), np.float64, shared=True)
        self._child = 0

    def start(self, call: Callable[[], np.ndarray]) -> None:
        """Begins `call` in a child. Args: call: returns float64 (size,); if it raises, `result` is None."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # what stops the run is the parent's to handle
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads, whose locks the child does not take
                self._child = os.fork()
            if not self._child:
                status = 1
                try:
                    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    self._room[:] = call()
                    status = 0
                finally:
                    os._exit(status)
        except OSError:  # no more processes: the caller computes it
            self._child = 0
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def result(self) -> np.ndarray | None:
        """Waits for the child. Returns: its numbers, overwritten by the next one; None if it failed or was killed."""
        child, self._child = self._child, 0
        try:
            return self._room if child and os.waitpid(child, 0)[1] == 0 else None
        except ChildProcessError:  # it has ended, but SIGCHLD is ignored, or somebody else has waited for it
            return None
