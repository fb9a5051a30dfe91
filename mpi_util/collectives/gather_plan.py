"""What each rank has for a gather, checked against the others, and rank 0's plan of where each row goes."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import pickles, tree
from ..arrays.adapters import array_of, kind_of
from ..arrays.layout import Layout, portable
from ..errors import BatchError, rank_mismatch


class Leaf(NamedTuple):
    """A leaf without its rows."""

    path: str
    kind: str  # "array", or its dtype's name if bits of it travel; "list": Python values, pickled, joined; "none"
    dtype: Any
    trailing: tuple[int, ...]  # shape without the rows
    scalar: bool  # a 0-d value, one row

    def __str__(self) -> str:
        if self.kind in ("list", "none"):
            return self.kind
        dtype = np.dtype(self.dtype) if self.kind == "array" else self.kind
        return f"{dtype} scalar" if self.scalar else tree.describe(dtype, self.trailing)


# What must be the same in every segment of every rank: the leaves, and the path of each container with "dict", "tuple"
# or a named tuple's name and fields. No class: pickle takes a microsecond more for one.
Structure = tuple[tuple[Leaf, ...], tuple[tuple[str, str], ...]]


class Header(NamedTuple):
    """What a rank sends to rank 0 before any row is moved."""

    structure: Structure | None  # None: this rank has no segment
    indexed: bool  # whether an index is given
    order: list[int]  # each segment's place in the whole
    rows: list[list[int]]  # of each segment, of each leaf


def pack(op: str, segment: Any, indexed: bool) -> tuple[Structure, list[np.ndarray]]:
    """The structure of a segment, and each leaf as an array with rows."""
    leaves, containers, arrays = [], [], []
    for path, node, is_leaf in tree.flatten(segment):
        if not is_leaf:
            if isinstance(node, list):
                raise BatchError(_refused_list(op, path, node, indexed))
            fields = getattr(node, "_fields", None)
            name = f"{type(node).__name__}({', '.join(fields)})" if fields else "tuple"
            containers.append((path, "dict" if isinstance(node, dict) else name))
            continue
        if is_plain(node):
            array = node if node.shape else node[None]
            leaf = Leaf(path, "array", portable(node.dtype), node.shape[1:], not node.shape)
        elif node is None:
            leaf, array = Leaf(path, "none", None, (), False), np.empty(0, np.uint8)
        elif isinstance(node, (list, str, bytes)):
            leaf = Leaf(path, "list", None, (), False)
            array = pickles.pack(op, node if isinstance(node, list) else [node])
        else:
            try:
                array = array_of(node)
            except BatchError as error:
                raise BatchError(f"{op}: '{path}' {error}") from None
            leaf = Leaf(path, kind_of(node, array) or "array", portable(array.dtype), array.shape[1:], not array.shape)
            array = array if array.shape else array[None]
        leaves.append(leaf)
        arrays.append(array)
    tree.check_paths([leaf.path for leaf in leaves])
    return (tuple(leaves), tuple(containers)), arrays


def is_plain(leaf: Any) -> bool:
    """True for an array of NumPy's own dtypes, which needs no adapter."""
    return type(leaf) is np.ndarray and leaf.dtype.isbuiltin == 1 and not leaf.dtype.hasobject


def _by_path(structure: Structure) -> dict[str, str]:
    leaves, containers = structure
    return dict(containers) | {leaf.path: str(leaf) for leaf in leaves}


def _difference(these: Structure, those: Structure) -> tuple[str, str, str]:
    """The first part that differs, what it is in these, what it is in those."""
    a, b = _by_path(these), _by_path(those)
    path = next((p for p in sorted(a.keys() | b.keys()) if a.get(p) != b.get(p)), "")
    return _quoted(path), a.get(path, "missing"), b.get(path, "missing")


def _refused_list(op: str, path: str, items: list[Any], indexed: bool) -> str:
    kind = type(next(item for item in items if not isinstance(item, tree.PLAIN))).__name__
    fix = "make it a tuple if each position means something, one array if its items are rows; for others: rank0_gather"
    if not path and not indexed:
        fix = "for episodes of deal() or share() add index=, as in index=episodes.taken; for others: rank0_gather"
    return f"{op}: {_quoted(path, indexed)} is a list of {len(items)} with {kind} objects; {fix}"


def _quoted(path: str, indexed: bool = False) -> str:
    return f"'{path}'" if path else "an item of the batch" if indexed else "the batch"


def check_segments(op: str, structures: Sequence[Structure]) -> None:
    """Raises BatchError if the segments of this rank differ."""
    for i, structure in enumerate(structures):
        if structure != structures[0]:
            path, here, there = _difference(structure, structures[0])
            raise BatchError(f"{op}: {path} is {here} in segment {i} and {there} in segment 0 of the same rank")


class Joined(NamedTuple):
    """Where the joined leaves lie in one block; small, is sent."""

    kinds: tuple[Leaf, ...]
    layout: Layout

    def leaves(self, block: np.ndarray) -> dict[str, Any]:
        """The leaves by path; large arrays are views of the block."""
        found: dict[str, Any] = {}
        for leaf, entry in zip(self.kinds, self.layout.entries):
            array = entry.view(block)
            if leaf.kind not in ("list", "none"):
                found[leaf.path] = array if array.nbytes > pickles.SMALL else array.copy()
            else:
                found[leaf.path] = pickles.unpack(array) if leaf.kind == "list" else None
        return found


class GatherPlan:
    """Rank 0's plan: where each piece of each rank goes in one block.

    Leaves lie one after another, each aligned; within a leaf the segments in the order of their index.

    Attributes:
        joined: the leaves of all ranks together.
        pieces: of each rank: (byte offset, number of bytes) of each leaf of each of its segments.
        example_from: the rank that sends rank 0 an example of the structure; 0 if rank 0 needs none.
    """

    def __init__(self, op: str, headers: list[Header]):
        indexed = [h.indexed for h in headers]
        if len(set(indexed)) > 1:
            table = ["with index" if given else "without index" for given in indexed]
            raise rank_mismatch(f"{op}: give an index on all ranks or on none", table)
        kinds, first = _agreed_leaves(op, headers)
        self.example_from = first if headers[0].structure is None else 0
        order = sorted((i, k, j) for k, h in enumerate(headers) for j, i in enumerate(h.order))
        for (i, k, _), (following, other, _) in itertools.pairwise(order):
            if i == following:
                raise BatchError(f"{op}: index {i} is given by rank {k} and by rank {other}; each segment has its own")
        rows = [headers[k].rows[j] for _, k, j in order]  # of each segment, in order; of each leaf
        dtypes = [np.dtype(leaf.dtype or np.uint8) for leaf in kinds]
        shapes = [(sum(column), *leaf.trailing) for leaf, column in zip(kinds, zip(*rows))]
        layout = Layout.of(zip([leaf.path for leaf in kinds], dtypes, shapes))
        self.joined = Joined(kinds, layout)
        # plain integers: for some hundred pieces that is twice as fast as arrays of them
        row_bytes = [dtype.itemsize * math.prod(leaf.trailing) for leaf, dtype in zip(kinds, dtypes)]
        starts = [entry.start for entry in layout.entries]
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for (_, k, j), ns in zip(order, rows):
            sizes = [n * nbytes for n, nbytes in zip(ns, row_bytes)]
            found[k, j] = list(zip(starts, sizes))
            starts = [start + size for start, size in found[k, j]]
        self.pieces = [[piece for j in range(len(h.order)) for piece in found[k, j]] for k, h in enumerate(headers)]


def _agreed_leaves(op: str, headers: list[Header]) -> tuple[tuple[Leaf, ...], int]:
    """(the leaves, the first rank that has any). Raises RankMismatchError if they differ."""
    structures = {k: h.structure for k, h in enumerate(headers) if h.structure is not None}
    if not structures:
        return (), 0
    first, expected = next(iter(structures.items()))
    other = next((k for k, structure in structures.items() if structure != expected), None)
    if other is None:
        return expected[0], first
    path, there, here = _difference(expected, structures[other])
    table = []
    for structure in structures.values():
        found = {_quoted(p): text for p, text in _by_path(structure).items()}
        others = ", ".join(name for name in found if name.startswith("'")) or "nothing"
        table.append(found.get(path, f"missing; this rank has {others}"))
    what = f"{op}: {path} is {there} on rank {first} and {here} on rank {other}"
    raise rank_mismatch(f"{what}; structure, keys, dtypes and shapes must be the same on every rank", table, structures)
