"""Any object as JSON, so that a reader of config.json knows what it was."""

import dataclasses
import enum
import math
import os
import re
from typing import Any

import numpy as np

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LARGEST = 100  # elements; a larger array is only described
_DEPTH = 4  # of objects within objects


def convert_json(obj: Any) -> Any:
    """`obj` as `json.dumps` accepts it; the same in every process for the same values.

    Dicts, lists, tuples, sets, dataclasses and NumPy values become dicts, lists and numbers; functions and classes
    their names; other objects {str(obj): public attributes}; infinity, NaN and the rest strings. Of a large array only
    dtype and shape remain.
    """
    return _convert(obj, ())


def _convert(obj: Any, around: tuple[int, ...]) -> Any:
    if obj is None or type(obj) in (bool, int, str):
        return obj
    if isinstance(obj, float):
        return float(obj) if math.isfinite(obj) else str(float(obj))
    if isinstance(obj, (np.generic, np.ndarray)):
        return _convert_array(obj, around)
    if isinstance(obj, enum.Enum):
        return obj.name
    if isinstance(obj, (os.PathLike, str)):
        return str(obj)
    if isinstance(obj, int):
        return int(obj)
    if id(obj) in around:
        return "..."  # it contains itself
    around = (*around, id(obj))
    if isinstance(obj, dict):
        return {_key(key): _convert(value, around) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [_convert(item, around) for item in obj]
    if isinstance(obj, (set, frozenset)):
        return sorted((_convert(item, around) for item in obj), key=repr)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {field.name: _convert(getattr(obj, field.name), around) for field in dataclasses.fields(obj)}
    return _convert_object(obj, around)


def _convert_array(array: Any, around: tuple[int, ...]) -> Any:
    if array.size > _LARGEST:
        return f"{array.dtype} array {array.shape}"
    value = array.tolist()
    return _convert(value, around) if not isinstance(value, (bytes, complex)) else str(value)


def _convert_object(obj: Any, around: tuple[int, ...]) -> Any:
    name = getattr(obj, "__name__", None)
    if isinstance(name, str) and "<lambda>" not in name:
        return name
    attributes = getattr(obj, "__dict__", None)
    if not attributes or isinstance(name, str) or len(around) > _DEPTH:
        return _str(obj)
    public = {key: value for key, value in attributes.items() if not str(key).startswith("_")}
    return {_str(obj): _convert(public, around)}


def _key(key: Any) -> str:
    return key if isinstance(key, str) else str(_convert(key, ()))


def _str(obj: Any) -> str:
    """`str` without the object's address, which differs from run to run."""
    return _ADDRESS.sub("", str(obj))
