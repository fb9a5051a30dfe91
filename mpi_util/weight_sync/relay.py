"""Updates for other machines. One rank of each, the relay, receives them, passes them on, and publishes them there."""

import atexit
import contextlib
import math
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..collectives.transport import parts, successors
from ..errors import SyncTimeoutError
from ..host.waiting import wait_until
from .connection import Deadline
from .publisher import Publisher
from .worker import Event, Report, Worker

# MPI tags: addresses; from the sender or another relay; "are you alive?"; to the sender; this rank ends; bytes
ADDRESS, DOWN, PING, UP, LEFT, BULK = range(1, 7)
TAGS = 1 << 14  # from BULK on; every MPI has 32767
_STALLED_S = 10.0  # a rank that sends no part for so long does not respond
_STOP_S = 2.0
# Pauses between two looks for messages, by the time since the last: more may follow soon.
_PAUSES = (20e-3, 1e-4), (1.0, 2e-3), (math.inf, 6e-3)

_in_flight: list[Any] = []  # requests of all schemes: MPI reads their memory until they are done
_testing = threading.Lock()  # MPI forbids two threads to test one request


def keep(request: Any) -> Any:
    """Returns a request, and keeps what it sends until it is done: no one needs to wait for it."""
    in_flight(_in_flight, request)
    return request


def in_flight(requests: list[Any] = _in_flight, *new: Any) -> bool:
    """True if some of these requests are not done; forgets the others."""
    with _testing:
        requests[:] = [*(each for each in requests if not each.Test()), *new]
        return bool(requests)


class Header(NamedTuple):
    """Goes ahead of the bytes of an update."""

    tag: int  # of the bytes; late ones of an update that was given up are not taken for another's
    version: int
    nbytes: int
    layout: bytes
    workers: list[int]  # that get it
    path: list[int]  # ranks that pass it on, the sender first


class Forwarding:
    """Sends an update to this rank's children in a binomial tree, part by part, without waiting for any of them."""

    def __init__(self, comm: Any, header: Header):
        self._comm, self._tag = comm, header.tag
        next_ones = successors(header.path.index(comm.Get_rank()), len(header.path))
        self._children = [header.path[i] for i in next_ones]
        self._requests = [keep(comm.isend(header, child, DOWN)) for child in self._children]

    def send(self, block: np.ndarray, arrive: Callable[[np.ndarray], None] = lambda part: None) -> None:
        """Sends each part of the block after `arrive` has returned: then it is there."""
        for part in parts(block):
            arrive(part)
            self._requests += [keep(self._comm.Isend(part, child, self._tag)) for child in self._children]

    def busy(self) -> bool:
        """True while the parts must stay as they are."""
        return in_flight(self._requests)


class Relay:
    """The rank that passes on updates to its machine's `workers` and to other relays; a thread, usually asleep."""

    def __init__(self, comm: Any, root: int, workers: list[int], name: str):
        self.publisher = Publisher({index: Worker(index) for index in workers}, name, slow=True)
        self._comm, self._root = comm, root
        self._stop = threading.Event()
        self.publisher.open()
        self._report(None)
        self._thread = threading.Thread(target=self._run, daemon=True, name="mpi_util weight sync: relay")
        self._thread.start()
        atexit.register(self.close)  # before MPI ends

    def _run(self) -> None:
        from mpi4py import MPI

        status, last = MPI.Status(), 0.0
        while not self._stopped():
            message = self._comm.improbe(MPI.ANY_SOURCE, DOWN, status)
            if message:
                source, header = status.source, message.recv()
                self._stop.set() if header is None else self._take(header, source)
                last = time.perf_counter()
            quiet_s = time.perf_counter() - last
            pause = next(pause for limit, pause in _PAUSES if quiet_s < limit)
            for report in self.publisher.poll(0 if message else pause):
                if report.event is not Event.CONNECTED:  # the sender sends without knowing of it
                    self._report(report)
        self.publisher.close()

    def _report(self, report: Report | None) -> None:
        """None: this relay is alive."""
        keep(self._comm.isend((self._comm.Get_rank(), report), self._root, UP))

    def _stopped(self) -> bool:
        """True when this relay is to end. Often asked, so it answers the sender's pings."""
        while ping := self._comm.improbe(self._root, PING):
            ping.recv()
            self._report(None)
        return self._stop.is_set()

    def _take(self, header: Header, source: int) -> None:
        """Receives an update, passes it on, and publishes it; the sender gets the error if that fails."""
        here = [worker for index, worker in self.publisher.workers.items() if index in header.workers]
        mine = [worker for worker in here if header.version > worker.sent]  # paths differ in length
        forwarding = Forwarding(self._comm, header)
        fill = partial(forwarding.send, arrive=partial(self._receive, source=source, tag=header.tag))
        try:
            section = self.publisher.publish(mine, header.version, header.nbytes, header.layout, fill)
            section.users.append(forwarding.busy)
        except SyncTimeoutError:
            return  # the sender will notice, and send it on another path
        except Exception as error:
            text = traceback.format_exc()
            if isinstance(error, OSError):  # no memory for it here; the others are to get it
                with contextlib.suppress(SyncTimeoutError):
                    fill(np.empty(header.nbytes, np.uint8))
            for worker in mine:
                self._report(Report(Event.ERROR, worker.index, header.version, text))

    def _receive(self, part: np.ndarray, source: int, tag: int) -> None:
        request, deadline = self._comm.Irecv(part, source, tag), Deadline(_STALLED_S)
        wait_until(lambda: self._stopped() or request.Test() or not deadline.left)
        if not request.Test():
            request.Cancel()
            request.Wait()
            raise SyncTimeoutError(f"rank {source} does not respond")

    def close(self) -> None:
        """This rank ends: the sender learns that its machine gets nothing any more."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join(_STOP_S)
            for index in self.publisher.workers:
                self._report(Report(Event.DIED, index, 0, "the relay of its machine has ended"))
