"""Ctrl-C, SIGTERM, a closed terminal, in a rank's process: the first signal ends it in order, the second at once."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from .failure import SAME_SIGNAL_S, stop_all
from .identity import rank
from .records import Failure


class StopRequest:
    """Notes SIGINT, SIGTERM and SIGHUP on rank 0, which decides when to stop; the other ranks ignore them.

    A second SIGINT or SIGTERM ends the job at once, unless it comes within 0.3 s: then it is the first one, sent to
    several processes. SIGHUP, which a closing terminal sends once or twice, counts neither as a first nor as a second
    one. A signal that is ignored when the program starts, as under nohup or in a script's background job, stays so.
    Handlers that others install later, such as ROS, are replaced when the program asks whether to stop.

    Attributes:
        signum: the signal that has come, or 0.
        then: called in the signal handler when one comes.
    """

    def __init__(self) -> None:
        self.signum, self._asked_at = 0, -math.inf
        self.then: Callable[[], None] = lambda: None
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._caught = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]
        self._catch()

    def _catch(self) -> None:
        for signum in self._caught if threading.current_thread() is threading.main_thread() else ():
            signal.signal(signum, self._note if rank() == 0 else signal.SIG_IGN)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._asked_at < SAME_SIGNAL_S:
            return
        over = not threading.main_thread().is_alive()  # only a thread keeps the process: nothing asks for the signal
        if over or (self._asked_at > -math.inf and signum != signal.SIGHUP):
            which = "after the program's end" if over else "second signal"
            with contextlib.suppress(OSError):
                os.write(2, f"mpi_util: {which}, stopping now\n".encode())
            stop_all(Failure(128 + signum, f"stopped by {signal.Signals(signum).name}, {which}"))
        self._asked_at = self._asked_at if signum == signal.SIGHUP else now
        self.signum = self.signum or signum
        self.then()

    def __bool__(self) -> bool:
        self._catch()
        return self.signum != 0

    @property
    def status(self) -> int:
        """The exit status for the signal: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP; 0 if none has come."""
        return 128 + self.signum if self.signum else 0
