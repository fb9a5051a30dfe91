"""A readers-writer lock, for weights that several threads use and one updates."""

import contextlib
import threading
from collections.abc import Iterator

from ..errors import UsageError


class LockClosed(Exception):
    """The lock was closed while a thread waited to write."""


class ReadersWriterLock:
    """Any number of readers, or one writer. A waiting writer goes first: readers that hardly pause would starve it.

    So a thread that reads must not wait for another one that is about to: that one may be waiting for a writer.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = self._waiting_writers = 0
        self._writing = self._closed = False
        self._thread = threading.local()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing is written inside. A thread that reads already may enter again."""
        depth = getattr(self._thread, "depth", 0)
        with self._changed:
            while depth == 0 and (self._writing or (self._waiting_writers and not self._closed)):
                self._changed.wait()
            self._readers += 1
        self._thread.depth = depth + 1
        try:
            yield
        finally:
            self._thread.depth = depth
            with self._changed:
                self._readers -= 1
                if not self._readers:
                    self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """No other thread is inside. Yields True if it had to wait for that.

        Raises:
            UsageError: this thread itself reads. LockClosed: the lock is closed.
        """
        if getattr(self._thread, "depth", 0):
            raise UsageError("inside frozen() the thread that called it cannot change the weights")
        with self._changed:
            waited = bool(self._readers or self._writing)
            self._waiting_writers += 1
            try:
                while (self._readers or self._writing) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    raise LockClosed
                self._writing = True
            finally:
                self._waiting_writers -= 1
                self._changed.notify_all()
        try:
            yield waited
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def close(self) -> None:
        """From now on nothing is written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
