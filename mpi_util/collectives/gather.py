"""Gathers batches of all ranks to rank 0; large arrays are copied once, to their final place. In each rank."""

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from ..arrays import tree
from ..arrays.adapters import adapter_for, array_of, is_of_framework, kind_of, not_rows
from ..arrays.layout import portable
from ..errors import BatchError, rank_mismatch
from ..host.segments import align
from ..ranks.identity import Comm
from . import pickles
from .agreement import SECOND
from .channel import Channel, Piece, channel_of, paired
from .mismatch import difference, list_refused, structures_differ

T = TypeVar("T")
Numbers = float | Mapping[Any, float]  # they become arrays
Index = Sequence[int] | None
_LENT = 3  # segments, of two descriptors each, lent at once by a program that drops a batch before the next but one
_NO_BYTES = np.empty(0, np.uint8)


@overload  # the types are those of rank 0's result; the others get `batch` itself
def rank0_accum_batches(batch: Numbers | Sequence[Numbers], *, index: Index = None, comm: Comm = None) -> Any: ...
@overload
def rank0_accum_batches(batch: T, *, index: None = None, comm: Comm = None) -> T: ...
@overload
def rank0_accum_batches(batch: Sequence[T], *, index: Sequence[int], comm: Comm = None) -> T: ...
def rank0_accum_batches(batch: Any, *, index: Index = None, comm: Comm = None) -> Any:
    """Collective: joins the batches of all ranks, row after row, on rank 0. Waits until all ranks call it.

    Args:
        batch: nested dict, or other mapping, tuple or pytree that JAX knows, of arrays whose first axis is rows.
            Leaves: NumPy arrays of any dtype but object, any shape and memory order; tensors of torch, TensorFlow and
            JAX, variables too; numbers and 0-d arrays (one row each); lists of plain Python values, which are joined.
            Structure, keys, dtypes and shapes must be the same on all ranks. The number of rows may differ between
            ranks and between leaves, and may be 0. A list that holds arrays or dicts is refused: it could be a
            structure (make it a tuple) or trajectories (give `index`, or use `rank0_gather`). So is a DataFrame.
        index: None: one batch per rank, joined in rank order. Else `batch` is a list of such batches ("segments", such
            as episodes) and `index` holds a number for each: they are joined in the order of these numbers. A rank may
            have none; if no rank has any, the result is an empty dict.
        comm: communicator; None: all ranks.

    Returns:
        Rank 0: the same structure (a mapping of another class is a dict), dtypes and kinds of leaves, with the rows of
        all ranks; numbers become an array of shape (number of batches,). The arrays stay valid and unchanged as long as
        they are referenced. Others: `batch`.

    Raises:
        RankMismatchError: on every rank, with a table of who has what, if these differ, or only some give an index.
        BatchError: on every rank: a leaf is an array of objects, a list holds arrays or dicts, segments of one rank
            differ, or an index is used twice.
    """
    return to_rank0(channel_of(comm), "rank0_accum_batches", batch, index)


@overload
def rank0_gather(obj: T, *, index: None = None, comm: Comm = None) -> list[T]: ...
@overload
def rank0_gather(obj: Sequence[T], *, index: Sequence[int], comm: Comm = None) -> list[T]: ...
def rank0_gather(obj: Any, *, index: Index = None, comm: Comm = None) -> list[Any]:
    """Collective: the objects of all ranks in a list on rank 0. Waits until all ranks call it.

    For trajectories and other objects that `rank0_accum_batches` does not join.

    Args:
        obj: anything that can be pickled. Arrays in it are sent as raw memory.
        index: None: one object per rank, in rank order. Else `obj` is a list of objects and `index` holds a number for
            each: they are listed in the order of these numbers.
        comm: communicator; None: all ranks.

    Returns:
        Rank 0: the list of all objects; large arrays in it are views of shared memory. Others: a list of their own.

    Raises:
        RankMismatchError, BatchError: as `rank0_accum_batches`; BatchError also if an object cannot be pickled. What
            its unpickling raises is raised on rank 0.
    """
    batch: Any = tree.Objects([obj])
    if index is not None:
        is_list = isinstance(obj, Sequence) and not isinstance(obj, (str, bytes))
        batch = [tree.Objects([item]) for item in obj] if is_list else obj
    gathered = to_rank0(channel := channel_of(comm), "rank0_gather", batch, index)
    return list(gathered) if channel.rank == 0 else [obj] if index is None else list(obj)


@overload
def all_accum_batches(batch: Numbers | Sequence[Numbers], *, index: Index = None, comm: Comm = None) -> Any: ...
@overload
def all_accum_batches(batch: T, *, index: None = None, comm: Comm = None) -> T: ...
@overload
def all_accum_batches(batch: Sequence[T], *, index: Sequence[int], comm: Comm = None) -> T: ...
def all_accum_batches(batch: Any, *, index: Index = None, comm: Comm = None) -> Any:
    """Collective: `rank0_accum_batches`, but every rank gets the joined rows, in arrays of its own.

    Args, Raises: as `rank0_accum_batches`; but in a dict a list is joined whatever is in it, as in 2017: pickled.
    """
    if index is None and isinstance(batch, dict):
        batch = {key: tree.Objects(leaf) if isinstance(leaf, list) else leaf for key, leaf in batch.items()}
    channel, op = channel_of(comm), "all_accum_batches"
    rows = Rows(op, channel.rank, batch, index)
    gathered = _gather(channel, op, rows)
    if channel.size == 1:
        return gathered.batch()

    def decide(_: list[None]) -> Sequence[Any]:
        sources = channel.spread_sources(len(gathered.block), lambda block: np.copyto(block, gathered.block))
        example = rows.example() if rows.segments else gathered.example
        return paired(sources, gathered._replace(block=_NO_BYTES, example=example))

    source, sent = channel.agree(op + SECOND, lambda: None, decide)
    block = channel.spread(op, source)
    if channel.rank == 0:
        return gathered.batch()
    return sent._replace(block=block.copy(), example=rows.segments[0] if rows.segments else sent.example).batch()


def to_rank0(channel: Channel, op: str, batch: Any, index: Index) -> Any:
    """Joins on rank 0, which then has the cores of all: the others have nothing to do until its next call."""
    gathered = _gather(channel, op, Rows(op, channel.rank, batch, index))
    channel.begin_update()
    return batch if channel.rank else gathered.batch()


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
        shape = ", ".join(["*", *map(str, self.trailing)]) + "," * (not self.trailing)
        return f"{dtype} scalar" if self.scalar else f"{dtype} ({shape})"  # such as float32 (*, 17)


# What must be the same in every segment of every rank: the leaves, and the path of each container with "dict", "tuple"
# or a named tuple's name and fields. No class: pickle takes a microsecond more for one.
Structure = tuple[tuple[Leaf, ...], tuple[tuple[str, str], ...]]


class Header(NamedTuple):
    """What a rank sends to rank 0 before any row is moved."""

    structure: Structure | None  # None: this rank has no segment
    indexed: bool  # whether an index is given
    order: list[int]  # each segment's place in the whole
    rows: list[list[int]]  # of each segment, of each leaf


def _pack(op: str, segment: Any, indexed: bool) -> tuple[Structure, list[np.ndarray]]:
    """The structure of a segment, and each leaf as an array with rows."""
    leaves, containers, arrays = [], [], []
    for path, node, is_leaf in tree.flatten(segment):
        if not is_leaf:
            if isinstance(node, list):
                raise list_refused(op, path, node, indexed)
            fields = getattr(type(node), "_fields", ()) if isinstance(node, tuple) else ()
            if fields and is_of_framework(node):
                raise BatchError(f"{op}: '{path}' {not_rows(node)}")
            name = "tuple" if type(node) is tuple else f"{type(node).__name__}({', '.join(fields)})"
            containers.append((path, "dict" if tree.is_mapping(node) else name))
            continue
        if _is_plain(node):
            array = node if node.shape else node[None]
            leaf = Leaf(path, "array", node.dtype.str, node.shape[1:], not node.shape)
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


def _is_plain(leaf: Any) -> bool:
    """True for an array of NumPy's own dtypes, which needs no adapter."""
    return type(leaf) is np.ndarray and leaf.dtype.isbuiltin == 1 and not leaf.dtype.hasobject


class Rows:
    """What a rank gives to a gather. It is examined at first use, within the agreement, so that errors reach all."""

    def __init__(self, op: str, rank: int, batch: Any, index: Index):
        self._op, self._rank, self._batch, self._index = op, rank, batch, index

    @functools.cached_property
    def segments(self) -> list[Any]:
        if self._index is None:
            return [self._batch]
        if not isinstance(self._batch, Sequence) or isinstance(self._batch, (str, bytes)):
            found = type(self._batch).__name__
            raise BatchError(f"{self._op}: with index, give a list of batches, not a {found}")
        return list(self._batch)

    @functools.cached_property
    def _packed(self) -> list[Any]:
        return [_pack(self._op, segment, self._index is not None) for segment in self.segments]

    @property
    def arrays(self) -> list[np.ndarray]:
        """The leaves of all segments, one after another."""
        return [array for _, arrays in self._packed for array in arrays]

    def header(self) -> Header:
        op, index = self._op, self._index
        try:
            order = [self._rank] if index is None else [operator.index(i) for i in index]
        except TypeError:
            raise BatchError(f"{op}: index has a whole number for each item; got {index!r}") from None
        if len(order) != len(self.segments):
            found = f"{len(self.segments)} items but {len(order)} entries in index"
            raise BatchError(f"{op}: {found}; after deal(): index=episodes.taken")
        for i, (structure, _) in enumerate(self._packed):
            if structure != self._packed[0][0]:
                path, here, there = difference(structure, self._packed[0][0])
                raise BatchError(f"{op}: {path} is {here} in number {order[i]} and {there} in number {order[0]}")
        rows = [[len(array) for array in arrays] for _, arrays in self._packed]
        return Header(self._packed[0][0] if self._packed else None, index is not None, order, rows)

    def example(self) -> Any:
        """The structure of a batch with something small for each leaf, from which another rank can build the same."""
        walked = tree.walk(self.segments[0])
        leaves = {path: None if leaf is None else adapter_for(leaf).token(leaf) for path, leaf in walked}
        return tree.rebuild(self.segments[0], leaves)


class Gathered(NamedTuple):
    """The rows of all ranks in one block: leaf after leaf, each aligned; within a leaf the segments in their order."""

    leaves: tuple[Leaf, ...] = ()
    shapes: Sequence[tuple[int, ...]] = ()  # of each leaf
    starts: Sequence[int] = ()  # of each leaf, its byte offset
    block: np.ndarray = _NO_BYTES  # uint8
    example: Any = {}  # a batch of the same structure and kinds of leaves
    own: bool = False  # each leaf gets memory of its own, so that the block is free again

    def batch(self) -> Any:
        """The joined leaves, large arrays as views of the block, in the structure of the example, tensors as it has."""
        found: dict[str, Any] = {}
        for leaf, shape, start in zip(self.leaves, self.shapes, self.starts):
            array = np.ndarray(shape, leaf.dtype or np.uint8, self.block, start)
            if self.own or (array.nbytes <= pickles.SMALL and leaf.kind != "list"):
                array = array.copy()
            found[leaf.path] = None if leaf.kind == "none" else pickles.unpack(array) if leaf.kind == "list" else array
        for path, like, is_leaf in tree.flatten(self.example):
            if is_leaf and not _is_plain(like) and isinstance(found[path], np.ndarray):
                found[path] = adapter_for(like).from_array(found[path], like)
        return tree.rebuild(self.example, found)


def _plan(op: str, headers: list[Header]) -> tuple[Gathered, int, int, list[list[Piece]]]:
    """Rank 0's plan: where each piece of each rank goes in one block.

    Returns: what lies where in the block. The first rank that has a segment: if that is not rank 0 it sends rank 0 an
        example of a batch. The block's bytes. For each rank the piece of each leaf of each of its segments.
    """
    indexed = [h.indexed for h in headers]
    if len(set(indexed)) > 1:
        table = ["with index" if given else "without index" for given in indexed]
        raise rank_mismatch(f"{op}: give an index on all ranks or on none", table)
    structures = {k: h.structure for k, h in enumerate(headers) if h.structure is not None}
    first = next(iter(structures), 0)
    if any(structure != structures[first] for structure in structures.values()):
        raise structures_differ(op, structures)
    leaves = structures[first][0] if structures else ()
    order = sorted((i, k, j) for k, h in enumerate(headers) for j, i in enumerate(h.order))
    for (i, k, _), (following, other, _) in itertools.pairwise(order):
        if i == following:
            raise BatchError(f"{op}: index {i} is given by rank {k} and by rank {other}; each segment has its own")
    rows = [headers[k].rows[j] for _, k, j in order]  # of each segment, in order; of each leaf
    shapes = [(sum(column), *leaf.trailing) for leaf, column in zip(leaves, zip(*rows))]
    # plain integers: for some hundred pieces that is twice as fast as arrays of them
    row_bytes = [np.dtype(leaf.dtype or np.uint8).itemsize * math.prod(leaf.trailing) for leaf in leaves]
    sizes = [align(shape[0] * nbytes) for shape, nbytes in zip(shapes, row_bytes)]
    *starts, nbytes = itertools.accumulate(sizes, initial=0)
    gathered = Gathered(leaves, shapes, starts)
    found: dict[tuple[int, int], list[Piece]] = {}
    for (_, k, j), ns in zip(order, rows):
        found[k, j] = [(start, n * nbytes) for start, n, nbytes in zip(starts, ns, row_bytes)]
        starts = [start + size for start, size in found[k, j]]
    pieces = [[piece for j in range(len(h.order)) for piece in found[k, j]] for k, h in enumerate(headers)]
    return gathered, first, nbytes, pieces


def _gather(channel: Channel, op: str, rows: Rows) -> Gathered:
    """Collective. Returns: on rank 0 the rows of all ranks; elsewhere nothing in it counts."""

    def decide(headers: list[Header]) -> list[tuple[Any, int, Gathered | None]]:
        gathered, first, nbytes, pieces = _plan(op, headers)
        targets = enumerate(channel.collect_targets(nbytes, pieces))
        return [(target, first, None if k else gathered) for k, target in targets]

    target, first, gathered = channel.agree(op, rows.header, decide)
    channel.collect(op, target, rows.arrays)
    if gathered is None:
        if channel.rank == first:
            channel.messages.send([0], rows.example())
        return Gathered()
    example = rows.segments[0] if rows.segments else channel.messages.receive(first, op) if first else {}
    crowded = sum(segment.lent for segment in channel.pool.segments) > _LENT
    return gathered._replace(block=target.block, example=example, own=crowded)
