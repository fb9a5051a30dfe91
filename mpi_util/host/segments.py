"""Shared memory of one machine: segments that one process owns and others map, lent out while arrays refer to them."""

import mmap
import os
import secrets
import struct
import weakref
from typing import NamedTuple

import numpy as np

ALIGN = 64  # bytes; a cache line, and what the widest SIMD loads like
_GROWTH = 1.25  # spare room, so that batches of varying length do not need a new segment each time
_PAGE = 1 << 21
_MARK = struct.Struct("q")  # the serial number, written behind the last byte of a segment


class Ticket(NamedTuple):
    """What another process of the machine needs to map a segment: the file is /proc/<pid>/fd/<fd>."""

    pid: int
    fd: int
    serial: int  # random, and written in the file: no other segment, nor one of another machine, passes for this one
    size: int  # bytes


class BlockAddress(NamedTuple):
    """Where another process finds a block that was leased here."""

    ticket: Ticket
    live: frozenset[int]  # serials of the owner's segments that still exist, so that maps of others can be dropped


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the next multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN


def private(nbytes: int) -> np.ndarray:
    """uint8 array of `nbytes` in this process's own memory, aligned like a segment."""
    raw = np.empty(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]


class Segment:
    """Shared memory that this process owns. OSError: the machine has no memfd, or not `size` bytes to give."""

    def __init__(self, size: int):
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        fd = os.memfd_create("mpi_util")
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, size + _MARK.size)  # fail here, not with a SIGBUS in the middle of a copy
            self.map = mmap.mmap(fd, size)
        except OSError:
            os.close(fd)
            raise
        self.ticket = Ticket(os.getpid(), fd, secrets.randbits(63), size)
        os.pwrite(fd, _MARK.pack(self.ticket.serial), size)
        self.lent = False

    def lend(self, nbytes: int) -> np.ndarray:
        """uint8 array of the first `nbytes`; the segment is free again when nothing refers to it or to a view of it."""
        self.lent = True
        array = np.ndarray((nbytes,), np.uint8, buffer=self.map)
        weakref.finalize(array, setattr, self, "lent", False).atexit = False
        return array

    def close(self) -> None:
        """Gives the memory back, when the last array is gone; other processes' maps stay valid until they drop them."""
        os.close(self.ticket.fd)
        if not self.lent:
            self.map.close()


class Pool:
    """Segments that one process owns for one purpose, reused, grown, dropped when too small; and maps of others'."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.maps: dict[Ticket, mmap.mmap] = {}

    def lease(self, nbytes: int) -> tuple[np.ndarray, BlockAddress]:
        """uint8 array of `nbytes`, in a segment to which no array refers, and its address. OSError: no room."""
        free = sorted((s for s in self.segments if not s.lent), key=lambda s: s.ticket.size)
        segment = next((s for s in free if s.ticket.size >= nbytes), None)
        if segment is None:
            for small in free:
                self.segments.remove(small)
                small.close()
            segment = Segment(-(-max(1, int(nbytes * _GROWTH)) // _PAGE) * _PAGE)
            self.segments.append(segment)
        return segment.lend(nbytes), BlockAddress(segment.ticket, frozenset(s.ticket.serial for s in self.segments))

    def close(self) -> None:
        """Gives back all segments; one to which arrays refer, when they are gone."""
        for segment in self.segments:
            segment.close()
        self.segments.clear()

    def map(self, address: BlockAddress) -> mmap.mmap:
        """The memory of another process's block; drops its segments that no longer exist. OSError as `attach`."""
        ticket, live = address
        for old in [t for t in self.maps if t.pid == ticket.pid and t.serial not in live]:
            del self.maps[old]  # unmapped when the last view of it is gone
        if ticket not in self.maps:
            fd, self.maps[ticket] = attach(ticket)
            os.close(fd)
        return self.maps[ticket]


def attach(ticket: Ticket, private: bool = False) -> tuple[int, mmap.mmap]:
    """(open file, memory) of a segment that another process owns; the caller closes the file.

    With `private`, what this process writes into the memory stays its own, and the file is read-only.

    Raises OSError: the owner cannot be reached from here (another machine, container or user), or has given the segment
        back; its process id or descriptor may then be another's.
    """
    access = os.O_RDONLY if private else os.O_RDWR
    # non-blocking: in place of the segment there may be a FIFO
    fd = os.open(f"/proc/{ticket.pid}/fd/{ticket.fd}", access | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mark = _MARK.pack(ticket.serial)
        if os.fstat(fd).st_size != ticket.size + len(mark) or os.pread(fd, len(mark), ticket.size) != mark:
            raise OSError(f"process {ticket.pid} no longer shares this memory ({ticket.size} bytes)")
        return fd, mmap.mmap(fd, ticket.size, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
    except OSError:
        os.close(fd)
        raise
