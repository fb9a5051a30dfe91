"""The messages of a scheme, and the socket between two processes of one machine; used by both sides.

Nothing is unpickled: a message has a header, fixed items, and a text or numbers, each of a length that is checked.
Before a byte is sent or read each end asks the kernel whose process the other one is: both must be of one user, and a
subscriber sends its key, in HELLO, only to the process that made it.

The socket is an abstract one that keeps messages apart (SEQPACKET). Each end also holds a pidfd of the other process.
By it the kernel reports at once that the process has died, even if one forked from it holds the socket open.
"""

import contextlib
import enum
import math
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

from mpi_util.errors import WorkerLeftError
from mpi_util.ranks.identity import Role
from mpi_util.ranks.state import state

FRAME_BYTES = 1 << 16
_HEADER = struct.Struct("=BI")  # number of the kind, bytes that follow
_TEXT_BYTES = FRAME_BYTES - 256
_MOST = 256  # messages received at once, so that a peer that never stops sending delays no other
_UNREAD = 64  # updates to one subscriber; a socket holds some 270


class Kind(enum.Enum):
    """Number of a message; its fixed items, as in `struct`; what follows them: "s" (text), "q" (numbers) or nothing.

    The last three travel only over MPI, where an UPDATE has the size of its weights instead of fd and serial.
    """

    HELLO = 1, "32sq", "s"  # subscriber: key, worker, name of the model
    REFUSED = 2, "", "s"  # publisher: why
    UPDATE = 3, "4q", "q"  # publisher: version, its section's fd, serial, size; serials of all sections
    STOP = 4, "", ""  # publisher: shuts down
    ACK = 5, "q", ""  # subscriber: version
    ERROR = 6, "qq", "s"  # subscriber: version that failed (0: the first), version that the model has, traceback
    BYE = 7, "", ""  # subscriber: shuts down
    ADDRESS = 8, "32sq", "s"  # publisher: its `Address`
    FETCH = 9, "", ""  # subscriber: asks for the next update
    ENDED = 10, "", ""  # any rank: its program ends

    def __init__(self, number: int, items: str, rest: str):
        self.number, self.items, self.rest = number, struct.Struct("=" + items), rest


_KINDS = {kind.number: kind for kind in Kind}


class ProtocolError(Exception):
    """The other end sent what it should not."""


class Address(NamedTuple):
    """Where the process `pid` listens as a publisher. It accepts only a process that has the key."""

    key: bytes
    pid: int
    name: str

    def __repr__(self) -> str:  # without the key
        return f"Address({self.name!r}, pid={self.pid})"


def left(text: str) -> WorkerLeftError:
    """The error of a side whose other side has ended. In a job the parent of mpi_fork reports that first."""
    error = WorkerLeftError(text)
    error.silent = bool(state(Role).job)
    return error


class Deadline:
    """`timeout` seconds from now; None: never."""

    def __init__(self, timeout: float | None):
        self.timeout = timeout
        self._end = math.inf if timeout is None else time.perf_counter() + timeout

    @property
    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self._end - time.perf_counter())


def frame(kind: Kind, *items: Any, text_bytes: int = _TEXT_BYTES) -> bytes:
    """A message as it is sent, at most `FRAME_BYTES`. Args: text_bytes: only the end of a longer text is sent."""
    rest = b""
    if kind.rest:
        *items, last = items  # type: ignore[assignment]
        is_text = kind.rest == "s"
        rest = last.encode(errors="replace")[-text_bytes:] if is_text else struct.pack(f"={len(last)}q", *last)
    return _HEADER.pack(kind.number, kind.items.size + len(rest)) + kind.items.pack(*items) + rest


def parse(data: bytes, expected: Collection[Kind]) -> tuple[Any, ...]:
    """(kind, items ...) of what `frame` made. ProtocolError: it is no whole message of these kinds."""
    if not _HEADER.size <= len(data) <= FRAME_BYTES:
        raise ProtocolError(f"{len(data)} bytes that are no message")
    number, length = _HEADER.unpack_from(data)
    kind = _KINDS.get(number)
    if kind not in expected or kind is None:
        raise ProtocolError(f"{kind.name if kind else f'an unknown message ({number})'} out of turn")
    extra = length - kind.items.size
    fits = extra >= 0 and extra % struct.calcsize(kind.rest) == 0 if kind.rest else extra == 0
    if length != len(data) - _HEADER.size or not fits:
        raise ProtocolError(f"{kind.name} of a wrong length")
    items = kind.items.unpack_from(data, _HEADER.size)
    if not kind.rest:
        return kind, *items
    rest = data[len(data) - extra :]
    return kind, *items, rest.decode(errors="replace") if kind.rest == "s" else struct.unpack(f"={extra // 8}q", rest)


class Connection:
    """One end of a socket. Messages arrive whole and in order.

    Attributes:
        fds: descriptors that are readable when there is something to receive: the socket, and the other's pidfd.
        pid: the other process. PermissionError: it belongs to another user.
        patient: True on a subscriber's end, where `send` waits for room.
    """

    patient = _closed = False

    def __init__(self, sock: socket.socket):
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, user, _ = struct.unpack("3i", credentials)
        if user != os.geteuid():
            sock.close()
            raise PermissionError(f"process {self.pid} belongs to user {user}, not to {os.geteuid()}")
        self._sock = sock
        self.fds: tuple[int, ...] = sock.fileno(), os.pidfd_open(self.pid)
        # closed when nothing refers to this end any more: until then a thread may sleep on them
        for close in (sock.close, partial(os.close, self.fds[1])):
            weakref.finalize(self, close).atexit = False

    def send(self, kind: Kind, *items: Any) -> None:
        """Sends a message. A subscriber waits for room, a publisher gets BlockingIOError. OSError: there is no peer."""
        self._sock.send(frame(kind, *items), 0 if self.patient else socket.MSG_DONTWAIT)

    def send_update(self, section: Any, live: list[int], unread: int) -> None:
        """Sends an update: where the weights are. Args: live: serials. unread: number of updates without an answer."""
        if unread >= _UNREAD:
            raise BlockingIOError
        self.send(Kind.UPDATE, section.version, *section.ticket[1:], live)  # the other end knows whose section it is

    def receive(self, timeout: float, expected: Collection[Kind], most: int = _MOST) -> list[tuple[Any, ...]]:
        """Waits up to `timeout` seconds for messages, and returns what is there, `most` of them: (kind, ...).

        Raises: EOFError: the other end has gone, and everything has been received. ProtocolError: see `parse`.
        """
        if timeout and not self._closed and not _readable(self.fds, timeout):
            return []
        if self._closed:
            raise EOFError
        ended = _readable(self.fds[1:], 0)  # asked first: what it has sent until then is there
        messages: list[tuple[Any, ...]] = []
        while len(messages) < most:
            try:
                data = self._sock.recv(FRAME_BYTES + 1, socket.MSG_DONTWAIT)  # one more: a longer one is noticed
            except ConnectionResetError:  # reported once, before what was sent until then
                continue
            except OSError as error:
                if isinstance(error, BlockingIOError) and not ended:
                    break
                data = b""
            if not data:
                if messages:
                    break
                raise EOFError
            messages.append(parse(data, expected))
        return messages

    def close(self) -> None:
        """Ends `receive` at the other end, and in a thread that waits in it here."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _readable(fds: tuple[int, ...], timeout: float) -> bool:
    """Sleeps until one of these can be read; False after `timeout` seconds."""
    # not multiprocessing.connection.wait, with which a `send` to two workers took a tenth longer
    sleeping = select.poll()  # one for each call, because two threads may sleep
    for fd in fds:
        sleeping.register(fd, select.POLLIN)
    return bool(sleeping.poll(timeout * 1e3 if timeout < 2e6 else None))
