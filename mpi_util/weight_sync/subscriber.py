"""A worker's connection to a publisher: receives where the newest update is, reads it there, and answers."""

import contextlib
import hmac
import os
import secrets
import socket
import struct
from typing import NamedTuple

from ..errors import UsageError, WorkerLeftError
from ..host.sections import Content, Reader
from ..host.segments import Ticket
from .connection import Address, Connection, Deadline, Kind, ProtocolError, new_socket, proof

_CONNECT_S = 10  # for whoever listens at the address and accepts nobody


class Update(NamedTuple):
    """Where a version is."""

    version: int
    ticket: Ticket
    live: tuple[int, ...]  # serial numbers of all sections that the publisher has


class Subscriber:
    """Connects to the publisher at `address`. WorkerLeftError: there is none, or another process has taken its place.

    Attributes:
        proven: both ends have shown that they have the key; only now do updates count.
        stopped: True if no more updates come: this side or the sender has shut down.
    """

    def __init__(self, address: Address, worker: int, name: str):
        self._address, self._worker, self._name = address, worker, name
        self._nonce = secrets.token_bytes(32)
        self._reader = Reader()
        self._newest: Update | None = None
        self.proven = self.stopped = False
        sock = new_socket()
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _CONNECT_S, 0))
            sock.connect(address.name)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
            self._connection = Connection(sock)
            if self._connection.pid != address.pid:
                raise PermissionError(f"process {self._connection.pid} has taken its address")
            self._connection.send(Kind.HELLO, self._nonce, worker, name)
        except OSError as error:
            sock.close()
            raise WorkerLeftError(f"worker {worker} finds no sender of {name}: it has ended ({error})") from None

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
        expected = (Kind.UPDATE, Kind.REFUSED, Kind.STOP) if self.proven else (Kind.CHALLENGE,)
        try:
            messages = self._connection.receive(timeout, expected)
            if messages and not self.proven:
                return self._prove(*messages[0][1:])
        except (EOFError, OSError):
            if self.stopped:
                return
            raise WorkerLeftError(f"the sender of {self._name} has ended without shutdown()") from None
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

    def _prove(self, nonce: bytes, theirs: bytes) -> None:
        known = (self._nonce, nonce), os.getpid(), self._worker, self._name
        if not hmac.compare_digest(theirs, proof(self._address, b"publisher", *known)):
            raise ProtocolError("a proof that is not made with the key of this scheme")
        self._connection.send_proof(proof(self._address, b"subscriber", *known))
        self.proven = True

    def reading(self, update: Update, discard: bool = False) -> contextlib.AbstractContextManager[Content]:
        """An update, or a newer one in its place. See `Reader.reading`."""
        self._reader.keep(update.live)
        return self._reader.reading(update.ticket, discard)

    def answer(self, kind: Kind, *content: object) -> None:
        """Sends ACK, ERROR or BYE, once it has proven who it is."""
        with contextlib.suppress(OSError):  # the sender has ended; the next `next` raises it
            if self.proven:
                self._connection.send(kind, *content)

    def close(self) -> None:
        """Leaves in order. Wakes a thread that waits in `next`."""
        self.answer(Kind.BYE)
        self.stopped = True
        self._connection.close()

    def release(self) -> None:
        """Gives the memory back, once nothing reads it."""
        self._reader.keep(())
