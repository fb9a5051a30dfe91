"""A worker's connection to a publisher: receives where the newest update is, reads it there, and answers."""

import contextlib
from typing import NamedTuple

from ..errors import UsageError, WorkerLeftError
from ..host.sections import Content, Reader
from ..host.segments import Ticket
from .connection import FRAME_BYTES, Address, Connection, Deadline, Kind, new_socket

_TEXT = FRAME_BYTES // 5  # characters


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
        sock = new_socket()
        try:
            sock.connect(address.name)
            self._connection = Connection(sock, wakeup=True)
            self._connection.send_hello(address.key, worker, name)
        except OSError as error:
            sock.close()
            raise WorkerLeftError(f"worker {worker} finds no sender of {name}: it has ended ({error})") from None
        self._name = name
        self._reader = Reader()
        self._newest: Update | None = None
        self.stopped = False

    def next(self, deadline: Deadline) -> Update | None:
        """The newest update that was not returned yet; None if none comes in time, or ever (`stopped`).

        Raises:
            UsageError: the publisher refuses this worker. WorkerLeftError: the sender has died.
        """
        while self._newest is None and not self.stopped:
            self._receive(deadline.left)
            if deadline.over:
                break
        update, self._newest = self._newest, None
        return update

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
                self._newest = Update(version, Ticket(*ticket), live)
            elif kind is Kind.REFUSED:
                raise UsageError(content[0])
            else:
                self.stopped = True

    def reading(self, update: Update, discard: bool = False) -> contextlib.AbstractContextManager[Content]:
        """An update, or a newer one in its place. See `Reader.reading`."""
        self._reader.keep(update.live)
        return self._reader.reading(update.ticket, discard)

    def answer(self, kind: Kind, version: int = 0, text: str = "") -> None:
        """Sends ACK, ERROR or BYE."""
        with contextlib.suppress(OSError):  # the sender has ended; the next `next` raises it
            self._connection.send(kind, version, text[-_TEXT:])

    def close(self) -> None:
        """Leaves in order. Wakes a thread that waits in `next`."""
        self.answer(Kind.BYE)
        self.stopped = True
        self._connection.close()

    def release(self) -> None:
        """Gives the memory back, once nothing reads it."""
        self._reader.keep(())
