"""In a receiver's process: the connection to the publisher, and where the newest update is."""

import contextlib
import socket
import struct
from typing import Any, NamedTuple

from mpi_util.errors import UsageError, WorkerLeftError
from mpi_util.host.segments import Ticket

from .connection import Address, Connection, Deadline, Kind, ProtocolError, new_socket
from .sections import Content, Reader
from .worker import left

_CONNECT_S = 10  # for a process that listens at the address and accepts no connection
_MESSAGES = (Kind.UPDATE, Kind.REFUSED, Kind.STOP)


class Update(NamedTuple):
    """Where a version is."""

    version: int
    ticket: Ticket
    live: tuple[int, ...]  # serial numbers of all sections that the publisher has


class Subscriber:
    """Connects to the publisher at `address`. WorkerLeftError: no process listens there, or another process does.

    Args: link: the `SenderLink` to a publisher on another machine. It is both the connection and the reader.
    """

    def __init__(self, address: Address, worker: int, name: str, link: Any = None):
        self._worker, self._name = worker, name
        self._newest: Update | None = None
        self.stopped = False  # True if no more updates come: this side or the sender has shut down
        self._reader = link or Reader()
        self._connection = link or self._connect(address)
        self._connection.send(Kind.HELLO, address.key, worker, name)

    def _connect(self, address: Address) -> Connection:
        sock = new_socket()
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _CONNECT_S, 0))
            sock.connect(address.name)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
            connection = Connection(sock)
            if connection.pid != address.pid:
                raise PermissionError(f"process {connection.pid} has taken its address")
            connection.patient = True
            return connection
        except OSError as error:
            sock.close()
            raise left(f"worker {self._worker} finds no sender of {self._name}: it has ended ({error})") from None

    def next(self, deadline: Deadline) -> Update | None:
        """The newest update that was not returned yet; None if none comes in time, or ever (`stopped`).

        Raises: UsageError: the publisher refuses this worker. WorkerLeftError: the sender has died, or is no sender.
        """
        while self._newest is None and not self.stopped:
            self._receive(deadline.left)
            if not deadline.left:
                break
        update, self._newest = self._newest, None
        return update

    def _receive(self, timeout: float) -> None:
        try:
            messages = self._connection.receive(timeout, _MESSAGES)
        except (EOFError, OSError):
            if self.stopped:
                return
            raise left(f"the sender of {self._name} has ended without shutdown()") from None
        except ProtocolError as error:
            self._connection.close()
            raise WorkerLeftError(f"worker {self._worker}: the sender of {self._name} sent {error}") from None
        for kind, *content in messages:
            if kind is Kind.UPDATE:
                version, fd, serial, size, live = content
                self._newest = Update(version, Ticket(self._connection.pid, fd, serial, size), live)
            elif kind is Kind.REFUSED:
                raise UsageError(content[0])
            else:
                self.stopped = True

    def reading(self, update: Update, discard: bool = False) -> contextlib.AbstractContextManager[Content]:
        """The content of an update, or of a newer one that has replaced it. See `Reader.reading`."""
        self._reader.keep(update.live)
        return self._reader.reading(update.ticket, discard)

    def answer(self, kind: Kind, *content: object) -> None:
        with contextlib.suppress(OSError):  # the sender has ended; the next `next` raises it
            self._connection.send(kind, *content)

    def close(self) -> None:
        """Leaves in order. Wakes a thread that waits in `next`."""
        self.answer(Kind.BYE)
        self.stopped = True
        self._connection.close()

    def release(self) -> None:  # the memory, once nothing reads it
        self._reader.keep(())
