"""Who may look at the weights, and who may change them."""

import contextlib
import threading
from collections.abc import Iterator

from ..errors import UsageError


class Closed(Exception):
    """The gate was closed while somebody waited to change the weights."""


class Gate:
    """Many may look at a time, or one change; whoever wants to change comes before those who come to look.

    A reader that looks again and again, with hardly a pause, would else never let a change in. So a thread that looks
    must not wait for another one that is about to: if a change waits, that one waits for the change.
    """

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._looking = 0
        self._changing = False
        self._wanted = 0  # changes that wait
        self._closed = False
        self._mine = threading.local()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Until it is left nothing changes. A thread that looks already may do so again within."""
        depth = getattr(self._mine, "depth", 0)
        with self._state:
            while depth == 0 and (self._changing or (self._wanted and not self._closed)):
                self._state.wait()
            self._looking += 1
        self._mine.depth = depth + 1
        try:
            yield
        finally:
            self._mine.depth = depth
            with self._state:
                self._looking -= 1
                if not self._looking:
                    self._state.notify_all()

    @contextlib.contextmanager
    def changing(self) -> Iterator[bool]:
        """Waits until nobody looks; until it is left nobody does. Gives True if it had to wait.

        Raises:
            UsageError: this thread itself looks. Closed: the gate is closed.
        """
        if getattr(self._mine, "depth", 0):
            raise UsageError("weights cannot be changed inside frozen() by the thread that holds them still")
        with self._state:
            waited = bool(self._looking or self._changing)
            self._wanted += 1
            try:
                while (self._looking or self._changing) and not self._closed:
                    self._state.wait()
                if self._closed:
                    raise Closed
                self._changing = True
            finally:
                self._wanted -= 1
                self._state.notify_all()
        try:
            yield waited
        finally:
            with self._state:
                self._changing = False
                self._state.notify_all()

    def close(self) -> None:
        """From now on nothing changes."""
        with self._state:
            self._closed = True
            self._state.notify_all()
