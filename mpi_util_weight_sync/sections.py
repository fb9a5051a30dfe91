"""Versioned blocks in the shared memory of one machine: the sender's process writes, receivers' processes read.

Each block has a header (version, sizes) and the kernel's file lock: shared while a reader reads, exclusive while the
owner writes. So no reader ever sees half of an update. The owner never waits for a reader: it takes another section
instead. The lock of a killed process is released only when the processes forked from it have ended too. Therefore a
reader that waits checks whether the owner still has the file open.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from mpi_util.errors import WorkerLeftError
from mpi_util.host.segments import ALIGN, Segment, Ticket, attach

_WRITING_S = 1e-3  # between two tries to read what is being written
_HEADER = struct.Struct("3q")  # version, bytes of the block, of the description


def _lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Section:
    """The owner's side. Args: nbytes: size of the block plus its description."""

    version = nbytes = size = 0  # of the content: its version, its block, and the block with its description

    def __init__(self, nbytes: int):
        # return True while a transfer over MPI needs the content; readers hold the lock instead
        self.users: list[Callable[[], bool]] = []
        self.segment = Segment(-(-(ALIGN + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.ticket = self.segment.ticket
        self._whole = self.segment.lend(self.ticket.size)
        self.memory = self._whole[ALIGN:]  # uint8: the block, and then its description

    def claim(self, nbytes: int = 0) -> bool:
        """True if it has room and is not in use; then readers are kept out until `publish` or `release`."""
        self.users = [needs for needs in self.users if needs()]
        if self.users or self.ticket.size < ALIGN + nbytes or not _lock(self.ticket.fd, fcntl.LOCK_EX):
            return False
        self.version = 0
        _HEADER.pack_into(self._whole.data, 0, 0, 0, 0)
        return True

    def publish(self, version: int, nbytes: int, description: bytes) -> None:
        """The block now holds that version; adds the description that readers need, and lets them in."""
        self.size = nbytes + len(description)
        self.memory[nbytes : self.size] = np.frombuffer(description, np.uint8)
        _HEADER.pack_into(self._whole.data, 0, version, nbytes, len(description))
        self.version, self.nbytes = version, nbytes
        self.release()

    def release(self) -> None:
        fcntl.flock(self.ticket.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Gives the memory back when its last reader has dropped it."""
        self._whole = self.memory = np.empty(0, np.uint8)
        self.segment.close()


class Content(NamedTuple):
    """What a reader sees. The block is uint8, shape (nbytes,)."""

    version: int
    block: np.ndarray
    description: np.ndarray


class Reader:
    """A reader's side of the sections of one owner."""

    def __init__(self) -> None:
        self._open: dict[Ticket, tuple[int, mmap.mmap]] = {}

    @contextlib.contextmanager
    def reading(self, ticket: Ticket, discard: bool = False) -> Iterator[Content]:
        """The content, which does not change inside. WorkerLeftError: the owner has given it back.

        Args: discard: drop what this process has written into its own, private view of the block.
        """
        if ticket not in self._open:
            try:
                # private: not even a faulty reader can change what the others get
                self._open[ticket] = attach(ticket, private=True)
            except OSError as error:
                raise WorkerLeftError(f"the sender has shut down before these weights were read ({error})") from None
        fd, memory = self._open[ticket]
        while not _lock(fd, fcntl.LOCK_SH):
            if not os.path.lexists(f"/proc/{ticket.pid}/fd/{ticket.fd}"):
                raise WorkerLeftError("the sender has ended while it wrote these weights")
            time.sleep(_WRITING_S)
        try:
            if discard:
                memory.madvise(mmap.MADV_DONTNEED)
            version, nbytes, extra = _HEADER.unpack_from(memory)
            block = np.ndarray(nbytes, np.uint8, memory, ALIGN)
            yield Content(version, block, np.ndarray(extra, np.uint8, memory, ALIGN + nbytes))
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def keep(self, live: tuple[int, ...]) -> None:
        """Drops the sections whose serial number is not in `live`."""
        for ticket in [ticket for ticket in self._open if ticket.serial not in live]:
            fd, _ = self._open.pop(ticket)  # unmapped when the last view of it is gone
            os.close(fd)
