"""Updates for other machines. One rank of each, the relay, receives them, passes them on, and publishes them there."""

import atexit
import contextlib
import itertools
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi_util.collectives.transport import parts, successors

from mpi_util.collectives.channel import Channel
from mpi_util.errors import SyncTimeoutError
from mpi_util.host.waiting import wait_until

from .connection import Deadline
from .publisher import Publisher
from .worker import Event, Report, Worker

# Tags of a scheme: addresses; from the sender or another relay; to the sender; "do not wait for this rank"; and from
# BULK on the bytes of updates, each with a tag of its own.
ADDRESS, DOWN, UP, LEFT, BULK = range(5)
_LINES = 1 << 10  # of schemes that exist at once; every MPI has 32767 tags, those in use some 2**28 and more
_STALLED_S = 60.0  # a rank that sends no part for so long does not respond
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


class Lines:
    """What the schemes of one communicator share: a duplicate of it, as MPICH has room for some 2,000 only.

    Collective, as is `next`.
    """

    def __init__(self, channel: Channel):
        from mpi4py import MPI

        self.comm, request = channel.comm.Idup()
        wait_until(request.Test)
        most: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self._width = (most + 1) // _LINES
        self._numbers = itertools.count(1)

    def next(self, sender: int) -> "Line":
        """The next scheme's."""
        number = next(self._numbers)
        return Line(self.comm, sender, number, (1 + number % (_LINES - 1)) * self._width, self._width)


class Line:
    """The messages of one scheme, separated from those of others by their tags."""

    def __init__(self, comm: Any, sender: int, number: int, first: int, tags: int):
        self._comm, self.sender, self._number, self._first = comm, sender, number, first
        self.rank: int = comm.Get_rank()
        self.bulk_tags = itertools.cycle(range(BULK, tags))
        self._pid = os.getpid()
        atexit.register(self.close)

    def close(self, tell: bool = True) -> None:
        """This rank has done with the scheme. Args: tell: the sender, which may wait for it to connect."""
        atexit.unregister(self.close)
        if tell and self.rank != self.sender and os.getpid() == self._pid:  # a process forked from a rank is none
            self.post(None, self.sender, LEFT)

    def post(self, thing: Any, rank: int, tag: int) -> Any:
        """Sends an object, which is pickled. Nobody needs to wait for it."""
        return keep(self._comm.isend((self._number, thing), rank, self._first + tag))

    def post_bytes(self, part: np.ndarray, rank: int, tag: int) -> Any:
        """Sends bytes; they must stay as they are until the request is done."""
        return keep(self._comm.Isend(part, rank, self._first + tag))

    def take(self, tag: int, source: int | None = None) -> tuple[int, Any] | None:
        """(rank, object) of a message that is there; from any rank if `source` is None."""
        from mpi4py import MPI

        status = MPI.Status()
        while message := self._comm.improbe(MPI.ANY_SOURCE if source is None else source, self._first + tag, status):
            number, thing = message.recv()
            if number == self._number:  # else it is of a scheme that has ended: tags are used again
                return status.source, thing
        return None

    def receive_bytes(self, part: np.ndarray, rank: int, tag: int) -> Any:
        """The request to receive bytes."""
        return self._comm.Irecv(part, rank, self._first + tag)


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

    def __init__(self, line: Line, header: Header):
        self._line, self._tag = line, header.tag
        next_ones = successors(header.path.index(line.rank), len(header.path))
        self._children = [header.path[i] for i in next_ones]
        self._requests = [line.post(header, child, DOWN) for child in self._children]

    def send(self, block: np.ndarray, arrive: Callable[[np.ndarray], None] = lambda part: None) -> None:
        """Sends each part of the block after `arrive` has returned: then it is there."""
        for part in parts(block):
            arrive(part)
            self._requests += [self._line.post_bytes(part, child, self._tag) for child in self._children]

    def busy(self) -> bool:
        """True while the parts must stay as they are."""
        return in_flight(self._requests)


class Relay:
    """The rank that passes on updates to its machine's `workers` and to other relays; a thread, usually asleep."""

    def __init__(self, line: Line, workers: list[int], name: str):
        self.publisher = Publisher({index: Worker(index) for index in workers}, name, slow=True)
        self._line = line
        self._stop = threading.Event()
        self.publisher.open()
        self._report(None)
        self._thread = threading.Thread(target=self._run, daemon=True, name="mpi_util weight sync: relay")
        self._thread.start()
        atexit.register(self.close)  # before MPI ends

    def _run(self) -> None:
        last = 0.0
        while not self._stop.is_set():
            if message := self._line.take(DOWN):
                source, header = message
                self._stop.set() if header is None else self._take(header, source)
                last = time.perf_counter()
            quiet_s = time.perf_counter() - last
            pause = next(pause for limit, pause in _PAUSES if quiet_s < limit)
            for report in self.publisher.poll(0 if message else pause):
                if report.event is not Event.CONNECTED:  # the sender sends without knowing of it
                    self._report(report)
        self.publisher.close()

    def _report(self, report: Report | None) -> None:
        """None: this relay is ready."""
        self._line.post(report, self._line.sender, UP)

    def _take(self, header: Header, source: int) -> None:
        """Receives an update, passes it on, and publishes it; the sender gets the error if that fails."""
        here = [worker for index, worker in self.publisher.workers.items() if index in header.workers]
        mine = [worker for worker in here if header.version > worker.sent]  # what was sent earlier may come later
        forwarding = Forwarding(self._line, header)
        fill = partial(forwarding.send, arrive=partial(self._receive, source=source, tag=header.tag))
        try:
            section = self.publisher.publish(mine, header.version, header.nbytes, header.layout, fill)
            section.users.append(forwarding.busy)
        except Exception as error:
            text = traceback.format_exc()
            if isinstance(error, OSError):  # no memory for it here; the others are to get it
                with contextlib.suppress(SyncTimeoutError):
                    fill(np.empty(header.nbytes, np.uint8))
            for worker in [] if self._stop.is_set() else mine:
                self._report(Report(Event.ERROR, worker.index, header.version, text))

    def _receive(self, part: np.ndarray, source: int, tag: int) -> None:
        request, deadline = self._line.receive_bytes(part, source, tag), Deadline(_STALLED_S)
        wait_until(lambda: self._stop.is_set() or request.Test() or not deadline.left)
        if not request.Test():
            request.Cancel()
            request.Wait()
            raise SyncTimeoutError(f"rank {source} does not respond")

    def close(self) -> None:
        """This rank ends: the sender learns that its machine gets nothing any more."""
        if self._thread.is_alive():
            atexit.unregister(self.close)
            self._stop.set()
            self._thread.join(_STOP_S)
            for index in self.publisher.workers:
                self._report(Report(Event.DIED, index, 0, "the relay of its machine has ended"))
