"""How weights get from the sender's machine to others: one rank of each passes them on, along a tree of machines."""

import atexit
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import WeightsError
from ..waiting import wait_until
from .bits import checksum
from .hub import Event, Hub
from .layout import Layout

# MPI tags: addresses; what comes from the sender; its bytes; whether this rank lives; what workers tell
CARD, DOWN, BULK, PING, UP = range(1, 6)
_PART_BYTES = 1 << 22  # passed on while the next part comes
_PAUSE_S = 2e-3  # between two looks for what comes from another machine, at most
_BUSY_S = 20e-3  # after something came, more may follow soon
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
    for start in range(0, len(block), _PART_BYTES):
        part = block[start : start + _PART_BYTES]
        receive(part)
        requests += [comm.Isend(part, k, BULK) for k in following]
    return [lambda request=request: not request.Test() for request in requests]


class Relay:
    """The rank that passes on what comes for the workers of its machine; a thread, which sleeps as a rule.

    Args:
        comm: of the scheme's own.
        root: the sender's rank.
        workers: indices of those on this machine.
    """

    def __init__(self, comm: Any, root: int, workers: list[int], who: str):
        self.hub = Hub(workers, who)
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
            brisk = time.perf_counter() - last < _BUSY_S
            self._tell(self.hub.poll(0 if message else _BRISK_S if brisk else _PAUSE_S))
        self.hub.close()

    def _handle(self, message: tuple, source: int) -> None:
        if message[0] == "stop":
            self._stop.set()
        else:
            self._take(message[1], source)

    def _answer_pings(self) -> None:
        while ping := self._comm.improbe(self._root, PING):
            ping.recv()
            self.hub.check_alive()
            self._tell([Event("pong", -1)])

    def _receive(self, part: np.ndarray, source: int) -> None:
        request = self._comm.Irecv(part, source, BULK)
        wait_until(lambda: self._answer_pings() or request.Test())

    def _take(self, parcel: Parcel, source: int) -> None:
        self._layouts |= parcel.layouts
        here, users = [worker for worker in parcel.workers if worker in self.hub.workers], []
        mine = [worker for worker in here if parcel.version > self._newest.get(worker, 0)]  # paths differ in length
        self._newest |= dict.fromkeys(mine, parcel.version)

        def fill(block: np.ndarray) -> int:
            users.extend(pass_on(self._comm, parcel, block, lambda part: self._receive(part, source)))
            if checksum(block) != parcel.checksum:
                raise WeightsError(f"version {parcel.version} came with bytes that are not its own")
            return parcel.checksum

        try:
            self.hub.publish(mine, parcel.version, self._layouts[here[0]], fill).users += users
        except Exception:
            text = traceback.format_exc()
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
