"""The watchdog, in each rank's process: after a long wait one rank prints who waits, who is missing, and all stacks.

Each rank keeps a note in shared memory: its phase and, once it has waited for a second, its call. So others can read it
even of a rank that is stopped, or hangs in a library. No thread and no timer runs beside the program. A signal makes a
rank's faulthandler write its stack into a memory file, even while a library computes.
"""

import contextlib
import faulthandler
import fcntl
import json
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..host.reap import is_stopped
from ..host.segments import Ticket, attach
from . import failure, runner
from .state import state

NOTE_BYTES = 1024
_AFTER_S, _NOTED_AFTER_S = 300.0, 1.0
_ANSWER_S, _LOOK_S = 1.0, 0.1  # the longest wait for stacks, and the pause between two looks
_END = "the end of the program"
_UNKNOWN = " on another machine, without shared memory, or ended: cannot be asked"
# the upper part of a stack: the lines of this package, and of Python's modules that it calls, within the program's call
_OURS = rf'  File "{failure.OURS.pattern}.*\n'
_PYTHONS = rf'  File "{re.escape(os.path.dirname(os.__file__))}/(?!.*-packages/).*\n'
_RUNNER = re.compile(rf'  File "{re.escape(runner.__file__)}".*\n')  # the lowest part
_INSIDE = re.compile(rf"(?<=call first\):\n)(?:  File .*\n)*?{_OURS}(?:(?:{_PYTHONS})*{_OURS})*")


def watchdog(seconds: float | None, kill: bool = False) -> None:
    """Sets after how long a wait is reported. Not collective; call it on every rank.

    Once a rank has waited that long in a call of this package, the lowest rank that waits prints a roll-call to stderr:
    who waits where and since when, who is missing, in which phase and episode (`during`), and the stacks; of ranks on
    other machines only that they exist. It does so again after twice the time, and so on. A report is no error: rank 0
    may well update for an hour.

    Args:
        seconds: 0: never; None: as it is, at first MPI_UTIL_WATCHDOG or 300.
        kill: end the job at the first report, with status 1 and a line that names the missing rank.

    Raises:
        UsageError: `seconds` is not a number of 0 or more.
    """
    dog = state(Watchdog)
    dog.after_s = dog.after_s if seconds is None else _checked("watchdog: seconds", seconds)
    dog.kill = kill


def _checked(name: str, value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        if float(value) >= 0:
            return float(value)
    raise UsageError(f"{name} is a number of seconds, 0 or more (0: never); got {value!r}")


class Watchdog:
    """Writes this rank's note and reports on the others'; `host.waiting.wait_until` calls it."""

    def __init__(self) -> None:
        self.after_s = _checked("MPI_UTIL_WATCHDOG", os.environ.get("MPI_UTIL_WATCHDOG", _AFTER_S))
        self.kill = False
        self._note, self._memory, self._rank = {"where": "", "stacks": -1}, bytearray(), 0
        self._owners: Sequence[tuple[int, Ticket | None]] = ()  # each rank's process id, and ticket of its note

    def join(self, rank: int, memory: Any, owners: Sequence[tuple[int, Ticket | None]]) -> None:
        """Begins to keep this rank's note in `memory`, NOTE_BYTES long; None: there is no shared memory."""
        if memory is not None:
            self._rank, self._owners, self._memory = rank, owners, memory
            self._note["stacks"] = stacks = os.memfd_create("mpi_util stack")
            fcntl.fcntl(stacks, fcntl.F_SETFL, os.O_APPEND)
            faulthandler.register(runner.STACK_SIGNAL, stacks)
            state(failure.FailureState).on_phase = self.over
            self.over()

    def due(self, waited: float) -> float:
        """Notes, or reports, that this rank has waited for `waited` seconds. Returns when to call this again."""
        noted_after_s = min(_NOTED_AFTER_S, self.after_s / 2) if self._owners and self.after_s else math.inf
        if waited < noted_after_s:
            return noted_after_s
        if waited >= self.after_s:
            self._report(waited)
            return 2 * waited
        call = state(failure.FailureState).call
        self._write(call if call == _END else f"{call} at {failure.call_site()}", time.time() - waited)
        return self.after_s

    def over(self) -> None:
        """Notes that a wait that was `due` is over, or that a phase begins or ends."""
        where = ", ".join(f"{key} {value}" for key, value in state(failure.FailureState).where.items())
        self._note["where"] = where[:200] or "outside of `mpi_util.during`"
        self._write("", time.time())

    def at_end(self) -> None:
        """Notes that this rank ends: it waits for the others, and then for MPI."""
        failure.enter(_END)
        self._write(_END, time.time())

    def _write(self, call: str, since: float) -> None:
        if self._owners and self._owners[self._rank][0] == os.getpid():  # else forked by the rank
            note = self._note | {"call": call[:200], "since": since}
            self._memory[:NOTE_BYTES] = json.dumps(note).encode().ljust(NOTE_BYTES)

    def _report(self, waited: float) -> None:
        ranks = [_RankView(pid, ticket) for pid, ticket in self._owners]
        if any(each.waits for each in ranks[: self._rank]):
            return  # that rank reports, now or soon
        lines = _grouped("", [each.described() for each in ranks])
        head = f"mpi_util: rank {self._rank} has waited for {waited:.3g} s"
        if not self.kill:
            head += ". This is a report, not an error: another rank may take that long. The next one is due after "
            head += f"{2 * waited:.3g} s (mpi_util.watchdog; 0: never)"
        asked, end = [each for each in ranks if each.answers], time.monotonic() + _ANSWER_S
        with contextlib.suppress(OSError):
            for each in asked:
                os.truncate(each.stacks, 0)
                os.kill(each.pid, runner.STACK_SIGNAL)
            while time.monotonic() < end and not all(each.stack() for each in asked):
                time.sleep(_LOOK_S)
            time.sleep(_LOOK_S)
        stacks = _grouped("stack of ", [each.stack() for each in ranks])
        failure.print_line("\n".join([head, *(f"  {line}" for line in lines), *stacks]))
        if self.kill:
            causes = ["; ".join(line for line in lines if what in line) for what in (": missing", _UNKNOWN)]
            cause = next(filter(None, causes), "all ranks wait, for one another")
            failure.fail(f"mpi_util: the watchdog ends the job after {waited:.3g} s: {cause}")


class _RankView:
    """A rank's note, and the state of its process. The note is empty if the process cannot be reached."""

    def __init__(self, pid: int, ticket: Ticket | None):
        self.pid, self._note = pid, dict[str, Any]()
        with contextlib.suppress(OSError, ValueError):
            if ticket is not None:
                fd, memory = attach(ticket)
                os.close(fd)
                self._note = json.loads(memory[:NOTE_BYTES])
        self._stopped = is_stopped(pid)
        self.stacks = Path(f"/proc/{pid}/fd/{self._note.get('stacks')}")
        self.waits = bool(self._note.get("call")) and not self._stopped
        self.answers = self.stacks.exists() and not self._stopped

    def described(self) -> str:
        if not (note := self._note):
            return _UNKNOWN
        since, state = time.strftime("%H:%M:%S", time.localtime(note["since"])), ""
        if self.waits:
            return f" waiting in {note['call']} since {since}"
        with contextlib.suppress(OSError):
            if (inside := Path(f"/proc/{self.pid}/wchan").read_text()) != "0":
                state = f", in the kernel's {inside}"
        if self._stopped:
            state = f", stopped: it has no stack to show, and `kill -CONT {self.pid}` continues it"
        return f" missing, {note['call'] or note['where']} since {since} (process {self.pid}{state})"

    def stack(self) -> str:
        """The stack that it has written, "" if none; without this package's own lines if the rank waits."""
        with contextlib.suppress(OSError):
            if self.answers and (text := self.stacks.read_text(errors="replace")):
                text = _RUNNER.sub("", re.sub(r"(Current t|T)hread 0x\w+", "Thread", text))  # any thread may answer
                return "\n" + (_INSIDE.sub("", text) if self.waits else text).rstrip()
        return ""


def _grouped(what: str, texts: Sequence[str]) -> list[str]:
    """`ranks 0, 2:text` for each text that is not empty."""
    of = {text: [str(k) for k, other in enumerate(texts) if other == text] for text in texts if text}
    return [f"{what}rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}:{text}" for text, ranks in of.items()]
