"""How weights get from the sender's machine to others: one rank of each passes them on, along a tree of machines."""

import atexit
import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import WeightsError
from ..host.waiting import wait_until
from .bits import checksum
from .hub import Event, Hub
from .layout import Layout

# MPI tags: addresses; what comes from the sender; whether this rank lives; what workers tell; this rank ends; bytes
CARD, DOWN, PING, UP, LEFT, BULK = range(1, 7)
_VERSIONS = 1 << 14  # tags from BULK on; every MPI has 32767
_PART_BYTES = 1 << 22  # passed on while the next part comes
_PAUSE_S = 2e-3  # between two looks for what comes from another machine, at most
_BUSY_S = 20e-3  # after something came, more may follow soon
_IDLE_S, _IDLE_PAUSE_S = 1.0, 6e-3
_STALLED_S = 10.0  # a rank that sends no part for so long stands still
_BRISK_S = 1e-4
_STOP_S = 2.0


class Parcel(NamedTuple):
    """What goes ahead of the bytes of an update.

    Attributes:
        path: ranks that pass it on, the sender first: number i sends to numbers 2 i + 1 and 2 i + 2.
        layouts: of the workers to whom it is new.
    """

    version: int
    checksum: int
    nbytes: int
    workers: list[int]
    path: list[int]
    layouts: dict[int, Layout]


def pass_on(
    comm: Any, parcel: Parcel, block: np.ndarray, receive: Callable[[np.ndarray], None] = lambda part: None
) -> list[Callable[[], bool]]:
    """Sends `block` to this rank's successors on the path, each part as soon as `receive` has filled it.

    Returns:
        Functions that say, until all is under way, that the block is needed; a rank that has stopped stops nobody else.
    """
    i = parcel.path.index(comm.Get_rank())
    following = parcel.path[2 * i + 1 : 2 * i + 3]
    requests = [comm.isend(("parcel", parcel), k, DOWN) for k in following]
    try:
        for start in range(0, len(block), _PART_BYTES):
            part = block[start : start + _PART_BYTES]
            receive(part)
            requests += [comm.Isend(part, k, bulk_tag(parcel.version)) for k in following]
    finally:
        users = [_under_way(request) for request in requests]
        keep_until_sent(users)
    return users


def _under_way(request: Any) -> Callable[[], bool]:
    return lambda: not request.Test()


def bulk_tag(version: int) -> int:
    """MPI tag of the bytes of a version: what comes late of one that was given up is not taken for a newer one's."""
    return BULK + version % _VERSIONS


_unsent: list[Callable[[], bool]] = []
_unsent_lock = threading.Lock()


def keep_until_sent(users: list[Callable[[], bool]]) -> bool:
    """MPI reads the memory until then, whatever becomes of those who sent it. True if nothing is under way now."""
    with _unsent_lock:
        _unsent[:] = [needs for needs in _unsent + users if needs()]
        return not _unsent


class _StalledError(Exception):
    """The rank that should pass on an update stands still."""


class Relay:
    """The rank that passes on what comes for the workers of its machine; a thread, which sleeps as a rule.

    Args:
        comm: of the scheme's own.
        root: the sender's rank.
        workers: indices of those on this machine.
    """

    def __init__(self, comm: Any, root: int, workers: list[int], who: str):
        self.hub = Hub(workers, who, slow=True)
        self._comm, self._root = comm, root
        self._layouts: dict[int, Layout] = {}
        self._newest: dict[int, int] = {}  # by worker: version
        self._pending: list[Any] = []
        self._stop = threading.Event()
        self.hub.open()
        self._tell([Event("up", -1)])
        self._thread = threading.Thread(target=self._run, daemon=True, name="mpi_util weight sync: relay")
        self._thread.start()
        atexit.register(self.close)  # before MPI ends

    def _run(self) -> None:
        from mpi4py import MPI

        status, last = MPI.Status(), 0.0
        while not self._stop.is_set():
            message = self._comm.improbe(MPI.ANY_SOURCE, DOWN, status)
            if message:
                source = status.source
                self._handle(message.recv(), source)
                last = time.perf_counter()
            self._answer_pings()
            quiet_s = time.perf_counter() - last
            pause = _BRISK_S if quiet_s < _BUSY_S else _PAUSE_S if quiet_s < _IDLE_S else _IDLE_PAUSE_S
            self._tell([event for event in self.hub.poll(0 if message else pause) if event.kind != "new"])
        self.hub.close()

    def _handle(self, message: tuple[Any, ...], source: int) -> None:
        if message[0] == "stop":
            self._stop.set()
        else:
            self._take(message[1], source)

    def _answer_pings(self) -> None:
        while ping := self._comm.improbe(self._root, PING):
            ping.recv()
            self.hub.check_alive()
            self._tell([Event("pong", -1)])

    def _receive(self, part: np.ndarray, source: int, version: int) -> None:
        request, end = self._comm.Irecv(part, source, bulk_tag(version)), time.perf_counter() + _STALLED_S

        def over() -> bool:
            self._answer_pings()
            return bool(request.Test()) or self._stop.is_set() or time.perf_counter() > end

        wait_until(over)
        if not request.Test():
            request.Cancel()
            request.Wait()
            raise _StalledError

    def _take(self, parcel: Parcel, source: int) -> None:
        self._layouts |= parcel.layouts
        here = [worker for worker in parcel.workers if worker in self.hub.workers]
        mine = [worker for worker in here if parcel.version > self._newest.get(worker, 0)]  # paths differ in length
        receive = partial(self._receive, source=source, version=parcel.version)

        users: list[Callable[[], bool]] = []
        begun = False

        def fill(block: np.ndarray) -> int:
            nonlocal begun
            begun = True
            users.extend(pass_on(self._comm, parcel, block, receive))
            if checksum(block) != parcel.checksum:
                raise WeightsError(f"version {parcel.version} came with bytes that are not its own")
            return parcel.checksum

        try:
            self.hub.publish(mine, parcel.version, self._layouts[here[0]], fill).users += users
            self._newest |= dict.fromkeys(mine, parcel.version)
        except _StalledError:
            return  # the sender will notice, and send it on another path
        except Exception:
            text = traceback.format_exc()
            if not begun:  # no memory for the bytes; the others are to get them
                with contextlib.suppress(_StalledError):
                    pass_on(self._comm, parcel, np.empty(parcel.nbytes, np.uint8), receive)
            self._tell([Event("error", worker, parcel.version, text) for worker in mine])

    def _tell(self, events: list[Event]) -> None:
        self._pending = [request for request in self._pending if not request.Test()]
        self._pending += [self._comm.isend(tuple(event), self._root, UP) for event in events]

    def close(self) -> None:
        """This rank ends: its machine gets nothing any more, and the sender is told so."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join(_STOP_S)
            why = "the rank that passed on the weights to its machine has ended"
            self._tell([Event("left", worker, 0, why) for worker in self.hub.workers])
