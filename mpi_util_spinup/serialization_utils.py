"""Any object as JSON, so that a reader of config.json knows what it was."""

import dataclasses
import enum
import json
import math
import re
from typing import Any

import numpy as np

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LARGEST = 100  # elements; a larger array is only described
_DEPTH = 4  # of objects within objects


def convert_json(obj: Any, _around: tuple[int, ...] = ()) -> Any:
    """`obj` as `json.dumps` accepts it; the same in every process for the same values.

    Dicts, lists, tuples, sets, dataclasses and NumPy values become dicts, lists and numbers; functions and classes
    their names; other objects {str(obj): public attributes}; infinity, NaN and the rest strings. Of a large array only
    dtype and shape remain.
    """
    if isinstance(obj, float) or type(obj) is np.longdouble:
        return float(obj) if math.isfinite(obj) else str(float(obj))
    if isinstance(obj, (np.generic, np.ndarray)):
        return convert_json(obj.tolist(), _around) if obj.size <= _LARGEST else f"{obj.dtype} array {obj.shape}"
    if isinstance(obj, enum.Enum):
        return obj.name
    if obj is None or isinstance(obj, (int, str)):
        return obj
    if id(obj) in _around:
        return "..."  # it contains itself
    _around = (*_around, id(obj))
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        obj = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
    if isinstance(obj, dict):
        return {k if isinstance(k, str) else str(convert_json(k)): convert_json(v, _around) for k, v in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [convert_json(item, _around) for item in obj]
    if isinstance(obj, (set, frozenset)):
        return sorted((convert_json(item, _around) for item in obj), key=repr)
    name = getattr(obj, "__name__", None)
    if isinstance(name, str) and "<lambda>" not in name:
        return name
    text = _ADDRESS.sub("", str(obj))  # it differs from run to run
    attributes = getattr(obj, "__dict__", None)
    if not attributes or isinstance(name, str) or len(_around) > _DEPTH:
        return text
    return {text: convert_json({k: v for k, v in attributes.items() if not str(k).startswith("_")}, _around)}


def is_json_serializable(v: Any) -> bool:
    try:
        json.dumps(v)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
