"""Sums and means over the ranks, of numbers, arrays and gradients; in the process of each rank.

Rank 0 adds them up in rank order, on a page of shared memory; where there is none they go along with the agreement.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from ..arrays import tree
from ..arrays.adapters import adapter_for, array_of
from ..arrays.layout import Layout
from ..errors import BatchError, RankMismatchError
from ..host.segments import ALIGN, align, private
from ..ranks.identity import Comm
from .agreement import SECOND
from .channel import Channel, channel_of
from .mismatch import check_same

T = TypeVar("T")
Arrays = dict[str, np.ndarray | None]  # by name; None where there is none
# (name, dtype, shape) of each array; (name, None, None) where there is none
Description = tuple[tuple[str, np.dtype | None, tuple[int, ...] | None], ...]


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
    own = Reduction(op, make, channel.size if divide else 0)
    if channel.size == 1:
        channel.enter(op)  # rank 0's threads are those of any number of ranks
        return own.arrays
    own.take(channel.adds_up(own) if channel.adds_up else add_up(channel, own))
    return own.arrays


class Reduction:
    """One sum or mean: what this rank adds, and how rows are added up.

    The arrays are made when they are first asked for, within the collective call, so that an error reaches all ranks.
    """

    def __init__(self, op: str, make: Callable[[], Arrays], divisor: int):
        self.op, self._make, self.divisor = op, make, divisor  # divisor: number of ranks if it is a mean, else 0

    @functools.cached_property
    def arrays(self) -> Arrays:
        made = self._make()
        for name, array in made.items():
            if array is not None and self.divisor and array.dtype.kind not in "fc":
                raise BatchError(f"{self.op}: '{name}' is {array.dtype}, which cannot be averaged; use a float dtype")
        return made

    @functools.cached_property
    def description(self) -> Description:
        """What must be the same on all ranks."""
        made = self.arrays.items()
        return tuple((name, None, None) if a is None else (name, a.dtype, a.shape) for name, a in made)

    @functools.cached_property
    def layout(self) -> Layout:
        """Of a row: the arrays of each dtype lie together. float16 is added up as float32."""
        there = ((name, np.dtype("f4") if dtype == "f2" else dtype, shape) for name, dtype, shape in self.description)
        return Layout.of((array for array in there if array[1]), packed=True)

    def write(self, row: np.ndarray) -> None:
        for array, view in self._pairs(row):
            np.copyto(view, array)

    def take(self, total: np.ndarray) -> None:
        for array, view in self._pairs(total):
            np.copyto(array, view)

    def _pairs(self, row: np.ndarray) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        return zip((array for array in self.arrays.values() if array is not None), self.layout.views(row))

    def combine(self, rows: Sequence[np.ndarray], total: np.ndarray) -> None:
        """Adds up rows in their order, and for a mean divides, into `total`."""
        for first, second, *rest, out in zip(*(self.layout.runs(row) for row in (*rows, total))):
            np.add(first, second, out=out)
            for row in rest:
                np.add(out, row, out=out)
            if self.divisor:
                np.divide(out, self.divisor, out)


class Page:
    """One rank's view of it: two rows of each rank, for calls in turn, each with the number of its call; a total.

    A rank may be interrupted, and in its next call before the others are: it must not overwrite what they add up.
    """

    def __init__(self, memory: Any, n: int, room: int, serial: int):
        """Args: n: number of ranks. room: bytes of a row. serial: a number that tells pages apart."""
        self.room, self.serial = room, serial
        *rows, self.total = np.ndarray((2 * n + 1, ALIGN + room), np.uint8, memory)[:, ALIGN:]
        numbers = np.ndarray((2 * n,), np.int64, memory, strides=(ALIGN + room,))
        self.rows, self.numbers = (rows[:n], rows[n:]), (numbers[:n], numbers[n:])


def add_up(channel: Channel, reduction: Reduction, part: str = "") -> Any:
    """Collective: all ranks' arrays, added up in rank order, in the reduction's layout; valid until the next call."""
    page, messages = channel.page, channel.messages

    def contribute() -> tuple[Description, int]:
        description = reduction.description
        if page is None or reduction.layout.nbytes > page.room:
            return description, 0
        page.numbers[messages.calls % 2][channel.rank] = messages.calls
        reduction.write(page.rows[messages.calls % 2][channel.rank])
        return description, page.serial

    def decide(contributed: Sequence[tuple[Description, int]]) -> list[Any]:
        """For each rank (): the total is on the page; or where a new page is, if there is memory, and its size."""
        check_same(reduction.op, [description for description, _ in contributed])
        if page and {serial for _, serial in contributed} == {page.serial}:
            reduction.combine(page.rows[messages.calls % 2], page.total)
            if (page.numbers[messages.calls % 2] != messages.calls).any():
                raise RankMismatchError(f"{reduction.op}: a rank was interrupted in it, and has gone on")
            return [()] * channel.size
        room = align(reduction.layout.nbytes)
        memory, address = channel.lease((2 * channel.size + 1) * (ALIGN + room), channel.below)
        new = (memory if address else None, room, messages.calls)
        return [new, *[(address, *new[1:])] * (channel.size - 1)]

    new_page = channel.agree(reduction.op + part, contribute, decide)
    if not new_page:
        return page.total
    memory, room, serial = new_page
    if memory is None:
        return add_in_messages(channel, reduction, SECOND)
    channel.page = Page(channel.pool.map(memory) if channel.rank else memory, channel.size, room, serial)
    return add_up(channel, reduction, SECOND)


def add_in_messages(channel: Channel, reduction: Reduction, part: str = "", most: float = math.inf) -> Any:
    """`add_up` for arrays that go along with the agreement. None: they have more than `most` bytes."""

    def contribute() -> tuple[Description, np.ndarray | None]:
        description = reduction.description
        if (nbytes := reduction.layout.nbytes) > most:
            return description, None
        reduction.write(row := private(nbytes))
        return description, row

    def decide(contributed: list[tuple[Description, np.ndarray | None]]) -> Sequence[np.ndarray | None]:
        check_same(reduction.op, [description for description, _ in contributed])
        total, rows = None, [row for _, row in contributed if row is not None]
        if rows:
            reduction.combine(rows, total := private(reduction.layout.nbytes))
        return [total] * channel.size

    return channel.agree(reduction.op + part, contribute, decide)
