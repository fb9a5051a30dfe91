"""The counter that the ranks of one machine share when they deal numbered work; in the process of each rank.

It lies in memory that all of them map, under a file lock, which the kernel gives back when its holder is killed.
"""

import fcntl
import itertools
import mmap
import os
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import RankMismatchError
from ..host.segments import Segment, Ticket, attach
from ..host.waiting import wait_until
from ..ranks import failure
from ..ranks.state import process
from ..ranks.watchdog import Watchdog

if TYPE_CHECKING:
    from .channel import Channel

# number of the round, how many it deals, the next to deal, the end of these, the round if it was closed
_SLOT = struct.Struct("qqqqq")
_DEALT, _CLOSED = struct.Struct("qqqq"), struct.Struct("q")  # its parts: the last one is written without the lock
_ROUNDS = 64  # rounds that may be under way at once: after as many a slot is used again
_NONE_YET = -1

Round = tuple[int, int]
"""Its number, how many numbers it deals."""


ALL_DEALT = range(-1, -1)


class Counter:
    """Collective: what has been dealt on one communicator: a slot for each of the last rounds.

    On several machines each has a counter, of a subclass (`Channel.counter_kind`). On machines other than rank 0's it
    begins with nothing and gets its numbers from rank 0, by overriding `_first` and `_more`.

    Attributes:
        rounds: gives this rank's next round its number.
        here: the ranks that share this counter.
        lock_threads: what keeps other ranks away does not keep away this rank's other threads.
    """

    def __init__(self, channel: "Channel"):
        self.channel, self.rounds, self.lock_threads = channel, itertools.count(), threading.RLock()
        self.here = [k for k, lowest in enumerate(channel.machine) if lowest == channel.machine[channel.rank]]
        slots = _SLOT.pack(_NONE_YET, 0, 0, 0, _NONE_YET) * _ROUNDS
        self._slots: mmap.mmap | bytearray = bytearray(slots)
        self._file: int | None = None  # which is locked
        self._segment: Segment | None = None
        owns = channel.rank == self.here[0]

        def make() -> Ticket | None:
            if not owns or len(self.here) == 1:
                return None
            self._segment = Segment(len(slots))
            self._segment.map[:] = slots
            return self._segment.ticket

        ticket = channel.agree("deal", make, lambda tickets: [tickets[lowest] for lowest in channel.machine])
        if self._segment:
            self._slots, self._file = self._segment.map, self._segment.ticket.fd
        elif ticket:
            self._file, self._slots = attach(ticket)  # opened by this process: a lock belongs to an open file

    def take(self, dealt: Round) -> int | None:
        """The next number of a round; None: all are dealt. RankMismatchError: another rank deals another number."""
        failure.enter("deal")
        with self.lock_threads:
            found = self.take_some(dealt)
        return found.start if found else None

    def take_some(self, dealt: Round, how_many: Callable[[int], int] = lambda left: 1) -> range:
        """The next numbers of a round. Args: how_many: number that are left here -> number to take, at least 1."""
        round_number, n = dealt
        start = round_number % _ROUNDS * _SLOT.size
        if self._file is not None:
            wait_until(self._try_lock, None, process.of(Watchdog))  # a holder may be stopped
        try:
            found, found_n, number, end, closed = _SLOT.unpack_from(self._slots, start)
            if found > round_number or closed == round_number:
                return ALL_DEALT
            if found < round_number:
                first = self._first(n)
                found_n, number, end = n, first.start, first.stop
            if found_n != n:
                raise RankMismatchError(
                    f"deal: this rank deals {n} numbers and another one {found_n}; give the same on every rank"
                )
            if number == end != ALL_DEALT.stop:
                more = self._more(dealt)
                number, end = more.start, more.stop
            taken = range(number, min(end, number + how_many(end - number)))
            _DEALT.pack_into(self._slots, start, round_number, n, max(number, taken.stop), end)
            return taken
        finally:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _first(self, n: int) -> range:
        """The numbers that are here when a round of `n` begins."""
        return range(n)

    def _more(self, dealt: Round) -> range:
        """More numbers for the ranks that share this counter, once it has none left. Called with the lock held."""
        return ALL_DEALT

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file or 0, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close_round(self, round_number: int) -> None:
        """Deals nothing more in that round. A signal handler may call it: it takes no lock."""
        _CLOSED.pack_into(self._slots, round_number % _ROUNDS * _SLOT.size + _DEALT.size, round_number)

    def is_closed(self, round_number: int) -> bool:
        """True once that round was closed."""
        at = round_number % _ROUNDS * _SLOT.size + _DEALT.size
        return bool(_CLOSED.unpack_from(self._slots, at)[0] == round_number)

    def serve(self) -> None:
        """Answers other machines, and hears of rounds that are closed, where there are several machines."""

    def close(self) -> None:
        """Gives file and memory back."""
        if self._segment is not None:
            self._segment.close()
        elif self._file is not None:
            os.close(self._file)
