"""A place in shared memory where the ranks of one machine lay down what they bring, and look at what the others did.

It is for calls whose cost counts in microseconds, such as the gradient of every optimizer step: to meet there takes two
stores and a few loads, where `Channel.agree` takes two messages. Only when something is amiss (no board yet, too small
a one, ranks that bring different things) do the ranks turn to `agree`, which finds out what, and tells everybody.

At each meeting a rank posts its number and a digest of what it brings; when all have posted the same, all go on. Posts
and small data have two places, which meetings use in turn: a rank that is quick to come to the next meeting must not
overwrite what a slow one still reads, and at the meeting after that the slow one has been.
"""

import platform
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..host.segments import Ticket, align
from ..host.waiting import Doorbell, wait_until
from ..launch import failure
from .channel import Channel
from .transport import Place, lease, places

SMALL = 1 << 18  # bytes of each rank that there is always room for
_ENTRY = struct.Struct("<q8s")  # number of the meeting, digest
_QUIET_TESTS = 8  # before a waiting rank looks for messages too
_LISTEN = 16  # meetings
_SPINS = 50  # tests, some 10 us, before all that a wait needs is set up
_NOTICE_S = 10e-3  # after which a waiting rank tells rank 0, which may wait for it elsewhere
_ROOM = 1.25


class Board:
    """One rank's view of the board.

    Attributes:
        small: two of uint8 (ranks, SMALL): each rank's data, of meetings with an even and with an odd number.
        large: uint8 (ranks, room), and total: uint8 (room,): for more data, in calls that meet twice.
        room: bytes.
        views: for callers to keep what they derive from the arrays above.
    """

    def __init__(self, channel: Channel, memory: np.ndarray, room: int):
        """Args: channel: of the ranks. memory: uint8, `_nbytes` of it, zeros at first. room: bytes for each rank."""
        self.channel, self.room = channel, room
        self.views: dict[Any, Any] = {}
        n = channel.size
        parts = np.split(memory, np.cumsum(_sizes(n, room))[:-1])
        self._asleep = parts[0][:n].data
        self._posts = [part[: n * _ENTRY.size].data for part in parts[1:3]]
        self.small: list[np.ndarray] = list(parts[3].reshape(2, n, SMALL))
        self.large: np.ndarray = parts[4].reshape(n, room)
        self.total: np.ndarray = parts[5]
        self.number = 0
        self._own = channel.rank * _ENTRY.size

    @property
    def next_small(self) -> np.ndarray:
        """uint8 (ranks, SMALL): where small data of the next meeting goes."""
        return self.small[(self.number + 1) % 2]

    @property
    def last_small(self) -> np.ndarray:
        """uint8 (ranks, SMALL): the small data of the last meeting."""
        return self.small[self.number % 2]

    def meet(self, op: str, digest: bytes) -> bool:
        """Collective: waits until all ranks have come. True if they bring the same.

        Args:
            op: name of the collective call.
            digest: eight bytes.

        Raises:
            RankMismatchError, RankLeftError: a rank is in another call, or has ended.
        """
        self.channel.enter(op)
        self.number += 1
        posts, own = self._posts[self.number % 2], self._own
        entry = _ENTRY.pack(self.number, digest)
        if self.channel.rank == 0 and (self.channel.left or self.number % _LISTEN == 0):
            self.channel.look_out(op)  # so that notices of ranks that have waited for long do not pile up
        posts[own + 8 : own + 16] = entry[8:]
        posts[own : own + 8] = entry[:8]  # last: processors of this kind show stores in their order
        same = entry * self.channel.size
        tests = _SPINS if self.channel.core_each else 1
        while bytes(posts) != same:
            tests -= 1
            if not tests:
                self._wait(op, posts, same)
                break
        sleepers = bytes(self._asleep)
        if any(sleepers):
            self._wake(sleepers)
        return bytes(posts) == same

    def _wait(self, op: str, posts: memoryview, same: bytes) -> None:
        channel, tests, noticed = self.channel, 0, False
        began = time.perf_counter()

        def came() -> list[bool]:
            return [number == self.number for number, _ in _ENTRY.iter_unpack(posts)]

        def all_came() -> bool:
            return bytes(posts) == same or all(came())

        def test() -> bool:
            nonlocal tests, noticed
            if all_came():
                return True
            tests += 1
            if tests > _QUIET_TESTS:
                channel.look_out(op, came)
                if channel.rank and not noticed and time.perf_counter() - began > _NOTICE_S:
                    noticed = True
                    channel.notice(op)
            return False

        missing = came()
        peer = missing.index(False) if False in missing else 0
        overdue = lambda: failure.report_missing(channel.rank, peer, channel.cards[peer].pid)  # noqa: E731
        wait_until(test, partial(self._nap, all_came), overdue, failure.watchdog_s())

    def _wake(self, sleepers: bytes) -> None:
        """Rings those who sleep; whoever finds that all have come does so."""
        for k, asleep in enumerate(sleepers):
            if asleep and k in self.channel.bells:
                self._asleep[k] = 0
                Doorbell.ring(self.channel.bells[k])

    def _nap(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Sleeps until rung, unless `ready`. True if it is worth looking again at once.

        Who sleeps is seen on the board: the others ring nobody who is awake.
        """
        own = self.channel.rank
        self._asleep[own] = 1
        try:
            return ready() or self.channel.bell.sleep(seconds)
        finally:
            self._asleep[own] = 0


def _sizes(n: int, room: int) -> list[int]:
    """Bytes of the parts of a board for `n` ranks: who sleeps, two rows of posts, small data, large data, its total."""
    posts = align(n * _ENTRY.size)
    return [align(n), posts, posts, 2 * n * SMALL, n * room, room]


def gather_round(
    channel: Channel,
    op: str,
    bring: Callable[[], tuple[bytes, int, Any]],
    lay: Callable[[Board], None],
    check: Callable[[Sequence[Any]], object],
) -> Board | None:
    """Collective: all ranks lay down what they bring on the channel's board, which is made and enlarged as needed.

    Args:
        bring: -> (eight bytes that are equal where the description is, bytes of large data, description: picklable).
            What it raises is raised on every rank.
        lay: puts this rank's data on the board that it is given: small data where the next meeting's goes.
        check: on rank 0: raises an MpiUtilError if these descriptions, of all ranks, differ.

    Returns:
        The board, on which everybody's data lies; None where there can be none (ranks on several machines, no shared
        memory): then the descriptions agree, and the caller has to move the data by other means.
    """
    error, digest, nbytes, description = None, b"failed  ", 0, None
    try:
        digest, nbytes, description = bring()
    except Exception as caught:  # raised below, where the others come to as well
        error = caught

    def show() -> tuple[int, Any]:
        if error:
            raise error
        return nbytes, description

    memory = np.empty(0, np.uint8)

    def decide(brought: list[Any]) -> list[Place]:
        nonlocal memory
        check([description for _, description in brought])
        memory, ticket, room = _new_memory(channel, brought[0][0])
        return places(channel, ticket, [room] * channel.size)

    while True:
        board: Board | None = channel.board
        if board:
            fits = not error and nbytes <= board.room
            try:
                if fits:
                    lay(board)
            except Exception as caught:
                error, fits, digest = caught, False, b"failed  "
            if board.meet(op, digest if fits or error else b"room" + digest[:4]) and fits:
                return board
        channel.board, board = None, None  # if one rank comes to this line, all do
        place = channel.agree(op, show, decide)
        if place.ticket is None:
            return None
        _take_board(channel, place, place.ticket, memory)


def possible(channel: Channel) -> bool:
    """True if there may be a board: all ranks on one machine, whose processors show stores in their order."""
    return channel.size > 1 and len(set(channel.machine)) == 1 and platform.machine() in ("x86_64", "AMD64")


def _new_memory(channel: Channel, nbytes: int) -> tuple[np.ndarray, Ticket | None, int]:
    """Rank 0: (memory of a board where each rank has room for so much, its ticket, the room); no ticket: no board."""
    room = align(int(nbytes * _ROOM))
    sizes = _sizes(channel.size, room)
    if not possible(channel):
        return np.empty(0, np.uint8), None, 0
    memory, ticket = lease(channel, sum(sizes))
    memory[: sum(sizes[:3])] = 0
    return memory, ticket, room


def _take_board(channel: Channel, place: Place, ticket: Ticket, memory: np.ndarray) -> None:
    if channel.rank:
        channel.attached.keep(ticket.pid, place.live)
        mapped = channel.attached.map(ticket)
        memory = np.ndarray((sum(_sizes(channel.size, place.plan)),), np.uint8, mapped)
    channel.open_bells()
    channel.board = Board(channel, memory, place.plan)
