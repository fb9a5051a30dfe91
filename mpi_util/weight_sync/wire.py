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
    """One end. Messages are tuples of picklable things; they arrive whole and in order."""

    def __init__(self, sock: socket.socket):
        self.sock = close_in_forks(sock)
        self.fd = sock.fileno()
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, *message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: the other end has gone.
        """
        self.send_packed(packed(*message))

    def send_packed(self, data: bytes) -> None:
        """Sends what `packed` has made: the same message to several."""
        with self._sending:
            self.sock.sendall(data)

    def receive(self, timeout: float | None) -> list[tuple]:
        """Waits for messages, and returns all that are there; none if `timeout` (seconds, None: never) is over.

        Raises:
            EOFError: the other end has gone, and left nothing.
        """
        if self.sock.fileno() < 0:
            raise EOFError
        if timeout is not None and not self._poll.poll(timeout * 1e3):
            return []
        try:
            data = self.sock.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer)
            if len(self._buffer) < _HEAD.size + length:
                break
            messages.append(pickle.loads(memoryview(self._buffer)[_HEAD.size : _HEAD.size + length]))
            del self._buffer[: _HEAD.size + length]
        return messages

    def peer(self) -> tuple[int, int]:
        """(process, user) of the other end."""
        pid, uid, _ = struct.unpack("3i", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid

    def close(self) -> None:
        """Both ends see it, and so does a thread that waits in `receive`."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
