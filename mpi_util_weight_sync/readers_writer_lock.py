"""A readers-writer lock with writer preference, between the threads of a receiver's process."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from mpi_util.errors import UsageError

_PATIENCE_S, _MOST_PATIENCE_S = 0.1, 20.0


class LockClosed(UsageError):
    """The weights cannot change after shutdown()."""


class ReadersWriterLock:
    """Any number of readers, or one writer. A waiting writer goes before new readers, who would starve it.

    A reader may wait for another thread that also wants to read (a pool that it has started, say). To avoid deadlock a
    new reader is admitted while a reader that predates the writer is inside, because the writer has to wait for that
    one anyway. Otherwise a new reader is admitted when its patience ends. The patience doubles each time that happens,
    until the writer has had its turn.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = Counter[int]()  # thread -> how often it has entered
        self._before: set[int] = set()  # threads that were inside when the writer came
        self._waiting, self._writing = 0, 0  # writers that wait; the thread that writes
        self._patience, self._closed = _PATIENCE_S, False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing is written inside. A thread that is reading already may enter again."""
        me = threading.get_ident()
        with self._changed:
            patience = self._patience
            if not self._inside[me] and not self._changed.wait_for(
                lambda: not self._writing and (not self._waiting or bool(self._before)), patience
            ):
                self._patience = min(max(self._patience, 2 * patience), _MOST_PATIENCE_S)
                self._before |= set(self._inside)  # the writer waits for these anyway
                self._changed.wait_for(lambda: not self._writing)
            self._inside[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= Counter([me])  # which also drops it when it is inside no more
                self._before &= set(self._inside)
                self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """No other thread is inside. Yields True if it had to wait.

        Raises: UsageError: this thread is reading. LockClosed: `close` was called.
        """
        with self._changed:
            if threading.get_ident() in self._inside:
                raise UsageError("inside frozen() the thread that called it cannot change the weights")
            if not self._waiting:
                self._before = set(self._inside)
            waited, self._waiting = bool(self._inside), self._waiting + 1
            try:
                self._changed.wait_for(lambda: self._closed or not (self._inside or self._writing))
                if self._closed:
                    raise LockClosed("the weights cannot change after shutdown()")
                self._writing, self._patience = threading.get_ident(), _PATIENCE_S
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield waited
        finally:
            with self._changed:
                self._writing = 0
                self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """No more writers; waits for another thread that is one. True: nothing is being written now."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._writing in (0, threading.get_ident()), timeout)
            return not self._writing
