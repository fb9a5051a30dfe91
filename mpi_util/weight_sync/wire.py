"""Small messages between two processes of one machine, over a socket without a place in the file system.

The kernel tells at once when the other end has died. A process that is forked from one of the two would keep its end
open; it closes what it inherits.
"""

import contextlib
import os
import pickle
import select
import socket
import struct
import threading
import weakref
from typing import Any

_HEAD = struct.Struct("<I")  # length of the message that follows
_CHUNK = 1 << 16
_UNREAD_S = 2  # who does not read for so long what fills its socket is given up
_inherited: Any = None  # sockets that a forked process has to close


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


def packed(*message: Any) -> bytes:
    """A message as it travels."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data)) + data


class Wire:
    """One end. Messages are tuples of picklable things; they arrive whole and in order.

    An end that has a bell sleeps on that instead of on its socket, and the other end rings when it has sent. To send to
    several, and then to ring, wakes them side by side: a write to a socket wakes its reader on the writer's own core,
    where the two share a core while another is idle.

    Attributes:
        rings: the other end's bell (an eventfd, which comes with its first message); None if it has none.
    """

    def __init__(self, sock: socket.socket, with_bell: bool = False):
        self.sock = close_in_forks(sock)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _UNREAD_S, 0))
        self.fd = sock.fileno()
        self.rings: int | None = None
        self._bell = self._own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)) if with_bell else None
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, *message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: the other end has gone, or does not read.
        """
        self.send_packed(packed(*message))

    def send_with_bell(self, *message: Any) -> None:
        """The first message, with which the other end gets this one's bell."""
        socket.send_fds(self.sock, [packed(*message)], [] if self._bell is None else [self._bell])

    def send_packed(self, data: bytes, ring: bool = True) -> None:
        """Sends what `packed` has made: the same message to several.

        Args:
            ring: False: the caller will.
        """
        with self._sending:
            for start in range(0, len(data), _CHUNK):
                if start:
                    self.ring()  # the socket may be full: the other end has to read
                self.sock.sendall(data[start : start + _CHUNK])
        if ring:
            self.ring()

    def ring(self) -> None:
        """Wakes the other end."""
        if self.rings is not None:
            os.eventfd_write(self.rings, 1)

    def wait(self, timeout: float | None) -> bool:
        """Sleeps until there is something to receive, or the other end has gone; False if `timeout` is over."""
        sleeping = select.poll()  # of this call: two threads may sleep
        sleeping.register(self.fd, select.POLLIN if self._bell is None else 0)  # 0: only its end
        if self._bell is not None:
            sleeping.register(self._bell, select.POLLIN)
        return bool(sleeping.poll(None if timeout is None else timeout * 1e3))

    def receive(self, timeout: float | None) -> list[tuple[Any, ...]]:
        """Waits for messages, and returns all that are there; none if `timeout` (seconds, None: never) is over.

        Raises:
            EOFError: the other end has gone, and left nothing.
        """
        if self.sock.fileno() < 0:
            raise EOFError
        if timeout != 0 and not self.wait(timeout):  # reading itself does not wait
            return []
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):  # the other end has gone
                os.eventfd_read(self._bell)
        self._read()
        messages = []
        while len(self._buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer)
            if len(self._buffer) < _HEAD.size + length:
                break
            messages.append(pickle.loads(memoryview(self._buffer)[_HEAD.size : _HEAD.size + length]))
            del self._buffer[: _HEAD.size + length]
        return messages

    def _read(self) -> None:
        """Reads once; with a bell all that is there, as nobody rings again for what was left."""
        some = False
        while True:
            try:
                data = self._receive_bytes()
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data and not some:
                raise EOFError
            self._buffer += data
            if self._bell is None or len(data) < _CHUNK:
                return
            some = True

    def _receive_bytes(self) -> bytes:
        if self._bell is not None or self.rings is not None:
            return self.sock.recv(_CHUNK, socket.MSG_DONTWAIT)
        data, bells, _, _ = socket.recv_fds(self.sock, _CHUNK, 1, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
        for bell in bells:
            self.rings = self._own(bell)
        return data

    def _own(self, fd: int) -> int:
        """Closed when nobody uses this end any more: a thread may sleep on it now."""
        weakref.finalize(self, os.close, fd).atexit = False
        return fd

    def peer(self) -> tuple[int, int]:
        """(process, user) of the other end."""
        pid, uid, _ = struct.unpack("3i", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid

    def close(self) -> None:
        """Both ends see it, and so does a thread that waits in `receive`."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        if self._bell is not None:
            os.eventfd_write(self._bell, 1)  # should a thread be about to sleep, on a descriptor that is another's now
