"""Sums and means of many arrays over the ranks as one block, for work that adds up at every step, such as gradients.

Every rank lays its arrays down side by side. If they are small each rank then adds up all of it; else each adds up a
part, and takes the others' parts from them. Always in rank order, so that all get the same bits in every run.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..arrays import tree
from ..errors import BatchError, rank_mismatch
from ..host.segments import align
from ..launch.identity import Comm
from .barrier import SMALL, Board, gather_round
from .channel import Channel
from .comm import channel_of
from .gather import rank0_accum_batches
from .reductions import bcast

T = TypeVar("T")

_FEW = 4  # ranks; among more, that each adds up everything costs more than a second meeting
_TINY = 1 << 14  # bytes; but not for so little
_GRAIN = 1 << 12  # elements; parts that ranks add up are multiples of it

# (name, dtype, shape) of an array; (name, None, None) where there is none
Arrays = dict[str, np.ndarray | None]  # by name; None where there is none
Description = tuple[tuple[str, np.dtype | None, tuple[int, ...] | None], ...]


class Views(list[np.ndarray]):
    """Arrays over some memory, in the order of the names. Callers may keep their own views of it in `more`."""

    more: list[Any] | None = None


class Layout(NamedTuple):
    """Where arrays lie in a block, those of one dtype together.

    Attributes:
        digest: eight bytes that stand for the call, names, dtypes and shapes.
        nbytes: of the block.
        places: for each array that there is: (dtype in the block, shape, byte offset).
        runs: for each dtype of the block: (dtype, byte offset, number of elements).
    """

    digest: bytes
    nbytes: int
    places: tuple[tuple[np.dtype, tuple[int, ...], int], ...]
    runs: tuple[tuple[np.dtype, int, int], ...]

    def views(self, memory: np.ndarray) -> Views:
        """The arrays over `memory`, uint8."""
        return Views(np.ndarray(shape, dtype, memory, start) for dtype, shape, start in self.places)


@functools.lru_cache(maxsize=256)
def layout_of(op: str, description: Description) -> Layout:
    """The Layout of the arrays that a call brings. float16 is added up, and so lies in the block, as float32."""
    there = [
        (np.dtype("f4") if dtype == "f2" else dtype, shape)
        for _, dtype, shape in description
        if dtype and shape is not None
    ]
    places: dict[int, tuple[np.dtype, tuple[int, ...], int]] = {}
    runs, nbytes = [], 0
    for kind in dict.fromkeys(dtype for dtype, _ in there):
        first = nbytes
        for i, (dtype, shape) in enumerate(there):
            if dtype == kind:
                places[i] = (dtype, shape, nbytes)
                nbytes += dtype.itemsize * math.prod(shape)
        runs.append((kind, first, (nbytes - first) // kind.itemsize))
        nbytes = align(nbytes)
    return Layout(tree.digest(op, description), nbytes, tuple(places[i] for i in range(len(there))), tuple(runs))


def average(op: str, bring: Callable[[], Arrays], *, comm: Comm = None) -> Arrays:
    """Collective: arrays become their mean over the ranks, which is the same bits on every rank.

    Args:
        op: name of the calling function, for messages.
        bring: gives this rank's arrays by name: floating point or complex, writable; they are overwritten. None stands
            for an array that there is not, on any rank. What `bring` raises is raised on every rank.
        comm: communicator; None: all ranks.

    Returns:
        What `bring` gave.

    Raises:
        RankMismatchError: on every rank, if names, dtypes or shapes differ, or a rank alone has None.
    """
    return _reduce(op, bring, comm, divide=True)


def add(op: str, bring: Callable[[], Arrays], *, comm: Comm = None) -> Arrays:
    """Collective: `average`, but the sum instead of the mean; integers too."""
    return _reduce(op, bring, comm, divide=False)


def _reduce(op: str, bring: Callable[[], Arrays], comm: Comm, divide: bool) -> Arrays:
    brought: Arrays = {}
    arrays: list[np.ndarray] = []

    def describe() -> Description:
        brought.update(bring())
        arrays.extend(array for array in brought.values() if array is not None)
        for name, array in brought.items():
            if array is not None and (array.dtype.kind not in "fc" if divide else array.dtype.kind not in "iufc"):
                raise BatchError(f"{op}: '{name}' is {array.dtype}, of which there is no {'mean' if divide else 'sum'}")
        return tuple((name, a.dtype, a.shape) if a is not None else (name, None, None) for name, a in brought.items())

    def write(views: Views) -> None:
        for view, array in zip(views, arrays):
            np.copyto(view, array)

    def read(views: Views) -> None:
        for view, array in zip(views, arrays):
            np.copyto(array, view, casting="same_kind")

    reduce(op, describe, write, read, divide, comm)
    return brought


def reduce(
    op: str,
    describe: Callable[[], Description],
    write: Callable[[Views], None],
    read: Callable[[Views], None],
    divide: bool,
    comm: Comm = None,
    add_up: Callable[[list[Views], int], None] | None = None,
) -> None:
    """Collective: the sum or mean of arrays, wherever they are.

    Args:
        describe: what arrays this rank brings.
        write: copies them into the given ones.
        read: takes over the result, from the given ones, which are valid during the call only.
        divide: True: the mean.
        comm: communicator; None: all ranks.
        add_up: takes the arrays of each rank, and the own rank, and does what is left where they are small; None: they
            are added up here, and `read`.
    """
    channel = channel_of(comm)
    layout = Layout(b"", 0, (), ())

    def bring() -> tuple[bytes, int, Description]:
        nonlocal layout
        description = describe()
        layout = layout_of(op, description)
        return layout.digest, 0 if _is_small(layout, channel) else layout.nbytes, description

    if channel.size == 1:
        bring()
        return
    board = gather_round(
        channel, op, bring, lambda board: write(_own(board, layout)), lambda brought: _check_alike(op, brought)
    )
    if board is None:
        read(layout.views(_through_messages(channel, layout, write, divide, comm)))
    elif _is_small(layout, channel) and add_up:
        add_up(_all(board, layout), channel.rank)
    elif _is_small(layout, channel):
        read(_add_up_all(board, layout, divide))
    else:
        read(_add_up_part(board, op, layout, divide))


def _is_small(layout: Layout, channel: Channel) -> bool:
    return layout.nbytes <= (SMALL if channel.size <= _FEW else _TINY)


def _kept(board: Board, key: Any, make: Callable[[], T]) -> T:
    """`make()`, once per board."""
    found: T | None = board.views.get(key)
    if found is None:
        found = board.views[key] = make()
    return found


def _own(board: Board, layout: Layout) -> Views:
    """Where this rank lays its arrays down."""
    rank = board.channel.rank
    if not _is_small(layout, board.channel):
        return _kept(board, ("own", layout.digest), lambda: layout.views(board.large[rank]))
    turn = (board.number + 1) % 2
    return _kept(board, ("own", turn, layout.digest), lambda: layout.views(board.small[turn][rank]))


def _all(board: Board, layout: Layout) -> list[Views]:
    """What each rank laid down, if it is small."""
    turn = board.number % 2
    return _kept(board, ("all", turn, layout.digest), lambda: [layout.views(row) for row in board.small[turn]])


def _runs(rows: Iterable[np.ndarray], layout: Layout) -> list[list[np.ndarray]]:
    """For each dtype of the block: the arrays of that dtype of each row of `rows`, flat, one array per row."""
    return [[np.ndarray((n,), dtype, row, start) for row in rows] for dtype, start, n in layout.runs]


def _add(rows: Sequence[np.ndarray], divide: bool, out: np.ndarray) -> None:
    """Adds up arrays, in their order, into another."""
    np.add(rows[0], rows[1], out)
    for row in rows[2:]:
        np.add(out, row, out)
    if divide:
        np.divide(out, len(rows), out)


def _add_up_all(board: Board, layout: Layout, divide: bool) -> Views:
    turn = board.number % 2

    def make() -> tuple[list[tuple[list[np.ndarray], np.ndarray]], Views]:
        total = np.empty(SMALL, np.uint8)
        runs = [(rows, out) for rows, (out,) in zip(_runs(board.small[turn], layout), _runs([total], layout))]
        return runs, layout.views(total)

    runs, result = _kept(board, ("sum", turn, layout.digest), make)
    for rows, out in runs:
        _add(rows, divide, out)
    return result


def _add_up_part(board: Board, op: str, layout: Layout, divide: bool) -> Views:
    channel = board.channel

    def make() -> tuple[list[tuple[list[np.ndarray], np.ndarray]], Views]:
        runs = []
        for rows, (out,) in zip(_runs(board.large, layout), _runs([board.total], layout)):
            part = math.ceil(len(out) / channel.size / _GRAIN) * _GRAIN
            own = slice(channel.rank * part, (channel.rank + 1) * part)
            runs.append(([row[own] for row in rows], out[own]))
        return runs, layout.views(board.total)

    runs, result = _kept(board, ("part", layout.digest), make)
    for rows, out in runs:
        _add(rows, divide, out)
    board.meet(op, layout.digest)  # what it is, all know since the meeting before
    return result


def _through_messages(
    channel: Channel, layout: Layout, write: Callable[[Views], None], divide: bool, comm: Any
) -> np.ndarray:
    """The result, uint8, where ranks share no memory: rank 0 adds up, and sends."""
    block = np.zeros(layout.nbytes, np.uint8)
    write(layout.views(block))
    stacked = rank0_accum_batches(block[None], comm=comm)
    if channel.rank == 0:
        for rows, (out,) in zip(_runs(stacked, layout), _runs([block], layout)):
            _add(rows, divide, out)
    return bcast(block, comm=comm)


def _check_alike(op: str, descriptions: Sequence[Description]) -> None:
    """Raises the RankMismatchError that names the first array that is not alike on all ranks."""
    if all(description == descriptions[0] for description in descriptions):
        return
    found = [{name: (dtype, shape) for name, dtype, shape in description} for description in descriptions]
    names = dict.fromkeys(itertools.chain.from_iterable(found))
    name = next((n for n in names if any(f.get(n) != found[0].get(n) for f in found)), next(iter(names)))

    def text(one: dict[str, tuple[np.dtype | None, tuple[int, ...] | None]]) -> str:
        if name not in one:
            return f"missing (of {len(one)} arrays)"
        dtype, shape = one[name]
        return "None" if dtype is None else f"{dtype} {shape}"

    raise rank_mismatch(f"{op}: '{name}' is not the same on all ranks", map(text, found))
