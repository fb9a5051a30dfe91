"""Versioned blocks in the shared memory of one machine: one process writes, any number of others read.

Each has a header (version, checksum, size) and the kernel's file lock, which a process that is killed
releases: shared while one reads, exclusive while the owner writes. So no reader ever sees half of an update, and the
owner never waits for a reader: it takes another section instead.
"""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np

from ..errors import WorkerLeftError
from .segments import ALIGN, Segment, Ticket, attach

_PAGE = mmap.PAGESIZE


class Section:
    """The owner's side.

    Attributes:
        users: return True while they still need the content; those who read it through the file are not among them.
    """

    def __init__(self, nbytes: int):
        self.users: list[Callable[[], bool]] = []
        self.segment = Segment(-(-(ALIGN + nbytes) // _PAGE) * _PAGE)
        self.ticket = self.segment.ticket
        self._whole = self.segment.lend(self.ticket.size)
        self._head = self._whole[:24].view(np.int64)

    @property
    def version(self) -> int:
        """Of the content."""
        return int(self._head[0])

    @property
    def checksum(self) -> int:
        """Of the content."""
        return int(self._head[1])

    def block(self, nbytes: int) -> np.ndarray:
        """uint8 array of the content, shape (nbytes,)."""
        return self._whole[ALIGN : ALIGN + nbytes]

    def holds(self, nbytes: int) -> bool:
        """True if it has room for that much."""
        return self.ticket.size >= ALIGN + nbytes

    def claim(self) -> bool:
        """Returns True if it is not in use, and keeps readers out until `publish` or `release`."""
        self.users = [needs for needs in self.users if needs()]
        if self.users:
            return False
        try:
            fcntl.flock(self.ticket.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self._head[0] = 0
        return True

    def publish(self, version: int, checksum: int, nbytes: int) -> None:
        """The block now holds that version; lets readers in."""
        self._head[:3] = version, checksum, nbytes
        self.release()

    def release(self) -> None:
        """Lets readers in."""
        fcntl.flock(self.ticket.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Gives the memory back when its last reader has dropped it."""
        self._whole = self._head = np.zeros(3, np.int64)
        self.segment.close()


class Reader:
    """A reader's side of the sections of one owner."""

    def __init__(self) -> None:
        self._open: dict[Ticket, tuple[int, mmap.mmap]] = {}

    @contextlib.contextmanager
    def reading(self, ticket: Ticket, discard: bool = False) -> Iterator[tuple[int, int, np.ndarray]]:
        """(version, checksum, uint8 block) of the content, which does not change inside.

        Args:
            discard: drop what this process has written into its own, private view of the block.

        Raises:
            WorkerLeftError: the owner has given it back.
        """
        if ticket not in self._open:
            try:
                # private: not even a faulty reader can change what the others get
                self._open[ticket] = attach(ticket, private=True)
            except OSError as error:
                raise WorkerLeftError(f"the sender has shut down before these weights were read ({error})") from None
        fd, memory = self._open[ticket]
        fcntl.flock(fd, fcntl.LOCK_SH)
        try:
            if discard:
                memory.madvise(mmap.MADV_DONTNEED)
            version, checksum, nbytes = np.ndarray(3, np.int64, memory).tolist()
            yield version, checksum, np.ndarray(nbytes, np.uint8, memory, ALIGN)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def keep(self, live: tuple[int, ...]) -> None:
        """Drops the sections whose serial number is not in `live`."""
        for ticket in [ticket for ticket in self._open if ticket.serial not in live]:
            fd, _ = self._open.pop(ticket)  # unmapped when the last view of it is gone
            os.close(fd)
