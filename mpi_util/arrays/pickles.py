"""Python objects as bytes, arrays in them as raw memory (pickle protocol 5). Only ranks of one job exchange them."""

import pickle
from typing import Any

import numpy as np

from ..errors import BatchError
from ..host.segments import align

_SMALL = 1 << 16  # bytes; what is not larger is copied, so that an object does not keep a whole block


def pack(op: str, items: list[Any]) -> np.ndarray:
    """The items as bytes: the number of parts, the size of each, the pickle, and the arrays' memory, aligned."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        parts: list[bytes | memoryview] = [pickle.dumps(list(items), 5, buffer_callback=buffers.append)]
    except Exception as error:  # of whatever object
        raise BatchError(f"{op}: pickle does not take this: {error}") from None
    arrays = [np.frombuffer(part, np.uint8) for part in [*parts, *(buffer.raw() for buffer in buffers)]]
    sizes = np.array([len(arrays), *map(len, arrays)])
    packed = np.empty(sum(map(align, [sizes.nbytes, *map(len, arrays)])), np.uint8)
    start = 0
    for array in [sizes.view(np.uint8), *arrays]:
        packed[start : start + len(array)] = array
        start += align(len(array))
    return packed


def unpack(packed: np.ndarray) -> list[Any]:
    """The items of `pack`; large arrays among them are views of `packed`."""
    memory = packed.data if len(packed) > _SMALL else memoryview(bytearray(packed.data))
    sizes = np.frombuffer(memory, np.int64, 1 + int(np.frombuffer(memory, np.int64, 1)[0]))
    start, parts = align(sizes.nbytes), []
    for size in sizes[1:].tolist():
        part = memory[start : start + size]
        parts.append(part if size > _SMALL else memoryview(bytearray(part)))
        start += align(size)
    items: list[Any] = pickle.loads(parts[0], buffers=parts[1:])
    return items
