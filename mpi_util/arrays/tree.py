"""Nested dict/list/tuple of arrays: walk it, rebuild it, describe its leaves. Runs in every rank.

A tree is a dict or other mapping, list or tuple (named tuples too), or what JAX knows as a container (FrozenDict, a
dataclass of Flax), whose items are trees or leaves: arrays, tensors, numbers, None. A list that holds only plain values
(numbers, strings, bytes, None, and lists or tuples of them) or nothing is a leaf too: data whose rows are Python
objects, such as episode returns. So is a bare str or bytes: one row.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import BatchError

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


class Objects(list[Any]):
    """A list whose items are data, whatever they are: a leaf."""


def is_plain(node: Any) -> bool:
    """True for a plain value, and for a list or tuple of nothing else."""
    return all(map(is_plain, node)) if isinstance(node, (list, tuple)) else isinstance(node, PLAIN)


def is_mapping(node: Any) -> bool:
    return isinstance(node, dict) or (type(node) is not np.ndarray and isinstance(node, Mapping))


def jax_trees() -> Any:
    """jax.tree_util; None if the program has not imported JAX, or imports it at this moment, in another thread."""
    jax = sys.modules.get("jax")
    begun = jax is None or getattr(jax.__spec__, "_initializing", False)
    return None if begun else sys.modules.get("jax.tree_util")


def _registered(node: Any) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]] | None:
    """(key, item) of each item of a container that the program has made known to JAX, and what makes one of others."""
    jax = jax_trees()
    if jax is None or isinstance(node, (dict, list, tuple, np.ndarray, *PLAIN)) or jax.all_leaves([node]):
        return None
    return jax_items(node, lambda inside: inside is not node)


def jax_items(node: Any, is_item: Callable[[Any], bool] | None = None) -> tuple[list[tuple[str, Any]], Any]:
    """(path, item) of each leaf of a tree, as JAX sees it, and what makes the tree of others."""
    jax = sys.modules["jax.tree_util"]
    items, structure = jax.tree_flatten_with_path(node, is_item)
    return [(jax.keystr(path, simple=True, separator="/"), item) for path, item in items], structure.unflatten


def children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """(key, item) of each item of a container, in its own order; None: it is a leaf."""
    if known := _registered(node):
        return known[0]
    if is_mapping(node):
        return [(key, node[key]) for key in node]
    is_leaf = not isinstance(node, (list, tuple)) or isinstance(node, Objects)
    return None if is_leaf or (isinstance(node, list) and is_plain(node)) else enumerate(node)


def with_items(node: Any, items: list[Any]) -> Any:
    """A container of the same kind with other items, in the same order; for other mappings than dicts a dict."""
    if known := _registered(node):
        return known[1](items)
    if is_mapping(node):
        copy = node.copy() if isinstance(node, dict) else {}  # of its own class, such as OrderedDict or defaultdict
        for key, item in zip(node, items):  # `update` of a Counter adds
            copy[key] = item
        return copy
    if isinstance(node, list):
        return items
    return type(node)(*items) if hasattr(type(node), "_fields") else tuple(items)


def flatten(tree: Any, path: str = "") -> list[tuple[str, Any, bool]]:
    """(path, node, whether it is a leaf) of the tree and of all in it, a container before what it holds.

    The order does not depend on the order of dict keys. A path joins the keys with "/":
    `{"obs": {"image": x}, "act": (y, z)}` has the leaves "act/0", "act/1", "obs/image".
    """
    items = children(tree)
    if items is None:
        return [(path, tree, True)]
    found = [(path, tree, False)]
    for key, item in sorted(items, key=lambda entry: str(entry[0])) if is_mapping(tree) else items:
        found += flatten(item, f"{path}/{key}" if path else str(key))
    return found


def walk(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of each leaf, in the order of `flatten`."""
    return [(path, node) for path, node, is_leaf in flatten(tree) if is_leaf]


def rebuild(tree: Any, leaves: dict[str, Any], path: str = "") -> Any:
    """The same containers as `tree`, in its own key order, with the leaves replaced by `leaves[path]`."""
    items = children(tree)
    if items is None:
        return leaves[path]
    return with_items(tree, [rebuild(item, leaves, f"{path}/{key}" if path else str(key)) for key, item in items])


def check_paths(paths: list[str]) -> None:
    """Raises BatchError if two leaves have one path, as those of {"a/b": x, "a": {"b": y}} and {1: x, "1": y} have."""
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise BatchError(f"two leaves are both named '{twice}'; rename a key")


def digest(*parts: Any) -> bytes:
    """Eight bytes that agree between processes for parts that are equal as text or as bytes."""
    h = hashlib.blake2b(digest_size=8)
    for part in parts:
        h.update(part if isinstance(part, (bytes, bytearray, memoryview)) else repr(part).encode())
        h.update(b"\0")
    return h.digest()
