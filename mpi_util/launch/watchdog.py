"""The watchdog: where a rank has waited for long, one rank prints who waits where, who is missing, and all stacks.

Each rank keeps a note in shared memory: in which phases it is, and, once it has waited for a second, in which call. So
others read it of a rank that is stopped, or hangs in a library. Nothing runs beside the program: no thread, no timer,
and no wait of less than a second costs anything. A rank's stack is asked for by a signal, at which faulthandler writes
it into a memory file, even while a library computes.
"""

import contextlib
import faulthandler
import fcntl
import json
import math
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..host.process import process
from ..host.segments import Ticket, attach
from . import failure
from .reap import STAT_PARENT, stat_field

NOTE_BYTES = 1024
_AFTER_S = 300.0
_NOTED_AFTER_S = 1.0
_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 3  # a real-time signal, as SIGUSR1 and SIGUSR2 are the programs'
_ANSWER_S, _LOOK_S = 1.0, 0.05  # how long stacks are waited for, and between two looks


def watchdog(seconds: float | None, kill: bool = False) -> None:
    """Sets after how long a wait is reported. Not collective; call it on every rank.

    Once a rank has waited for so long in a call of this package, the lowest rank that waits prints a roll-call to
    stderr: who waits where and since when, who is missing, in which phase and episode (`during`), and the stacks; of
    ranks on other machines only that they are there. Then again after twice the time, and so on. A report is no error:
    rank 0 may well update for an hour.

    Args:
        seconds: 0: never; None: as it is, at first MPI_UTIL_WATCHDOG or 300.
        kill: end the job at the first report, with status 1 and a line that names the missing rank.

    Raises:
        UsageError: `seconds` is not a number of 0 or more.
    """
    dog = process.of(Watchdog)
    dog.after_s = dog.after_s if seconds is None else _checked("watchdog: seconds", seconds)
    dog.kill = kill


def _checked(name: str, value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        if float(value) >= 0:
            return float(value)
    raise UsageError(f"{name} is a number of seconds, 0 or more (0: never); got {value!r}")


class Watchdog:
    """Watches the waits of this process (`host.waiting.Watch`)."""

    def __init__(self) -> None:
        self.after_s = _checked("MPI_UTIL_WATCHDOG", os.environ.get("MPI_UTIL_WATCHDOG", _AFTER_S))
        self.kill = False
        self._rank, self._memory, self._owners = 0, memoryview(b""), list[tuple[int, Ticket | None]]()
        self._call, self._since, self._where_since = "", 0.0, time.time()
        self._stacks = -1

    def join(self, rank: int, memory: Any, owners: Sequence[tuple[int, Ticket | None]]) -> None:
        """Begins to keep this rank's note.

        Args:
            memory: for the note, NOTE_BYTES; None: there is no shared memory.
            owners: of each rank the process id, and the ticket for its note.
        """
        self._rank, self._owners = rank, list(owners)
        if memory is None:
            return
        self._memory, self._stacks = memoryview(memory), os.memfd_create("mpi_util stack")
        fcntl.fcntl(self._stacks, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(_SIGNAL, self._stacks)
        process.of(failure.Rank).on_phase = self._phase
        self._write()

    def close(self) -> None:
        """Gives the file back."""
        if self._stacks >= 0:
            faulthandler.unregister(_SIGNAL)
            os.close(self._stacks)
            self._memory.release()

    def first_s(self) -> float:
        """When `due` is to be called first."""
        return min(_NOTED_AFTER_S, self.after_s / 2) if self._owners and self.after_s else math.inf

    def due(self, waited: float) -> float:
        """This rank has waited for so many seconds. Returns after how many to call this again."""
        if waited < self.after_s:
            self._call = f"{process.of(failure.Rank).call} at {failure.call_site()}"
            self._since = time.time() - waited
            self._write()
            return self.after_s
        self._report(waited)
        return 2 * waited

    def over(self) -> None:
        """A wait that was `due` is over."""
        self._call, self._where_since = "", time.time()
        self._write()

    def ended(self) -> None:
        """This rank has left with the others: if it is still there, it waits for MPI's end."""
        self._call, self._since = "the end of the program", time.time()
        self._write()

    def _phase(self) -> None:
        self._where_since = time.time()
        self._write()

    def _write(self) -> None:
        if self._owners[self._rank][0] != os.getpid() or not self._memory:  # forked by the rank
            return
        where = " ".join(f"{key} {value}," for key, value in process.of(failure.Rank).where.items())[:200].rstrip(",")
        since = self._since if self._call else self._where_since
        note = {"call": self._call[:200], "where": where, "since": since, "stacks": self._stacks}
        self._memory[:NOTE_BYTES] = json.dumps(note).encode().ljust(NOTE_BYTES)

    def _report(self, waited: float) -> None:
        notes = [_note(*owner) for owner in self._owners]
        waiting = [bool(note.get("call")) and not _stopped(pid) for note, (pid, _) in zip(notes, self._owners)]
        if any(waiting[: self._rank]):
            return  # that rank reports, now or soon
        shown: dict[str, list[int]] = {}
        for k, (note, (pid, _)) in enumerate(zip(notes, self._owners)):
            shown.setdefault(_describe(note, pid, waiting[k]), []).append(k)
        lines = [f"{_ranks(ranks)}: {text}" for text, ranks in shown.items()]
        head = (
            f"mpi_util: rank {self._rank} has waited for {waited:.3g} s. This is a report, not an error: another rank "
            f"may take that long. The next one is due after {2 * waited:.3g} s (mpi_util.watchdog; 0: never)"
        )
        failure.print_line("\n".join([head, *(f"  {line}" for line in lines), *self._all_stacks(notes, waiting)]))
        if self.kill:
            cause = "; ".join(line for line in lines if ": missing" in line) or "all ranks wait, for one another"
            failure.fail(f"mpi_util: the watchdog ends the job after {waited:.3g} s: {cause}")

    def _all_stacks(self, notes: Sequence[dict[str, Any]], waiting: Sequence[bool]) -> list[str]:
        """The ranks' stacks, those that are the same once; of a rank that waits, from its call of this package on."""
        asked = {}
        for k, (note, (pid, _)) in enumerate(zip(notes, self._owners)):
            with contextlib.suppress(OSError, KeyError):
                place = Path(f"/proc/{pid}/fd/{note['stacks']}")
                os.truncate(place, 0)
                if _catches(pid) and not _stopped(pid):
                    os.kill(pid, _SIGNAL)
                    asked[k] = place
        sizes, end = [-1], time.monotonic() + _ANSWER_S
        while time.monotonic() < end and not (all(sizes) and min(sizes, default=0) >= 0):
            time.sleep(_LOOK_S)
            before, sizes = sizes, [place.stat().st_size if place.exists() else 0 for place in asked.values()]
            sizes = sizes if before == sizes else [-1]
        stacks: dict[str, list[int]] = {}
        for k, place in asked.items():
            with contextlib.suppress(OSError):
                stack = re.sub(r"hread 0x\w+", "hread", place.read_text(errors="replace").strip())
                stack = re.sub(rf'  File "{failure.HERE}.*\n', "", stack) if waiting[k] else stack
                stacks.setdefault(stack or "  it does not answer", []).append(k)
        return [f"stack of {_ranks(ranks)}:\n{stack}" for stack, ranks in stacks.items()]


def _note(pid: int, ticket: Ticket | None) -> dict[str, Any]:
    """What a rank has noted; {} of one that cannot be reached from here."""
    try:
        if ticket is None:
            return {}
        fd, memory = attach(ticket)
        os.close(fd)
        with memory:
            note: dict[str, Any] = json.loads(memory[:NOTE_BYTES])
            return note
    except (OSError, ValueError):
        return {}


def _describe(note: dict[str, Any], pid: int, waits: bool) -> str:
    """What a rank does, for the roll-call."""
    if not note:
        return "on another machine, without shared memory, or ended: cannot be asked"
    since = time.strftime("%H:%M:%S", time.localtime(note["since"]))
    if waits:
        return f"waiting in {note['call']} since {since}"
    where = f"in {note['call']}" if note["call"] else note["where"] or "outside of `mpi_util.during`"
    state = ""
    with contextlib.suppress(OSError):
        state = f", in the kernel's {inside}" if (inside := Path(f"/proc/{pid}/wchan").read_text()) != "0" else ""
    state = f", stopped: it has no stack to show, and `kill -CONT {pid}` continues it" if _stopped(pid) else state
    return f"missing, {where} since {since} (process {pid}{state})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _stopped(pid: int) -> bool:
    return any(stat_field(pid, STAT_PARENT, state) is not None for state in "Tt")


def _catches(pid: int) -> bool:
    """True if the process catches the signal, which would end it otherwise."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (_SIGNAL - 1) & 1)
