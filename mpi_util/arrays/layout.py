"""Where arrays lie in one block of bytes, and how a model's values get into it and out of it. Runs in every rank."""

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ..host.segments import align as align  # pickles.py takes it from here
from . import tree

_REGISTER_BYTES = 16  # new memory begins at a multiple


class Slot(NamedTuple):
    """One array of a model."""

    name: str  # unique in the model
    dtype: np.dtype  # of the bytes that travel (bfloat16 travels as uint16)
    shape: tuple[int, ...]
    read: Callable[[np.ndarray], None]  # writes the values into an array of that dtype and shape
    write: Callable[[np.ndarray], object]  # sets the values from such an array, in place and on the model's device
    on_host: bool = False  # `read` and `write` are copies between two pieces of host memory, which do not fail
    to_numbers: Callable[[np.ndarray], np.ndarray] = np.asarray  # makes numbers to calculate with of what travels
    to_bits: Callable[[np.ndarray], np.ndarray] = np.asarray  # the reverse
    # called after the last `write`, if there is one, and if not `on_host` sets the values then; several slots share one
    flush: Callable[[], None] | None = None
    aliases: tuple[str, ...] = ()  # other names of the same array: tied parameters of torch
    optional: bool = False  # a state dict lacks it: a buffer of torch that is registered as not persistent
    kind: str = ""  # name of the values' own dtype where it is another, such as bfloat16
    unwritable: str = ""  # why it cannot be written; "": it can
    alignment: int = 0  # `alignment_key` of values in host memory, on which last bits of products depend; 0 elsewhere

    def copy(self) -> np.ndarray:
        """A copy of the values as they travel."""
        self.read(values := np.empty(self.shape, self.dtype))
        return values


class Entry(NamedTuple):
    """One array: what it is, and where it lies in the block."""

    name: str
    dtype: str | np.dtype  # see `portable`
    shape: tuple[int, ...]
    start: int  # bytes
    kind: str = ""  # as of `Slot`

    def view(self, memory: Any, dtype: np.dtype | None = None) -> np.ndarray:
        """The array over `memory`, as it travels. Args: dtype: that of the slot, which may say more than the text."""
        return np.ndarray(self.shape, self.dtype if dtype is None else dtype, memory, self.start)


class Layout:
    """Where arrays lie in a block of `nbytes`; small, to be sent. `aliases`: (other name, name) of an array."""

    def __init__(self, entries: tuple[Entry, ...] = (), nbytes: int = 0, aliases: tuple[tuple[str, str], ...] = ()):
        self.entries, self.nbytes, self.aliases = entries, nbytes, aliases

    @classmethod
    def of(cls, arrays: Iterable[tuple[Any, ...]], aliases: Iterable[Any] = ()) -> "Layout":
        """The arrays, such as slots, (name, dtype, shape, ...) each, one after another at aligned offsets."""
        named = tuple((*array[:3], getattr(array, "kind", "")) for array in arrays)
        return _layout(named, tuple(aliases))

    @functools.cached_property
    def kinds(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        """(name, dtype, shape) of each array: what must be the same where the block is sent to."""
        return [(entry.name, entry.kind or entry.dtype, entry.shape) for entry in self.entries]

    @functools.cached_property
    def signature(self) -> bytes:
        """Eight bytes that are equal where `kinds` is."""
        return tree.digest(self.kinds)

    def views(self, memory: Any) -> list[np.ndarray]:
        """The arrays over `memory`, which has at least `nbytes`."""
        return [entry.view(memory) for entry in self.entries]


@functools.lru_cache(maxsize=128)  # to make one takes longer than to send a small model
def _layout(arrays: tuple[Any, ...], aliases: tuple[Any, ...]) -> Layout:
    sizes = [align(dtype.itemsize * math.prod(shape)) for _, dtype, shape, _ in arrays]
    *starts, nbytes = itertools.accumulate(sizes, initial=0)
    named = zip(arrays, starts)
    entries = (Entry(name, portable(dtype), shape, start, kind) for (name, dtype, shape, kind), start in named)
    return Layout(tuple(entries), nbytes, aliases)


class ModelCopier:
    """A model's slots, each with its entry in a layout: the maker compares them, so that all that is written fits."""

    def __init__(self, layout: Layout, pairs: Iterable[tuple[Entry, Slot]]):
        self.layout = layout
        self.pairs = list(pairs)
        # first what can fail: a device, a framework
        self._to_write = sorted(self.pairs, key=lambda pair: pair[1].on_host)

    @classmethod
    def of(cls, slots: list[Slot]) -> "ModelCopier":
        layout = Layout.of(slots)
        return cls(layout, zip(layout.entries, slots))

    def read(self, memory: Any) -> None:
        for entry, slot in self.pairs:
            slot.read(entry.view(memory, slot.dtype))

    def write(self, memory: Any) -> None:
        """Sets the model's values from `memory`."""
        for entry, slot in self._to_write:
            slot.write(entry.view(memory, slot.dtype))
        self.flush(self.pairs)

    def flush(self, pairs: Iterable[tuple[Entry, Slot]]) -> None:
        """Makes what these slots have been written to the model's values, where they are not so at once."""
        for flush in {slot.flush for _, slot in pairs if slot.flush}:
            flush()


def alignment_key(address: int, strides: tuple[int, ...], contiguous: bool) -> int:
    """A number that is equal for arrays of a shape with the same strides and the same position in a vector register."""
    return address % _REGISTER_BYTES + (0 if contiguous else _REGISTER_BYTES * zlib.crc32(repr(strides).encode()))


def portable(dtype: np.dtype) -> str | np.dtype:
    """What stands for a dtype in a layout: its text, or the dtype itself if it has fields, which the text lacks."""
    return dtype if dtype.fields else dtype.str
