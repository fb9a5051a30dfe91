"""NumPy arrays in every rank; dicts, lists, tuples and plain objects of them, of numbers, tensors and models."""

import enum
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import numpy as np

from ...errors import BatchError, WeightsError
from .. import tree
from ..layout import Slot, alignment_key
from . import adapter_for, as_bits, as_numbers, is_extension, is_model, named, opened, value_slot, with_bits

_DTYPES: dict[type, str] = {bool: "?", int: "i8", float: "f8", complex: "c16"}  # as which Python's numbers travel
_LONG, _DEEP = 1000, 5  # a longer list is data; so deep in an object nothing is looked for


def to_array(leaf: Any, numbers: bool = False) -> np.ndarray:
    """The leaf as an array. Raises BatchError if it would be an array of objects.

    Args: numbers: in the machine's byte order; as float32 where its dtype is an extension to NumPy's.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise BatchError("is a masked array; fill it, or send data and mask")
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise BatchError(f"holds objects ({type(leaf).__name__}); give it a numeric dtype, or use rank0_gather")
    if not numbers:
        return as_bits(array)
    array = as_numbers(array)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def from_array(array: np.ndarray, like: Any) -> np.ndarray:
    """`array` itself; of `like`'s dtype where its values came as bits."""
    return array.view(like.dtype) if is_extension(getattr(like, "dtype", None)) else array


def from_numbers(array: np.ndarray, like: Any) -> np.ndarray:
    """`array`, of `like`'s dtype where that is an extension to NumPy's; for a number a NumPy scalar."""
    array = array.astype(like.dtype) if is_extension(getattr(like, "dtype", None)) else array
    return array if isinstance(like, np.ndarray) else array[()]


def token(leaf: Any) -> Any:
    """An int stands for every array and number, but for those whose bits travel."""
    return np.empty(0, leaf.dtype) if is_extension(getattr(leaf, "dtype", None)) else 0


def slots(model: Any, read_only: bool, held: list[tuple[str, Any]]) -> list[Slot]:
    """Those of a nested dict, list or tuple, or of a plain object. Args: held: as of `adapters.slots`."""
    search = _Search(read_only, held)
    search.add("", model)
    tree.check_paths([slot.name for slot in search.found])
    return search.found


class _Search:
    """Finds slots. What the program gives is sent, or is an error.

    What of an object is sent says `rank0_bcast_wts`: the rest may be data, a buffer, a logger or a configuration.
    """

    def __init__(self, read_only: bool, held: list[tuple[str, Any]]):
        self.read_only, self.held, self.found = read_only, held, list[Slot]()

    def add(self, path: str, thing: Any, owner: Any = None, key: Any = None) -> None:
        """Adds what is sent of `thing`. Args: owner: thing is `owner[key]`, which can be replaced."""
        if isinstance(thing, (MutableMapping, list, tuple)):
            owner = None if self.read_only or isinstance(thing, tuple) else thing
            keys: Any = sorted(thing, key=str) if tree.is_mapping(thing) else range(len(thing))
            for k in keys:
                self.add("/".join(filter(None, (path, str(k)))), thing[k], owner, k)
        elif owner is not None and _is_number(thing):
            self.found.append(_number_slot(path, thing, owner, key))
        elif is_model(thing):
            self.found += [slot._replace(name=f"{path}/{slot.name}") for slot in adapter_for(thing).slots(thing)]
            self.held.append((path, thing))
        elif owner is not None and (item_slot := getattr(adapter_for(thing), "item_slot", None)):
            self.found.append(item_slot(path, owner, key))
        elif not self.read_only and _is_plain(thing):
            n_found = len(self.found)
            self._add_inside(path, thing, True, [id(thing)])
            if len(self.found) == n_found:
                raise _refused(path, thing)
        else:
            self.found.append(_slot(path, thing, self.read_only))

    def _add_inside(self, path: str, thing: Any, values: bool, around: list[int]) -> None:
        """Of an object, or of what one holds. Args: values: numbers and arrays, too. around: ids, against cycles."""
        for key, item in _items(thing):
            owner = None if isinstance(thing, tuple) else thing if isinstance(thing, (dict, list)) else vars(thing)
            place = f"{path}/{key}" if path else str(key)
            if values and owner is not None and (box := opened(item)):
                n_found = len(self.found)
                self.add(place, box[0])
                inside = self.found[n_found:]
                puts = {slot.flush: partial(_put, owner, key, box[1], slot.flush) for slot in inside}
                self.found[n_found:] = [slot._replace(flush=puts[slot.flush]) for slot in inside]
            elif _is_network(item) or (values and _is_value(item) and (owner is not None or not _is_number(item))):
                self.add(place, item, owner, key)
            elif id(item) not in around and len(around) < _DEEP:
                self._add_inside(place, item, _is_state(item), [*around, id(item)])


def _put(owner: Any, key: Any, give: Callable[[], Any], before: Callable[[], None] | None) -> None:
    if before:
        before()
    owner[key] = give()


def _slot(path: str, leaf: Any, read_only: bool) -> Slot:
    make: Callable[[str, Any], Slot] | None = getattr(adapter_for(leaf), "tensor_slot", None)
    if make is not None:
        try:
            return make(path, leaf)
        except WeightsError:
            if not read_only:
                raise
    elif not read_only and not isinstance(leaf, np.ndarray):
        raise _refused(path, leaf)
    writable = isinstance(leaf, np.ndarray) and leaf.flags.writeable and not leaf.dtype.hasobject
    if not writable and not read_only:
        raise WeightsError(f"'{path}' cannot be written in place: {leaf.dtype} array, or read-only; give a copy")
    with named(path):
        array = adapter_for(leaf).to_array(leaf)
    slot = _array_slot(path, array, array if writable else None)
    return with_bits(slot, leaf.dtype) if is_extension(getattr(leaf, "dtype", None)) else slot


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


def _number_slot(path: str, number: Any, owner: Any, key: Any) -> Slot:
    kind = type(number)
    try:
        dtype = np.array(number, _DTYPES.get(kind)).dtype
    except OverflowError:
        raise WeightsError(f"'{path}' is an int beyond 64 bits; make it a float, or send it by bcast") from None

    def write(values: np.ndarray) -> None:
        owner[key] = values.item() if kind in _DTYPES else values[()]

    return value_slot(path, dtype, (), lambda: owner[key], write)


def _is_number(thing: Any) -> bool:
    return type(thing) in _DTYPES or isinstance(thing, (np.number, np.bool_))


def _is_value(thing: Any) -> bool:
    """A number, or an array or tensor that can be written: none that torch is calculating with, as saved log-probs."""
    if isinstance(thing, np.ndarray):
        return thing.flags.writeable and not thing.dtype.hasobject
    tensor = hasattr(thing, "shape") and hasattr(adapter_for(thing), "tensor_slot")
    return _is_number(thing) or (tensor and getattr(thing, "grad_fn", None) is None) or opened(thing) is not None


def _is_network(thing: Any) -> bool:
    """A model, and no optimizer."""
    return is_model(thing) and bool(adapter_for(thing).parts(thing))


def _items(thing: Any) -> list[tuple[Any, Any]]:
    """Of a dict, list, tuple or plain object, in an order that all ranks have; of anything else, and of data, none."""
    if isinstance(thing, (list, tuple)):
        return [*enumerate(thing)] if len(thing) < _LONG else []
    inside = thing if isinstance(thing, dict) else vars(thing) if _is_plain(thing) else {}
    return sorted(inside.items(), key=lambda item: str(item[0]))


def _is_state(thing: Any, depth: int = 1) -> bool:
    """It holds nothing but numbers, arrays, tensors, models and what holds such; unless a dict, more than numbers."""
    items = [item for _, item in _items(thing) if not isinstance(item, (str, type, type(None)))]
    if not items or depth == _DEEP or (all(map(_is_number, items)) and not isinstance(thing, dict)):
        return False
    return all(
        _is_value(item) or _is_network(item) or _is_state(item, depth + 1)
        or (isinstance(item, tuple) and all(map(_is_number, item)))  # such as a shape
        for item in items
    )  # fmt: skip


def _is_plain(thing: Any) -> bool:
    """An object of the program's own, not frozen, and no environment."""
    kind: Any = type(thing)
    other = isinstance(thing, (np.ndarray, Mapping, enum.Enum)) or hasattr(adapter_for(thing), "parts")
    other = other or (hasattr(kind, "reset") and hasattr(kind, "step"))
    return not other and type(getattr(thing, "__dict__", None)) is dict and kind.__setattr__ is object.__setattr__


def _refused(path: str, thing: Any) -> WeightsError:
    kind, known = type(thing).__name__, "a torch module or optimizer, or a dict, list or tuple of NumPy arrays"
    if all(hasattr(thing, name) for name in ("mean", "var", "count")):
        return WeightsError(f"a {kind} holds running means: merge_moments merges those of all ranks")
    if not path:
        return WeightsError(f"no weights found in a {kind}; give {known}")
    return WeightsError(f"'{path}' is a {kind}, not written in place; give np.array([...]), and set x[:] = ...")
