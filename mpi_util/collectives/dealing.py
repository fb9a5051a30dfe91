"""Divides numbered work among the ranks: dealt to whichever is free, or in equal shares."""

import collections
import contextlib
import fcntl
import itertools
import mmap
import operator
import os
import struct
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import RankMismatchError, UsageError
from ..host.segments import Segment, attach
from ..host.waiting import wait_until
from ..ranks import failure, threads
from ..ranks.identity import Comm, nworkers, rank
from ..ranks.state import process
from ..ranks.watchdog import Watchdog
from .channel import Channel, channel_of
from .messages import Background

# number of the round, how many it deals, the next to deal here, the end of these, the round if it was closed
_SLOT = struct.Struct("qqqqq")
_DEALT, _CLOSED = struct.Struct("qqqq"), struct.Struct("q")  # its parts: the last one is written without the lock
_ROUNDS = 64  # rounds that may be under way at once: after as many a slot is used again
_NONE_YET = -1
_ALL_DEALT = -1  # as the end, on another machine than rank 0's
_QUESTION_TAG = 2  # of a rank that asks rank 0 for numbers
_CLOSED_TAG = 3  # of rank 0, which tells the other machines that it has closed a round
_WATCHED = 4  # rounds of which they may still have numbers


def share(n: int) -> range:
    """This rank's part of 0 .. n-1, one block of it; the first ranks get the remainder. Not collective.

    As `deal` does, it ends the time in which rank 0 computes with all cores: what is shared is computed beside others.

        for step in range(len(share(4000))): ...      # of 4000 steps
        envs = [make_env(i) for i in share(num_envs)]

    Args:
        n: how many; 0 gives every rank an empty range.

    Raises:
        UsageError: n is not a count.
    """
    each, remainder = divmod(_count("share", n), nworkers())
    threads.beside()
    first = rank() * each + min(rank(), remainder)
    return range(first, first + each + (rank() < remainder))


def _count(call: str, n: int) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__") or n < 0:
        raise UsageError(f"{call}: n is a number of things to be shared, 0 or more; got {n!r}")
    return operator.index(n)


def deal(n: int, *, comm: Comm = None) -> "Deal":
    """Collective: an iterator over this rank's part of 0 .. n-1; together the ranks get each number once.

    A rank takes the next number when it asks for one, so a rank that is done never waits for one that is slow. Ranks of
    one machine count in shared memory under a lock. Another machine than rank 0's gets its numbers from rank 0, at
    first half of its ranks' part at once, then half of what is theirs of the rest, down to one by one. Rank 0 answers
    before each number of its own, while it waits in a collective call, and in `Deal.serve`. A rank that does not call
    it gets none. If all ranks of such a machine leave the loop early, no rank gets the numbers that are left there.

    Args:
        n: how many; the same on every rank.
        comm: communicator; None: all ranks.

    Raises:
        UsageError: `n` is not a count. Or, raised when this rank asks for the next number: the loop's body has dealt
            too, which each rank runs a different number of times, so numbers of that inner deal were lost.
        RankMismatchError: another rank deals another number. Raised when this rank asks for one.
    """
    n, channel = _count("deal", n), channel_of(comm)
    if comm is None or channel.size > 1:  # else a rank deals to itself
        process.of(_Made)[threading.get_ident()] += 1
    return Deal(channel.states.of(_Counter), n)


class _Made(collections.Counter[int]):
    """How many deals of several ranks each thread of this process has made."""


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
        made, n_made = process.of(_Made), None
        while True:
            here = threading.get_ident()
            if n_made and n_made != (here, made[here]) and n_made[0] == here:
                raise UsageError(
                    "deal: the body of a loop over dealt numbers has dealt too; each rank runs it a different number "
                    "of times, so numbers were lost. Deal pairs as one range: "
                    "for i, j in (divmod(k, m) for k in deal(n * m))"
                )
            threads.beside()  # each time, as there may have been a gather
            self.serve()
            if (number := self._counter.take((self._round, self._n))) is None:
                return
            self.taken.append(number)
            n_made = here, made[here]
            yield number

    def close(self) -> None:
        """Deals nothing more in this round, on any rank. Rank 0 calls it; a signal handler may: it takes no lock."""
        _CLOSED.pack_into(self._counter.map, self._closed_at, self._round)

    @property
    def closed(self) -> bool:
        """True once the round was closed: at once on rank 0's machine, elsewhere at the next number or `serve`."""
        return bool(_CLOSED.unpack_from(self._counter.map, self._closed_at)[0] == self._round)

    def serve(self) -> None:
        """Call it amid an episode: on rank 0, so that other machines need not wait for its end; there, for `closed`."""
        self._counter.serve()


class _Counter:
    """What has been dealt on one communicator: a slot for each of the last rounds, on each machine."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self.rounds = itertools.count()
        self._lock: int | None = None
        self._threads = threading.RLock()  # what keeps other ranks away does not keep away this rank's other threads
        self._segment: Segment | None = None
        slots = _SLOT.pack(_NONE_YET, 0, 0, 0, _NONE_YET) * _ROUNDS
        self.map: mmap.mmap | bytearray = bytearray(slots)
        if channel.members:
            with contextlib.suppress(OSError):
                self._segment = Segment(len(slots))
                self.map, self._lock = self._segment.map, self._segment.ticket.fd
                self.map[:] = slots
        mine = self._segment.ticket if self._segment else None
        ticket = channel.agree("deal", lambda: mine, lambda tickets: [tickets[leader] for leader in channel.machine])
        if ticket is not None and channel.rank != channel.leader:
            self._lock, self.map = attach(ticket)  # each process needs an open file of its own: a lock belongs to that
        shares = ticket is not None
        self._has_all = channel.rank == 0 or (shares and channel.leader == 0)
        self._n_ranks = len(channel.here()) if shares else 1
        self._others = [k for k in range(1, channel.size) if channel.machine[k] or not shares]  # as rank 0 sees it
        self._watched: list[int] = []
        self._notices: list[Any] = []
        if channel.rank == 0 and self._others:
            process.of(Background).append(self.serve)

    def take(self, question: tuple[int, int]) -> int | None:
        """The next number of a round, or None. `question`: the round, and how many it deals."""
        failure.enter("deal")
        with self._threads:
            found = self._take_here(question, 0)
        if isinstance(found, str):
            raise RankMismatchError(found)
        return found.start if found else None

    def _take_here(self, question: tuple[int, int], n_ranks: int) -> range | str:
        """The next number; for that many ranks of another machine several. What is wrong, if something is."""
        number_of_round, n = question
        place = number_of_round % _ROUNDS * _SLOT.size
        if self._lock is not None:
            wait_until(self._try_lock, None, process.of(Watchdog))  # a holder may be stopped
        try:
            found, found_n, number, end, closed = _SLOT.unpack_from(self.map, place)
            if found > number_of_round or closed == number_of_round:
                return range(0)
            if found < number_of_round:
                found_n, number, end = n, 0, n if self._has_all else 0
            if found_n != n:
                return f"deal: this rank deals {n} numbers and another one {found_n}; give the same on every rank"
            if number == end and not self._has_all:
                got = self._ask(question)
                if isinstance(got, str):
                    return got
                number, end = (got.start, got.stop) if got else (0, _ALL_DEALT)
            taken = range(number, min(end, number + max(1, (end - number) * n_ranks // (2 * self._channel.size))))
            _DEALT.pack_into(self.map, place, number_of_round, n, max(number, taken.stop), end)
            return taken
        finally:
            if self._lock is not None:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _ask(self, question: tuple[int, int]) -> range | str:
        """The next numbers for this machine, from rank 0."""
        messages = self._channel.messages
        messages.wait(messages.comm.isend((messages.rank, question, self._n_ranks), 0, _QUESTION_TAG).Test)
        got: range | str = messages.receive(0, "deal", serves=True)
        return got

    def _try_lock(self) -> bool:
        """The kernel gives the lock back when its holder is killed."""
        try:
            fcntl.flock(self._lock or 0, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def serve(self) -> None:
        """Rank 0 answers other machines, and tells them of rounds that are closed; these hear of it."""
        comm = self._channel.comm
        if self._channel.rank:
            while not self._has_all and (message := comm.improbe(0, _CLOSED_TAG)):
                number_of_round = message.recv()
                _CLOSED.pack_into(self.map, number_of_round % _ROUNDS * _SLOT.size + _DEALT.size, number_of_round)
            return
        while self._others and (message := comm.improbe(tag=_QUESTION_TAG)):
            asking, question, n_ranks = message.recv()
            with self._threads:
                found = self._take_here(question, n_ranks)
            self._channel.messages.send(asking, found)
            if question[0] not in self._watched:
                self._watched = [*self._watched[1 - _WATCHED :], question[0]]
        for number_of_round in self._watched:
            if (
                _CLOSED.unpack_from(self.map, number_of_round % _ROUNDS * _SLOT.size + _DEALT.size)[0]
                == number_of_round
            ):
                self._watched.remove(number_of_round)
                self._notices += [comm.isend(number_of_round, k, _CLOSED_TAG) for k in self._others]
                break
        self._notices = [request for request in self._notices if not request.Test()]

    def close(self) -> None:
        """Gives file and memory back."""
        background = process.of(Background)
        if self.serve in background:
            background.remove(self.serve)
        if self._segment is not None:
            self._segment.close()
        elif self._lock is not None:
            os.close(self._lock)
