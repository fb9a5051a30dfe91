"""Sums, means and copies over the ranks. The order of summation is that of the ranks, so the bits never vary."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .adapters import adapter_for
from .comm import channel_of
from .errors import RankMismatchError
from .gather import rank0_accum_batches
from .transport import spread

_SMALL = 2048  # bytes; up to this an array travels within the agreement itself


def all_sum(x: Any, *, comm: Any = None) -> Any:
    """Collective: the elementwise sum over the ranks, on every rank, added in rank order.

    Args:
        x: number, array or tensor; same dtype and shape on every rank. Integers keep their dtype and may wrap around.
        comm: communicator; None: all ranks.

    Returns:
        A new array (or tensor, or NumPy scalar for a number) of x's dtype and shape.

    Raises:
        RankMismatchError: on every rank, if dtypes or shapes differ.
    """
    return _reduce("all_sum", x, comm, lambda total, n: total)


def all_mean(x: Any, *, comm: Any = None) -> Any:
    """Collective: the elementwise mean over the ranks, on every rank: `all_sum(x) / nworkers`.

    Args, Raises: as `all_sum`. Returns: float64 for integers and bools, else x's dtype.
    """
    return _reduce("all_mean", x, comm, lambda total, n: np.divide(total, n, dtype=_mean_dtype(total.dtype)))


def bcast(x: Any, *, comm: Any = None) -> Any:
    """Collective: rank 0's `x` on every rank.

    Args:
        x: an array is overwritten in place on the other ranks, where it must have rank 0's dtype and shape; anything
            else that pickle takes is returned as a copy of rank 0's.
        comm: communicator; None: all ranks.

    Returns:
        Rank 0's value; for an array, `x` itself.

    Raises:
        RankMismatchError: on every rank, if an array's dtype or shape differs.
    """
    channel = channel_of(comm)
    if not isinstance(x, np.ndarray):
        return channel.agree("bcast", None, lambda headers: _all_none("bcast", headers) or [x] * len(headers))

    def check(headers: list) -> tuple[int, Any]:
        _all_same("bcast", headers)
        return x.nbytes, None

    def view(block: np.ndarray) -> np.ndarray:
        return np.ndarray(x.shape, x.dtype, block)

    def fill(block: np.ndarray) -> Iterator[int]:
        np.copyto(view(block), x)
        yield x.nbytes

    def take(block: np.ndarray, wait_for: Callable[[int], None]) -> None:
        wait_for(x.nbytes)
        np.copyto(x, view(block))

    spread(channel, "bcast", (x.dtype.str, x.shape), check, fill, take)
    return x


def _reduce(op: str, x: Any, comm: Any, finish: Any) -> Any:
    channel = channel_of(comm)
    array = adapter_for(x).to_array(x)
    small = array.nbytes <= _SMALL

    def decide(headers: list) -> list:
        _all_same(op, [(dtype, shape) for dtype, shape, _ in headers])
        return [finish(_sum([values for *_, values in headers]), channel.size) if small else None] * channel.size

    result = channel.agree(op, (array.dtype.str, array.shape, array if small else None), decide)
    if not small:
        stacked = rank0_accum_batches(array[None], comm=comm)
        result = (
            finish(_sum(stacked), channel.size)
            if channel.rank == 0
            else np.empty(array.shape, array.dtype if op == "all_sum" else _mean_dtype(array.dtype))
        )
        bcast(result, comm=comm)
    return result[()] if np.ndim(x) == 0 and not hasattr(x, "detach") else adapter_for(x).from_array(result, x)


def _sum(arrays: Any) -> np.ndarray:
    """Sum over the first axis, one after another, in x's own dtype."""
    total = np.array(arrays[0])
    for array in arrays[1:]:
        total += array if total.dtype != bool else array.astype(bool)
    return total


def _mean_dtype(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.kind in "fc" else np.dtype(np.float64)


def _all_same(op: str, found: list) -> None:
    if any(f != found[0] for f in found):
        table = "\n".join(f"  rank {k}: {f[0]} {f[1]}" if f else f"  rank {k}: no array" for k, f in enumerate(found))
        raise RankMismatchError(f"{op}: every rank must bring the same dtype and shape:\n{table}")


def _all_none(op: str, headers: list) -> None:
    if any(header is not None for header in headers):
        _all_same(op, headers)
