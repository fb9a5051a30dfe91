"""Divides numbered work among the ranks: dealt to whichever is free, or in equal shares."""

import contextlib
import fcntl
import itertools
import mmap
import operator
import os
import struct
from collections.abc import Iterator

from ..errors import RankMismatchError, UsageError
from ..host import threads
from ..host.process import process
from ..host.segments import Segment, attach
from ..host.waiting import wait_until
from ..launch import failure
from ..launch.identity import Comm, nworkers, rank
from ..launch.watchdog import Watchdog
from .channel import Channel, channel_of
from .messages import Background

_SLOT = struct.Struct("qqqq")  # number of the round, how many it deals, the next to deal, the round if it was closed
_DEALT, _CLOSED = struct.Struct("qqq"), struct.Struct("q")  # its parts: the last one is written without the lock
_ROUNDS = 64  # rounds that may be under way at once: after as many a slot is used again
_NONE_YET = -1
_QUESTION_TAG = 2  # of a rank that asks rank 0 for a number


def share(n: int) -> range:
    """This rank's part of 0 .. n-1, one block of it; the first ranks get the remainder. Not collective.

        for step in range(len(share(4000))): ...      # of 4000 steps
        envs = [make_env(i) for i in share(num_envs)]

    Args:
        n: how many; 0 gives every rank an empty range.

    Raises:
        UsageError: n is not a count.
    """
    each, remainder = divmod(_count("share", n), nworkers())
    first = rank() * each + min(rank(), remainder)
    return range(first, first + each + (rank() < remainder))


def _count(call: str, n: int) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__") or n < 0:
        raise UsageError(f"{call}: n is a number of things to be shared, 0 or more; got {n!r}")
    return operator.index(n)


def deal(n: int, *, comm: Comm = None) -> "Deal":
    """Collective: an iterator over this rank's part of 0 .. n-1; together the ranks get each number once.

    A rank takes the next number when it asks for one, so a rank that is done never waits for one that is slow. Ranks on
    rank 0's machine count in shared memory under a lock; others ask rank 0, which answers before each number of its
    own, while it waits in a collective call, and in `Deal.serve`. A rank that does not call it gets none.

    Args:
        n: how many; the same on every rank.
        comm: communicator; None: all ranks.

    Raises:
        RankMismatchError: another rank deals another number. Raised when this rank asks for one.
    """
    n, channel = _count("deal", n), channel_of(comm)
    return Deal(channel.states.of(_Counter), n)


class Deal:
    """One round of dealing. Iterate over it; `close` ends the round for all ranks.

    Attributes:
        taken: the numbers that this rank has got so far: the `index` of what it made of them.
    """

    def __init__(self, counter: "_Counter", n: int):
        self._counter, self._n = counter, n
        self._round = next(counter.rounds)
        self._closed_at = self._round % _ROUNDS * _SLOT.size + _DEALT.size
        self.taken: list[int] = []

    def __iter__(self) -> Iterator[int]:
        threads.beside()
        while True:
            self.serve()
            if (number := self._counter.take((self._round, self._n))) is None:
                return
            self.taken.append(number)
            yield number

    def close(self) -> None:
        """Deals nothing more in this round, on any rank. Rank 0 calls it; a signal handler may: it takes no lock."""
        _CLOSED.pack_into(self._counter.map, self._closed_at, self._round)

    @property
    def closed(self) -> bool:
        """True once the round was closed (seen at once on rank 0's machine, elsewhere at the next number)."""
        page = self._counter.map
        return bool(page) and _CLOSED.unpack_from(page, self._closed_at)[0] == self._round

    def serve(self) -> None:
        """Rank 0 may call this amid an episode, so that ranks of other machines need not wait for its end."""
        self._counter.serve()


class _Counter:
    """What has been dealt on one communicator: a slot for each of the last rounds."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self.rounds = itertools.count()
        self.map: mmap.mmap | bytearray = bytearray()  # empty on a machine without rank 0
        self._lock: int | None = None
        self._segment: Segment | None = None
        if channel.rank == 0:
            slots = _SLOT.pack(_NONE_YET, 0, 0, _NONE_YET) * _ROUNDS
            with contextlib.suppress(OSError):
                self._segment = Segment(len(slots)) if channel.size > 1 else None
            self.map = self._segment.map if self._segment else bytearray(len(slots))
            self.map[:] = slots
        mine = self._segment.ticket if self._segment else None
        ticket = channel.agree("deal", lambda: None, lambda brought: [mine] * channel.size)
        if ticket is not None and channel.rank == 0:
            self._lock = ticket.fd
        elif ticket is not None and channel.leader == 0:
            self._lock, self.map = attach(ticket)  # each process needs an open file of its own: a lock belongs to that
        if channel.rank == 0 and (any(channel.machine) or (ticket is None and channel.size > 1)):
            process.of(Background).append(self.serve)

    def take(self, question: tuple[int, int]) -> int | None:
        """The next number of a round, or None. `question`: the round, and how many it deals."""
        answer: int | str | None
        failure.enter("deal")
        if self.map:
            answer = self._take_here(question)
        else:
            messages = self._channel.messages
            messages.wait(messages.comm.isend((messages.rank, question), 0, _QUESTION_TAG).Test)
            answer = messages.receive(0, "deal", serves=True)
        if isinstance(answer, str):
            raise RankMismatchError(answer)
        return answer

    def _take_here(self, question: tuple[int, int]) -> int | str | None:
        number_of_round, n = question
        place = number_of_round % _ROUNDS * _SLOT.size
        if self._lock is not None:
            wait_until(self._try_lock, None, process.of(Watchdog))  # a holder may be stopped
        try:
            found, found_n, number, closed = _SLOT.unpack_from(self.map, place)
            if found > number_of_round or closed == number_of_round:
                return None
            if found < number_of_round:
                found_n, number = n, 0
            if found_n != n:
                return f"deal: this rank deals {n} numbers and another one {found_n}; give the same on every rank"
            if number >= n:
                return None
            _DEALT.pack_into(self.map, place, number_of_round, n, number + 1)
            return int(number)
        finally:
            if self._lock is not None:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        """The kernel gives the lock back when its holder is killed."""
        try:
            fcntl.flock(self._lock or 0, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def serve(self) -> None:
        """Rank 0 answers ranks that ask for a number, which are on other machines."""
        while self._channel.size > 1 and (message := self._channel.comm.improbe(tag=_QUESTION_TAG)):
            asking, question = message.recv()
            self._channel.messages.send(asking, self._take_here(question))

    def close(self) -> None:
        """Gives file and memory back."""
        background = process.of(Background)
        if self.serve in background:
            background.remove(self.serve)
        if self._segment is not None:
            self._segment.close()
        elif self._lock is not None:
            os.close(self._lock)
