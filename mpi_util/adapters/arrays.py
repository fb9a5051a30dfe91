"""NumPy arrays, and nested dicts, lists and tuples of them (which may hold tensors of any framework too)."""

from typing import Any

import numpy as np

from .. import tree
from ..errors import BatchError, WeightsError
from . import Slot, adapter_for


def to_array(leaf: Any) -> np.ndarray:
    """The leaf as an array. Raises BatchError if it would be an array of objects."""
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise BatchError(f"holds {type(leaf).__name__} objects; give it a numeric dtype, or make it a list")
    return array


def from_array(array: np.ndarray, like: Any) -> np.ndarray:
    """`array` itself."""
    return array


def slots(model: Any) -> list[Slot]:
    """A slot for each array of a nested dict, list or tuple; they must be writable in place."""
    if not isinstance(model, (dict, list, tuple, np.ndarray)):
        raise WeightsError(
            f"no weights found in a {type(model).__name__}; give a torch module or optimizer, "
            "or a dict, list or tuple of NumPy arrays"
        )
    found = []
    for path, leaf in tree.walk(model):
        adapter = adapter_for(leaf)
        if isinstance(leaf, np.ndarray):
            if leaf.dtype.hasobject or not leaf.flags.writeable:
                raise WeightsError(f"'{path}' cannot be written in place: {leaf.dtype} array, or read-only")
            found.append(_array_slot(path, leaf))
        elif hasattr(adapter, "tensor_slot"):
            found.append(adapter.tensor_slot(path, leaf))
        else:
            raise WeightsError(
                f"'{path}' is a {type(leaf).__name__}; only arrays can be written in place: np.array(...)"
            )
    return found


def _array_slot(name: str, array: np.ndarray) -> Slot:
    return Slot(
        name,
        array.dtype,
        array.shape,
        array.reshape(-1) if array.flags.c_contiguous else None,
        lambda out: np.copyto(out, array),
        lambda values: np.copyto(array, values),
    )
