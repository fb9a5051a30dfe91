"""Python objects as bytes, arrays in them as raw memory (pickle protocol 5). Only the ranks of a job exchange them."""

import io
import pickle
from typing import Any

import numpy as np

from ..arrays.adapters import adapter_for
from ..arrays.layout import align
from ..errors import BatchError, first_line

SMALL = 1 << 16  # bytes; a leaf or an object up to this is copied, so that keeping it does not keep the whole block


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        """A view travels as what it shows, as NumPy's do; torch would send all memory that the tensor is a part of."""
        compact = getattr(adapter_for(thing), "compact", None)
        return NotImplemented if compact is None or (own := compact(thing)) is thing else own.__reduce_ex__(5)


def pack(op: str, items: list[Any]) -> np.ndarray:
    """The items as bytes: the number of parts, the size of each, the pickle, and the arrays' memory, aligned."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        _Pickler(file := io.BytesIO(), 5, buffer_callback=buffers.append).dump(list(items))
    except Exception as error:  # of whatever object
        raise BatchError(f"{op}: pickle does not take this: {first_line(error)}") from None
    arrays = [np.frombuffer(part, np.uint8) for part in [file.getbuffer(), *(buffer.raw() for buffer in buffers)]]
    sizes = np.array([len(arrays), *map(len, arrays)])
    packed = np.empty(sum(map(align, [sizes.nbytes, *map(len, arrays)])), np.uint8)
    start = 0
    for array in [sizes.view(np.uint8), *arrays]:
        packed[start : start + len(array)] = array
        start += align(len(array))
    return packed


def unpack(packed: np.ndarray) -> list[Any]:
    """The items of all that `pack` gave, one after another; large arrays among them are views of `packed`."""
    items: list[Any] = []
    start = 0
    while start < len(packed):
        header = packed[start:].view(np.int64)
        sizes = header[1 : 1 + header[0]].tolist()
        start, parts = start + align(header.itemsize * (1 + len(sizes))), []
        for size in sizes:
            part = packed[start : start + size].data
            parts.append(part if size > SMALL else memoryview(bytearray(part)))
            start += align(size)
        items += pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  # from a rank of this job
    return items
