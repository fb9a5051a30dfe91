"""The wire between a worker and the program that it has started: a Unix socket; in both.

A message is a line of JSON, and behind it the memory of its arrays. Nothing is unpickled: the program may have another
NumPy. Each end asks the kernel whose process the other is, and shows half of a key.
"""

import json
import os
import secrets
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ..arrays.adapters import framework
from ..errors import UsageError

ADDRESS = "MPI_UTIL_SERVE"  # of the program: the socket's name, the half key that it shows, the one that it sees
_MADE_OF = {  # of Gymnasium, and what makes one
    "Box": ("low", "high", "shape", "dtype"), "Discrete": ("n", "start"), "MultiBinary": ("n",),
    "MultiDiscrete": ("nvec", "dtype", "start"), "Tuple": ("spaces",), "Dict": (),
    "EnvSpec": ("id", "reward_threshold", "max_episode_steps"),
}  # fmt: skip


class Wire:
    """One end. OSError, EOFError: the other one is another user's, or does not show `expect`."""

    def __init__(self, sock: socket.socket, show: str, expect: str):
        user = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]
        self.connection = Connection(sock.detach())
        if user == os.geteuid():
            self.connection.send_bytes(show.encode())
        if user != os.geteuid() or not secrets.compare_digest(self.connection.recv_bytes(99), expect.encode()):
            raise PermissionError("the other end of the socket is another user's")

    def send(self, number: int, what: Any) -> None:
        """Args: what: None, numbers, text, arrays, spaces, in lists, tuples, dicts. UsageError: something else."""
        parts = [b"\n"]
        text = json.dumps([number, _plain(what, parts)])
        self.connection.send_bytes(b"".join([text.encode(), *parts]))

    def receive(self) -> tuple[int, Any]:
        """(number, what) of the next message. EOFError, OSError: the other end has gone."""
        self._data = self.connection.recv_bytes()
        self._at = self._data.index(b"\n") + 1
        number, what = json.loads(self._data[: self._at])
        return number, self._rebuilt(what)

    def _rebuilt(self, x: Any) -> Any:
        """What `_plain` was given. Arrays are copies, taken in the order of the text."""
        if not isinstance(x, list):
            return x
        kind, *rest = x
        if kind == "array":
            dtype, shape, is_scalar = rest
            array = np.ndarray(tuple(shape), np.dtype(dtype), self._data, self._at).copy()
            self._at += array.nbytes
            return array[()] if is_scalar else array
        items = [self._rebuilt(item) for item in rest]
        if kind in _MADE_OF:
            gymnasium = framework("gymnasium")
            return getattr(gymnasium.spaces, kind, gymnasium.envs.registration.EnvSpec)(**dict(items))
        kinds = {"list": list, "tuple": tuple, "dict": dict, "bytes": bytes}
        return np.dtype(items[0]) if kind == "dtype" else kinds[kind](items)


def _plain(x: Any, parts: list[bytes]) -> Any:
    """What JSON can hold of it: [kind, item, ...]. Appends the arrays' memory; NumPy's numbers travel as arrays too."""
    kind = type(x)
    if x is None or kind in (bool, int, float, str):
        return x
    name, items = kind.__name__, x
    if isinstance(x, dict):
        name, items = "dict", x.items()
    elif isinstance(x, (list, tuple)) or kind is bytes:  # as NumPy's they would lose zeros at their end
        name = name if kind in (list, bytes) else "tuple"
    elif isinstance(x, np.dtype):
        name, items = "dtype", [x.str]
    elif kind.__module__.startswith("gymnasium.") and name in _MADE_OF:  # a Dict's dict would be sorted
        items = [(given, getattr(x, given)) for given in _MADE_OF[name]] or [("spaces", [*x.items()])]
    else:
        array = np.asarray(x)
        if array.dtype.kind in "OV":
            raise UsageError(f"{x!r:.99} is a {name}, which cannot travel between a simulator and its worker")
        parts.append(array.tobytes())
        return ["array", array.dtype.str, array.shape, not isinstance(x, np.ndarray)]
    return [name, *(_plain(item, parts) for item in items)]
