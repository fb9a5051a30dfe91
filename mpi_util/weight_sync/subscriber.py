"""A worker's connection to a publisher: receives where each update is, reads it there, and answers."""

import collections
import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..errors import UsageError, WorkerLeftError
from ..host.sections import Reader
from ..host.segments import Ticket
from .connection import Address, Connection, Deadline, Kind
from .layout import Layout


class Update(NamedTuple):
    """Where a version is.

    Attributes:
        live: serial numbers of all sections that the publisher has.
    """

    version: int
    ticket: Ticket
    live: tuple[int, ...]


class Subscriber:
    """Connects to the publisher at `address`.

    Attributes:
        stopped: True if no more updates come: this side or the sender has shut down.

    Raises:
        WorkerLeftError: there is no publisher.
    """

    def __init__(self, address: Address, worker: int, name: str):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address.name)
            self._connection = Connection(sock, wakeup=True)
            self._connection.send_hello(address.key, worker, name)
        except OSError as error:
            sock.close()
            raise WorkerLeftError(f"worker {worker} finds no sender of {name}: it has ended ({error})") from None
        self._name = name
        self._reader = Reader()
        self._updates: collections.deque[Update] = collections.deque()
        self._welcome: Layout | None = None
        self.stopped = False

    def layout(self, deadline: Deadline) -> Layout | None:
        """What the sender's weights look like; None if the sender is not ready in time.

        Raises:
            UsageError: the publisher refuses this worker. WorkerLeftError: the sender has ended.
        """
        while self._welcome is None and not self.stopped:
            self._receive(deadline.left)
            if deadline.over:
                break
        return self._welcome

    def next(self, deadline: Deadline, newest: bool) -> Update | None:
        """The next update, or the newest that is there; None if none comes in time, or ever (`stopped`).

        Raises:
            WorkerLeftError: the sender has died.
        """
        while not self._updates and not self.stopped:
            self._receive(deadline.left)
            if deadline.over:
                break
        if newest and self._updates and not self.stopped:
            with contextlib.suppress(WorkerLeftError):  # the next call raises it
                self._receive(0)
        while newest and len(self._updates) > 1:
            self._updates.popleft()
        return self._updates.popleft() if self._updates else None

    def _receive(self, timeout: float) -> None:
        try:
            messages = self._connection.receive(timeout)
        except EOFError:
            if self.stopped:
                return
            raise WorkerLeftError(f"the sender of {self._name} has ended without shutdown()") from None
        for kind, *content in messages:
            if kind is Kind.UPDATE:
                version, ticket, live = content
                self._updates.append(Update(version, Ticket(*ticket), live))
            elif kind is Kind.WELCOME:
                self._welcome = content[0]
            elif kind is Kind.REFUSED:
                raise UsageError(content[0])
            elif self._welcome is None:
                raise WorkerLeftError(f"the sender of {self._name} has shut down")
            else:
                self.stopped = True

    @contextlib.contextmanager
    def reading(self, update: Update, discard: bool = False) -> Iterator[tuple[int, int, np.ndarray]]:
        """(version, checksum, block) of an update, or of a newer one in its place. Arguments as `Reader.reading`."""
        self._reader.keep(update.live)
        with self._reader.reading(update.ticket, discard) as content:
            yield content

    def answer(self, kind: Kind, version: int = 0, text: str = "") -> None:
        """Sends ACK, ERROR or BYE."""
        with contextlib.suppress(OSError):  # the sender has ended; the next `next` raises it
            self._connection.send(kind, version, text)

    def close(self) -> None:
        """Leaves in order. Wakes a thread that waits in `next`."""
        self.answer(Kind.BYE)
        self.stopped = True
        self._connection.close()

    def release(self) -> None:
        """Gives the memory back, once nothing reads it."""
        self._reader.keep(())
