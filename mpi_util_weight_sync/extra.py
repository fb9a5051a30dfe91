"""What torch modules keep beside their tensors (`get_extra_state`), as JSON: it goes with the weights."""

import base64
import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mpi_util.arrays import adapters
from mpi_util.arrays.frameworks import framework
from mpi_util.errors import MpiUtilError, WeightsError


def packed(states: dict[str, Any]) -> bytes:
    """Extra states by name; b"" if there are none. WeightsError: one has something in it that JSON cannot say."""
    try:
        return json.dumps({name: _plain(state) for name, state in states.items()}).encode() if states else b""
    except (TypeError, ValueError, AttributeError, RecursionError, MpiUtilError) as error:
        known = "numbers, text, bytes, None, lists, tuples, dicts, arrays and tensors can be sent"
        raise WeightsError(f"the extra state of {', '.join(states)}: {error}; {known}") from None


@contextlib.contextmanager
def holding(parts: Iterable[tuple[str, Any]], text: bytes) -> Iterator[None]:
    """Gives modules, by their names in a state dict, what `packed` has made; their own again if the block raises."""
    former: list[tuple[Any, Any]] = []
    try:
        states = json.loads(text) if text else {}
        for name, part in parts:
            if name in states:
                former.append((part, part.get_extra_state()))
                part.set_extra_state(_whole(states[name]))
        yield
    except BaseException:
        for part, state in reversed(former):
            part.set_extra_state(state)
        raise


def _plain(thing: Any) -> Any:
    if thing is None or isinstance(thing, (bool, int, float, str)):
        return thing
    if isinstance(thing, dict):
        return {"dict": [[_plain(key), _plain(value)] for key, value in thing.items()]}
    if isinstance(thing, (list, tuple)):
        return {"tuple" if isinstance(thing, tuple) else "list": [*map(_plain, thing)]}
    if isinstance(thing, bytes):
        return {"bytes": base64.b64encode(thing).decode()}
    array = np.asarray(adapters.adapter_for(thing).to_array(thing))
    lacks = isinstance(thing, np.ndarray) and adapters.is_extension(thing.dtype)
    if array.dtype.hasobject or array.dtype.fields or lacks:
        raise TypeError(f"has a {type(thing).__name__}")
    is_tensor = not isinstance(thing, (np.ndarray, np.generic))
    kind = str(thing.dtype).removeprefix("torch.") if is_tensor else None
    return {"array": [array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode(), kind]}


def _whole(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "dict":
        return {_whole(key): _whole(value) for key, value in content}
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in ("list", "tuple"):
        return (tuple if kind == "tuple" else list)(map(_whole, content))
    dtype, shape, text, torch_dtype = content
    array = np.frombuffer(bytearray(base64.b64decode(text)), dtype).reshape(shape)
    if torch_dtype is None:
        return array
    torch = framework("torch")
    return torch.from_numpy(array).view(getattr(torch, torch_dtype))
