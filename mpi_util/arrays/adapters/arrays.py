"""NumPy arrays, and nested dicts, lists and tuples of them (which may hold tensors of any framework too)."""

from typing import Any

import numpy as np

from ...errors import BatchError, WeightsError
from .. import tree
from ..layout import Slot
from . import adapter_for, slot_maker


def to_array(leaf: Any) -> np.ndarray:
    """The leaf as an array. Raises BatchError if it would be an array of objects."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise BatchError("is a masked array; fill it, or send data and mask")
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise BatchError(f"holds objects ({type(leaf).__name__}); give it a numeric dtype, or use rank0_gather")
    return array


def from_array(array: np.ndarray, like: Any) -> np.ndarray:
    """`array` itself."""
    return array


def to_numbers(leaf: Any) -> np.ndarray:
    """The leaf as an array in the machine's byte order."""
    array = to_array(leaf)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def from_numbers(array: np.ndarray, like: Any) -> np.ndarray:
    """`array`; for a number a NumPy scalar."""
    return array if isinstance(like, np.ndarray) else array[()]


def token(leaf: Any) -> int:
    """An int stands for every array and number."""
    return 0


def slots(model: Any, read_only: bool = False) -> list[Slot]:
    """A slot for each array of a nested dict, list or tuple, and those of models among them."""
    if not isinstance(model, (dict, list, tuple, np.ndarray)):
        if all(hasattr(model, name) for name in ("mean", "var", "count")):
            raise WeightsError(f"a {type(model).__name__} holds running means: merge_moments merges those of all ranks")
        raise WeightsError(
            f"no weights found in a {type(model).__name__}; give a torch module or optimizer, "
            "or a dict, list or tuple of NumPy arrays"
        )
    found: list[Slot] = []
    for path, leaf in tree.walk(model):
        if type(leaf) is np.ndarray and leaf.flags.writeable and not leaf.dtype.hasobject:  # quick: these are many
            found.append(_array_slot(path, leaf, leaf))
        elif hasattr(leaf, "state_dict") or hasattr(leaf, "trainable_variables"):  # a model in a dict of models
            found += [slot._replace(name=f"{path}/{slot.name}") for slot in adapter_for(leaf).slots(leaf)]
        else:
            found.append(_slot(path, leaf, read_only))
    tree.check_paths([slot.name for slot in found])
    return found


def _slot(path: str, leaf: Any, read_only: bool) -> Slot:
    make = slot_maker(leaf)
    if make is not None:
        try:
            return make(path, leaf)
        except WeightsError:
            if not read_only:
                raise
    elif not read_only and not isinstance(leaf, np.ndarray):
        raise WeightsError(f"'{path}' is a {type(leaf).__name__}; only arrays can be written in place: give np.array([...]), and change it by x[:] = ...")
    writable = isinstance(leaf, np.ndarray) and leaf.flags.writeable and not leaf.dtype.hasobject
    if not writable and not read_only:
        raise WeightsError(f"'{path}' cannot be written in place: {leaf.dtype} array, or read-only")
    try:
        array = adapter_for(leaf).to_array(leaf)
    except BatchError as error:
        raise WeightsError(f"weights '{path}' {error}") from None

    return _array_slot(path, array, array if writable else None)


def _array_slot(path: str, array: np.ndarray, writable: np.ndarray | None) -> Slot:
    def write(values: np.ndarray) -> None:
        if writable is None:
            raise WeightsError(f"'{path}' cannot be written in place; give a writable NumPy array, tensor or variable")
        np.copyto(writable, values)

    flat = writable.reshape(-1) if writable is not None and writable.flags.c_contiguous else None
    return Slot(path, array.dtype, array.shape, flat, lambda out: np.copyto(out, array), write)
