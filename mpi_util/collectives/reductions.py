"""Sums, means and broadcasts. The order of summation is that of the ranks, so the bits never vary."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import numpy as np

from ..arrays.adapters import adapter_for, array_of
from ..errors import BatchError, MpiUtilError
from ..ranks.identity import Comm
from .averaging import Arrays, combine
from .channel import channel_of
from .weights import all_same

T = TypeVar("T")
Array = TypeVar("Array", bound=Iterable[Any])  # of any framework: no number is iterable


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
        RankMismatchError: on every rank, if dtypes or shapes differ. BatchError: x is text, or holds objects.
    """
    return _combine("all_sum", x, np.add, lambda dtype: np.dtype(np.int64) if dtype.kind == "b" else dtype, comm)


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
    return _combine("all_mean", x, np.add, lambda dtype: dtype if dtype.kind in "fc" else np.dtype(float), comm, True)


def all_reduce(x: Any, op: np.ufunc, *, comm: Comm = None) -> Any:
    """Collective: as `all_sum`, but of x's dtype, with any NumPy function of two arrays, the same on every rank.

    Raises:
        RankMismatchError: on every rank, if dtypes, shapes or functions differ.
        MpiUtilError: on every rank, if the function does not accept such an array.
    """
    return _combine(f"all_reduce({op.__name__})", x, op, lambda dtype: dtype, comm)


def _combine(
    name: str, x: Any, op: np.ufunc, result_dtype: Callable[[np.dtype], np.dtype], comm: Comm, divide: bool = False
) -> Any:
    """A number is sent within an agreement; arrays are combined as gradients are, which takes a third of the time."""
    channel, adapter = channel_of(comm), adapter_for(x)
    try:
        array = array_of(x, numbers=True)
    except Exception:  # raised again within the agreement, and so on every rank
        array = np.empty(())

    def accepted(found: np.ndarray) -> np.ndarray:
        if found.dtype.kind in "SU":
            raise BatchError(f"{name}: {found.dtype} is text; give it a number, or use rank0_gather")
        nothing = np.empty(0, result_dtype(found.dtype))
        try:
            op(nothing, nothing, out=nothing)
        except TypeError as error:
            raise MpiUtilError(f"{name}: {error}") from None
        return found

    def make() -> Arrays:
        return {"x": accepted(array).astype(result_dtype(array.dtype))}

    def decide(numbers: list[np.ndarray]) -> list[np.ndarray]:
        all_same(name, [(number.dtype, number.shape) for number in numbers])
        first, *others = numbers
        dtype = result_dtype(first.dtype)
        total = first.astype(np.float32 if dtype == np.float16 else dtype)  # float16 is too narrow to add in
        for number in others:
            op(total, number, out=total)
        return [np.asarray(total / channel.size if divide else total).astype(dtype)] * channel.size

    total: Any
    if array.ndim:
        total = combine(f"{name} of an array", make, op, divide, comm)["x"]
    else:
        total = channel.agree(name, lambda: accepted(array_of(x, numbers=True)), decide)
    return adapter.from_numbers(total, x)
