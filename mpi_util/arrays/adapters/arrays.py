"""NumPy arrays in every rank, and nested dicts, lists and tuples of them and of tensors of any framework."""

from typing import Any

import numpy as np

from ...errors import BatchError, WeightsError
from .. import tree
from ..layout import Slot, alignment_key
from . import adapter_for, as_bits, as_numbers, is_extension, slot_maker, with_bits


def to_array(leaf: Any) -> np.ndarray:
    """The leaf as an array. Raises BatchError if it would be an array of objects."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise BatchError("is a masked array; fill it, or send data and mask")
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise BatchError(f"holds objects ({type(leaf).__name__}); give it a numeric dtype, or use rank0_gather")
    return as_bits(array)


def from_array(array: np.ndarray, like: Any) -> np.ndarray:
    """`array` itself; of `like`'s dtype where its values came as bits."""
    return array.view(like.dtype) if _has_bits(like) else array


def to_numbers(leaf: Any) -> np.ndarray:
    """The leaf as an array in the machine's byte order; as float32 where its dtype is an extension to NumPy's."""
    if _has_bits(leaf):
        return as_numbers(np.asarray(leaf))
    array = to_array(leaf)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def from_numbers(array: np.ndarray, like: Any) -> np.ndarray:
    """`array`, of `like`'s dtype where that is an extension to NumPy's; for a number a NumPy scalar."""
    array = array.astype(like.dtype) if _has_bits(like) else array
    return array if isinstance(like, np.ndarray) else array[()]


def token(leaf: Any) -> Any:
    """An int stands for every array and number, but for those whose bits travel."""
    return np.empty(0, leaf.dtype) if _has_bits(leaf) else 0


def _has_bits(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return isinstance(dtype, np.dtype) and is_extension(dtype)


def slots(model: Any, read_only: bool = False) -> list[Slot]:
    """A slot for each array of a nested dict, list or tuple, and those of models among them."""
    if not isinstance(model, (dict, list, tuple, np.ndarray)):
        kind, known = type(model).__name__, "a torch module or optimizer, or a dict, list or tuple of NumPy arrays"
        if all(hasattr(model, name) for name in ("mean", "var", "count")):
            raise WeightsError(f"a {kind} holds running means: merge_moments merges those of all ranks")
        raise WeightsError(f"no weights found in a {kind}; give {known}")
    found: list[Slot] = []
    for path, leaf in tree.walk(model):
        plain = type(leaf) is np.ndarray and leaf.flags.writeable and not (leaf.dtype.hasobject or _has_bits(leaf))
        if plain:  # quick: these are many
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
        kind = type(leaf).__name__
        raise WeightsError(f"'{path}' is a {kind}, not written in place; give np.array([...]), and set x[:] = ...")
    writable = isinstance(leaf, np.ndarray) and leaf.flags.writeable and not leaf.dtype.hasobject
    if not writable and not read_only:
        raise WeightsError(f"'{path}' cannot be written in place: {leaf.dtype} array, or read-only")
    try:
        array = adapter_for(leaf).to_array(leaf)
    except BatchError as error:
        raise WeightsError(f"weights '{path}' {error}") from None

    slot = _array_slot(path, array, array if writable else None)
    return with_bits(slot, leaf.dtype) if _has_bits(leaf) else slot


def _array_slot(path: str, array: np.ndarray, writable: np.ndarray | None) -> Slot:
    def write(values: np.ndarray) -> None:
        if writable is None:
            raise WeightsError(f"'{path}' cannot be written in place; give a writable NumPy array, tensor or variable")
        np.copyto(writable, values)

    contiguous, alignment = array.flags.c_contiguous, 0
    if not contiguous or array.base is not None:  # else it begins where memory does
        alignment = alignment_key(array.__array_interface__["data"][0], array.strides, contiguous)
    read, on_host = lambda out: np.copyto(out, array), writable is not None
    return Slot(path, array.dtype, array.shape, read, write, on_host, alignment=alignment)
