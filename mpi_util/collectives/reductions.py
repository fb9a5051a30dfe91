"""Sums, means and copies over the ranks. The order of summation is that of the ranks, so the bits never vary."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

import numpy as np

from ..arrays.adapters import adapter_for
from ..errors import rank_mismatch
from ..launch.identity import Comm
from .channel import Channel
from .comm import channel_of
from .gather import rank0_accum_batches
from .transport import Broadcast

T = TypeVar("T")
Array = TypeVar("Array", bound=Iterable[Any])  # of any framework: no number is iterable

_SMALL = 2048  # bytes; up to this an array travels within the agreement itself


@overload
def all_sum(x: Array, *, comm: Comm = None) -> Array: ...
@overload
def all_sum(x: int, *, comm: Comm = None) -> np.int64: ...
@overload
def all_sum(x: T, *, comm: Comm = None) -> T: ...
def all_sum(x: Any, *, comm: Comm = None) -> Any:
    """Collective: the elementwise sum over the ranks, on every rank, added in rank order.

    Args:
        x: number, array or tensor; same dtype and shape on every rank.
        comm: communicator; None: all ranks.

    Returns:
        A new array, a tensor on x's device, or a NumPy scalar for a number. Of x's dtype, in which integers may wrap
        around; bools are counted: int64.

    Raises:
        RankMismatchError: on every rank, if dtypes or shapes differ.
    """
    return _reduce("all_sum", x, comm, result_dtype=lambda dtype: np.dtype(np.int64) if dtype.kind == "b" else dtype)


@overload
def all_mean(x: Array, *, comm: Comm = None) -> Array: ...
@overload
def all_mean(x: int, *, comm: Comm = None) -> np.float64: ...
@overload
def all_mean(x: T, *, comm: Comm = None) -> T: ...
def all_mean(x: Any, *, comm: Comm = None) -> Any:
    """Collective: the elementwise mean over the ranks, on every rank: their sum in rank order, divided by their number.

    Args, Raises: as `all_sum`. Returns: as `all_sum`, but float64 for integers and bools.
    """
    return _reduce(
        "all_mean", x, comm, result_dtype=lambda dtype: dtype if dtype.kind in "fc" else np.dtype(float), divide=True
    )


def all_reduce(x: Any, op: np.ufunc, *, comm: Comm = None) -> Any:
    """Collective: `x` combined elementwise over the ranks, on every rank, in rank order.

    Args:
        x: number, array or tensor; same dtype and shape on every rank.
        op: NumPy function of two arrays, such as np.maximum or np.multiply; the same on every rank.
        comm: communicator; None: all ranks.

    Returns:
        A new array, a tensor on x's device, or a NumPy scalar for a number; of x's dtype.

    Raises:
        RankMismatchError: on every rank, if dtypes, shapes or functions differ.
        MpiUtilError: on every rank, if the function does not take such an array.
    """
    return _reduce(f"all_reduce({op.__name__})", x, comm, op)


def bcast(x: T, *, comm: Comm = None) -> T:
    """Collective: rank 0's `x` on every rank.

    Args:
        x: an array is overwritten in place on the other ranks, where it must have rank 0's dtype and shape; anything
            else that pickle takes, an array of objects too, is returned as a copy of rank 0's.
        comm: communicator; None: all ranks.

    Returns:
        Rank 0's value; for an array, `x` itself.

    Raises:
        RankMismatchError: on every rank, if an array's dtype or shape differs.
    """
    value: T = _Copy(x).send(channel_of(comm))
    return value


class _Copy(Broadcast):
    """Sends rank 0's array, or within the agreement any other object."""

    op = "bcast"

    def __init__(self, x: Any):
        self._x = x
        self._in_place = isinstance(x, np.ndarray) and not x.dtype.hasobject

    def describe(self) -> tuple[Any, ...] | None:
        return (self._x.dtype, self._x.shape) if self._in_place else None

    def decide(self, channel: Channel, described: list[Any]) -> tuple[int, Any]:
        _all_same("bcast", described)
        return (self._x.nbytes, None) if self._in_place else (0, self._x)

    def write(self, block: np.ndarray) -> Iterator[int]:
        np.copyto(self._view(block), self._x)
        yield self._x.nbytes

    def take(self, block: np.ndarray, wait_for: Callable[[int], None]) -> None:
        wait_for(self._x.nbytes)
        np.copyto(self._x, self._view(block))

    def _view(self, block: np.ndarray) -> np.ndarray:
        return np.ndarray(self._x.shape, self._x.dtype, block)

    def send(self, channel: Channel) -> Any:
        value = super().send(channel)
        return self._x if self._in_place or channel.rank == 0 else value


def _reduce(
    name: str,
    x: Any,
    comm: Comm,
    op: np.ufunc = np.add,
    result_dtype: Callable[[np.dtype], np.dtype] = lambda dtype: dtype,
    divide: bool = False,
) -> Any:
    channel = channel_of(comm)
    array = np.empty(0)

    def bring() -> tuple[np.dtype, tuple[int, ...], np.ndarray | None]:
        nonlocal array
        array = adapter_for(x).to_numbers(x)
        return array.dtype, array.shape, array if array.nbytes <= _SMALL else None

    def combine(arrays: Any) -> np.ndarray:
        dtype = result_dtype(array.dtype)
        half = dtype == np.float16  # too narrow to add up in
        first, *others = arrays
        total = first.astype(np.float32 if half else dtype)
        for one in others:
            op(total, one, out=total)
        return np.asarray(total / channel.size if divide else total).astype(dtype, copy=False)

    def decide(brought: list[Any]) -> list[np.ndarray | None]:
        _all_same(name, [b[:2] for b in brought])
        if array.nbytes <= _SMALL:
            return [combine([values for *_, values in brought])] * channel.size
        combine([np.empty(0, array.dtype)] * 2)  # what `op` does not take is an error here, on every rank
        return [None] * channel.size

    result = channel.agree(name, bring, decide)
    if result is None:
        stacked = rank0_accum_batches(array[None], comm=comm)
        result = np.empty(array.shape, result_dtype(array.dtype)) if channel.rank else combine(stacked)
        bcast(result, comm=comm)
    return adapter_for(x).from_numbers(result, x)


def _all_same(op: str, found: list[Any]) -> None:
    if any(f != found[0] for f in found):
        table = [f"{f[0]} {f[1]}" if f else "no array" for f in found]
        raise rank_mismatch(f"{op}: every rank must bring the same dtype and shape", table)
