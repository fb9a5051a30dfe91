"""Ctrl-C, SIGTERM, a closed terminal: the program ends in order at the first signal, at once at the second."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from .failure import SAME_SIGNAL_S, stop_all
from .identity import rank
from .records import Failure


class StopRequest:
    """Notes SIGINT, SIGTERM and SIGHUP on rank 0, which decides when to stop; the other ranks pass over them.

    A second SIGINT or SIGTERM ends the job at once; but what comes within 0.3 s is the same one, sent to several
    processes. SIGHUP, which a terminal that closes sends, sometimes twice, does not count for that. A signal that is
    ignored stays so: by nohup, in a background job of a script.

    Attributes:
        signum: the signal that came, or 0.
        then: called when it comes, in the signal handler.
    """

    def __init__(self) -> None:
        self.signum, self._asked_at = 0, -math.inf
        self.then: Callable[[], None] = lambda: None
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._note if rank() == 0 else signal.SIG_IGN)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._asked_at < SAME_SIGNAL_S:
            return
        if self._asked_at > -math.inf and signum != signal.SIGHUP:
            with contextlib.suppress(OSError):
                os.write(2, b"mpi_util: second signal, stopping now\n")
            stop_all(Failure(128 + signum, f"stopped by a second {signal.Signals(signum).name}"))
        self._asked_at = self._asked_at if signum == signal.SIGHUP else now
        self.signum = self.signum or signum
        self.then()

    def __bool__(self) -> bool:
        return self.signum != 0

    @property
    def status(self) -> int:
        """Exit status of a program that ends because of the signal: 130 for SIGINT, 143 SIGTERM, 129 SIGHUP; else 0."""
        return 128 + self.signum if self.signum else 0
