"""Gathers batches of every rank to rank 0, each row copied once, straight to its final place."""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from ..arrays import pickles, tree
from ..arrays.adapters import adapter_for
from ..errors import BatchError, rank_mismatch
from ..host import threads
from ..host.segments import align
from ..launch.identity import Comm
from .channel import Channel
from .comm import channel_of
from .transport import Place, finish, lease, places, put, spread, write

T = TypeVar("T")
Numbers = float | Mapping[Any, float]  # they become arrays

_SMALL = 1 << 16  # bytes; a leaf up to this is copied, so that keeping it does not keep the whole block


class _Kind(NamedTuple):
    """What every rank must bring alike for one leaf."""

    path: str
    kind: str  # "array", or "list": Python values, pickled, joined; or "none"
    dtype: Any
    trailing: tuple[int, ...]  # shape without the rows
    scalar: bool  # a 0-d value, one row

    def __str__(self) -> str:
        if self.kind != "array":
            return self.kind
        return f"{self.dtype} scalar" if self.scalar else tree.describe(np.dtype(self.dtype), self.trailing)


_Packed = tuple[tuple[_Kind, ...], list[np.ndarray]]  # a segment: what its leaves are, and each as an array with rows


class _Header(NamedTuple):
    """What a rank brings to the agreement."""

    kinds: tuple[_Kind, ...] | None  # None: this rank has no segment
    indexed: bool  # whether an index is given
    order: list[int]  # each segment's place in the whole
    rows: list[list[int]]  # of each segment, of each leaf


@overload  # the types are those of rank 0's result; the others get `batch` itself
def rank0_accum_batches(
    batch: Numbers | Sequence[Numbers], *, index: Sequence[int] | None = None, comm: Comm = None
) -> Any: ...
@overload
def rank0_accum_batches(batch: T, *, index: None = None, comm: Comm = None) -> T: ...
@overload
def rank0_accum_batches(batch: Sequence[T], *, index: Sequence[int], comm: Comm = None) -> T: ...
def rank0_accum_batches(batch: Any, *, index: Sequence[int] | None = None, comm: Comm = None) -> Any:
    """Collective: joins the batches of all ranks, row after row, on rank 0. A rank that does not call it is waited for.

    Args:
        batch: nested dict/tuple of arrays whose first axis is rows. Leaves: NumPy arrays of any dtype but object, any
            shape and memory order; tensors of torch and TensorFlow, variables too; numbers and 0-d arrays (one row
            each); lists of plain Python values, which are joined. Ranks agree on keys, dtypes and shapes but for the
            number of rows, which may differ between ranks and between leaves, and may be 0. A list that holds arrays or
            dicts is refused: it could be a structure (make it a tuple) or trajectories (give `index`, or use
            `rank0_gather`).
        index: None: one batch per rank, joined in rank order. Else `batch` is a list of such batches ("segments", for
            instance episodes) and `index` holds the place of each in the whole: they are joined in the order of the
            index, whichever rank made them. A rank may have none; where no rank has any, the result is an empty dict.
        comm: communicator; None: all ranks.

    Returns:
        Rank 0: the same structure, dtypes and kinds of leaves, with the rows of all ranks; numbers become an array of
        shape (number of batches,). The arrays stay valid and unchanged as long as they are held. Others: `batch`.

    Raises:
        RankMismatchError: on every rank, with a table of who has what, if they bring different keys, dtypes or shapes,
            or only some give an index.
        BatchError: on every rank: a leaf is an array of objects, a list holds arrays or dicts, or an index is used
            twice.
    """
    return _to_rank0(channel_of(comm), "rank0_accum_batches", batch, index)


@overload
def rank0_gather(obj: T, *, index: None = None, comm: Comm = None) -> list[T]: ...
@overload
def rank0_gather(obj: Sequence[T], *, index: Sequence[int], comm: Comm = None) -> list[T]: ...
def rank0_gather(obj: Any, *, index: Sequence[int] | None = None, comm: Comm = None) -> list[Any]:
    """Collective: the objects of all ranks in a list on rank 0. A rank that does not call it is waited for.

    For trajectories and whatever else `rank0_accum_batches` does not join: the objects stay as they are.

    Args:
        obj: anything that pickle takes. Arrays in it travel as raw memory.
        index: None: one object per rank, listed in rank order. Else `obj` is a list of objects and `index` holds the
            place of each in the whole: they are listed in the order of the index, whichever rank made them.
        comm: communicator; None: all ranks.

    Returns:
        Rank 0: the list of all objects; large arrays in it lie in shared memory, as long as they are held. Others: a
        list of their own.

    Raises:
        RankMismatchError, BatchError: as `rank0_accum_batches`; BatchError too where an object cannot be pickled. What
            its unpickling raises is raised on rank 0.
    """
    brought: Any = tree.Objects([obj])
    if index is not None:
        brought = [tree.Objects([item]) for item in obj] if isinstance(obj, Sequence) else obj
    gathered = _to_rank0(channel := channel_of(comm), "rank0_gather", brought, index)
    return list(gathered) if channel.rank == 0 else [obj] if index is None else list(obj)


@overload
def all_accum_batches(
    batch: Numbers | Sequence[Numbers], *, index: Sequence[int] | None = None, comm: Comm = None
) -> Any: ...
@overload
def all_accum_batches(batch: T, *, index: None = None, comm: Comm = None) -> T: ...
@overload
def all_accum_batches(batch: Sequence[T], *, index: Sequence[int], comm: Comm = None) -> T: ...
def all_accum_batches(batch: Any, *, index: Sequence[int] | None = None, comm: Comm = None) -> Any:
    """Collective: `rank0_accum_batches`, but every rank gets the joined rows, in arrays of its own.

    Args, Raises: as `rank0_accum_batches`.
    """
    channel = channel_of(comm)
    joined, leaves, example = _accumulate(channel, "all_accum_batches", batch, index)
    if channel.size == 1:
        return joined
    own = [batch] if index is None else list(batch)[:1]
    return _copy_to_all(channel, joined, leaves, example, own)


def _to_rank0(channel: Channel, op: str, batch: Any, index: Sequence[int] | None) -> Any:
    """Joins on rank 0, which then has the machine: the others have nothing to do before it goes on."""
    joined = _accumulate(channel, op, batch, index)[0]
    if channel.whole and channel.rank == 0:
        threads.alone()
    return joined


def _accumulate(channel: Channel, op: str, batch: Any, index: Sequence[int] | None) -> tuple[Any, dict[str, Any], Any]:
    """(what this rank returns; on rank 0 the joined leaves by path, and an example of the structure)."""
    listed = isinstance(batch, Sequence) and not isinstance(batch, (str, bytes))
    segments = [batch] if index is None else list(batch) if listed else []
    packed: list[_Packed] = []
    leased: list[tuple[_Layout, np.ndarray]] = []  # on rank 0

    def bring() -> _Header:
        order = [channel.rank] if index is None else [operator.index(i) for i in index]
        if index is not None and not listed:
            raise BatchError(f"{op}: with index, give a list of batches, not a {type(batch).__name__}")
        if len(order) != len(segments):
            raise BatchError(
                f"{op}: {len(segments)} items but {len(order)} entries in index; after deal(): index=episodes.taken"
            )
        for segment in segments:
            _refuse_lists(op, segment, index is not None)
            packed.append(_pack(op, segment))
        _check_alike(op, packed)
        kinds = packed[0][0] if packed else None
        return _Header(kinds, index is not None, order, [[len(a) for a in arrays] for _, arrays in packed])

    def decide(headers: list[_Header]) -> list[Place]:
        layout = _Layout(op, headers)
        block, ticket = lease(channel, layout.nbytes)
        leased.append((layout, block))
        plans = [(starts, k == layout.shower) for k, starts in enumerate(layout.starts)]
        return places(channel, ticket, plans)

    place = channel.agree(op, bring, decide)
    all_starts, shows = place.plan
    pieces = [(array, start) for (_, arrays), starts in zip(packed, all_starts) for array, start in zip(arrays, starts)]
    if channel.rank:
        put(channel, place, pieces)
        if shows:
            channel.send(0, _skeleton(segments[0]))
        return batch, {}, None
    layout, block = leased[0]
    write(block, pieces)
    finish(channel, block, place.ticket, layout.pieces)
    example = channel.receive(layout.shower, op) if layout.shower else _skeleton(segments[0]) if segments else {}
    leaves = layout.leaves(block)
    return _rebuild(segments[0] if segments else example, leaves), leaves, example


def _skeleton(segment: Any) -> Any:
    """The structure of a batch with something small for each leaf, by which another rank can build the same."""
    return tree.rebuild(segment, {path: _token(leaf) for path, leaf in tree.walk(segment)})


def _token(leaf: Any) -> Any:
    return None if leaf is None else 0 if tree.is_joined_list(leaf) else adapter_for(leaf).token(leaf)


def _rebuild(example: Any, leaves: dict[str, Any]) -> Any:
    """`leaves` in the structure of `example`, tensors where it has tensors."""
    like = dict(tree.walk(example))
    return tree.rebuild(example, {path: _restore(leaf, like[path]) for path, leaf in leaves.items()})


def _pack(op: str, segment: Any) -> _Packed:
    """What the leaves of a segment are, and each as an array with rows."""
    kinds, arrays = [], []
    for path, leaf in tree.walk(segment):
        if leaf is None:
            kind, array = _Kind(path, "none", None, (), False), np.empty(0, np.uint8)
        elif tree.is_joined_list(leaf):
            kind = _Kind(path, "list", None, (), False)
            array = pickles.pack(op, leaf if isinstance(leaf, list) else [leaf])
        else:
            array = _as_array(op, path, leaf)
            dtype = array.dtype if array.dtype.fields else array.dtype.str
            kind = _Kind(path, "array", dtype, array.shape[1:], not array.shape)
            array = array if array.shape else array[None]
        kinds.append(kind)
        arrays.append(array)
    tree.check_paths([kind.path for kind in kinds])
    return tuple(kinds), arrays


def _refuse_lists(op: str, segment: Any, indexed: bool) -> None:
    found = tree.find_list(segment)
    if found is None:
        return
    path, items = found
    kind = type(next(item for item in items if not isinstance(item, tree.PLAIN))).__name__
    where = f"'{path}'" if path else "an item of the batch" if indexed else "the batch"
    mend = "make it a tuple if each position means something, one array if its items are rows; for others: rank0_gather"
    if not path and not indexed:
        mend = "for episodes of deal() or share() add index=, as in index=episodes.taken; for others: rank0_gather"
    raise BatchError(f"{op}: {where} is a list of {len(items)} with {kind} objects; {mend}")


def _as_array(op: str, path: str, leaf: Any) -> np.ndarray:
    try:
        return adapter_for(leaf).to_array(leaf)
    except BatchError as error:
        raise BatchError(f"{op}: '{path}' {error}") from None


def _check_alike(op: str, packed: list[_Packed]) -> None:
    for i, (kinds, _) in enumerate(packed):
        if kinds != packed[0][0]:
            path, here, there = _first_difference(kinds, packed[0][0])
            raise BatchError(f"{op}: '{path}' is {here} in segment {i} and {there} in segment 0 of the same rank")


def _first_difference(these: tuple[_Kind, ...], those: tuple[_Kind, ...]) -> tuple[str, str, str]:
    """(path, what these have, what those have) of the first leaf that differs."""
    a, b = ({kind.path: kind for kind in kinds} for kinds in (these, those))
    path = next(p for p in sorted(a.keys() | b.keys()) if a.get(p) != b.get(p))
    return path, str(a.get(path, "missing")), str(b.get(path, "missing"))


class _Layout:
    """Rank 0's plan: where each piece of each rank goes in one block.

    Leaves lie one after another, each aligned; within a leaf the segments in the order of their index.
    """

    def __init__(self, op: str, headers: list[_Header]):
        _check_indexed(op, [h.indexed for h in headers])
        # plain integers: for some hundred pieces that is twice as fast as arrays of them
        self.kinds, first = _agreed_kinds(op, headers)
        self.shower = first if headers[0].kinds is None else 0  # the rank that shows rank 0 the structure
        order = sorted((i, k, j) for k, h in enumerate(headers) for j, i in enumerate(h.order))
        _check_unique(op, order)
        self.rows = [headers[k].rows[j] for _, k, j in order]  # of each segment in the order of the whole, of each leaf
        row_bytes = [_row_bytes(kind) for kind in self.kinds]
        self.totals = [sum(column) for column in zip(*self.rows)]
        self.bases, self.nbytes = [], 0
        for total, size in zip(self.totals, row_bytes):
            self.bases.append(self.nbytes)
            self.nbytes += align(total * size)
        self.starts: list[list[list[int]]] = [
            [[]] * len(h.order) for h in headers
        ]  # of each rank, segment, leaf: byte offset
        self.pieces: list[list[tuple[int, int]]] = [
            [] for _ in headers
        ]  # of each rank: (byte offset, number of bytes), as it puts them
        cursor = list(self.bases)
        for (_, k, j), rows in zip(order, self.rows):
            self.starts[k][j] = list(cursor)
            for leaf, n in enumerate(rows):
                cursor[leaf] += n * row_bytes[leaf]
        for k, h in enumerate(headers):
            for starts, rows in zip(self.starts[k], h.rows):
                self.pieces[k] += [(start, n * size) for start, n, size in zip(starts, rows, row_bytes)]

    def leaves(self, block: np.ndarray) -> dict[str, Any]:
        """The joined leaves by path, as views of the block."""
        columns = zip(*self.rows)
        return {
            kind.path: self._leaf(kind, block, base, total, column)
            for kind, base, total, column in zip(self.kinds, self.bases, self.totals, columns)
        }

    def _leaf(self, kind: _Kind, block: np.ndarray, base: int, total: int, rows: Sequence[int]) -> Any:
        if kind.kind == "none":
            return None
        array = np.ndarray((total, *kind.trailing), np.dtype(kind.dtype or np.uint8), block, base)
        if kind.kind == "array":
            return array if array.nbytes > _SMALL else array.copy()
        parts = np.split(array, np.cumsum(rows)[:-1])
        return [item for part in parts for item in pickles.unpack(part)]


def _check_indexed(op: str, indexed: list[bool]) -> None:
    if len(set(indexed)) > 1:
        table = ["with index" if given else "without index" for given in indexed]
        raise rank_mismatch(f"{op}: give an index on all ranks or on none", table)


def _check_unique(op: str, order: list[tuple[int, int, int]]) -> None:
    for (i, k, _), (following, other, _) in itertools.pairwise(order):
        if i == following:
            raise BatchError(f"{op}: index {i} is given by rank {k} and by rank {other}; each segment has its own")


def _row_bytes(kind: _Kind) -> int:
    return np.dtype(kind.dtype or np.uint8).itemsize * math.prod(kind.trailing)


def _agreed_kinds(op: str, headers: list[_Header]) -> tuple[tuple[_Kind, ...], int]:
    """(the leaves that all ranks bring, the first rank that has any). Raises RankMismatchError where they differ."""
    first = next((k for k, h in enumerate(headers) if h.kinds is not None), 0)
    kinds = headers[first].kinds or ()
    for k, h in enumerate(headers):
        if h.kinds is not None and h.kinds != kinds:
            raise _mismatch(op, headers, *_first_difference(h.kinds, kinds), k, first)
    return kinds, first


def _mismatch(op: str, headers: list[_Header], path: str, here: str, there: str, k: int, first: int) -> Exception:
    """The error for the first leaf that differs, with what each rank has there."""
    ranks = [j for j, h in enumerate(headers) if h.kinds is not None]
    brought = [{kind.path: str(kind) for kind in headers[j].kinds or ()} for j in ranks]
    table = [found.get(path, "missing; it has " + ", ".join(found)) for found in brought]
    what = f"{op}: '{path}' is {there} on rank {first} and {here} on rank {k}"
    return rank_mismatch(f"{what}; bring the same keys, dtypes and shapes on every rank", table, ranks)


def _restore(leaf: Any, like: Any) -> Any:
    """The leaf in the kind in which it came: a tensor for a tensor."""
    if isinstance(leaf, np.ndarray) and like is not None:
        return adapter_for(like).from_array(leaf, like)
    return leaf


def _copy_to_all(channel: Channel, joined: Any, leaves: dict[str, Any], example: Any, segments: list[Any]) -> Any:
    """Sends rank 0's joined leaves to all ranks and rebuilds them there, in the order of this rank's own keys."""
    arrays = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, np.ndarray)}
    others = {path: leaf for path, leaf in leaves.items() if path not in arrays}
    places, nbytes = {}, 0
    for path, array in arrays.items():
        places[path], nbytes = (array.shape, array.dtype, nbytes), nbytes + align(array.nbytes)
    copy = np.empty(0, np.uint8)

    def fill(block: np.ndarray) -> Iterator[int]:
        write(block, [(array, places[path][2]) for path, array in arrays.items()])
        yield nbytes

    def take(block: np.ndarray, wait_for: Callable[[int], None]) -> None:
        nonlocal copy
        wait_for(len(block))
        copy = block.copy()

    def check(brought: list[None]) -> tuple[int, Any]:
        return nbytes, (places, others, example)

    places, others, example = spread(channel, "all_accum_batches", lambda: None, check, fill, take)
    if channel.rank == 0:
        return joined
    mine = {path: np.ndarray(shape, dtype, copy, start) for path, (shape, dtype, start) in places.items()}
    return _rebuild(segments[0] if segments else example, mine | others)
