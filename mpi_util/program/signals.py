"""Ctrl-C and SIGTERM: the program ends in order at the first, at once at the second."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from ..launch.failure import stop_all
from ..launch.identity import rank


class StopRequest:
    """Notes SIGINT and SIGTERM on rank 0, which decides when to stop; the other ranks pass over both.

    Attributes:
        signum: the signal that came, or 0.
        then: called when it comes, in the signal handler.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.then: Callable[[], None] = lambda: None
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as it is in a background job of a script: stays so
                signal.signal(signum, self._note if rank() == 0 else signal.SIG_IGN)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum:
            os.write(sys.stderr.fileno(), b"mpi_util: second signal, stopping now\n")
            stop_all(128 + signum, f"stopped by a second {signal.Signals(signum).name}")
        self.signum = signum
        self.then()

    def __bool__(self) -> bool:
        return self.signum != 0

    @property
    def status(self) -> int:
        """Exit status of a program that ends because of the signal: 130 for SIGINT, 143 for SIGTERM; else 0."""
        return 128 + self.signum if self.signum else 0
