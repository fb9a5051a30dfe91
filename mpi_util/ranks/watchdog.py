"""The watchdog, in each rank's process: after a long wait one rank prints who waits, who is missing, and all stacks.

It reads the notes of all ranks (docs/architecture.md), even of one that is stopped, or hangs in a library. No thread
and no timer runs beside the program.
"""

import contextlib
import faulthandler
import fcntl
import functools
import json
import math
import os
import re
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..host.reap import is_stopped
from ..host.segments import Segment, Ticket, attach
from . import failure, runner
from .identity import nworkers, rank
from .state import state

FIRST_CALL = "the first call"  # on a communicator: it waits for all of them
_NOTE_BYTES, _MOST_AWAITED = 4096, 200
_AFTER_S, _NOTED_AFTER_S, _NOTED_EACH_S = 300.0, 1.0, 0.5
_SURE = 3  # notes of a rank in the same wait, each after another look for messages
_OURS_TOO = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # have a handler of Python's, or of StopRequest
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

    Once a rank has waited that long in a call of this package, the lowest rank that waits prints a roll-call to stderr
    (docs/failures.md; of ranks on other machines only that they exist), and again after twice the time, and so on. A
    report is no error: rank 0 may well update for an hour.

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
        self.tickets = dict[int, Ticket]()  # of the notes of ranks with which this one has a communicator
        self._note: dict[str, Any] = {"where": "", "stacks": -1, "wait": 0, "times": 0}
        self._memory: Any = None
        self._pid, self._report_at = 0, 0.0  # 0: after `after_s`
        self._circle: dict[int, Any] = {}  # the notes of ranks that were seen to wait for one another

    @functools.cached_property
    def ticket(self) -> Ticket | None:
        """Of this rank's note, which it keeps from the first time on that this is read; None: no shared memory."""
        with contextlib.suppress(OSError):
            segment = Segment(_NOTE_BYTES)
            self._note["stacks"] = stacks = os.memfd_create("mpi_util stack")
            fcntl.fcntl(stacks, fcntl.F_SETFL, os.O_APPEND)
            faulthandler.register(runner.STACK_SIGNAL, stacks)
            self._memory, self._pid, state(failure.FailureState).on_phase = segment.map, os.getpid(), self.over
            self.over()
            return segment.ticket
        return None

    def due(self, waited: float, awaited: Callable[[], tuple[Sequence[int], Iterable[int]]] | None) -> float:
        """Notes, or reports, that this rank has waited for `waited` seconds. Returns when to call this again.

        Args: awaited: gives the rank in the world of each rank of a communicator, and those of its ranks that must act.
        """
        report_at = self._report_at or self.after_s or math.inf
        noted_after_s = min(_NOTED_AFTER_S, report_at / 2) if self._pid else math.inf
        if waited < noted_after_s:
            return noted_after_s
        call, (members, ranks) = state(failure.FailureState).call, awaited() if awaited else ((), ())
        text = call if call == _END else f"{call} at {failure.call_site()}"
        if 0 < len(members) < nworkers():
            text += f", on the communicator of ranks {', '.join(map(str, members))}"
        self._note["times"] += 1
        awaits = [members[k] for k in ranks if members[k] >= 0]
        opens = zlib.crc32(repr([*members]).encode()) if call == FIRST_CALL else 0
        self._write(text, time.time() - waited, [] if _may_act() or len(awaits) > _MOST_AWAITED else awaits, opens)
        self._check_circle()
        if waited >= report_at:
            self._report(waited)
            self._report_at = report_at = 2 * waited
        return min(report_at, waited + _NOTED_EACH_S)

    def over(self) -> None:
        """Notes that a wait that was `due` is over, or that a phase begins or ends."""
        where = failure.named(state(failure.FailureState).where)
        self._note["where"] = where[:200] or "outside of `mpi_util.during`"
        self._note["wait"] += 1
        self._report_at = 0
        self._write("", time.time())

    def at_end(self) -> None:
        """Notes that this rank ends: it waits for the others, and then for MPI."""
        failure.enter(_END)
        self._write(_END, time.time())

    def _write(self, call: str, since: float, awaits: Sequence[int] = (), opens: int = 0) -> None:
        if self._pid == os.getpid():  # else forked by the rank
            note = self._note | {"call": call[:200], "since": since, "awaits": awaits, "opens": opens}
            text = json.dumps(note, ensure_ascii=False).encode(errors="replace")  # an escaped emoji has 12 bytes
            self._memory[:_NOTE_BYTES] = text.ljust(_NOTE_BYTES)

    def _views(self) -> "list[_RankView]":
        return [_RankView(self.tickets.get(k)) for k in range(nworkers())]

    def _check_circle(self) -> None:
        """Ends the job if this rank waits for one that waits, directly or through others, for this one.

        Each has looked for messages several times since all were seen to wait: what they had sent before has come.
        """
        note = functools.cache(lambda k: _RankView(self.tickets.get(k)).note)
        circle, before = {k: note(k) for k in _circle(rank(), note)}, self._circle
        if circle.keys() != before.keys() or any(circle[k]["wait"] != before[k]["wait"] for k in circle):
            self._circle = circle
        elif rank() == min(circle, default=-1) and all(note(k)["times"] >= before[k]["times"] + _SURE for k in circle):
            what = f"ranks {', '.join(map(str, sorted(circle)))} wait for one another and can never meet; "
            what += "is comm= missing in one of these calls, or do they come in another order?"
            failure.fail("\n  ".join([f"mpi_util: {what}", *_grouped("", [v.described() for v in self._views()])]))

    def _report(self, waited: float) -> None:
        ranks = self._views()
        if any(each.waits for each in ranks[: rank()]):
            return  # that rank reports, now or soon
        lines = _grouped("", [each.described() for each in ranks])
        head = f"mpi_util: rank {rank()} has waited for {waited:.3g} s"
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

    def __init__(self, ticket: Ticket | None):
        self.pid, self.note = ticket.pid if ticket else 0, dict[str, Any]()
        with contextlib.suppress(OSError, ValueError):
            if ticket is not None:
                fd, memory = attach(ticket)
                os.close(fd)
                self.note = json.loads(memory[:_NOTE_BYTES])
        self._stopped = is_stopped(self.pid)
        self.stacks = Path(f"/proc/{self.pid}/fd/{self.note.get('stacks')}")
        self.waits = bool(self.note.get("call")) and not self._stopped
        self.answers = self.stacks.exists() and not self._stopped

    def described(self) -> str:
        if not (note := self.note):
            return _UNKNOWN
        since = time.strftime("%H:%M:%S", time.localtime(note["since"]))
        if self.waits:
            return f" waiting in {note['call']} since {since}"
        state = f", stopped: it has no stack to show, and `kill -CONT {self.pid}` continues it" * self._stopped
        return f" missing, {note['call'] or note['where']} since {since} (process {self.pid}{state})"

    def stack(self) -> str:
        """The stack that it has written, "" if none; without this package's own lines if the rank waits."""
        with contextlib.suppress(OSError):
            if self.answers and (text := self.stacks.read_text(errors="replace")):
                text = _RUNNER.sub("", re.sub(r"(Current t|T)hread 0x\w+", "Thread", text))  # any thread may answer
                return "\n" + (_INSIDE.sub("", text) if self.waits else text).rstrip()
        return ""


def _circle(own: int, note: Callable[[int], dict[str, Any]]) -> tuple[int, ...]:
    """Ranks that wait, each for the next one and the last for `own`; (): none. Args: note: gives that of a rank."""
    paths: dict[int, tuple[int, ...]] = {own: (own,)}
    for k in (queue := [own]):
        for other in note(k).get("awaits", ()):
            here, there = note(k), note(other)
            if there.get("awaits") and not here["opens"] == there["opens"] != 0:  # else it computes, or has come
                if other == own:
                    return paths[k]
                if other not in paths:
                    paths[other] = (*paths[k], other)
                    queue.append(other)
    return ()


def _may_act() -> bool:
    """True for a rank that may do something while it waits: in another thread of the program, or at a signal."""
    me, signals = threading.current_thread(), signal.valid_signals() - _OURS_TOO
    handles = any(callable(signal.getsignal(signum)) for signum in signals)
    return handles or not all(each is me or each.daemon for each in threading.enumerate())


def _grouped(what: str, texts: Sequence[str]) -> list[str]:
    """`ranks 0, 2:text` for each text that is not empty."""
    of = {text: [str(k) for k, other in enumerate(texts) if other == text] for text in texts if text}
    return [f"{what}rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}:{text}" for text, ranks in of.items()]
