"""Blocks of weights in the shared memory of one machine: one process writes, any number of others read.

Each has a header (version, checksum) and the kernel's file lock, which a process that is killed gives back: shared
while one reads, exclusive while the owner writes. So no reader ever sees half of an update, and no owner ever waits for
a reader: it takes another section instead.
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
        users: say whether they still need what is there, beside those who read it through the file.
    """

    def __init__(self, nbytes: int):
        self.users: list[Callable[[], bool]] = []
        self.segment = Segment(-(-(ALIGN + nbytes) // _PAGE) * _PAGE)
        self.ticket = self.segment.ticket
        self._whole = self.segment.lend(self.ticket.size)
        self._head = self._whole[:32].view(np.int64)
        self._head[3] = self.ticket.serial

    @property
    def version(self) -> int:
        """Of its content."""
        return int(self._head[0])

    @property
    def checksum(self) -> int:
        """Of its content."""
        return int(self._head[1])

    def block(self, nbytes: int) -> np.ndarray:
        """uint8 array of the content."""
        return self._whole[ALIGN : ALIGN + nbytes]

    def holds(self, nbytes: int) -> bool:
        """True if that much has room in it."""
        return self.ticket.size >= ALIGN + nbytes

    def claim(self) -> bool:
        """True if nobody needs or reads it, and from now on nobody can until `publish` or `release`."""
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
        """What has been written is that version."""
        self._head[:3] = version, checksum, nbytes
        self.release()

    def release(self) -> None:
        """Others may read again."""
        fcntl.flock(self.ticket.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Gives the memory back when its last reader has dropped it."""
        self._whole = self._head = np.zeros(4, np.int64)
        self.segment.close()


class Reader:
    """A reader's side of the sections of one owner."""

    def __init__(self) -> None:
        self._open: dict[Ticket, tuple[int, mmap.mmap]] = {}

    @contextlib.contextmanager
    def reading(self, ticket: Ticket, anew: bool = False) -> Iterator[tuple[int, int, np.ndarray]]:
        """(version, checksum, uint8 block) of what is there now; it stays so until this is left.

        Args:
            anew: this process may have written into its view of the block, which nobody else sees: forget that.

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
            if anew:
                memory.madvise(mmap.MADV_DONTNEED)
            version, checksum, nbytes, serial = np.ndarray(4, np.int64, memory).tolist()
            if serial != ticket.serial:
                raise WorkerLeftError("the sender has shut down before these weights were read")
            yield version, checksum, np.ndarray(nbytes, np.uint8, memory, ALIGN)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def keep(self, live: tuple[int, ...]) -> None:
        """Drops the sections whose serial number is not in `live`: the owner has done so too."""
        for ticket in [ticket for ticket in self._open if ticket.serial not in live]:
            fd, _ = self._open.pop(ticket)  # unmapped when the last view of it is gone
            os.close(fd)

    def close(self) -> None:
        """Drops them all."""
        self.keep(())
