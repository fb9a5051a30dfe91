"""A model's weights by name, and how they fit the block that another process has made.

Names are those of a torch module's parameters and buffers (`0.weight`); the path `a/b` of a nested dict and the key
`("a", "b")` of a TensorDict are both `a.b`, so that either may be sent to either.
"""

import functools
import json
import math
import sys
from typing import Any

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from mpi_util.arrays import adapters
from mpi_util.arrays.layout import Entry, Layout, Plan, Slot, derived, portable
from mpi_util.errors import WeightsError

from . import extra


class Weights:
    """Anything that has weights, by name."""

    def __init__(self, found: list[Slot]):
        self.slots: dict[str, Slot] = {}
        for slot in found:
            if self.slots.setdefault(name := slot.name.replace("/", "."), slot) is not slot:
                raise WeightsError(f"there are two arrays whose path is '{name}'; rename one")
        # other names of the same array (tied parameters) -> its name in `slots`
        self.aliases = {alias: name for name, slot in self.slots.items() for alias in slot.aliases}
        self.named = {alias: self.slots[name] for alias, name in self.aliases.items()} | self.slots
        self._plan = Plan(Layout(), [])  # the last one
        self._stateful = getattr(found, "stateful", ())
        self._states: dict[str, Any] = {}  # what a state dict has of these

    @classmethod
    def of(cls, thing: Any) -> "Weights":
        """The weights of anything; the last ones of a module that has the same tensors in their places.

        What holds writable arrays can be written too, all else can only be read.
        """
        if any(kind.__name__ == "TensorDictBase" for kind in type(thing).__mro__):  # also a module: TensorDictParams
            items = thing.items(True, True)
            thing = {key if isinstance(key, str) else "/".join(key): value for key, value in items}
        states = {key: thing[key] for key in thing if _is_extra(key)} if isinstance(thing, dict) else {}
        if states:
            thing = {key: value for key, value in thing.items() if not _is_extra(key)}
        weights = derived(adapters.slots(thing, read_only=True), cls)
        weights._states |= states
        return weights

    @property
    def parts(self) -> list[tuple[str, Any]]:
        """The parts of a torch module that have more than tensors, by its names in a state dict."""
        return [(name, part) for name, ref in self._stateful if (part := ref()) is not None]

    def extra(self) -> bytes:
        """What else the weights have, for another process; b"": nothing."""
        return extra.packed(self._states or {name: part.get_extra_state() for name, part in self.parts})

    def layout(self) -> Layout:
        """The layout in which these weights travel."""
        named = (slot._replace(name=name) for name, slot in self.slots.items())
        return Layout.of(named, aliases=self.aliases.items())

    def plan(self, layout: Layout, who: str, other: str, base: "Weights | None" = None) -> Plan:
        """Each entry of the layout with the slot that has its values; the last plan if it was for this layout.

        Args:
            who, other: whose weights these are, and whose the layout is, for the WeightsError if these differ.
            base: of the layout; has the values that a state dict lacks.
        """

        def check(name: str, slot: Slot | None, entry: Entry | None) -> tuple[Entry, Slot]:
            if slot is not None and entry is not None:
                same_kind = slot.kind == entry.kind or not (slot.kind and entry.kind)  # a NumPy array may have the bits
                if (portable(slot.dtype), slot.shape) == entry[1:3] and same_kind:
                    return entry, slot
            mine = "no such array" if slot is None else f"{slot.kind or slot.dtype} {slot.shape}"
            theirs = "no such array" if entry is None else f"{entry.kind or np.dtype(entry.dtype)} {entry.shape}"
            raise WeightsError(f"{who} and {other} differ, first at '{name}': {mine} in {who}, {theirs} in {other}")

        if self._plan.layout is layout:
            return self._plan
        entries, slots = {entry.name: entry for entry in layout.entries}, self.slots
        if all(name.isdigit() for name in slots) and len(entries) == len(slots):
            slots = dict(zip(entries, slots.values()))  # a list is known by its order
        lacking = {name: slot for name, slot in base.named.items() if slot.optional} if base else {}
        known = lacking | self.named | slots
        pairs = [check(entry.name, known.get(entry.name), entry) for entry in layout.entries]
        used, tied = {id(slot) for _, slot in pairs}, dict(layout.aliases)
        for name, slot in slots.items():  # what is one array there may be two here
            if id(slot) not in used and not slot.optional:
                pairs.append(check(name, slot, entries.get(tied.get(name, ""))))
        self._plan = Plan(layout, pairs)
        return self._plan


def _is_extra(key: Any) -> bool:
    """True for what a torch module's `get_extra_state` adds to a state dict; or to a TensorDict: that stays here."""
    return isinstance(key, str) and (key.rpartition(".")[2] == "_extra_state" or key.startswith("__extra_state__"))


@functools.lru_cache(maxsize=32)  # of many arrays it takes longer than to send these
def packed(layout: Layout) -> bytes:
    """A layout as JSON, for another process."""
    entries = [(entry.name, dtype_to_descr(np.dtype(entry.dtype)), *entry[2:]) for entry in layout.entries]
    return json.dumps([entries, layout.nbytes, layout.aliases]).encode()


def unpacked(text: bytes, room: int) -> Layout:
    """The layout that `packed` described. WeightsError: it describes none whose arrays fit.

    Args: room: bytes of the block; arrays lie in it one after another, so they are not larger together.
    """
    try:
        described, nbytes, aliases = json.loads(text)
        entries, end = [], 0
        for name, descr, shape, start, kind in described:
            dtype = descr_to_dtype(descr)
            if not (isinstance(name, str) and isinstance(kind, str) and all(type(n) is int for n in [start, *shape])):
                raise ValueError(f"{name!r} is not described")
            # NumPy refuses an empty array too whose other sizes are too large
            fits = math.prod(max(n, 1) for n in shape) * dtype.itemsize <= sys.maxsize and not dtype.hasobject
            if not fits or start < end or min(shape, default=0) < 0:
                raise ValueError(f"'{name}' is {dtype} {shape} at byte {start}")
            end = start + math.prod(shape) * dtype.itemsize
            entries.append(Entry(name, portable(dtype), tuple(shape), start, kind))
        if not end <= nbytes <= room or len({entry.name for entry in entries}) < len(entries):
            raise ValueError(f"arrays of {end} bytes in {nbytes} of {room}")
        pairs = tuple((str(alias), str(name)) for alias, name in aliases)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, SyntaxError) as error:
        raise WeightsError(f"the sender's description of its weights is damaged: {error}") from None
    return Layout(tuple(entries), nbytes, pairs)
