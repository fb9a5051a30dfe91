"""A simulator that a command has started, in the worker's process: calls it over a wire, pauses it, ends it."""

import contextlib
import math
import os
import secrets
import select
import shlex
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..errors import SimulatorError
from ..ranks.identity import rank
from .calls import Doing, Request
from .solver import Solver
from .wire import ADDRESS, KEY, KEY_BYTES, KIND, Wire

_IDLE_S = 0.02  # without a call, after which it is paused; longer than between two steps of a rollout
_HANDSHAKE_S, _END_S, _LAST_WORDS_S = 10.0, 5.0, 1.0


class Process:
    """The program, with one environment. Args: as of `simulator`; limit: seconds."""

    def __init__(
        self, command: str | Sequence[str], limit: float, pause: bool, log_dir: str | os.PathLike[str] | None,
        cwd: str | os.PathLike[str] | None, env: Mapping[str, str] | None,
    ):  # fmt: skip
        words = shlex.split(command) if isinstance(command, str) else [os.fspath(word) for word in command]
        self._name, self._limit = f"the simulator of worker {rank()} ({shlex.join(words):.200})", limit
        self._calls, self._doing, self._ended = 0, Doing(), ""
        self._doing.begin(Request(0, "make"))
        self._busy, self._called_at, self._turn = True, 0.0, threading.Lock()
        key = secrets.token_bytes(2 * KEY_BYTES)
        with tempfile.TemporaryDirectory(prefix="mpi_util-serve-") as folder, socket.socket(*KIND) as listener:
            fd = os.open(folder, os.O_RDONLY)
            listener.bind(f"/proc/self/fd/{fd}/socket")  # a path of any length
            os.close(fd)
            listener.listen()
            self.solver = Solver(words, cwd, log_dir, {ADDRESS: folder, KEY: key.hex()} | dict(env or {}))
            self._pidfd = os.pidfd_open(self.solver.pid)
            weakref.finalize(self, os.close, self._pidfd).atexit = False
            self._wire = self._accepted(listener, key)
        threading.Thread(target=_look, args=(weakref.ref(self), pause), daemon=True).start()

    def make(self, _: object) -> tuple[int, Any]:
        """(number, facts) of its environment."""
        try:
            return 0, self.call(Request(0, "make", "", [None]))
        except SimulatorError:
            self.solver.kill()
            raise

    def call(self, request: Request) -> Any:
        """Makes a call there. Returns: its result."""
        if self._ended:
            raise SimulatorError(f"{self._ended}\nit cannot be called any more; make a new one")
        self._doing.begin(request)
        self._calls += 1
        with self._turn:
            self._busy = True
            self.solver.resume()
        try:
            with contextlib.suppress(OSError):  # it has ended, as `_answer` finds
                self._wire.send(self._calls, request)
            answer, *rest = self._answer(self._limit if request.name in ("reset", "step") else math.inf)
        finally:
            self._busy, self._called_at = False, time.monotonic()
        if request.name == "close":
            self._close()
        if answer == "result":
            return rest[0]
        if request.what == "get" and rest[0] == "AttributeError":
            raise AttributeError(rest[1].rpartition("AttributeError: ")[2])
        raise SimulatorError(f"{self._name} failed in {self._doing.now}:\n{rest[1]}")

    def _answer(self, limit: float) -> Any:
        number = 0
        while number != self._calls:  # what is left of a call that was interrupted
            self._wait(self._wire.sock, limit)
            try:
                number, what = self._wire.receive()
            except EOFError:
                self._fail("has closed its connection")
        return what

    def _accepted(self, listener: socket.socket, key: bytes) -> Wire:
        """The first connection that shows the key."""
        while True:
            self._wait(listener, math.inf)
            sock, _ = listener.accept()
            sock.settimeout(_HANDSHAKE_S)
            with contextlib.suppress(OSError):
                if (wire := Wire(sock)).prove(key[KEY_BYTES:], key[:KEY_BYTES]):
                    sock.settimeout(None)
                    return wire
            sock.close()

    def _wait(self, sock: socket.socket, limit: float) -> None:
        """Sleeps until there is something to receive. SimulatorError: it has ended, or `limit` seconds are over."""
        poll = select.poll()
        for each in (sock.fileno(), self._pidfd):
            poll.register(each, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(None if limit == math.inf else limit * 1e3)]
        if not ready:
            self._fail(f"was not done after {limit:g} s, and has been ended", 0)
        if sock.fileno() not in ready:
            self._fail("has ended")

    def _fail(self, what: str, patience_s: float = _LAST_WORDS_S) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.solver.wait(patience_s)
            what += f" with status {code}" if code >= 0 else f" by signal {-code}"
        self.solver.kill()
        said = self.solver.tail().replace("\n", "\n  ")
        self._ended = f"{self._name} {what}, in {self._doing.now}; " + (f"it said last\n  {said}" if said else "it said nothing")
        raise SimulatorError(self._ended)

    def _close(self) -> None:
        self._ended = f"{self._name} was closed"
        self._wire.sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.solver.wait(_END_S)
        self.solver.kill()  # and what it has left

    def look(self, pause: bool) -> bool:
        """To be called often: pauses it when it has not been called for a while. False: it has ended."""
        self.solver.bound_log()
        with self._turn:
            if pause and not (self._busy or self.solver.paused) and time.monotonic() - self._called_at > _IDLE_S:
                self.solver.pause()
        return not self._ended


def _look(process: "weakref.ref[Process]", pause: bool) -> None:
    while (here := process()) and here.look(pause):
        del here
        time.sleep(_IDLE_S)
