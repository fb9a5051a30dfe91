"""Nested dict/list/tuple of arrays: walk it, rebuild it, describe its leaves. No MPI here.

A tree is a dict, list or tuple (named tuples too) whose items are trees or leaves. Leaves are NumPy arrays, tensors of
torch or TensorFlow, numbers, and None. A list that holds only plain values (numbers, strings, bytes, None) or nothing
is itself a leaf: it is data whose rows are Python objects, such as a list of episode returns.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from .errors import BatchError

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def is_joined_list(node: Any) -> bool:
    """True if `node` is a list of plain Python values, which counts as one leaf."""
    return isinstance(node, list) and all(isinstance(x, PLAIN) and not isinstance(x, np.generic) for x in node)


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) in an order that does not depend on the order of dict keys.

    A path joins the keys with "/": `{"obs": {"image": x}, "act": (y, z)}` has "act/0", "act/1", "obs/image".
    """
    if isinstance(tree, dict):
        names = [str(key) for key in tree]
        if len(set(names)) < len(names):
            raise BatchError(f"{path or 'the batch'}: two keys read the same as text: {sorted(names)}; rename one")
        for key in sorted(tree, key=str):
            yield from walk(tree[key], f"{path}/{key}" if path else str(key))
    elif isinstance(tree, tuple) or (isinstance(tree, list) and not is_joined_list(tree)):
        for i, item in enumerate(tree):
            yield from walk(item, f"{path}/{i}" if path else str(i))
    else:
        yield path, tree


def rebuild(tree: Any, leaves: dict[str, Any], path: str = "") -> Any:
    """The same containers as `tree`, in its own key order, with the leaves replaced by `leaves[path]`."""
    if isinstance(tree, dict):
        items = {key: rebuild(item, leaves, f"{path}/{key}" if path else str(key)) for key, item in tree.items()}
        return items if type(tree) is dict else _like_mapping(tree, items)
    if isinstance(tree, tuple) or (isinstance(tree, list) and not is_joined_list(tree)):
        items = [rebuild(item, leaves, f"{path}/{i}" if path else str(i)) for i, item in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return leaves[path]


def _like_mapping(tree: dict, items: dict) -> dict:
    """A mapping of `tree`'s own class (OrderedDict, defaultdict) that holds `items`."""
    copy = tree.copy()
    copy.update(items)
    return copy


def describe(dtype: np.dtype, trailing: tuple[int, ...]) -> str:
    """Text for an array of any number of rows: `float32 (*, 17)`."""
    return f"{dtype} ({', '.join(['*', *map(str, trailing)])}{'' if trailing else ','})"


def digest(*parts: Any) -> bytes:
    """Eight bytes that agree between processes for parts that are equal as text or as bytes."""
    h = hashlib.blake2b(digest_size=8)
    for part in parts:
        h.update(part if isinstance(part, (bytes, bytearray, memoryview)) else repr(part).encode())
        h.update(b"\0")
    return h.digest()
