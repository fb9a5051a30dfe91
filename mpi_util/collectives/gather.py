"""Gathers batches of all ranks to rank 0; each row is copied once, to its final place. In the process of each rank.

Each rank describes its rows (`Header`), rank 0 checks that they fit together and plans where each goes (gather_plan.py),
and `Channel.collect` brings them there. Rank 0 gets views of that memory.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from ..arrays import tree
from ..arrays.adapters import adapter_for
from ..errors import BatchError
from ..ranks import threads
from ..ranks.identity import Comm
from ..ranks.old_names import renamed
from .channel import Channel, channel_of, paired
from .gather_plan import GatherPlan, Header, Joined, check_segments, is_plain, pack

T = TypeVar("T")
Numbers = float | Mapping[Any, float]  # they become arrays
Index = Sequence[int] | None


@overload  # the types are those of rank 0's result; the others get `batch` itself
def rank0_accum_batches(batch: Numbers | Sequence[Numbers], *, index: Index = None, comm: Comm = None) -> Any: ...
@overload
def rank0_accum_batches(batch: T, *, index: None = None, comm: Comm = None) -> T: ...
@overload
def rank0_accum_batches(batch: Sequence[T], *, index: Sequence[int], comm: Comm = None) -> T: ...
@renamed(segins="batch")
def rank0_accum_batches(batch: Any, *, index: Index = None, comm: Comm = None) -> Any:
    """Collective: joins the batches of all ranks, row after row, on rank 0. Waits until all ranks call it.

    Args:
        batch: nested dict/tuple of arrays whose first axis is rows. Leaves: NumPy arrays of any dtype but object, any
            shape and memory order; tensors of torch and TensorFlow, variables too; numbers and 0-d arrays (one row
            each); lists of plain Python values, which are joined. Structure, keys, dtypes and shapes must be the same
            on all ranks. The number of rows may differ between ranks and between leaves, and may be 0. A list that
            holds arrays or dicts is refused: it could be a structure (make it a tuple) or trajectories (give `index`,
            or use `rank0_gather`).
        index: None: one batch per rank, joined in rank order. Else `batch` is a list of such batches ("segments", such
            as episodes) and `index` holds a number for each: they are joined in the order of these numbers. A rank may
            have none; if no rank has any, the result is an empty dict.
        comm: communicator; None: all ranks.

    Returns:
        Rank 0: the same structure, dtypes and kinds of leaves, with the rows of all ranks; numbers become an array of
        shape (number of batches,). The arrays stay valid and unchanged as long as they are referenced. Others: `batch`.

    Raises:
        RankMismatchError: on every rank, with a table of who has what, if structures, keys, dtypes or shapes differ, or
            only some give an index.
        BatchError: on every rank: a leaf is an array of objects, a list holds arrays or dicts, segments of one rank
            differ, or an index is used twice.
    """
    return _to_rank0(channel_of(comm), "rank0_accum_batches", batch, index)


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
        batch = [tree.Objects([item]) for item in obj] if isinstance(obj, Sequence) else obj
    gathered = _to_rank0(channel := channel_of(comm), "rank0_gather", batch, index)
    return list(gathered) if channel.rank == 0 else [obj] if index is None else list(obj)


@overload
def all_accum_batches(batch: Numbers | Sequence[Numbers], *, index: Index = None, comm: Comm = None) -> Any: ...
@overload
def all_accum_batches(batch: T, *, index: None = None, comm: Comm = None) -> T: ...
@overload
def all_accum_batches(batch: Sequence[T], *, index: Sequence[int], comm: Comm = None) -> T: ...
@renamed(segs="batch")
def all_accum_batches(batch: Any, *, index: Index = None, comm: Comm = None) -> Any:
    """Collective: `rank0_accum_batches`, but every rank gets the joined rows, in arrays of its own.

    Args, Raises: as `rank0_accum_batches`; but in a dict a list is joined whatever is in it, as in 2017: pickled.
    """
    if index is None and isinstance(batch, dict):
        batch = {key: tree.Objects(leaf) if isinstance(leaf, list) else leaf for key, leaf in batch.items()}
    return _to_all(channel_of(comm), "all_accum_batches", batch, index)


def _to_rank0(channel: Channel, op: str, batch: Any, index: Index) -> Any:
    """Joins on rank 0, which then has all cores: the others have nothing to do until its next collective call."""
    gathered = _gather(channel, op, Rows(op, channel.rank, batch, index))
    if channel.whole and channel.rank == 0:
        threads.alone()
    return gathered.batch() if gathered else batch


class Rows:
    """What a rank gives to a gather. It is looked at when first asked for, in the agreement, so that errors reach all."""

    def __init__(self, op: str, rank: int, batch: Any, index: Index):
        self._op, self._rank, self._batch, self._index = op, rank, batch, index

    @functools.cached_property
    def segments(self) -> list[Any]:
        """The batches of this rank."""
        if self._index is None:
            return [self._batch]
        if not isinstance(self._batch, Sequence) or isinstance(self._batch, (str, bytes)):
            found = type(self._batch).__name__
            raise BatchError(f"{self._op}: with index, give a list of batches, not a {found}")
        return list(self._batch)

    @functools.cached_property
    def _packed(self) -> list[Any]:
        return [pack(self._op, segment, self._index is not None) for segment in self.segments]

    @property
    def arrays(self) -> list[np.ndarray]:
        """The leaves of all segments, one after another."""
        return [array for _, arrays in self._packed for array in arrays]

    def header(self) -> Header:
        """What rank 0 is to know of them."""
        op, index = self._op, self._index
        try:
            order = [self._rank] if index is None else [operator.index(i) for i in index]
        except TypeError:
            raise BatchError(f"{op}: index has a whole number for each item; got {index!r}") from None
        if len(order) != len(self.segments):
            found = f"{len(self.segments)} items but {len(order)} entries in index"
            raise BatchError(f"{op}: {found}; after deal(): index=episodes.taken")
        check_segments(op, [structure for structure, _ in self._packed])
        rows = [[len(array) for array in arrays] for _, arrays in self._packed]
        return Header(self._packed[0][0] if self._packed else None, index is not None, order, rows)

    def example(self) -> Any:
        """The structure of a batch with something small for each leaf, from which another rank can build the same."""
        leaves = {
            path: None if leaf is None else adapter_for(leaf).token(leaf) for path, leaf in tree.walk(self.segments[0])
        }
        return tree.rebuild(self.segments[0], leaves)


class Gathered(NamedTuple):
    """The rows of all ranks in one block."""

    joined: Joined
    block: np.ndarray
    example: Any  # a batch of the same structure and kinds of leaves

    def batch(self) -> Any:
        """The leaves that lie in the block, in the structure of the example, tensors where that has tensors."""
        leaves = self.joined.leaves(self.block)
        for path, like, is_leaf in tree.flatten(self.example):
            if is_leaf and not is_plain(like) and isinstance(leaves[path], np.ndarray):
                leaves[path] = adapter_for(like).from_array(leaves[path], like)
        return tree.rebuild(self.example, leaves)


class _Answer(NamedTuple):
    """Rank 0's answer."""

    target: Any  # of `Channel.collect`
    example_from: int  # the rank that sends rank 0 an example of the structure; 0: it needs none
    plan: GatherPlan | None = None  # on rank 0


def _gather(channel: Channel, op: str, rows: Rows) -> Gathered | None:
    """Collective. Returns: on rank 0 the rows of all ranks."""

    def decide(headers: list[Header]) -> list[_Answer]:
        plan = GatherPlan(op, headers)
        targets = channel.collect_targets(plan.joined.layout.nbytes, plan.pieces)
        return [_Answer(each, plan.example_from, None if k else plan) for k, each in enumerate(targets)]

    target, example_from, plan = channel.agree(op, rows.header, decide)
    channel.collect("gather", target, rows.arrays)
    if plan is None:
        if example_from == channel.rank:
            channel.messages.send(0, rows.example())
        return None
    example = channel.messages.receive(example_from, op) if example_from else rows.segments[0] if rows.segments else {}
    return Gathered(plan.joined, target.block, example)


def _to_all(channel: Channel, op: str, batch: Any, index: Index) -> Any:
    """Collective. Returns: the joined batch on every rank, in the order of its own keys."""
    rows = Rows(op, channel.rank, batch, index)
    gathered = _gather(channel, op, rows)
    if channel.size == 1:
        return gathered and gathered.batch()

    def decide(_: list[None]) -> Sequence[Any]:
        assert gathered is not None
        example = rows.example() if rows.segments else gathered.example
        sources = channel.spread_sources(len(gathered.block), lambda block: np.copyto(block, gathered.block))
        return paired(sources, (gathered.joined, example))

    source, (joined, example) = channel.agree(op, lambda: None, decide)
    block = channel.spread(op, source)
    if gathered is None:
        gathered = Gathered(joined, block.copy(), rows.segments[0] if rows.segments else example)
    return gathered.batch()
