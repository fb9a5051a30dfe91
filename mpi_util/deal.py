"""Deals numbered work (episodes) to whichever rank is free."""

import fcntl
import os
import struct
from collections.abc import Iterator
from typing import Any

from .comm import Channel, channel_of
from .shared import Segment, Ticket

_WORD = struct.Struct("q")
_NEXT, _CLOSED = 0, _WORD.size  # places of the next number to deal, and of the end of the round that was closed early
_PAGE = 4096


def deal(n: int, *, comm: Any = None) -> "Deal":
    """Collective: an iterator over this rank's share of 0 .. n-1; together the ranks get each number once.

    A rank takes the next number when it asks for one, so a rank that is done never waits for one that is slow. The
    ranks of one machine count in shared memory under a lock; others ask rank 0, which answers while it waits in a
    collective call and in `Deal.serve`. A rank that does not call it gets none.

    Args:
        n: how many; the same on every rank.
        comm: communicator; None: all ranks.
    """
    channel = channel_of(comm)
    if channel.dealer is None:
        channel.dealer = _Counter(channel)
    return Deal(channel.dealer, n)


class Deal:
    """One round of dealing. Iterate over it; `close` ends the round for all ranks."""

    def __init__(self, counter: "_Counter", n: int):
        self._counter = counter
        self._start, self._end = counter.next_round(n)

    def __iter__(self) -> Iterator[int]:
        while (number := self._counter.take((self._start, self._end))) is not None:
            yield number - self._start

    def close(self) -> None:
        """Deals nothing more in this round, on any rank. Rank 0 calls it; a signal handler may."""
        self._counter.close(self._end)

    @property
    def closed(self) -> bool:
        """True once the round was closed early (seen at once on rank 0's machine, elsewhere at the next number)."""
        return self._counter.closed >= self._end

    def serve(self) -> None:
        """Rank 0 calls this between the steps of its own work, so that ranks of other machines need not wait for it."""
        self._counter.serve()


class _Counter:
    """The numbers dealt on one communicator, from 0 on, without end: round after round."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._rounds_end = 0
        self._map = self._lock = None
        ticket = None
        if channel.rank == 0:
            try:
                self._segment = Segment(_PAGE)
                ticket = self._segment.ticket
            except OSError:
                self._own = bytearray(_PAGE)
        ticket = channel.agree("deal", None, lambda headers: [ticket] * channel.size)
        if channel.rank == 0 and ticket is None:
            self._map = self._own
        elif channel.leader == 0 and ticket is not None:
            self._attach(ticket)
        if channel.rank == 0 and (channel.remote_leaders or (ticket is None and channel.size > 1)):
            channel.serve_ticket = self._take_here

    def _attach(self, ticket: Ticket) -> None:
        self._map = self._channel.attached.map(ticket)
        # a lock belongs to an open file, so each process opens the file itself
        self._lock = os.open(f"/proc/{ticket.pid}/fd/{ticket.fd}", os.O_RDWR)

    def take(self, part: tuple[int, int]) -> int | None:
        """The next number of the round from part[0] to before part[1], or None."""
        return self._take_here(part) if self._map is not None else self._channel.ask_ticket(part)

    def _take_here(self, part: tuple[int, int]) -> int | None:
        start, end = part
        with _Locked(self._lock):
            number = max(start, _WORD.unpack_from(self._map, _NEXT)[0])  # a round that was closed early left some
            if number >= end or self.closed >= end:
                return None
            _WORD.pack_into(self._map, _NEXT, number + 1)
            return number

    def next_round(self, n: int) -> tuple[int, int]:
        start, self._rounds_end = self._rounds_end, self._rounds_end + n
        return start, self._rounds_end

    def close(self, end: int) -> None:
        """Takes no lock, so that a signal handler may call it."""
        _WORD.pack_into(self._map, _CLOSED, end)

    @property
    def closed(self) -> int:
        return _WORD.unpack_from(self._map, _CLOSED)[0] if self._map is not None else 0

    def serve(self) -> None:
        if self._channel.serve_ticket:
            self._channel.poll_tickets()


class _Locked:
    """Holds a file lock; it sleeps until it has it, and the kernel gives it back when a holder is killed."""

    def __init__(self, fd: int | None):
        self.fd = fd

    def __enter__(self) -> None:
        if self.fd is not None:
            fcntl.flock(self.fd, fcntl.LOCK_EX)

    def __exit__(self, *_: Any) -> None:
        if self.fd is not None:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
