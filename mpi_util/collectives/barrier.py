"""A page of shared memory where the ranks of one machine wait for each other, and leave small data for each other.

It is for calls whose cost counts in microseconds, such as the gradient of every optimizer step: a round takes two
stores and a few loads, where `Channel.agree` takes two messages. Only when something is wrong (no page yet, too small a
page, ranks that bring different things) do the ranks turn to `agree`, which finds out what, and reports it to all.

In each round a rank posts its number and a digest of what it brings; when all have posted the same, all go on. Posts
and small data have two places, which rounds use in turn: a rank that is quick to come to the next round must not
overwrite what a slow one still reads, and by the round after that the slow one has passed.
"""

import contextlib
import math
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..errors import rank_mismatch
from ..host.segments import STORES_IN_ORDER, align
from .channel import Channel
from .transport import Place, lease, places

T = TypeVar("T")
# (name, dtype, shape) of each array; (name, None, None) where there is none
Description = Sequence[tuple[str, Any, Any]]

SMALL = 1 << 18  # bytes of each rank that there is always room for
_ENTRY = struct.Struct("<q8s")  # number of the round, digest
_FAILED = b"failed  "  # in place of a digest
_QUIET_TESTS = 8  # before a waiting rank looks for messages too
_LISTEN = 16  # rounds
_SPINS = 50  # tests, some 10 us, before all that a wait needs is set up
_NOTICE_S = 10e-3  # after which a waiting rank notifies rank 0, which may wait for it elsewhere
_ROOM = 1.25
_KEPT = 64  # a program that averages ever other shapes must not fill the memory


class Page:
    """One rank's view of the barrier page.

    Attributes:
        rank: of the channel.
        large: uint8 (ranks, room), and total: uint8 (room,): for more data, in calls that take two rounds.
        scratch: uint8 (SMALL,), of this rank alone.
        room: bytes.
    """

    def __init__(self, channel: Channel, memory: np.ndarray, room: int):
        """Args: channel: of the ranks. memory: uint8, all `_sizes`, zeros at first. room: bytes for each rank."""
        self.channel, self.rank, self.room = channel, channel.rank, room
        self.scratch = np.empty(SMALL, np.uint8)
        self._kept: dict[Any, Any] = {}
        n = channel.size
        parts = np.split(memory, np.cumsum(_sizes(n, room))[:-1])
        self._posts = [part[: n * _ENTRY.size].data for part in parts[:2]]
        self._small = parts[2].reshape(2, n, SMALL)
        self.large: np.ndarray = parts[3].reshape(n, room)
        self.total: np.ndarray = parts[4]
        self.number = 0
        self._own = channel.rank * _ENTRY.size

    def small(self, ahead: int = 0) -> np.ndarray:
        """uint8 (ranks, SMALL): each rank's small data of the last round, or with ahead=1 of the next."""
        rows: np.ndarray = self._small[(self.number + ahead) % 2]
        return rows

    def kept(self, key: Any, make: Callable[[], T]) -> T:
        """`make()`, which is kept for the next time, among the `_KEPT` latest: for views of the arrays above."""
        found: T | None = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            found = self._kept[key] = make()
        return found

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
        if self.rank == 0 and (self.channel.messages.ended or self.number % _LISTEN == 0):
            self.channel.check_messages(op)  # so that those of ranks that have waited for long do not pile up
        posts[own + 8 : own + 16] = entry[8:]
        posts[own : own + 8] = entry[:8]  # last: processors of this kind show stores in their order
        same = entry * self.channel.size
        tests = _SPINS if self.channel.core_each else 1
        while bytes(posts) != same:
            tests -= 1
            if not tests:
                self._wait(op, posts)
                break
        for k in self.channel.peers.rings.sleepers():  # the rank that finds that all have come wakes them
            self.channel.peers.wake(k)
        return bytes(posts) == same

    def _wait(self, op: str, posts: memoryview) -> None:
        """Waits until all have come, and looks for messages that say why one does not."""
        quiet_tests, notice = _QUIET_TESTS, time.perf_counter() + _NOTICE_S

        def came() -> list[bool]:
            return [number == self.number for number, _ in _ENTRY.iter_unpack(posts)]

        def over() -> bool:
            nonlocal quiet_tests, notice
            if all(came()):
                return True
            quiet_tests -= 1
            if quiet_tests < 0:
                self.channel.check_messages(op, came)
                if self.rank and time.perf_counter() > notice:
                    notice = math.inf  # once
                    self.channel.report_waiting(op)
            return False

        sleep = partial(self.channel.peers.sleep, lambda: all(came()))
        self.channel.messages.wait(over, sleep, by_mpi=False)


def _sizes(n: int, room: int) -> list[int]:
    """Bytes of the parts of a page for `n` ranks: two rows of posts, small data, large data, its total."""
    posts = align(n * _ENTRY.size)
    return [posts, posts, 2 * n * SMALL, n * room, room]


class Exchange:
    """One round of all ranks on their barrier page. Subclasses say what they bring, in two steps.

    Attributes:
        op: name of the collective call.
    """

    op: str
    _error: Exception | None = None
    _nbytes = 0
    _description: Any = None
    _memory = np.empty(0, np.uint8)  # of a new page, on rank 0

    def describe(self) -> tuple[bytes, int, Any]:
        """(eight bytes that are equal where the description is, bytes of large data, description: see `check_same`).

        What it raises is raised on every rank.
        """
        raise NotImplementedError

    def write(self, page: Page) -> None:
        """Writes this rank's data on the page: small data where the next round's goes."""
        raise NotImplementedError

    def exchange(self, channel: Channel) -> Page | None:
        """Collective: takes the steps. The channel's page is made and enlarged as needed.

        Returns:
            The page, with the data of all ranks; None where there can be none (ranks on several machines, no shared
            memory): then the descriptions agree, and the caller has to move the data by other means.
        """
        digest = _FAILED
        try:
            digest, self._nbytes, self._description = self.describe()
        except Exception as caught:  # raised in the agreement, and so on all ranks
            self._error = caught
        while True:
            page: Page | None = channel.page
            if page:
                fits = self._write(page)
                if page.meet(self.op, _FAILED if self._error else digest if fits else b"room" + digest[:4]) and fits:
                    return page
            page = channel.page = None  # its memory is free; if one rank comes to this line, all do
            place = channel.agree(self.op, self._brought, partial(self._new_page, channel))
            if place.ticket is None:
                return None
            if channel.rank:
                mapped = channel.attached.map(place.ticket, place.live)
                self._memory = np.ndarray((sum(_sizes(channel.size, place.plan)),), np.uint8, mapped)
            channel.peers.open_all(channel.here())
            channel.page = Page(channel, self._memory, place.plan)

    def _write(self, page: Page) -> bool:
        """True if this rank's data is on the page."""
        if self._error or self._nbytes > page.room:
            return False
        try:
            self.write(page)
        except Exception as caught:
            self._error = caught
        return not self._error

    def _brought(self) -> tuple[int, Any]:
        if self._error:
            raise self._error
        return self._nbytes, self._description

    def _new_page(self, channel: Channel, brought: list[Any]) -> list[Place]:
        """Rank 0: where each rank finds a page with room for that much, if there can be one."""
        check_same(self.op, [description for _, description in brought])
        room, ticket = align(int(brought[0][0] * _ROOM)), None
        if possible(channel):
            sizes = _sizes(channel.size, room)
            self._memory, ticket = lease(channel, sum(sizes))
            self._memory[: sum(sizes[:2])] = 0
        return places(channel, ticket, room)


DIFFERS = "is not the same on all ranks"  # what all ranks have brought to one call


def check_same(op: str, descriptions: Sequence[Description]) -> None:
    """Raises the RankMismatchError that names the first array that differs between the ranks, if there is one."""
    other = next((description for description in descriptions if description != descriptions[0]), None)
    if other is None:
        return
    found = [{name: (dtype, shape) for name, dtype, shape in description} for description in descriptions]
    differ = (entry for entry in (*other, *descriptions[0]) if entry not in other or entry not in descriptions[0])
    name = (next(differ, None) or other[0])[0]

    def text(one: dict[str, Any]) -> str:
        dtype, shape = one.get(name, ("missing", ""))
        with contextlib.suppress(TypeError):  # the name of a dtype that NumPy lacks
            dtype = dtype and np.dtype(dtype)
        what = dtype if dtype == "missing" else f"{dtype} {shape}" if dtype else "None"
        return f"{what} (of {len(one)} arrays)"

    what = f"{op}: '{name}' {DIFFERS}; they must have the same names, dtypes and shapes"
    raise rank_mismatch(what, map(text, found))


def possible(channel: Channel) -> bool:
    """True if there may be a page: all ranks on one machine, whose processors show stores in their order."""
    return channel.size > 1 and len(set(channel.machine)) == 1 and STORES_IN_ORDER
