"""A page of shared memory on which the ranks of one machine add up gradients; in the process of each rank.

It is for sums and means at every optimizer step, whose cost counts in microseconds: a round takes two stores and a few
loads, where `Channel.agree` takes two messages for each rank. On any mismatch (no page yet, too small a page, arrays that
differ) the ranks fall back to `agree`, which finds out what it is, and reports it to all.

In each round a rank posts the round's number and a digest of what it adds; when all have posted the same, all go on.
Posts and small data have two rows, which rounds use in turn: a rank that is early in the next round must not overwrite
what a slow one still reads, and by the round after that the slow one has passed.
"""

import math
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from ..arrays.layout import Layout
from ..errors import MpiUtilError
from ..host.cores import usable_cores
from ..host.segments import STORES_IN_ORDER, align, private
from .messages import CALL, ERROR, LEAVE, WAITING, WAITS, opened, portable

if TYPE_CHECKING:
    from .channel import Channel

SMALL = 1 << 18  # bytes of each rank that there is always room for
_FEW = 4  # ranks; among more, that each adds up everything costs more than a second round
_TINY = 1 << 14  # bytes; but not for so little
_ALONG, _TOGETHER = 1 << 16, 1 << 20  # bytes of a rank, of all, that go along with an agreement
_ENTRY = struct.Struct("<q8s")  # number of the round, digest
_FAILED = b"failed  "  # in place of a digest
_QUIET_TESTS = 8  # before a waiting rank looks for messages too
_LISTEN = 16  # rounds
_SPINS = 50  # tests, some 10 us, before all that a wait needs is set up
_NOTICE_S = 10e-3  # after which a waiting rank notifies rank 0, which may wait for it elsewhere
_ROOM = 1.25


class Reduction(Protocol):
    """What a rank adds to a sum over the ranks, and how rows of several ranks are combined.

    Attributes:
        op: name of the collective call.
        function: of two arrays.
        divisor: by which the combination is divided; 0: it is not.
        description: (name, dtype, shape) of each array. The first to read it makes the arrays, which may raise.
        digest: eight bytes that are equal where `op` and `description` are.
        layout: of a row: all arrays of a rank in one block, packed.
    """

    op: str
    function: Any
    divisor: int

    @property
    def description(self) -> Any: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def layout(self) -> Layout: ...

    def check(self, descriptions: Sequence[Any]) -> None:
        """Raises the RankMismatchError that says how the ranks' descriptions differ, if they do."""

    def write(self, row: np.ndarray) -> None:
        """Copies this rank's arrays into a row."""

    def combine(self, rows: Sequence[np.ndarray], total: np.ndarray, part: int = 0, parts: int = 1) -> None:
        """Combines rows in their order, and for a mean divides, into `total`; or one of so many parts of each."""


class SharedBarrier:
    """One rank's view of the page.

    Attributes:
        large: uint8 (ranks, room), and total: uint8 (room,): for more data, in calls that take two rounds.
        scratch: uint8 (SMALL,), of this rank alone.
        room: bytes.
    """

    def __init__(self, channel: "Channel", memory: Any, room: int):
        """Args: channel: of the ranks. memory: of `_sizes`, zeros at first. room: bytes for each rank."""
        self.room, self.scratch = room, private(SMALL)
        self._channel = channel
        n, sizes = channel.size, _sizes(channel.size, room)
        parts = np.split(np.ndarray((sum(sizes),), np.uint8, memory), np.cumsum(sizes)[:-1])
        self._posts = [part[: n * _ENTRY.size].data for part in parts[:2]]
        self._asleep = parts[2][:n].data
        self._small = parts[3].reshape(2, n, SMALL)
        self.large: np.ndarray = parts[4].reshape(n, room)
        self.total: np.ndarray = parts[5]
        self.number = 0
        self._spins = _SPINS if n <= usable_cores() else 1

    def small(self, ahead: int = 0) -> np.ndarray:
        """uint8 (ranks, SMALL): each rank's small data of the last round, or with ahead=1 of the next."""
        rows: np.ndarray = self._small[(self.number + ahead) % 2]
        return rows

    def wait(self, op: str, digest: bytes) -> bool:
        """Collective: waits until all ranks have come. True if they have the same digest.

        Raises:
            RankMismatchError, RankLeftError: a rank is in another call, or has ended.
        """
        channel, rank = self._channel, self._channel.rank
        channel.enter(op)
        self.number += 1
        posts, own = self._posts[self.number % 2], rank * _ENTRY.size
        entry = _ENTRY.pack(self.number, digest)
        if rank == 0 and (channel.messages.ended or self.number % _LISTEN == 0):
            self._check_messages(op)  # so that those of ranks that have waited for long do not pile up
        posts[own + 8 : own + 16] = entry[8:]
        posts[own : own + 8] = entry[:8]  # last: processors of this kind show stores in their order
        same, spins = entry * channel.size, self._spins
        while bytes(posts) != same:
            spins -= 1
            if not spins:
                self._wait(op, posts)
                break
        if any(bytes(self._asleep)):  # the rank that finds that all have come wakes them
            for k in range(channel.size):
                if self._asleep[k]:
                    self._asleep[k] = 0
                    channel.peers.wake(k)
        return bytes(posts) == same

    def _wait(self, op: str, posts: memoryview) -> None:
        """Waits until all have come, and looks for messages that say why one does not."""
        channel, quiet_tests, notice = self._channel, _QUIET_TESTS, time.perf_counter() + _NOTICE_S

        def came() -> list[bool]:
            return [number == self.number for number, _ in _ENTRY.iter_unpack(posts)]

        def over() -> bool:
            nonlocal quiet_tests, notice
            if all(came()):
                return True
            quiet_tests -= 1
            if quiet_tests < 0:
                self._check_messages(op, came)
                if channel.rank and time.perf_counter() > notice:
                    notice = math.inf  # once
                    self._report_waiting(op)
            return False

        def sleep(seconds: float) -> bool:
            self._asleep[channel.rank] = 1
            try:
                return all(came()) or channel.peers.pipe.sleep(seconds)
            finally:
                self._asleep[channel.rank] = 0

        channel.messages.wait(over, sleep, by_mpi=False)

    def _report_waiting(self, op: str) -> None:
        """Notifies rank 0 that this rank waits here, in case rank 0 waits for it in `agree`."""
        op, number, site = self._channel.call_id(op)
        self._channel.messages.post(0, WAITING, (op + WAITS, number, site))

    def _raise_left(self, op: str, source: int) -> NoReturn:
        if source == 0:
            self._report_waiting(op)  # rank 0, where it ends, says so
        raise self._channel.messages.left_error(op, source)

    def _check_messages(self, op: str, arrived: Callable[[], list[bool]] = list) -> None:
        """Looks for messages that say why a rank does not arrive. Rank 0 passes on to all ranks what it finds.

        Args: arrived: for each rank whether it has. One that has may be further on already; its messages can wait.

        Raises:
            RankMismatchError: a rank is in another call. RankLeftError: it has ended.
        """
        channel, messages = self._channel, self._channel.messages
        unread = set(range(1, channel.size)) if channel.rank == 0 else set[int]()
        messages.poll()
        # what was early in the last round may be about this one
        came = [(source, message) for source, queue in messages.inbox.items() for message in queue]
        messages.inbox.clear()
        try:
            for source in messages.ended:
                self._raise_left(op, source)
            while came:
                source, message = came.pop(0)
                (kind, payload), there = opened(message), arrived()
                # an error from a rank that has arrived, while others have not, is about this call
                if there and (all(there) or (there[source] and kind != ERROR)):
                    messages.inbox.setdefault(source, []).append(message)
                elif kind == LEAVE:
                    messages.ended[source] = payload
                    self._raise_left(op, source)
                elif kind == ERROR:
                    raise payload
                elif kind == CALL and not messages.is_late(source, message):
                    unread.discard(source)
                    channel.check_calls([channel.call_id(op), payload[:3]], [channel.rank, source])
        except MpiUtilError as error:
            channel.fail_all(portable(op, 0, error), unread)
            raise
        finally:
            for source, message in came:
                messages.inbox.setdefault(source, []).append(message)


def _sizes(n: int, room: int) -> list[int]:
    """Bytes of the parts of a page for `n` ranks: posts, who sleeps, small data, large data, its total."""
    posts = align(n * _ENTRY.size)
    return [posts, posts, align(n), 2 * n * SMALL, n * room, room]


def add_up(channel: "Channel", reduction: Reduction) -> np.ndarray:
    """Collective: `Channel.add_up`."""
    page = _meet(channel, reduction) if STORES_IN_ORDER else None
    if page is None:
        return add_up_on_rank_0(channel, reduction)
    if _is_small(channel, reduction):
        reduction.combine(page.small(), page.scratch)
        return page.scratch
    reduction.combine(page.large, page.total, channel.rank, channel.size)
    page.wait(reduction.op, reduction.digest)  # all parts are there when all have come again
    return page.total


def _is_small(channel: "Channel", reduction: Reduction) -> bool:
    """True if each rank combines all rows, rather than a part of each."""
    return reduction.layout.nbytes <= (SMALL if channel.size <= _FEW else _TINY)


def _meet(channel: "Channel", reduction: Reduction) -> SharedBarrier | None:
    """Collective: the page with the rows of all ranks. It is made and enlarged as needed.

    Returns: None where there is no shared memory; then the descriptions agree.
    """
    page: SharedBarrier | None
    error, digest, room = None, _FAILED, 0

    def fits(page: SharedBarrier) -> bool:
        """True if this rank's row is on the page."""
        nonlocal error, digest
        if error or room > page.room:
            return False
        try:
            rows = page.large if room else page.small(ahead=1)
            reduction.write(rows[channel.rank])
        except Exception as caught:
            error, digest = caught, _FAILED
        return not error

    try:
        digest = reduction.digest
        room = 0 if _is_small(channel, reduction) else reduction.layout.nbytes
    except Exception as caught:  # raised in the agreement, and so on all ranks
        error = caught
    while True:
        if page := channel.barrier:
            written = fits(page)
            if page.wait(reduction.op, digest if written or error else b"room" + digest[:4]) and written:
                return page
        channel.barrier = page = None  # its memory is free; if one rank comes to this line, all do

        def contribute() -> tuple[int, Any]:
            if error:
                raise error
            return room, reduction.description

        found = channel.agree(reduction.op, contribute, partial(_new_page, channel, reduction))
        if found is None:
            return None
        memory, room_there = found
        channel.peers.open_all()
        channel.barrier = SharedBarrier(channel, channel.map(memory) if channel.rank else memory, room_there)


def _new_page(channel: "Channel", reduction: Reduction, contributed: Sequence[tuple[int, Any]]) -> list[Any]:
    """Rank 0: each rank's answer: memory for a page, or its address, and the room on it; None: there is no memory."""
    reduction.check([description for _, description in contributed])
    room = align(int(contributed[0][0] * _ROOM))
    sizes = _sizes(channel.size, room)
    memory, address = channel.lease(sum(sizes))
    if address is None:
        return [None] * channel.size
    memory[: sum(sizes[:3])] = 0
    return [(memory, room), *[(address, room)] * (channel.size - 1)]


def add_up_on_rank_0(channel: "Channel", reduction: Reduction) -> np.ndarray:
    """Collective: `Channel.add_up` without a page."""
    total = add_in_agreement(channel, reduction)
    return add_through_rank_0(channel, reduction) if total is None else total


def add_in_agreement(channel: "Channel", reduction: Reduction) -> np.ndarray | None:
    """Collective: small rows go along with the agreement, in which rank 0 combines them. None: they are too large."""

    def contribute() -> tuple[Any, np.ndarray | None]:
        description = reduction.description
        if (nbytes := reduction.layout.nbytes) > min(_ALONG, _TOGETHER // channel.size):
            return description, None
        reduction.write(row := private(nbytes))
        return description, row

    def decide(contributed: list[tuple[Any, np.ndarray | None]]) -> Sequence[np.ndarray | None]:
        reduction.check([description for description, _ in contributed])
        rows = [row for _, row in contributed if row is not None]
        if not rows:
            return [None] * channel.size
        reduction.combine(rows, total := private(reduction.layout.nbytes))
        return [total] * channel.size

    return channel.agree(reduction.op, contribute, decide)


def add_through_rank_0(channel: "Channel", reduction: Reduction) -> np.ndarray:
    """Collective: large rows, which agree, all come to rank 0, and their combination to all ranks."""
    nbytes = reduction.layout.nbytes
    own = private(nbytes)

    def targets(_: list[None]) -> Sequence[Any]:
        return channel.collect_targets(channel.size * nbytes, [[(k * nbytes, nbytes)] for k in range(channel.size)])

    target = channel.agree(reduction.op, lambda: reduction.write(own), targets)
    channel.collect(reduction.op, target, [own])

    def sources(_: list[None]) -> Sequence[Any]:
        rows = target.block.reshape(channel.size, -1)
        return channel.spread_sources(nbytes, lambda block: reduction.combine(rows, block))

    return channel.spread(reduction.op, channel.agree(reduction.op, lambda: None, sources))
