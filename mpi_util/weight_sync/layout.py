"""Names, dtypes and shapes of a model's weights, their places in one block of bytes, and how they get in and out.

Names are those of a torch module's parameters and buffers (`0.weight`); the path `a/b` of a nested dict and the key
`("a", "b")` of a TensorDict are both `a.b`, so that either may be sent to either.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays import adapters, tree
from ..arrays.adapters import Slot
from ..errors import BatchError, WeightsError
from ..host.segments import align
from .bits import NARROW, Checksum, rounded, widened

_PART = 1 << 16  # numbers that are copied or rounded at a time, so that they are still in the cache for what follows


class Weights:
    """Anything that has weights, by name.

    Attributes:
        slots: by name.
        aliases: other names of the same array (tied parameters) -> its name in `slots`.
        optional: names that a state dict lacks: buffers that are registered as not persistent.
    """

    def __init__(self, thing: Any):
        self.aliases: dict[str, str] = {}
        self.optional: set[str] = set()
        if is_tensordict(thing):
            found = _leaf_slots((_joined(key), value) for key, value in thing.items(True, True))
        elif isinstance(thing, (dict, list, tuple)):
            found = _leaf_slots(tree.walk(thing))
        else:
            found = adapters.slots(thing)
            self._look_into_module(thing)
        if not found:
            raise WeightsError(f"{type(thing).__name__} holds no weights")
        self.slots = {slot.name.replace("/", "."): slot for slot in found}
        if len(self.slots) < len(found):
            names = [slot.name.replace("/", ".") for slot in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise WeightsError(f"{type(thing).__name__} has two arrays whose path is '{twice}'")

    def _look_into_module(self, thing: Any) -> None:
        if not hasattr(thing, "named_parameters") or not hasattr(thing, "named_buffers"):
            return
        for each in (thing.named_parameters, thing.named_buffers):
            first: dict[int, str] = {}
            for name, tensor in each(remove_duplicate=False):
                if first.setdefault(id(tensor), name) != name:
                    self.aliases[name] = first[id(tensor)]
        for prefix, module in thing.named_modules():
            names = getattr(module, "_non_persistent_buffers_set", ())
            self.optional |= {f"{prefix}.{name}" if prefix else name for name in names}

    def get(self, name: str) -> Slot | None:
        """The slot of this name, or of the array that has this other name too."""
        return self.slots.get(name) or self.slots.get(self.aliases.get(name, ""))

    def named_like(self, names: list[str]) -> None:
        """A list is known by its order: its items take these names, if there are as many."""
        if list(self.slots) != names and all(name.isdigit() for name in self.slots) and len(names) == len(self.slots):
            self.slots = dict(zip(names, self.slots.values()))


def is_tensordict(thing: Any) -> bool:
    """True for a TensorDict, also one that is a module (TensorDictParams)."""
    return any(kind.__name__ == "TensorDictBase" for kind in type(thing).__mro__)


def _joined(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _leaf_slots(leaves: Iterable[tuple[str, Any]]) -> list[Slot]:
    """Slots to read from; what holds writable arrays can be written too."""
    found = []
    for name, leaf in leaves:
        try:
            if (make := adapters.slot_maker(leaf)) is not None:
                found.append(make(name, leaf)._replace(name=name))
                continue
        except WeightsError:
            pass  # a tensor that only lets itself be read
        try:
            found.append(_array_slot(name, adapters.adapter_for(leaf).to_array(leaf), leaf))
        except BatchError as error:
            raise WeightsError(f"weights '{name}' {error}") from None
    tree.check_paths([slot.name for slot in found])
    return found


def _array_slot(name: str, array: np.ndarray, leaf: Any) -> Slot:
    def write(values: np.ndarray) -> None:
        if array is not leaf or not array.flags.writeable:
            raise WeightsError(f"'{name}' cannot be written in place; give a writable NumPy array, tensor or variable")
        np.copyto(array, values)

    flat = array.reshape(-1) if array.flags.c_contiguous else None
    writable = array is leaf and array.flags.writeable
    return Slot(name, array.dtype, array.shape, flat if writable else None, lambda out: np.copyto(out, array), write)


class Entry(NamedTuple):
    """One array: what it is, and where it lies in the block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes
    narrow: bool  # float32 that travels as bfloat16

    def place(self, block: np.ndarray) -> np.ndarray:
        """Its bytes in `block`, as an array of what travels."""
        return np.ndarray(self.shape, NARROW if self.narrow else self.dtype, block, self.start)


class Layout(NamedTuple):
    """The places of all arrays in a block of `nbytes`; small, to be sent.

    Attributes:
        aliases: (other name, name) of tied arrays. A copy of the model may have come apart there.
    """

    entries: tuple[Entry, ...]
    nbytes: int
    aliases: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, weights: Weights, wire_dtype: str | None = None) -> "Layout":
        """The layout in which these weights travel."""
        entries, start = [], 0
        for name, slot in weights.slots.items():
            narrow = wire_dtype == "bfloat16" and slot.dtype == np.float32
            entries.append(Entry(name, slot.dtype.str, tuple(slot.shape), start, narrow))
            start += align(math.prod(slot.shape) * (NARROW.itemsize if narrow else slot.dtype.itemsize))
        return cls(tuple(entries), start, tuple(weights.aliases.items()))

    def plan(self, weights: Weights, who: str, other: str, base: Weights | None = None) -> "Plan":
        """Each entry with the slot that has its values.

        Args:
            who, other: whose `weights` these are, and whose the layout is, for the message.
            base: of the layout; has the values that a state dict lacks.

        Raises:
            WeightsError: names, dtypes or shapes differ.
        """
        weights.named_like([entry.name for entry in self.entries])
        found = []
        for entry in self.entries:
            slot = weights.get(entry.name)
            if slot is None and base is not None and entry.name in base.optional:
                slot = base.get(entry.name)
            if slot is None or (slot.dtype.str, tuple(slot.shape)) != (entry.dtype, entry.shape):
                mine = "no such array" if slot is None else f"{slot.dtype} {tuple(slot.shape)}"
                theirs = f"{np.dtype(entry.dtype)} {entry.shape}"
                raise WeightsError(
                    f"{who} and {other} differ, first at '{entry.name}': {mine} in {who}, {theirs} in {other}"
                )
            found.append((entry, slot))
        used, tied = {id(slot) for _, slot in found}, dict(self.aliases)
        entries = {entry.name: entry for entry in self.entries}
        for name, slot in weights.slots.items():
            twin = entries.get(tied.get(name, ""))
            if id(slot) in used or name in weights.optional:
                continue
            if twin is None or (slot.dtype.str, tuple(slot.shape)) != (twin.dtype, twin.shape):
                raise WeightsError(
                    f"{who} and {other} differ, first at '{name}': {slot.dtype} {tuple(slot.shape)} in {who}, "
                    f"no such array in {other}"
                )
            found.append((twin, slot))
        return found


Plan = list[tuple[Entry, Slot]]  # each entry with the slot that has its values


def pack(plan: Plan, block: np.ndarray) -> int:
    """Writes the values into `block`, uint8 of the layout's size, and returns its checksum. The model is only read."""
    total = Checksum(block)
    for nbytes in _fill(plan, block):
        total.take(nbytes)
    return total.end()


def _fill(plan: Plan, block: np.ndarray) -> Iterator[int]:
    """Writes the values; now and then gives the number of bytes up to which the block will not change any more."""
    for entry, slot in plan:
        place = entry.place(block)
        if slot.host is None and not entry.narrow:
            slot.read(place)
            continue
        values = slot.host
        if values is None:
            slot.read(values := np.empty(slot.shape, np.float32))
            values = values.reshape(-1)
        flat = place.reshape(-1)
        for start in range(0, flat.size, _PART):
            if start:
                yield entry.start + start * flat.itemsize
            part = values[start : start + _PART]
            flat[start : start + _PART] = rounded(part) if entry.narrow else part


def unpack(plan: Plan, block: np.ndarray) -> None:
    """Sets a model's values, all of them or, if an error is raised, none.

    What can fail (a device, a framework) comes first, and is set back if it does; what is left are copies between two
    pieces of host memory of the same size.
    """
    undo: list[tuple[Slot, np.ndarray]] = []
    devices = [(entry, slot) for entry, slot in plan if slot.host is None]
    try:
        for entry, slot in devices:
            before = np.empty(slot.shape, slot.dtype)
            slot.read(before)
            undo.append((slot, before))
            slot.write(widened(entry.place(block)) if entry.narrow else entry.place(block))
        _flush(devices)
    except BaseException:
        for slot, before in undo:
            slot.write(before)
        _flush(devices)
        raise
    for entry, slot in plan:
        if slot.host is not None and entry.narrow:
            bits = entry.place(block).reshape(-1)
            for start in range(0, bits.size, _PART):
                slot.host[start : start + _PART] = widened(bits[start : start + _PART])
        elif slot.host is not None:
            np.copyto(slot.host, entry.place(block).reshape(-1))


def _flush(pairs: Plan) -> None:
    for flush in {slot.flush for _, slot in pairs if slot.flush}:
        flush()


class Plans:
    """Remembers the last plan: to look through a module's parameters takes longer than to copy those of a small one."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Keeps nothing alive."""
        self._thing: Any = None
        self._weights: Weights | None = None
        self._layout: Layout | None = None
        self._plan: Plan = []
        self._holders: list[tuple[dict[str, Any], int]] = []
        self._tensors: list[tuple[dict[str, Any], str, Any, int, Any]] = []

    def weights(self, thing: Any) -> Weights:
        """`Weights(thing)`, or the last ones if they are of the same module with the same tensors in their places."""
        if self._weights is None or thing is not self._thing or not self._unchanged():
            self.forget()
            self._weights = Weights(thing)
            if hasattr(thing, "named_parameters") and not is_tensordict(thing):
                self._watch(thing)
        return self._weights

    def _watch(self, module: Any) -> None:
        self._thing = module
        for part in module.modules():
            self._holders += [(held, len(held)) for held in (part._parameters, part._buffers, part._modules)]
            self._tensors += [
                (held, name, tensor, tensor.data_ptr(), tensor.shape)
                for held in (part._parameters, part._buffers)
                for name, tensor in held.items()
                if tensor is not None
            ]

    def _unchanged(self) -> bool:
        """True if the module has the same tensors, in the same memory, in the same places."""
        return all(len(held) == n for held, n in self._holders) and all(
            tensor.data_ptr() == place and tensor.shape == shape and held.get(name) is tensor
            for held, name, tensor, place, shape in self._tensors
        )

    def plan(self, thing: Any, layout: Layout, who: str, other: str, base: Weights | None = None) -> Plan:
        """`layout.plan(...)`."""
        weights = self.weights(thing)
        if self._layout is not layout:
            self._plan = layout.plan(weights, who, other, base)
            self._layout = layout
        return self._plan
