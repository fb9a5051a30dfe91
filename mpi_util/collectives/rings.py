"""Messages between a leader and the other ranks of its machine, in memory that they share; in order, without MPI.

A ring is a queue of bytes with one process that writes and one that reads, so it needs no lock: each only ever adds to
its own counter, after the bytes are there, or are read. Each of the ranks has one up to its leader, and one down. A
message through MPI costs its two ends some 40 us of processor time, here 5.
"""

import struct
from collections.abc import Iterator, Sequence

from ..host.segments import align

_RING = 1 << 16  # bytes
LARGE = 1 << 14  # bytes; what is larger goes through MPI, which is as fast then
_LENGTH = struct.Struct("q")


def size_of(n: int) -> int:
    """Bytes of memory for `n` ranks, zeros at first."""
    return align(n) + 4 * align(8 * n) + 2 * n * _RING


class _Ring:
    """One direction, between two ranks."""

    def __init__(self, counts: tuple[memoryview, memoryview], k: int, data: memoryview):
        """Args: counts: bytes written and bytes read since the beginning, of all rings; this one has the place `k`."""
        self._written, self._read, self._k, self._data = *counts, k, data

    def write(self, message: bytes) -> bool:
        """False: there is no room for it now."""
        data, written = _LENGTH.pack(len(message)) + message, self._written[self._k]
        if len(data) > _RING - written + self._read[self._k]:
            return False
        start = written % _RING
        first = min(len(data), _RING - start)
        self._data[start : start + first] = data[:first]
        self._data[: len(data) - first] = data[first:]
        self._written[self._k] = written + len(data)  # last: processors of this kind show stores in their order
        return True

    def messages(self) -> Iterator[bytes]:
        """All that have come."""
        read, written = self._read[self._k], self._written[self._k]
        start = read % _RING
        data = bytes(self._data[start : start + written - read])
        data += bytes(self._data[: written - read - len(data)])
        self._read[self._k] = written
        place = 0
        while place < len(data):
            (length,) = _LENGTH.unpack_from(data, place)
            place += _LENGTH.size + length
            yield data[place - length : place]


class Rings:
    """Those of one rank, and which ranks of the machine sleep.

    Attributes:
        ranks: those to whom this rank can write.
    """

    def __init__(self, view: memoryview, here: Sequence[int], rank: int, reached: Sequence[int]):
        """Args: here: the ranks of the machine, the leader first. reached: those among them that share memory."""
        n, self._places = len(here), {r: k for k, r in enumerate(here)}
        self._place = self._places[rank]
        line = align(8 * n)
        self._asleep = view[:n]
        parts = [view[align(n) + i * line :][: 8 * n].cast("q") for i in range(4)]
        data = view[align(n) + 4 * line :]

        def ring(up: bool, k: int) -> _Ring:
            return _Ring((parts[2 * up], parts[2 * up + 1]), k, data[(2 * k + up) * _RING :][:_RING])

        leads = rank == here[0]
        pairs = {r if leads else here[0]: self._places[r] for r in (reached[1:] if leads else [rank])}
        self._out = {r: ring(not leads, k) for r, k in pairs.items()}
        self._in = {r: ring(leads, k) for r, k in pairs.items()}
        self._written = parts[2 * leads][slice(None) if leads else slice(self._place, self._place + 1)]
        self._seen = bytes(self._written.nbytes)
        self.ranks = self._out.keys()

    def sleeps(self, asleep: bool) -> None:
        """Others are to see whether this rank must be woken."""
        self._asleep[self._place] = asleep

    def sleepers(self) -> list[int]:
        """The ranks that sleep now."""
        found = bytes(self._asleep)
        return [rank for rank, k in self._places.items() if found[k]] if any(found) else []

    def wakes(self, rank: int) -> bool:
        """True if that rank must be woken, as far as this one knows; the rank that asks wakes it."""
        if (place := self._places.get(rank)) is None:
            return True
        asleep, self._asleep[place] = self._asleep[place], 0
        return bool(asleep)

    def write(self, rank: int, message: bytes) -> bool:
        """False: there is no room for it now."""
        return self._out[rank].write(message)

    def news(self) -> bool:
        """True if something has come since `take`."""
        return bytes(self._written) != self._seen

    def take(self) -> Iterator[tuple[int, bytes]]:
        """(rank, message) of all messages that have come."""
        if self.news():
            self._seen = bytes(self._written)
            for rank, ring in self._in.items():
                for message in ring.messages():
                    yield rank, message
