"""A page of shared memory on which the ranks of one machine add up gradients; in the process of each rank.

It is for sums and means at every optimizer step: a round takes two stores and a few loads, where `Channel.agree` takes
two messages for each rank. On any mismatch (no page yet, too small a page, different arrays) the ranks fall back to it.

When all ranks have written their rows, each adds up small ones for itself. Of large ones each rank adds up one part,
and a second round makes sure that all parts are there. In a round a rank posts the round's number and a digest of what
it adds. Posts and rows have two places, which rounds use in turn: a rank that is early in the next round must not
overwrite what a slow one still reads.
"""

import math
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MpiUtilError, RankMismatchError
from ..host.cores import usable_cores
from ..host.segments import STORES_IN_ORDER, align, private
from ..host.waiting import WakePipe
from .messages import CALL, ERROR, LEAVE, WAITING, WAITS, opened, packed, portable
from .mismatch import check_same

if TYPE_CHECKING:
    from .channel import Channel
    from .reduce import Reduction

_ALONG, _TOGETHER = 1 << 18, 1 << 20  # bytes of a rank, of all, that go along with an agreement
_ENTRY = struct.Struct("<q8s")  # number of the round, digest
_FAILED, _TOO_SMALL = b"failed  ", b"room    "  # in place of a digest
_QUIET_TESTS = 8  # before a waiting rank looks for messages too
_SPINS = 50  # tests, some 10 us, before all that a wait needs is set up
_NOTICE_S = 10e-3  # after which a waiting rank notifies rank 0, which may wait for it elsewhere
_LEAST_ROOM, _SPARE = 1 << 18, 1.25
_SMALL, _FEW = 1 << 18, 4  # bytes of a row that each rank adds up for itself, where there are few ranks
_TINY = 1 << 14  # the same, where there are more


class SharedBarrier:
    """One rank's view of the page."""

    number = 0  # of the last round

    def __init__(self, channel: "Channel", memory: Any, room: int):
        """Args: memory: of `_sizes` bytes; its first three parts are zeros. room: bytes of a row."""
        self.room, self._channel = room, channel
        n, sizes = channel.size, _sizes(channel.size, room)
        parts = np.split(np.ndarray((sum(sizes),), np.uint8, memory), np.cumsum(sizes)[:-1])
        self._posts = [part[: n * _ENTRY.size].data for part in parts[:2]]
        self._asleep = parts[2][:n].data
        self.rows: np.ndarray = parts[3].reshape(2, n, room)  # for the rounds in turn, one of each rank
        self.total: np.ndarray = parts[4]
        self.scratch = private(_SMALL)  # of this rank alone
        self._spins = _SPINS if n <= usable_cores() else 1

    def wait(self, op: str, digest: bytes) -> bool:
        """Collective: waits until all ranks have come; True: with the same digest. Raises as `_check_messages`."""
        channel, rank = self._channel, self._channel.rank
        channel.enter(op)
        self.number += 1
        posts, own = self._posts[self.number % 2], rank * _ENTRY.size
        entry = _ENTRY.pack(self.number, digest)
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
                if self._asleep[k] and k in channel.peers.wake_fds:
                    self._asleep[k] = 0
                    WakePipe.wake(channel.peers.wake_fds[k])
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

        channel.messages.wait(over, sleep, False, awaited=lambda: (k for k, here in enumerate(came()) if not here))

    def _report_waiting(self, op: str) -> None:
        """Notifies rank 0 that this rank waits here, in case rank 0 waits for it in `agree`, or ends."""
        op, number, site = self._channel.call_id(op)
        self._channel.messages.post_all({0: packed(WAITING, (op + WAITS, number, site))})

    def _check_messages(self, op: str, came: Callable[[], list[bool]]) -> None:
        """Looks for messages that say why a rank does not come. Rank 0 passes on to all ranks what it finds.

        Args: came: for each rank whether it has. One that has may be further on already; its messages can wait.

        Raises RankMismatchError: a rank is in another call; RankLeftError: it has ended.
        """
        channel, messages = self._channel, self._channel.messages
        unread = set(channel.below)
        messages.poll()
        # what was early in the last round may be about this one
        found = [(source, message) for source, queue in messages.inbox.items() for message in queue]
        messages.inbox.clear()
        try:
            while found and not messages.ended:
                source, message = found.pop(0)
                (kind, payload), there = opened(message), came()
                # an error from a rank that has come, while others have not, is about this call
                if all(there) or (there[source] and kind != ERROR):
                    messages.inbox.setdefault(source, []).append(message)
                elif kind == LEAVE:
                    messages.ended[source] = payload
                elif kind == ERROR:
                    raise payload
                elif kind == CALL and not messages.is_late(source, message):
                    unread.discard(source)
                    channel.check_calls([channel.call_id(op), payload[:3]], [channel.rank, source])
            for source in messages.ended:
                if channel.rank:
                    self._report_waiting(op)
                raise messages.left_error(op, source)
        except MpiUtilError as error:
            channel.fail_all(portable(op, 0, error), unread)
            raise
        finally:
            for source, message in found:
                messages.inbox.setdefault(source, []).append(message)


def _sizes(n: int, room: int) -> list[int]:
    """Bytes of the parts of a page for `n` ranks: two rows of posts, who sleeps, the rows, their total."""
    posts = align(n * _ENTRY.size)
    return [posts, posts, align(n), 2 * n * room, room]


def add_up(channel: "Channel", reduction: "Reduction") -> np.ndarray:
    """Collective: all ranks' arrays, added up in rank order, in the reduction's layout; valid until the next call."""
    page = _meet(channel, reduction) if STORES_IN_ORDER else None
    if page is None:
        total = add_in_agreement(channel, reduction)
        return add_through_rank_0(channel, reduction) if total is None else total
    rows, nbytes = [*page.rows[page.number % 2]], reduction.layout.nbytes
    if nbytes <= (_SMALL if channel.size <= _FEW else _TINY):
        reduction.combine(rows, page.scratch)
        return page.scratch
    error: Exception | None = None
    try:
        reduction.combine(rows, page.total, channel.rank, channel.size)
    except Exception as caught:  # such as an overflow that NumPy was asked to raise
        error = caught
    # another digest than before: what a rank that was interrupted calls next must not pass for this round
    if page.wait(reduction.op, _FAILED if error else reduction.digest[::-1]) and not error:
        return page.total

    def contribute() -> None:
        if error:
            raise error

    channel.barrier = None
    channel.agree(f"the end of {reduction.op}", contribute, lambda _: [None] * channel.size)  # raises, on all ranks
    raise RankMismatchError(f"{reduction.op}: the ranks do not add up the same arrays")


def _meet(channel: "Channel", reduction: "Reduction") -> SharedBarrier | None:
    """Collective: the page, with the rows of all ranks. It is made and enlarged as needed. None: there is no memory."""
    error: Exception | None = None
    try:
        digest, nbytes = reduction.digest, reduction.layout.nbytes
    except Exception as caught:  # raised in the agreement, and so on all ranks
        error, digest, nbytes = caught, _FAILED, 0

    def contribute() -> tuple[int, Any]:
        if error:
            raise error
        return nbytes, reduction.description

    def new_page(contributed: Sequence[tuple[int, Any]]) -> list[Any]:
        """Rank 0: for each rank (memory for a page, on others its address; room). None: there is no shared memory."""
        check_same(reduction.op, [description for _, description in contributed])
        room = align(max(int(contributed[0][0] * _SPARE), _LEAST_ROOM))
        sizes = _sizes(channel.size, room)
        memory, address = channel.lease(sum(sizes), channel.below)
        memory[: sum(sizes[:3])] = 0
        return [(memory if address else None, room), *[(address, room)] * (channel.size - 1)]

    while True:
        if page := channel.barrier:
            fits = not error and nbytes <= page.room
            try:
                if fits:
                    reduction.write(page.rows[(page.number + 1) % 2, channel.rank])
            except Exception as caught:
                error, digest, fits = caught, _FAILED, False
            if page.wait(reduction.op, digest if fits or error else _TOO_SMALL) and fits:
                return page
        channel.barrier = page = None  # all ranks come to this line together, so that none uses the old page any more
        memory, room = channel.agree(reduction.op, contribute, new_page)
        if memory is None:
            return None
        channel.barrier = SharedBarrier(channel, channel.pool.map(memory) if channel.rank else memory, room)


def add_in_agreement(channel: "Channel", reduction: "Reduction") -> np.ndarray | None:
    """Collective: small rows go along with the agreement, in which rank 0 combines them. None: they are too large."""

    def contribute() -> tuple[Any, np.ndarray | None]:
        description = reduction.description
        if (nbytes := reduction.layout.nbytes) > min(_ALONG, _TOGETHER // channel.size):
            return description, None
        reduction.write(row := private(nbytes))
        return description, row

    def decide(contributed: list[tuple[Any, np.ndarray | None]]) -> Sequence[np.ndarray | None]:
        check_same(reduction.op, [description for description, _ in contributed])
        rows = [row for _, row in contributed if row is not None]
        if not rows:
            return [None] * channel.size
        reduction.combine(rows, total := private(reduction.layout.nbytes))
        return [total] * channel.size

    return channel.agree(reduction.op, contribute, decide)


def add_through_rank_0(channel: "Channel", reduction: "Reduction") -> np.ndarray:
    """Collective: large rows, which agree, all come to rank 0, and their combination to all ranks."""
    own = private(nbytes := reduction.layout.nbytes)

    def targets(_: list[None]) -> Sequence[Any]:
        return channel.collect_targets(channel.size * nbytes, [[(k * nbytes, nbytes)] for k in range(channel.size)])

    target = channel.agree(reduction.op, lambda: reduction.write(own), targets)
    channel.collect(reduction.op, target, [own])

    def sources(_: list[None]) -> Sequence[Any]:
        rows = target.block.reshape(channel.size, -1)
        return channel.spread_sources(nbytes, lambda block: reduction.combine(rows, block))

    return channel.spread(reduction.op, channel.agree(reduction.op, lambda: None, sources))
