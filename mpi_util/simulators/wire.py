"""The wire between a worker and a program that its command has started: a Unix socket, and memory that both map.

Nothing is unpickled. A message on the socket has two numbers: of the call, and the bytes of a text. The text is JSON,
at the beginning of the sender's memory (memfd), whose descriptor comes with the first message that uses it; behind it
lie the arrays. Each end asks the kernel for the other's user, and shows half of a key that the command's environment
has. Calls take turns, so each end overwrites its memory with its next message.
"""

import contextlib
import json
import mmap
import os
import secrets
import socket
import struct
from typing import Any

import numpy as np

from ..arrays.adapters import framework
from ..errors import UsageError
from ..host.segments import Segment, align

ADDRESS, KEY, KEY_BYTES = "MPI_UTIL_SERVE", "MPI_UTIL_SERVE_KEY", 32  # a folder, and half of the key's bytes
KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET
_HEAD = struct.Struct("=QQ")
_LEAST_BYTES = 1 << 16
_SPACES = {  # of Gymnasium: what their constructors take
    "Box": ("low", "high", "shape", "dtype"), "Discrete": ("n", "start"), "MultiDiscrete": ("nvec", "dtype", "start"),
    "MultiBinary": ("n",), "Text": ("max_length", "min_length", "charset"),
}  # fmt: skip


class Wire:
    """One end. Args: sock: SOCK_SEQPACKET. PermissionError: the other end is another user's."""

    def __init__(self, sock: socket.socket):
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            raise PermissionError("the other end of the socket is another user's")
        self.sock = sock
        self._mine: Segment | None = None
        self._theirs: Any = b""

    def prove(self, show: bytes, expect: bytes) -> bool:
        """Exchanges keys; True if the other end shows `expect`."""
        self.sock.send(show)
        return secrets.compare_digest(self.sock.recv(len(expect)), expect)

    def send(self, number: int, what: Any) -> None:
        """Args: what: None, bools, numbers, strings, arrays and spaces, in lists, tuples and dicts. UsageError: more."""
        arrays: list[tuple[int, np.ndarray]] = []
        text = json.dumps(_plain(what, arrays)).encode()
        start = align(len(text))
        size, fds = start + (arrays[-1][0] + align(arrays[-1][1].nbytes) if arrays else 0), []
        if self._mine is None or self._mine.ticket.size < size:
            if self._mine:
                self._mine.close()
            self._mine = Segment(max(_LEAST_BYTES, size * 2))
            fds = [self._mine.ticket.fd]
        memory: Any = self._mine.map
        memory[: len(text)] = text
        for offset, array in arrays:
            np.copyto(np.ndarray(array.shape, array.dtype, memory, start + offset), array)
        socket.send_fds(self.sock, [_HEAD.pack(number, len(text))], fds)

    def receive(self) -> tuple[int, Any]:
        """(number, what) of the next message. EOFError: the other end has gone."""
        data, fds = b"", list[int]()
        with contextlib.suppress(ConnectionError):
            data, fds, _, _ = socket.recv_fds(self.sock, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
        for fd in fds:
            self._theirs = mmap.mmap(fd, os.fstat(fd).st_size)
            os.close(fd)
        if len(data) != _HEAD.size:
            raise EOFError
        number, length = _HEAD.unpack(data)
        return number, _rebuilt(json.loads(self._theirs[:length]), self._theirs, align(length))


def _plain(x: Any, arrays: list[tuple[int, np.ndarray]]) -> Any:
    """What JSON can hold of it; arrays, and NumPy's numbers, are appended to `arrays` with their offsets."""
    kind = type(x)
    if x is None or kind in (bool, int, float, str):
        return x
    if kind is list:
        return [_plain(item, arrays) for item in x]
    if isinstance(x, dict):
        return {"dict": [[_plain(key, arrays), _plain(value, arrays)] for key, value in x.items()]}
    if isinstance(x, (tuple, frozenset)):
        return {"tuple": [_plain(item, arrays) for item in x]}
    if isinstance(x, (np.dtype, type)):
        return {"dtype": np.dtype(x).str}
    if kind.__module__.startswith("gymnasium.spaces") and hasattr(x, "spaces"):
        parts = [*x.spaces.items()] if isinstance(x.spaces, dict) else [*x.spaces]
        return {"space": [kind.__name__, _plain({"spaces": parts}, arrays)]}
    if kind.__module__.startswith("gymnasium.spaces") and kind.__name__ in _SPACES:
        given = {name: getattr(x, name.replace("charset", "characters")) for name in _SPACES[kind.__name__]}
        return {"space": [kind.__name__, _plain(given, arrays)]}
    array = np.asarray(x)
    if array.dtype.kind in "OV":
        raise UsageError(f"{x!r:.99} is a {kind.__name__}, which cannot be sent between a simulator and its worker")
    offset = arrays[-1][0] + align(arrays[-1][1].nbytes) if arrays else 0
    arrays.append((offset, array))
    return {"array": [array.dtype.str, array.shape, offset, not isinstance(x, np.ndarray)]}


def _rebuilt(x: Any, memory: Any, start: int) -> Any:
    """What `_plain` was given. Arrays are copies."""
    if isinstance(x, list):
        return [_rebuilt(item, memory, start) for item in x]
    if not isinstance(x, dict):
        return x
    ((kind, value),) = x.items()
    if kind == "array":
        dtype, shape, offset, is_scalar = value
        array = np.ndarray(tuple(shape), np.dtype(dtype), memory, start + offset).copy()
        return array[()] if is_scalar else array
    if kind == "dtype":
        return np.dtype(value)
    if kind == "space":
        return getattr(framework("gymnasium").spaces, value[0])(**_rebuilt(value[1], memory, start))
    items = _rebuilt(value, memory, start)
    return tuple(items) if kind == "tuple" else {key: item for key, item in items}
