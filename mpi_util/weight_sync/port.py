"""A worker's end of a hub: it connects when it is ready, hears of new versions, reads them, and answers."""

import collections
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError, WorkerLeftError
from ..host.sections import Reader
from ..host.segments import Ticket
from .layout import Layout
from .wire import Wire


class Address(NamedTuple):
    """Where a hub is. The key is what tells a worker from a stranger."""

    name: str
    key: bytes


class Note(NamedTuple):
    """What a worker is told: that a version lies in a section. It travels as plain tuples, which unpickle faster.

    Attributes:
        live: serial numbers of the sections that there are.
    """

    version: int
    ticket: Ticket
    live: tuple[int, ...]


class Port:
    """A worker's end: connects to the hub at `address`.

    Raises:
        UsageError: the hub refuses it. WorkerLeftError: there is no hub (any more).
    """

    def __init__(self, address: Address, worker: int, who: str):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address.name)
            self._wire = Wire(sock, with_bell=True)
            self._wire.send_with_bell(address.key, worker, who)
        except OSError as error:
            sock.close()
            raise WorkerLeftError(f"worker {worker} finds no sender of {who}: it has ended ({error})") from None
        self._who = who
        self._reader = Reader()
        self._notes: collections.deque[Note] = collections.deque()
        self.stopped = False

    def layout(self, timeout: float | None) -> Layout | None:
        """What the sender's weights look like; None if the sender is not ready in time."""
        end = None if timeout is None else time.perf_counter() + timeout
        welcome: list[tuple[Any, ...]] = []
        while not welcome:
            welcome = self._receive(None if end is None else max(0.0, end - time.perf_counter()))
            if not welcome and (self.stopped or (end is not None and time.perf_counter() >= end)):
                return None
        kind, content = welcome[0][0], welcome[0][-1]
        if kind == "refused":
            raise UsageError(content)
        if kind == "stop":
            raise WorkerLeftError(f"the sender of {self._who} has shut down")
        self._take_in(welcome[1:])
        layout: Layout = content
        return layout

    def _receive(self, timeout: float | None) -> list[tuple[Any, ...]]:
        try:
            return self._wire.receive(timeout)
        except EOFError:
            if not self.stopped:
                raise WorkerLeftError(f"the sender of {self._who} has ended without shutdown()") from None
            return []

    def _take_in(self, messages: list[tuple[Any, ...]]) -> None:
        for message in messages:
            if message[0] == "stop":
                self.stopped = True
            else:
                version, ticket, live = message[1:]
                self._notes.append(Note(version, Ticket(*ticket), live))

    def next(self, timeout: float | None, newest: bool) -> Note | None:
        """The next note, or the newest that is there; None if none comes in time, or ever (`stopped`).

        Raises:
            WorkerLeftError: the sender has died.
        """
        end = None if timeout is None else time.perf_counter() + timeout
        while not self._notes and not self.stopped:
            left = None if end is None else max(0.0, end - time.perf_counter())
            self._take_in(self._receive(left))
            if end is not None and time.perf_counter() >= end:
                break
        if newest and self._notes and not self.stopped:
            with contextlib.suppress(WorkerLeftError):  # the next call says so
                self._take_in(self._receive(0))
        note = None
        while self._notes and (note is None or newest):
            note = self._notes.popleft()
        return note

    @contextlib.contextmanager
    def reading(self, note: Note, anew: bool = False) -> Iterator[tuple[int, int, np.ndarray]]:
        """(version, checksum, block) of what lies where the note says: that version, or a newer one. See `Reader`."""
        self._reader.keep(note.live)
        with self._reader.reading(note.ticket, anew) as content:
            yield content

    def answer(self, kind: str, version: int, text: str = "") -> None:
        """Tells the hub "ack" or "error"."""
        with contextlib.suppress(OSError):  # the sender has gone; the next `next` says so
            self._wire.send(kind, version, text)

    def close(self) -> None:
        """Leaves in order. Wakes a thread that waits in `next`."""
        self.answer("bye", 0)
        self.stopped = True
        self._wire.close()

    def drop(self) -> None:
        """Gives the memory back, once nobody reads in it."""
        self._reader.close()
