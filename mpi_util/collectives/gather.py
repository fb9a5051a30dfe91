"""Gathers batches of every rank to rank 0; each row is copied once, directly to its final place."""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from ..arrays import tree
from ..arrays.adapters import adapter_for
from ..errors import BatchError
from ..ranks import threads
from ..ranks.identity import Comm
from .channel import Channel, channel_of
from .gather_plan import Header, Joined, Plan, check_segments, pack
from .gather_transfer import Collection, Share, bring, put
from .transport import broadcast

T = TypeVar("T")
Numbers = float | Mapping[Any, float]  # they become arrays
Index = Sequence[int] | None

_FEW = 1 << 13  # bytes of a rank that go along with what it says of them, which saves a message each way


@overload  # the types are those of rank 0's result; the others get `batch` itself
def rank0_accum_batches(batch: Numbers | Sequence[Numbers], *, index: Index = None, comm: Comm = None) -> Any: ...
@overload
def rank0_accum_batches(batch: T, *, index: None = None, comm: Comm = None) -> T: ...
@overload
def rank0_accum_batches(batch: Sequence[T], *, index: Sequence[int], comm: Comm = None) -> T: ...
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
def all_accum_batches(batch: Any, *, index: Index = None, comm: Comm = None) -> Any:
    """Collective: `rank0_accum_batches`, but every rank gets the joined rows, in arrays of its own.

    Args, Raises: as `rank0_accum_batches`; but in a dict a list is joined whatever is in it, as in 2017: pickled.
    """
    if index is None and isinstance(batch, dict):
        batch = {key: tree.Objects(leaf) if isinstance(leaf, list) else leaf for key, leaf in batch.items()}
    return _Gather(channel_of(comm), "all_accum_batches", batch, index).run_for_all()


def _to_rank0(channel: Channel, op: str, batch: Any, index: Index) -> Any:
    """Joins on rank 0, which then has all cores: the others have nothing to do until its next collective call."""
    joined = _Gather(channel, op, batch, index).run()
    if channel.whole and channel.rank == 0:
        threads.alone()
    return joined


class _Gather:
    """One gather: all ranks describe what they have, rank 0 plans where it goes, all write it there.

    Attributes:
        segments: this rank's.
        plan, block: on rank 0, where the rows lie in which memory.
        example: the structure, with something small for each leaf, where this rank needs it and has no segment.
    """

    plan: Plan
    block = np.empty(0, np.uint8)

    def __init__(self, channel: Channel, op: str, batch: Any, index: Index):
        self.op, self._channel, self._batch, self._index = op, channel, batch, index
        self._listed = isinstance(batch, Sequence) and not isinstance(batch, (str, bytes))
        self.segments = [batch] if index is None else list(batch) if self._listed else []
        self.example: Any = {}

    def run(self) -> Any:
        """Collective. Returns: rank 0: the joined batch; others: their own."""
        channel = self._channel
        share, sends_example = channel.agree(self.op, self._describe, self._plan_all)
        own = list(itertools.chain(*self._arrays))
        if channel.rank:
            bring(channel, share, own if self._follow else [])
            if sends_example:
                channel.messages.send(0, _skeleton(self.segments[0]))
            return self._batch
        self._collection.finish(own)
        self.block = self._collection.block
        if self.plan.example_from:
            self.example = channel.messages.receive(self.plan.example_from, self.op)
        return self._joined(self.plan.joined)

    def _describe(self) -> Header:
        """What this rank has."""
        op, index, segments = self.op, self._index, self.segments
        try:
            order = [self._channel.rank] if index is None else [operator.index(i) for i in index]
        except TypeError:
            raise BatchError(f"{op}: index has a whole number for each item; got {index!r}") from None
        if index is not None and not self._listed:
            raise BatchError(f"{op}: with index, give a list of batches, not a {type(self._batch).__name__}")
        if len(order) != len(segments):
            found = f"{len(segments)} items but {len(order)} entries in index"
            raise BatchError(f"{op}: {found}; after deal(): index=episodes.taken")
        packed = [pack(op, segment, index is not None) for segment in segments]
        check_segments(op, [structure for structure, _ in packed])
        self._arrays = [arrays for _, arrays in packed]
        rows = [[len(array) for array in arrays] for arrays in self._arrays]
        own, data = list(itertools.chain(*self._arrays)), None
        self._follow = self._channel.rank == 0 or sum(array.nbytes for array in own) > _FEW
        if not self._follow:
            data = b"".join(array.tobytes() for array in own)
        return Header(packed[0][0] if packed else None, index is not None, order, rows, data)

    def _plan_all(self, headers: list[Header]) -> list[tuple[Share, bool]]:
        """Rank 0: where each rank's rows go to."""
        self.plan = Plan(self.op, headers)
        follow = [[] if h.data is not None else own for h, own in zip(headers, self.plan.pieces)]
        self._collection = Collection(self._channel, self.plan.joined.layout.nbytes, follow)
        for header, own in zip(headers, self.plan.pieces):
            if header.data:
                put(self._collection.block, own, np.frombuffer(header.data, np.uint8))
        return [(share, k == self.plan.example_from) for k, share in enumerate(self._collection.shares)]

    def _joined(self, joined: Joined) -> Any:
        """The leaves that lie in the block, in the structure of this rank's batch, tensors where that has tensors."""
        example, leaves = self.segments[0] if self.segments else self.example, joined.leaves(self.block)
        for path, like in tree.walk(example):
            if isinstance(leaves[path], np.ndarray):
                leaves[path] = adapter_for(like).from_array(leaves[path], like)
        return tree.rebuild(example, leaves)

    def run_for_all(self) -> Any:
        """Collective. Returns: the joined batch on every rank, in the order of its own keys."""
        channel, at_rank0 = self._channel, self.run()
        if channel.size == 1:
            return at_rank0

        def decide(described: list[None]) -> tuple[int, Any]:
            return len(self.block), (self.plan.joined, _skeleton(self.segments[0]) if self.segments else self.example)

        def write(block: np.ndarray) -> Iterator[int]:
            np.copyto(block, self.block)
            yield len(block)

        def take(block: np.ndarray, wait_for: Callable[[int], None]) -> None:
            wait_for(len(block))
            self.block = block.copy()

        joined, self.example = broadcast(channel, self.op, lambda: None, decide, write, take)
        return self._joined(joined) if channel.rank else at_rank0


def _skeleton(segment: Any) -> Any:
    """The structure of a batch with something small for each leaf, from which another rank can build the same."""
    leaves = {path: None if leaf is None else adapter_for(leaf).token(leaf) for path, leaf in tree.walk(segment)}
    return tree.rebuild(segment, leaves)
