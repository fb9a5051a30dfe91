"""NumPy arrays in every rank; dicts, lists, tuples and plain objects of them, of numbers, tensors and models."""

from typing import Any

import numpy as np

from ...errors import BatchError, WeightsError
from .. import tree
from ..layout import Slot, alignment_key
from . import adapter_for, as_bits, as_numbers, is_extension, slot_maker, value_slot, with_bits

_DTYPES: dict[type, str] = {bool: "?", int: "i8", float: "f8", complex: "c16"}  # as which Python's numbers travel
_LONG, _DEEP = 1000, 4  # a list in an object is data, and an object in objects none of what the program gives


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


def slots(model: Any, read_only: bool, held: list[tuple[str, Any]]) -> list[Slot]:
    """Those of a nested dict, list or tuple, or of a plain object. Args: held: as of `adapters.slots`."""
    search = _Search(read_only, held)
    search.add("", model)
    found = search.found + search.of_models
    tree.check_paths([slot.name for slot in found])
    return found


class _Search:
    """Finds slots. What the program gives is sent, or is an error; of a plain object these attributes are:

    numbers, arrays, tensors, models, dicts and lists of such, and objects that hold nothing else, as normalisers do.
    Others stay as they are: an object with a generator or a file is an environment or a logger, one of strings and
    numbers a configuration, and their numbers are the rank's own. Models in those are sent.
    """

    def __init__(self, read_only: bool, held: list[tuple[str, Any]]):
        self.read_only, self.held = read_only, held
        self.found, self.of_models = list[Slot](), list[Slot]()
        self.around, self.left = list[int](), set[int]()  # ids of objects: around this place; that stay as they are

    def add(self, path: str, thing: Any, owner: Any = None, key: Any = None) -> bool:
        """Adds what is sent of `thing`, which is `owner[key]` if that can be replaced. False: something is not sent."""
        is_dict = isinstance(thing, dict)
        if type(thing) is np.ndarray and thing.flags.writeable and not (thing.dtype.hasobject or _has_bits(thing)):
            self.found.append(_array_slot(path, thing, thing))  # quick: these are many
        elif is_dict or isinstance(thing, (list, tuple)):
            is_tuple = isinstance(thing, tuple)
            if self.around and not is_dict and (not 0 < len(thing) < _LONG or tree.is_joined_list([thing[0]])):
                return is_tuple  # a shape is no state; a list of numbers is data
            items = sorted(thing.items(), key=lambda item: str(item[0])) if is_dict else enumerate(thing)
            owner = None if is_tuple or self.read_only else thing
            return all([self.add(f"{path}/{k}" if path else str(k), item, owner, k) for k, item in items])
        elif owner is not None and (type(thing) in _DTYPES or isinstance(thing, (np.number, np.bool_))):
            self.found.append(_number_slot(path, thing, owner, key))
        elif _is_model(thing, optimizers=not self.around):
            slots = adapter_for(thing).slots(thing)
            self.of_models += [slot._replace(name=f"{path}/{slot.name}") for slot in slots]
            self.held.append((path, thing))
        elif not self.read_only and _is_plain(thing):
            return self.add_attributes(path, thing, vars(thing))
        elif not self.around or (slot_maker(thing) and hasattr(thing, "shape")):
            self.found.append(_slot(path, thing, self.read_only))
        else:
            return thing is None or isinstance(thing, (str, type)) or type(thing).__name__ in ("device", "dtype")
        return True

    def add_attributes(self, path: str, thing: Any, attributes: dict[str, Any]) -> bool:
        if id(thing) in self.around or id(thing) in self.left or len(self.around) == _DEEP:
            return id(thing) in self.around
        n_found, n_models, whole = len(self.found), len(self.of_models), True
        self.around.append(id(thing))
        for name, value in sorted(attributes.items()):
            n = len(self.found)
            if not self.add(f"{path}/{name}" if path else name, value, attributes, name):
                whole = False
                del self.found[n:]
        self.around.pop()
        found = self.found[n_found:]
        if not self.around and not found and len(self.of_models) == n_models:
            raise _refused(path, thing)
        is_configuration = any(type(v) is str for v in attributes.values()) and not any(slot.shape for slot in found)
        if self.around and (is_configuration or not whole):
            self.left.add(id(thing))
        return id(thing) not in self.left


def _slot(path: str, leaf: Any, read_only: bool) -> Slot:
    make = slot_maker(leaf)
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


def _number_slot(path: str, number: Any, owner: Any, key: Any) -> Slot:
    kind = type(number)
    try:
        dtype = np.array(number, _DTYPES.get(kind)).dtype
    except OverflowError:
        raise WeightsError(f"'{path}' is an int beyond 64 bits; make it a float, or send it by bcast") from None

    def write(values: np.ndarray) -> None:
        owner[key] = values.item() if kind in _DTYPES else values[()]

    return value_slot(path, dtype, (), lambda: owner[key], write)


def _is_model(thing: Any, optimizers: bool) -> bool:
    adapter = adapter_for(thing)
    stateful = hasattr(thing, "state_dict") or hasattr(thing, "trainable_variables")
    return stateful and hasattr(adapter, "parts") and (optimizers or bool(adapter.parts(thing)))


def _is_plain(thing: Any) -> bool:
    """An object of the program's own, not frozen, and no environment."""
    kind: Any = type(thing)
    known = isinstance(thing, np.ndarray) or hasattr(adapter_for(thing), "parts")
    known = known or (hasattr(kind, "reset") and hasattr(kind, "step"))
    return not known and type(getattr(thing, "__dict__", None)) is dict and kind.__setattr__ is object.__setattr__


def _refused(path: str, thing: Any) -> WeightsError:
    kind, known = type(thing).__name__, "a torch module or optimizer, or a dict, list or tuple of NumPy arrays"
    if all(hasattr(thing, name) for name in ("mean", "var", "count")):
        return WeightsError(f"a {kind} holds running means: merge_moments merges those of all ranks")
    if not path:
        return WeightsError(f"no weights found in a {kind}; give {known}")
    return WeightsError(f"'{path}' is a {kind}, not written in place; give np.array([...]), and set x[:] = ...")
