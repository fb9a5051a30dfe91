"""Messages between two processes of one machine, over an abstract Unix socket that keeps them apart (SEQPACKET).

The kernel reports at once when the other process has died. A forked child would keep its parent's end open, so it
closes the sockets that it inherits.
"""

import contextlib
import enum
import math
import os
import pickle
import select
import socket
import struct
import time
import weakref
from typing import Any, NamedTuple

FRAME_BYTES = 1 << 16
_FD_BYTES = socket.CMSG_LEN(struct.calcsize("i"))
_READ_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)  # once: such an `|` takes microseconds
_inherited: Any = None  # sockets that a forked process has to close


class Kind(enum.Enum):
    """First item of a message, who sends it, and the items that follow."""

    HELLO = 0  # subscriber: key, worker, name of the model; its eventfd comes with it
    REFUSED = 1  # publisher: why
    UPDATE = 2  # publisher: version, ticket of its section, serial numbers of all sections
    STOP = 3  # publisher: shuts down
    ACK = 4  # subscriber: version
    ERROR = 5  # subscriber: version (0: not even the first could be applied), traceback
    BYE = 6  # subscriber: shuts down


class Address(NamedTuple):
    """Where a publisher listens. It accepts only a process that has the key."""

    name: str
    key: bytes


class Deadline:
    """`timeout` seconds from now; None: never."""

    def __init__(self, timeout: float | None):
        self.timeout = timeout
        self._end = math.inf if timeout is None else time.perf_counter() + timeout

    @property
    def left(self) -> float:
        """Seconds, at least 0; math.inf if there is no limit."""
        return max(0.0, self._end - time.perf_counter())

    @property
    def over(self) -> bool:
        """True if no time is left."""
        return time.perf_counter() >= self._end


def new_socket() -> socket.socket:
    """A socket without a place in the file system."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def close_in_forks(sock: socket.socket) -> socket.socket:
    """A process that is forked from this one closes its copy of the socket."""
    global _inherited
    if _inherited is None:
        _inherited = weakref.WeakSet()
        os.register_at_fork(after_in_child=_close_inherited)
    _inherited.add(sock)
    return sock


def _close_inherited() -> None:
    for sock in list(_inherited):
        sock.close()


def frame(kind: Kind, *content: Any) -> bytes:
    """A message as it is sent, at most `FRAME_BYTES`."""
    return pickle.dumps((kind.value, *content), pickle.HIGHEST_PROTOCOL)


class Connection:
    """One end of a socket. Messages arrive whole and in order.

    A subscriber sleeps on an eventfd instead of on its socket, and the publisher signals that after it has sent. A
    write to a socket wakes its reader on the writer's own core, so that several readers would run one after another
    while other cores are idle; sending to all and then waking them lets them run side by side.

    Args:
        wakeup: make an eventfd to sleep on, and send it with the first message.

    Attributes:
        fd: descriptor of the socket.
        peer_wakeup: the other end's eventfd, which comes with its first message; None if it has none.
    """

    def __init__(self, sock: socket.socket, wakeup: bool = False):
        self._sock = close_in_forks(sock)
        self.fd = sock.fileno()
        self.peer_wakeup: int | None = None
        self._wakeup = self._own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)) if wakeup else None

    def _own(self, fd: int) -> int:
        """Closed when nothing refers to this end any more: until then a thread may sleep on it."""
        weakref.finalize(self, os.close, fd).atexit = False
        return fd

    def send(self, kind: Kind, *content: Any) -> None:
        """Sends a message. A subscriber waits for room in the socket, a publisher does not.

        Raises:
            OSError: the other process has ended, or (BlockingIOError) is not reading.
        """
        self.send_frame(frame(kind, *content))
        self.wake()

    def send_frame(self, data: bytes) -> None:
        """Sends what `frame` made, which may go to several; the caller calls `wake`."""
        self._sock.send(data, socket.MSG_DONTWAIT if self._wakeup is None else 0)

    def send_hello(self, *content: Any) -> None:
        """Sends a subscriber's first message, with its eventfd."""
        socket.send_fds(self._sock, [frame(Kind.HELLO, *content)], [] if self._wakeup is None else [self._wakeup])

    def wake(self) -> None:
        """Wakes the other end."""
        if self.peer_wakeup is not None:
            os.eventfd_write(self.peer_wakeup, 1)

    def wait(self, timeout: float) -> bool:
        """Sleeps until there is something to receive, or the other end is closed; False after `timeout` seconds."""
        sleeping = select.poll()  # of this call: two threads may sleep
        sleeping.register(self.fd, select.POLLIN if self._wakeup is None else 0)  # 0: only its end
        if self._wakeup is not None:
            sleeping.register(self._wakeup, select.POLLIN)
        return bool(sleeping.poll(None if timeout == math.inf else timeout * 1e3))

    def receive(self, timeout: float) -> list[tuple[Any, ...]]:
        """Waits up to `timeout` seconds for messages, and returns all that are there: (kind, ...).

        Raises:
            EOFError: the other end is closed, and everything has been received.
        """
        if self._sock.fileno() < 0:
            raise EOFError
        if timeout and not self.wait(timeout):
            return []
        if self._wakeup is not None:
            with contextlib.suppress(BlockingIOError):  # the other end is closed
                os.eventfd_read(self._wakeup)
        messages: list[tuple[Any, ...]] = []
        while True:
            try:
                data = self._read()
            except BlockingIOError:
                return messages
            except ConnectionResetError:  # reported once, before what was sent until then
                continue
            except OSError:
                data = b""
            if not data and not messages:
                raise EOFError
            if not data:
                return messages
            kind, *content = pickle.loads(data)
            messages.append((Kind(kind), *content))

    def _read(self) -> bytes:
        if self._wakeup is not None or self.peer_wakeup is not None:
            return self._sock.recv(FRAME_BYTES, socket.MSG_DONTWAIT)
        # not socket.recv_fds, which ignores its flags
        data, received, *_ = self._sock.recvmsg(FRAME_BYTES, _FD_BYTES, _READ_FLAGS)
        for *_, descriptor in received:
            self.peer_wakeup = self._own(*struct.unpack("i", descriptor))
        return data

    def peer(self) -> tuple[int, int]:
        """(process, user) of the other end."""
        pid, uid, _ = struct.unpack("3i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid

    def close(self) -> None:
        """Ends `receive` at the other end, and in a thread that waits in it here."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if self._wakeup is not None:
            os.eventfd_write(self._wakeup, 1)  # a thread about to sleep would poll a descriptor that may be reused
