"""bfloat16 for NumPy, and the checksum of a block."""

import zlib

import numpy as np

NARROW = np.dtype(np.uint16)  # of bfloat16's bits
_ROW = 512  # words of eight bytes: their sums stay in the first-level cache


def rounded(values: np.ndarray) -> np.ndarray:
    """float32 -> the uint16 bits of bfloat16: to the nearest, ties to even; NaN stays NaN.

    The relative error is at most 2**-9 for normal numbers; what lies above bfloat16's largest number becomes infinite.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    up = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, up).astype(NARROW)


def widened(bits: np.ndarray) -> np.ndarray:
    """The uint16 bits of bfloat16 -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Checksum:
    """A number that differs, but for an accident of one in four billion, if part of a block is another version's.

    Args:
        block: uint8, of a multiple of eight bytes.
    """

    def __init__(self, block: np.ndarray):
        self._words = block.view(np.uint64)
        self._sums = np.zeros(_ROW, np.uint64)
        self._done = 0

    def take(self, nbytes: int) -> None:
        """The block will not change any more up to there: that part is summed while it is in the cache."""
        there = nbytes // (8 * _ROW) * _ROW
        if there > self._done:
            self._sums += self._words[self._done : there].reshape(-1, _ROW).sum(axis=0, dtype=np.uint64)
            self._done = there

    def end(self) -> int:
        """The checksum of the whole block, 32 bits."""
        self.take(self._words.nbytes)
        return zlib.crc32(self._words[self._done :].tobytes(), zlib.crc32(self._sums.tobytes()))


def checksum(block: np.ndarray) -> int:
    """The checksum of a block that is complete."""
    return Checksum(block).end()
