"""The wire between a worker and the program that it has started: a Unix socket, and memory that both map; in both.

A message has two numbers: of the call, and the bytes of a text. The text is JSON, at the beginning of the sender's
memory (memfd), whose descriptor comes with the first message; behind it lie the arrays. Nothing is unpickled. Each end
asks the kernel whose process the other is, and shows half of a key. Calls take turns, so an end writes over its last
message.
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

# the variables of the program with the socket's name and the key; the bytes of half a key
ADDRESS, KEY, HALF = "MPI_UTIL_SERVE", "MPI_UTIL_SERVE_KEY", 32
KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET
_HEAD = struct.Struct("=QQ")
_SPACES = {  # of Gymnasium, and what makes one
    "Box": ("low", "high", "shape", "dtype"), "Discrete": ("n", "start"), "MultiDiscrete": ("nvec", "dtype"),
    "MultiBinary": ("n",), "Tuple": ("spaces",), "Dict": ("spaces",),
}  # fmt: skip


class Wire:
    """One end. PermissionError: the other end is another user's."""

    def __init__(self, sock: socket.socket):
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            raise PermissionError("the other end of the socket is another user's")
        self.sock = sock
        self._mine: Segment | None = None
        self._theirs: Any = b""

    def prove(self, show: bytes, expect: bytes) -> bool:
        """Exchanges halves of the key; True if the other end shows `expect`."""
        self.sock.send(show)
        return secrets.compare_digest(self.sock.recv(HALF), expect)

    def send(self, number: int, what: Any) -> None:
        """Args: what: None, numbers, text, arrays, spaces, in lists, tuples, dicts. UsageError: something else."""
        arrays: list[np.ndarray] = []
        text, fds = json.dumps(_plain(what, arrays)).encode(), list[int]()
        size = align(len(text)) + sum(align(array.nbytes) for array in arrays)
        if self._mine is None or self._mine.ticket.size < size:
            if self._mine:
                self._mine.close()
            self._mine = Segment(max(1 << 16, 2 * size))
            fds = [self._mine.ticket.fd]
        memory: Any = self._mine.map
        memory[: (at := len(text))] = text
        for array in arrays:
            np.copyto(np.ndarray(array.shape, array.dtype, memory, at := align(at)), array)
            at += array.nbytes
        socket.send_fds(self.sock, [_HEAD.pack(number, len(text))], fds)

    def receive(self) -> tuple[int, Any]:
        """(number, what) of the next message. EOFError: the other end has gone."""
        data, fds = b"", list[int]()
        with contextlib.suppress(ConnectionError):
            data, fds, _, _ = socket.recv_fds(self.sock, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
        for fd in fds:
            self._theirs = mmap.mmap(fd, os.fstat(fd).st_size)
            os.close(fd)
        if not data:
            raise EOFError
        number, self._at = _HEAD.unpack(data)
        return number, self._rebuilt(json.loads(self._theirs[: self._at]))

    def _rebuilt(self, x: Any) -> Any:
        """What `_plain` was given. Arrays are copies, taken in the order of the text."""
        if isinstance(x, list):
            return [self._rebuilt(item) for item in x]
        if not isinstance(x, dict):
            return x
        ((kind, value),) = x.items()
        if kind == "array":
            dtype, shape, is_scalar = value
            array = np.ndarray(tuple(shape), np.dtype(dtype), self._theirs, at := align(self._at)).copy()
            self._at = at + array.nbytes
            return array[()] if is_scalar else array
        found = self._rebuilt(value)
        if kind == "space":
            return getattr(framework("gymnasium").spaces, found[0])(**dict(found[1]))
        return {"tuple": tuple, "dict": dict, "dtype": np.dtype}[kind](found)


def _plain(x: Any, arrays: list[np.ndarray]) -> Any:
    """What JSON can hold of it. Appends the arrays, as which NumPy's numbers travel too."""
    kind = type(x)
    if x is None or kind in (bool, int, float, str):
        return x
    if isinstance(x, dict):
        return {"dict": _plain([*x.items()], arrays)}
    if isinstance(x, (list, tuple)):
        items = [_plain(item, arrays) for item in x]
        return items if kind is list else {"tuple": items}
    if isinstance(x, np.dtype):
        return {"dtype": x.str}
    if kind.__module__.startswith("gymnasium.spaces") and kind.__name__ in _SPACES:
        given = [[name, getattr(x, name)] for name in _SPACES[kind.__name__]]
        if isinstance(x.__dict__.get("spaces"), dict):
            given = [["spaces", [*x.spaces.items()]]]  # a dict would be sorted
        return {"space": [kind.__name__, _plain(given, arrays)]}
    array = np.asarray(x)
    if array.dtype.kind in "OV":
        raise UsageError(f"{x!r:.99} is a {kind.__name__}, which cannot travel between a simulator and its worker")
    arrays.append(array)
    return {"array": [array.dtype.str, array.shape, not isinstance(x, np.ndarray)]}
