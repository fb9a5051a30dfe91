"""Sums and means of many arrays over the ranks as one block, for work that adds up at every step, such as gradients.

On one machine every rank writes its arrays side by side. If they are small each rank then adds up all of it; else each
adds up a part, and takes the others' parts from them. On several machines small arrays go to rank 0 with the agreement,
large ones along the machines (chain.py). Always in rank order, so that all get the same bits in every run and anywhere.
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from ..arrays import tree
from ..arrays.layout import Layout
from ..cluster.chain import add_up
from ..errors import BatchError
from ..host.segments import private
from ..ranks.identity import Comm
from .barrier import SMALL, Exchange, Page, check_same, possible
from .channel import Channel, channel_of

_FEW = 4  # ranks; among more, that each adds up everything costs more than a second round
_TINY = 1 << 14  # bytes; but not for so little
_ALONG, _TOGETHER = 1 << 16, 1 << 20  # bytes of a rank, of all, that go along with the agreement between machines
_GRAIN = 1 << 12  # elements; parts that ranks add up are multiples of it

Arrays = dict[str, np.ndarray | None]  # by name; None where there is none
# (name, dtype, shape) of each array; (name, None, None) where there is none
Description = tuple[tuple[str, np.dtype | None, tuple[int, ...] | None], ...]


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
    return combine(op, make, np.add, True, comm)


def combine(op: str, make: Callable[[], Arrays], function: np.ufunc, divide: bool, comm: Comm) -> Arrays:
    """Collective: `average`, but with any NumPy function of two arrays, and of integers too if it does not `divide`."""
    return _Reduction(op, make, function, divide, channel_of(comm)).run()


@functools.lru_cache(maxsize=256)
def _layout_of(op: str, description: Description) -> tuple[bytes, Layout]:
    """(eight bytes that stand for the call and its arrays, their layout). float16 is added up as float32."""
    there = ((name, np.dtype("f4") if dtype == "f2" else dtype, shape) for name, dtype, shape in description if dtype)
    return tree.digest(op, description), Layout.of(there, packed=True)


def _copy(arrays: list[np.ndarray], into: list[np.ndarray]) -> None:
    for array, target in zip(arrays, into):
        np.copyto(target, array)


class _Reduction(Exchange):
    """One sum, mean or other reduction: the ranks write their arrays on the barrier page, and combine them there."""

    def __init__(self, op: str, make: Callable[[], Arrays], function: np.ufunc, divide: bool, channel: Channel):
        self.op, self._make, self._function, self._divide, self._channel = op, make, function, divide, channel

    def describe(self) -> tuple[bytes, int, Description]:
        self._made = self._make()
        for name, array in self._made.items():
            if array is not None and self._divide and array.dtype.kind not in "fc":
                raise BatchError(f"{self.op}: '{name}' is {array.dtype}, which cannot be averaged; use a float dtype")
        made = self._made.items()
        self._there = [array for _, array in made if array is not None]
        description = tuple((name, None, None) if a is None else (name, a.dtype, a.shape) for name, a in made)
        self._digest, self._layout = _layout_of(self.op, description)
        self._small = self._layout.nbytes <= (SMALL if self._channel.size <= _FEW else _TINY)
        return self._digest, 0 if self._small else self._layout.nbytes, description

    def write(self, page: Page) -> None:
        turn = (page.number + 1) % 2 if self._small else 2
        rows = page.small(ahead=1) if self._small else page.large
        _copy(self._there, page.kept(("own", turn, self._layout), lambda: self._layout.views(rows[page.rank])))

    def run(self) -> Arrays:
        if self._channel.size == 1:
            self._channel.enter(self.op)  # rank 0's threads are those of any number of ranks
            self.describe()
            return self._made
        page = self.exchange(self._channel) if possible(self._channel) else None
        if page is None:
            views = self._between_machines()
        elif self._small:
            turn, rows = page.number % 2, [*page.small(), page.scratch]
            self._add(page.kept(("runs", turn, self._layout), lambda: self._runs(rows)))
            views = page.kept(("sum", self._layout), lambda: self._layout.views(page.scratch))
        else:
            views = self._add_up_part(page)
        _copy(views, self._there)
        return self._made

    def _runs(self, rows: Sequence[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
        """For each dtype of the block: the arrays of that dtype as one, of each row."""
        return list(zip(*(self._layout.runs(row) for row in rows)))

    def _add(self, runs: list[tuple[np.ndarray, ...]]) -> None:
        """Of each run combines all arrays but the last, in their order, into the last."""
        for first, second, *rest, out in runs:
            self._function(first, second, out=out)
            for row in rest:
                self._function(out, row, out=out)
            if self._divide:
                np.divide(out, self._channel.size, out)

    def _add_up_part(self, page: Page) -> list[np.ndarray]:
        """Each rank adds up one part of each run; all parts are there when all have come to a second round."""

        def own_parts() -> list[tuple[np.ndarray, ...]]:
            found = []
            for run in self._runs([*page.large, page.total]):
                size = math.ceil(len(run[0]) / self._channel.size / _GRAIN) * _GRAIN
                found.append(tuple(row[page.rank * size : (page.rank + 1) * size] for row in run))
            return found

        self._add(page.kept(("part", self._layout), own_parts))
        page.meet(self.op, self._digest)
        return page.kept(("total", self._layout), lambda: self._layout.views(page.total))

    def _between_machines(self) -> list[np.ndarray]:
        """The results where not all ranks share memory."""
        channel = self._channel

        def bring() -> tuple[Description, np.ndarray | None]:
            _, _, description = self.describe()
            if self._layout.nbytes > min(_ALONG, _TOGETHER // channel.size):
                return description, None
            block = private(self._layout.nbytes)
            _copy(self._there, self._layout.views(block))
            return description, block

        def decide(brought: list[tuple[Description, np.ndarray | None]]) -> list[np.ndarray | None]:
            check_same(self.op, [description for description, _ in brought])
            rows = [row for _, row in brought if row is not None]
            if not rows:
                return [None] * channel.size
            total = private(self._layout.nbytes)
            self._add(self._runs([*rows, total]))
            return [total] * channel.size

        total = channel.agree(self.op, bring, decide)
        if total is not None:
            return self._layout.views(total)

        def finish(found: np.ndarray, out: np.ndarray) -> None:
            if self._divide:
                np.divide(found, channel.size, out)
            else:
                np.copyto(out, found)

        def write(row: np.ndarray) -> None:
            _copy(self._there, self._layout.views(row))

        return self._layout.views(add_up(channel, self.op, self._layout, write, self._function, finish))
