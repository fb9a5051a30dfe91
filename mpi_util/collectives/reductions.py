"""Sums, means and broadcasts. The order of summation is that of the ranks, so the bits never vary."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import numpy as np

from ..arrays.adapters import adapter_for
from ..launch.identity import Comm
from .averaging import Arrays, add, average
from .channel import channel_of
from .gather import rank0_accum_batches
from .weights import all_same, bcast

T = TypeVar("T")
Array = TypeVar("Array", bound=Iterable[Any])  # of any framework: no number is iterable

_SMALL = 2048  # bytes; an array up to this is sent within the agreement itself


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
    return _sum("all_sum", x, lambda dtype: np.dtype(np.int64) if dtype.kind == "b" else dtype, False, comm)


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
    return _sum("all_mean", x, lambda dtype: dtype if dtype.kind in "fc" else np.dtype(float), True, comm)


def all_reduce(x: Any, op: np.ufunc, *, comm: Comm = None) -> Any:
    """Collective: as `all_sum`, but of x's dtype, with any NumPy function of two arrays, the same on every rank.

    Raises:
        RankMismatchError: on every rank, if dtypes, shapes or functions differ.
        MpiUtilError: on every rank, if the function does not accept such an array.
    """
    return _reduce(f"all_reduce({op.__name__})", x, op, lambda dtype: dtype, comm)


def _sum(op: str, x: Any, result_dtype: Callable[[np.dtype], np.dtype], divide: bool, comm: Comm) -> Any:
    """A number is sent within an agreement; an array is added up as gradients are, which takes a third of the time."""
    try:
        array = adapter_for(x).to_numbers(x)
    except Exception:  # raised again within the agreement, and so on every rank
        array = np.empty(())
    if not array.ndim or array.dtype.kind not in "biufc":
        return _reduce(op, x, np.add, result_dtype, comm, divide)

    def make() -> Arrays:
        return {"x": array.astype(result_dtype(array.dtype))}

    total: Any = (average if divide else add)(f"{op} of an array", make, comm=comm)["x"]
    return adapter_for(x).from_numbers(total, x)


def _reduce(
    name: str, x: Any, op: np.ufunc, result_dtype: Callable[[np.dtype], np.dtype], comm: Comm, divide: bool = False
) -> Any:
    """Collective: one reduction. Small arrays travel within the agreement; larger ones are gathered on rank 0."""
    channel = channel_of(comm)

    def describe() -> tuple[np.dtype, tuple[int, ...], np.ndarray | None]:
        array = adapter_for(x).to_numbers(x)
        return array.dtype, array.shape, array if array.nbytes <= _SMALL else None

    def combine(arrays: Iterable[np.ndarray]) -> np.ndarray:
        first, *others = arrays
        dtype = result_dtype(first.dtype)
        total = first.astype(np.float32 if dtype == np.float16 else dtype)  # float16 is too narrow to add in
        for array in others:
            op(total, array, out=total)
        return np.asarray(total / channel.size if divide else total).astype(dtype, copy=False)

    def decide(described: list[Any]) -> list[np.ndarray | None]:
        all_same(name, [found[:2] for found in described])
        arrays = [values for *_, values in described]
        if arrays[0] is not None:
            return [combine(arrays)] * len(arrays)
        combine([np.empty(0, described[0][0])] * 2)  # if `op` rejects such an array, all ranks raise that
        return [None] * len(arrays)

    result = channel.agree(name, describe, decide)
    if result is None:
        result = combine(rank0_accum_batches(adapter_for(x).to_numbers(x)[None], comm=comm))
        bcast(result, comm=comm)  # the others have combined only their own
    return adapter_for(x).from_numbers(result, x)
