"""Adapters read and write the arrays of a framework's objects. A framework is imported inside functions only.

Each adapter module has
    to_array(leaf) -> np.ndarray     the tensor's values, or bits, in host memory (a view where possible)
    from_array(array, like)          a tensor of the same kind as `like` over `array`'s memory (where possible)
    to_numbers(leaf) -> np.ndarray   the tensor's values in a dtype that NumPy can calculate with
    from_numbers(array, like)        a tensor of the same kind as `like`, and on its device, with these values
    token(leaf)                      something small, to be sent, that can stand for `like`
    slots(model) -> list[Slot]       what the model's weights are, and how to read and write each
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..errors import WeightsError


def _same(array: np.ndarray) -> np.ndarray:
    return array


class Slot(NamedTuple):
    """One array of a model.

    Attributes:
        name: unique in the model.
        dtype, shape: of the bytes that travel (bfloat16 travels as uint16).
        host: the values themselves as a flat array, if they lie in one piece of host memory, else None.
        read: writes the values into an array of that dtype and shape.
        write: sets the values, in place and on the model's device, from such an array.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    host: np.ndarray | None
    read: Callable[[np.ndarray], None]
    write: Callable[[np.ndarray], None]
    number: Callable[[np.ndarray], np.ndarray] = _same  # bits that travel -> numbers to calculate with
    bits: Callable[[np.ndarray], np.ndarray] = _same  # and back


def adapter_for(thing: Any) -> ModuleType:
    """The adapter of the framework that `thing` (a model or a tensor) comes from."""
    return _adapter_of(type(thing))


@functools.cache  # asked for every leaf of every batch
def _adapter_of(kind: type) -> ModuleType:
    roots = {cls.__module__.partition(".")[0] for cls in kind.__mro__}
    if "torch" in roots:
        from . import pytorch

        return pytorch
    from . import arrays

    return arrays


def slots(model: Any) -> list[Slot]:
    """Everything in `model` that a broadcast of its weights carries.

    Raises:
        WeightsError: the model is of no known kind, or holds no weights.
    """
    found = adapter_for(model).slots(model)
    if not found:
        raise WeightsError(f"{type(model).__name__} holds no weights")
    return found
