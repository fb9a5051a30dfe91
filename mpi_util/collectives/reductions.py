"""Sums, means and broadcasts. The order of summation is that of the ranks, so the bits never vary."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import numpy as np

from ..arrays.adapters import adapter_for
from ..launch.identity import Comm
from .averaging import Arrays, add, average
from .comm import channel_of
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
    return _Reduction(f"all_reduce({op.__name__})", x, op, lambda dtype: dtype).run(comm)


def _sum(op: str, x: Any, result_dtype: Callable[[np.dtype], np.dtype], divide: bool, comm: Comm) -> Any:
    """A number is sent within an agreement; an array is added up as gradients are, which takes a third of the time."""
    try:
        array = adapter_for(x).to_numbers(x)
    except Exception:  # raised again within the agreement, and so on every rank
        array = np.empty(())
    if not array.ndim or array.dtype.kind not in "biufc":
        return _Reduction(op, x, np.add, result_dtype).run(comm, divide)

    def make() -> Arrays:
        return {"x": array.astype(result_dtype(array.dtype))}

    total: Any = (average if divide else add)(f"{op} of an array", make, comm=comm)["x"]
    return adapter_for(x).from_numbers(total, x)


class _Reduction:
    """One reduction. Small arrays are sent within the agreement; larger ones are gathered, the result is broadcast."""

    def __init__(self, name: str, x: Any, op: np.ufunc, result_dtype: Callable[[np.dtype], np.dtype]):
        self._name, self._x, self._op, self._result_dtype = name, x, op, result_dtype

    def run(self, comm: Comm, divide: bool = False) -> Any:
        """Collective: the result on every rank, of the kind of x. divide: by the number of ranks."""
        channel = channel_of(comm)
        self._n, self._divisor = channel.size, channel.size if divide else None
        result = channel.agree(self._name, self._describe, self._decide)
        if result is None:
            stacked = rank0_accum_batches(self._array[None], comm=comm)
            result = np.empty(self._array.shape, self._dtype) if channel.rank else self._combine(stacked)
            bcast(result, comm=comm)
        return adapter_for(self._x).from_numbers(result, self._x)

    def _describe(self) -> tuple[np.dtype, tuple[int, ...], np.ndarray | None]:
        """This rank's dtype and shape; the values too if they are few."""
        array = self._array = adapter_for(self._x).to_numbers(self._x)
        self._dtype = self._result_dtype(array.dtype)
        return array.dtype, array.shape, array if array.nbytes <= _SMALL else None

    def _decide(self, found: list[Any]) -> list[np.ndarray | None]:
        """Rank 0: the result; None if it has to gather the arrays first."""
        all_same(self._name, [f[:2] for f in found])
        if self._array.nbytes <= _SMALL:
            return [self._combine([values for *_, values in found])] * self._n
        self._combine([np.empty(0, self._array.dtype)] * 2)  # if `op` rejects such an array, all ranks raise that
        return [None] * self._n

    def _combine(self, arrays: Any) -> np.ndarray:
        first, *others = arrays
        # float16 is too narrow to add in
        total = first.astype(np.float32 if self._dtype == np.float16 else self._dtype)
        for array in others:
            self._op(total, array, out=total)
        return np.asarray(total / self._divisor if self._divisor else total).astype(self._dtype, copy=False)
