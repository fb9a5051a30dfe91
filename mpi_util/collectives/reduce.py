"""Sums and means over the ranks, of numbers, arrays and gradients; in the process of each rank.

Rank 0 adds them up in rank order. Small ones go along with the agreement, large ones as in a gather and a broadcast.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from ..arrays import tree
from ..arrays.adapters import adapter_for, array_of
from ..arrays.layout import Layout
from ..errors import BatchError
from ..host.segments import private
from ..ranks.identity import Comm
from .agreement import SECOND
from .channel import channel_of, write_rows
from .mismatch import check_same

T = TypeVar("T")
Arrays = dict[str, np.ndarray | None]  # by name; None where there is none
# (name, dtype, shape) of each array; (name, None, None) where there is none
Description = tuple[tuple[str, np.dtype | None, tuple[int, ...] | None], ...]
_ALONG, _TOGETHER = 1 << 18, 1 << 20  # bytes of a rank, of all, that go along with the agreement


@overload
def all_sum(x: int, *, comm: Comm = None) -> np.int64: ...
@overload
def all_sum(x: T, *, comm: Comm = None) -> T: ...
def all_sum(x: Any, *, comm: Comm = None) -> Any:
    """Collective: the elementwise sum over the ranks, on every rank, added in rank order.

    Args:
        x: number, array or tensor, or a nested dict, tuple or list of such and None; same dtypes, shapes everywhere.
        comm: communicator; None: all ranks.

    Returns:
        A new array, a tensor on x's device, or a NumPy scalar for a number; of a list of numbers an array; else a
        container like x. Of x's dtype, in which integers may wrap around; bools are counted: int64.

    Raises:
        RankMismatchError: on every rank, if dtypes or shapes differ. BatchError: x is text, or holds objects.
    """
    return _combine("all_sum", x, lambda dtype: np.dtype(np.int64) if dtype.kind == "b" else dtype, comm)


@overload
def all_mean(x: int, *, comm: Comm = None) -> np.float64: ...
@overload
def all_mean(x: T, *, comm: Comm = None) -> T: ...
def all_mean(x: Any, *, comm: Comm = None) -> Any:
    """Collective: the elementwise mean over the ranks, on every rank: their sum in rank order, divided by their number.

    Args, Raises: as `all_sum`. Returns: as `all_sum`, but float64 for integers and bools.
    """
    return _combine("all_mean", x, lambda dtype: dtype if dtype.kind in "fc" else np.dtype(float), comm, True)


def _combine(name: str, x: Any, result_dtype: Callable[[np.dtype], np.dtype], comm: Comm, divide: bool = False) -> Any:
    leaves = dict(walked := tree.walk(x))

    def given(path: str) -> np.ndarray:
        try:
            array = array_of(leaves[path], numbers=True)
            if array.dtype.kind in "SU":
                raise BatchError(f"is {array.dtype}, which is text; give numbers, or use rank0_gather")
            np.add(nothing := np.empty(0, array.dtype), nothing)
        except (BatchError, TypeError) as error:
            raise BatchError(f"{name}: '{path or 'x'}' {error}") from None
        return array.astype(result_dtype(array.dtype))

    def make() -> Arrays:
        tree.check_paths([path or "x" for path, _ in walked])
        return {path or "x": None if path and leaf is None else given(path) for path, leaf in leaves.items()}

    totals: Any = average(name, make, comm=comm, divide=divide)
    found = {p: adapter_for(leaf).from_numbers(totals[p or "x"], leaf) for p, leaf in walked if leaf is not None}
    return tree.rebuild(x, leaves | found)


def average(op: str, make: Callable[[], Arrays], *, comm: Comm = None, divide: bool = True) -> Arrays:
    """Collective: arrays become their mean over the ranks, the same bits on every rank, and are returned.

    Args:
        op: name of the calling function, for messages.
        make: gives this rank's arrays by name: floating point or complex, writable; they are overwritten. None stands
            for an array that there is not, on any rank. What `make` raises is raised on every rank.
        divide: False: they are not divided by the number of ranks, and may be integers.

    Raises RankMismatchError: on every rank, if names, dtypes or shapes differ, or a rank alone has None.
    """
    channel = channel_of(comm)
    own = _Sum(op, make, channel.size if divide else 0)
    if channel.size == 1:
        channel.enter(op)  # rank 0's threads are those of any number of ranks
        own.prepare()
        return own.arrays

    def contribute() -> tuple[Description, np.ndarray | None]:
        description, row = own.prepare(), None
        if own.layout.nbytes <= min(_ALONG, _TOGETHER // channel.size):
            write_rows(row := private(own.layout.nbytes), own.addends, [entry.start for entry in own.layout.entries])
        return description, row

    def decide(contributed: list[tuple[Description, np.ndarray | None]]) -> Sequence[Any]:
        """For each rank the total; or its answer for a block with a row of each."""
        check_same(op, [description for description, _ in contributed])
        if rows := [row for _, row in contributed if row is not None]:
            own.combine(rows, total := private(own.layout.nbytes))
            return [total] * channel.size
        places = [(entry.start, array.nbytes) for entry, array in zip(own.layout.entries, own.addends)]
        pieces = [[(k * own.layout.nbytes + start, n) for start, n in places] for k in range(channel.size)]
        return channel.collect_targets(channel.size * own.layout.nbytes, pieces)

    def add(_: Any) -> Sequence[Any]:
        rows = answer.block.reshape(channel.size, -1)
        return channel.spread_sources(own.layout.nbytes, lambda total: own.combine(rows, total))

    total = answer = channel.agree(op, contribute, decide)
    if not isinstance(answer, np.ndarray):  # what fails while the rows move reaches all ranks by the second agreement
        second = op + SECOND
        total = channel.spread(second, channel.agree(second, lambda: channel.collect(second, answer, own.addends), add))
    for array, view in zip(own.there.values(), own.layout.views(total)):
        np.copyto(array, view)
    return own.arrays


class _Sum:
    """One sum or mean: what this rank adds, and how rows are added up."""

    arrays: Arrays
    there: dict[str, np.ndarray]  # those that are not None
    layout: Layout  # of a row; float16 is added up as float32
    addends: list[np.ndarray]  # this rank's arrays as they are added up, in the order of the layout

    def __init__(self, op: str, make: Callable[[], Arrays], divisor: int):
        self.op, self._make, self.divisor = op, make, divisor  # divisor: number of ranks if it is a mean, else 0

    def prepare(self) -> Description:
        """Makes the arrays, within the collective call, so that an error reaches all ranks. Returns: what they are."""
        self.arrays = self._make()
        self.there = {name: array for name, array in self.arrays.items() if array is not None}
        for name, array in self.there.items():
            if self.divisor and array.dtype.kind not in "fc":
                raise BatchError(f"{self.op}: '{name}' is {array.dtype}, which cannot be averaged; use a float dtype")
        dtypes = (np.dtype("f4") if array.dtype == "f2" else array.dtype for array in self.there.values())
        named = zip(self.there, dtypes, (array.shape for array in self.there.values()))
        self.layout = Layout.of(named)
        self.addends = [np.asarray(array, e.dtype) for array, e in zip(self.there.values(), self.layout.entries)]
        made = self.arrays.items()
        return tuple((name, None, None) if a is None else (name, a.dtype, a.shape) for name, a in made)

    def combine(self, rows: Sequence[np.ndarray], total: np.ndarray) -> None:
        """Adds up rows in their order, and for a mean divides, into `total`."""
        for first, second, *rest, out in zip(*map(self.layout.views, (*rows, total))):
            np.add(first, second, out=out)
            for row in rest:
                np.add(out, row, out=out)
            if self.divisor:
                np.divide(out, self.divisor, out)
