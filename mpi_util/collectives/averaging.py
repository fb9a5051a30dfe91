"""Sums and means of many arrays over the ranks as one block, for work that adds up at every step, such as gradients.

Every rank writes its arrays side by side. If they are small each rank then adds up all of it; else each adds up a part,
and takes the others' parts from them. Always in rank order, so that all get the same bits in every run.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays import tree
from ..arrays.layout import Layout
from ..errors import BatchError
from ..launch.identity import Comm
from .barrier import SMALL, Exchange, Page
from .channel import Channel, channel_of
from .gather import rank0_accum_batches
from .weights import bcast

_FEW = 4  # ranks; among more, that each adds up everything costs more than a second round
_TINY = 1 << 14  # bytes; but not for so little
_GRAIN = 1 << 12  # elements; parts that ranks add up are multiples of it

Arrays = dict[str, np.ndarray | None]  # by name; None where there is none
# (name, dtype, shape) of each array; (name, None, None) where there is none
Description = tuple[tuple[str, np.dtype | None, tuple[int, ...] | None], ...]


class Summands:
    """The arrays that one rank brings to a sum, wherever they are. Subclasses say how they are read and written."""

    adds_up = False  # True, from `describe` on, if `add_up` takes less time than `read`

    def describe(self) -> Description:
        """What arrays these are. What it raises is raised on every rank."""
        raise NotImplementedError

    def wrap(self, views: list[np.ndarray]) -> list[Any]:
        """Arrays of shared memory as `write`, `read` and `add_up` take them. The results are kept from call to call."""
        return views

    def write(self, views: list[Any]) -> None:
        """Copies the values into `views`, in the order of the description."""
        raise NotImplementedError

    def read(self, views: list[Any]) -> None:
        """Takes over the result from `views`, which are valid only now."""
        raise NotImplementedError

    def add_up(self, ranks: list[list[Any]], own: int) -> None:
        """Instead of `read`, where arrays are small and `adds_up` is set: sets the values to their mean.

        Args:
            ranks: of each rank what it has written.
            own: the number of this rank.
        """
        raise NotImplementedError


class _HostArrays(Summands):
    """NumPy arrays, which are overwritten."""

    def __init__(self, op: str, make: Callable[[], Arrays], kinds: str, verb: str):
        self._op, self._make, self._kinds, self._verb = op, make, kinds, verb

    def describe(self) -> Description:
        self.made = self._make()
        self._there = [array for array in self.made.values() if array is not None]
        for name, array in self.made.items():
            if array is not None and array.dtype.kind not in self._kinds:
                raise BatchError(f"{self._op}: '{name}' is {array.dtype}, which cannot be {self._verb}")
        return tuple((name, None, None) if a is None else (name, a.dtype, a.shape) for name, a in self.made.items())

    def write(self, views: list[np.ndarray]) -> None:
        for view, array in zip(views, self._there):
            np.copyto(view, array)

    def read(self, views: list[np.ndarray]) -> None:
        for view, array in zip(views, self._there):
            np.copyto(array, view, casting="same_kind")


def average(op: str, make: Callable[[], Arrays], *, comm: Comm = None) -> Arrays:
    """Collective: arrays become their mean over the ranks, which is the same bits on every rank.

    Args:
        op: name of the calling function, for messages.
        make: gives this rank's arrays by name: floating point or complex, writable; they are overwritten. None stands
            for an array that there is not, on any rank. What `make` raises is raised on every rank.
        comm: communicator; None: all ranks.

    Returns:
        What `make` gave.

    Raises:
        RankMismatchError: on every rank, if names, dtypes or shapes differ, or a rank alone has None.
    """
    summands = _HostArrays(op, make, "fc", "averaged; use a float dtype")
    reduce(op, summands, divide=True, comm=comm)
    return summands.made


def add(op: str, make: Callable[[], Arrays], *, comm: Comm = None) -> Arrays:
    """Collective: `average`, but the sum instead of the mean; integers too."""
    summands = _HostArrays(op, make, "iufc", "added up")
    reduce(op, summands, divide=False, comm=comm)
    return summands.made


def reduce(op: str, summands: Summands, divide: bool, comm: Comm = None) -> None:
    """Collective: arrays become their sum over the ranks, or with `divide` their mean."""
    _Reduction(op, summands, divide, channel_of(comm)).run(comm)


@functools.lru_cache(maxsize=256)
def _layout_of(op: str, description: Description) -> tuple[bytes, Layout]:
    """(eight bytes that stand for the call and its arrays, their layout). float16 is added up as float32."""
    there = ((name, np.dtype("f4") if dtype == "f2" else dtype, shape) for name, dtype, shape in description if dtype)
    return tree.digest(op, description), Layout.of(there, packed=True)


class _Reduction(Exchange):
    """One sum or mean: the ranks write their arrays on the barrier page, and add them up there."""

    def __init__(self, op: str, summands: Summands, divide: bool, channel: Channel):
        self.op, self._summands, self._divide, self._channel = op, summands, divide, channel

    def describe(self) -> tuple[bytes, int, Description]:
        description = self._summands.describe()
        self._digest, self._layout = _layout_of(self.op, description)
        self._small = self._layout.nbytes <= (SMALL if self._channel.size <= _FEW else _TINY)
        return self._digest, 0 if self._small else self._layout.nbytes, description

    def write(self, page: Page) -> None:
        turn = (page.number + 1) % 2 if self._small else 2
        rows = page.small(ahead=1) if self._small else page.large
        self._summands.write(page.kept(("own", turn, self._layout), lambda: self._views(rows[page.rank])))

    def run(self, comm: Comm) -> None:
        if self._channel.size == 1:
            self._summands.describe()
            return
        page = self.exchange(self._channel)
        if page is None:
            self._summands.read(self._views(self._through_messages(comm)))
        elif not self._small:
            self._add_up_part(page)
        else:
            turn, rows = page.number % 2, page.small()
            if self._summands.adds_up:
                views = page.kept(("all", turn, self._layout), lambda: [self._views(row) for row in rows])
                self._summands.add_up(views, page.rank)
            else:
                self._add(page.kept(("runs", turn, self._layout), lambda: self._runs([*rows, page.scratch])))
                self._summands.read(page.kept(("sum", self._layout), lambda: self._views(page.scratch)))

    def _views(self, memory: np.ndarray) -> list[Any]:
        return self._summands.wrap(self._layout.views(memory))

    def _runs(self, rows: Sequence[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
        """For each dtype of the block: the arrays of that dtype as one, of each row."""
        return list(zip(*(self._layout.runs(row) for row in rows)))

    def _add(self, runs: list[tuple[np.ndarray, ...]]) -> None:
        """Of each run adds up all arrays but the last, in their order, into the last."""
        for first, second, *rest, out in runs:
            np.add(first, second, out)
            for row in rest:
                np.add(out, row, out)
            if self._divide:
                np.divide(out, self._channel.size, out)

    def _add_up_part(self, page: Page) -> None:
        """Each rank adds up one part of each run; all parts are there when all have come to a second round."""

        def own_parts() -> list[tuple[np.ndarray, ...]]:
            found = []
            for run in self._runs([*page.large, page.total]):
                size = math.ceil(len(run[0]) / self._channel.size / _GRAIN) * _GRAIN
                found.append(tuple(row[page.rank * size : (page.rank + 1) * size] for row in run))
            return found

        self._add(page.kept(("part", self._layout), own_parts))
        page.meet(self.op, self._digest)
        self._summands.read(page.kept(("total", self._layout), lambda: self._views(page.total)))

    def _through_messages(self, comm: Comm) -> np.ndarray:
        """The result, uint8, where ranks share no memory: rank 0 adds up, and sends."""
        block = np.zeros(self._layout.nbytes, np.uint8)
        self._summands.write(self._views(block))
        stacked = rank0_accum_batches(block[None], comm=comm)
        if self._channel.rank == 0:
            self._add(self._runs([*stacked, block]))
        return bcast(block, comm=comm)
