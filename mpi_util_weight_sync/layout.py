"""A model's weights by name, in a block of bytes and back; in the sender's process and in receivers'.

Names are those of a torch module's parameters and buffers (`0.weight`); the path `a/b` of a nested dict and the key
`("a", "b")` of a TensorDict are both `a.b`, so that either may be sent to either.
"""

import functools
import json
import math
import re
import sys
from typing import Any

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from mpi_util.arrays import adapters
from mpi_util.arrays.layout import Entry, Layout, ModelCopier, Slot, portable
from mpi_util.errors import WeightsError


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
        self.left_out: list[str] = []  # names of a torch module's extra states
        self._copier = ModelCopier(Layout(), [])  # that of the last layout

    @classmethod
    def of(cls, thing: Any) -> "Weights":
        """The weights of anything; writable arrays can be written too, everything else can only be read."""
        if any(kind.__name__ == "TensorDictBase" for kind in type(thing).__mro__):  # also a module: TensorDictParams
            items = thing.items(True, True)
            thing = {key if isinstance(key, str) else "/".join(key): value for key, value in items}
        if isinstance(thing, dict) and any(map(_is_extra, thing)):
            thing = {key: value for key, value in thing.items() if not _is_extra(key)}
        weights = cls(adapters.slots(thing, read_only=True))
        torch: Any = sys.modules.get("torch")
        model: Any = thing
        parts = model.named_modules() if torch and isinstance(model, torch.nn.Module) else ()
        extra = [name for name, part in parts if type(part).get_extra_state is not torch.nn.Module.get_extra_state]
        weights.left_out = [f"{name}._extra_state".lstrip(".") for name in extra]
        return weights

    def layout(self) -> Layout:
        named = (slot._replace(name=name) for name, slot in self.slots.items())
        return Layout.of(named, aliases=self.aliases.items())

    def copier(self, layout: Layout, who: str, other: str, base: "Weights | None" = None) -> ModelCopier:
        """Pairs each entry of the layout with the slot that has its values.

        Args:
            who, other: the owner of these weights and that of the layout, for the WeightsError if these differ.
            base: the weights of the layout's owner, which have the values that a state dict lacks.
        """

        def check(name: str, slot: Slot | None, entry: Entry | None) -> tuple[Entry, Slot]:
            if slot is not None and entry is not None:
                same_kind = slot.kind == entry.kind or not (slot.kind and entry.kind)  # a NumPy array may have the bits
                if (portable(slot.dtype), slot.shape) == entry[1:3] and same_kind:
                    return entry, slot
            mine = "no such array" if slot is None else f"{slot.kind or slot.dtype} {slot.shape}"
            theirs = "no such array" if entry is None else f"{entry.kind or np.dtype(entry.dtype)} {entry.shape}"
            raise WeightsError(f"{who} and {other} differ, first at '{name}': {mine} in {who}, {theirs} in {other}")

        if self._copier.layout is layout:
            return self._copier
        entries, slots = {entry.name: entry for entry in layout.entries}, self.slots
        if entries.keys() != slots.keys() and all(name.isdigit() for name in slots) and len(entries) == len(slots):
            by_text = [*entries] == sorted(entries)  # a dict: p.10 before p.2. a list has no names: its order counts
            order = sorted(entries, key=lambda name: by_text and re.sub(r"\d+", lambda n: n[0].zfill(9), name))
            slots = dict(zip(order, (slots[name] for name in sorted(slots, key=int))))
        lacking = {name: slot for name, slot in base.named.items() if slot.optional} if base else {}
        known = lacking | self.named | slots
        pairs = [check(entry.name, known.get(entry.name), entry) for entry in layout.entries]
        used, tied = {id(slot) for _, slot in pairs}, dict(layout.aliases)
        for name, slot in slots.items():  # two arrays here may be one array, with two names, there
            if id(slot) not in used and not slot.optional:
                pairs.append(check(name, slot, entries.get(tied.get(name, ""))))
        self._copier = ModelCopier(layout, pairs)
        return self._copier


def _is_extra(key: Any) -> bool:
    """True for the key under which a state dict or a TensorDict has a torch module's extra state."""
    return isinstance(key, str) and (key.rpartition(".")[2] == "_extra_state" or key.startswith("__extra_state__"))


@functools.lru_cache(maxsize=32)  # for many arrays this takes longer than sending them
def packed(layout: Layout) -> bytes:
    """A layout as JSON, for another process, where the same arrays lie in the same places."""
    entries = [(e.name, dtype_to_descr(np.dtype(e.dtype)), e.shape, e.kind) for e in layout.entries]
    return json.dumps([entries, layout.aliases]).encode()


def unpacked(text: bytes, room: int) -> Layout:
    """The layout that `packed` described. WeightsError: it is damaged, or a block of `room` bytes is too small."""
    try:
        described, aliases = json.loads(text)
        arrays = {}
        for name, descr, shape, kind in described:
            dtype = descr_to_dtype(descr)
            if not (isinstance(name, str) and isinstance(kind, str) and all(type(n) is int and n >= 0 for n in shape)):
                raise ValueError(f"{name!r} is not described")
            # NumPy refuses even an empty array if its other sizes are too large
            if math.prod(max(n, 1) for n in shape) * dtype.itemsize > sys.maxsize or dtype.hasobject:
                raise ValueError(f"'{name}' cannot be {dtype} {shape}")
            arrays[name] = Entry(name, dtype, tuple(shape), 0, kind)
        layout = Layout.of(arrays.values(), aliases=[(str(alias), str(name)) for alias, name in aliases])
        if layout.nbytes > room or len(arrays) < len(described):
            raise ValueError(f"{len(described)} arrays of {layout.nbytes} bytes in {room}")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, SyntaxError) as error:
        raise WeightsError(f"the sender's description of its weights is damaged: {error}") from None
    return layout
