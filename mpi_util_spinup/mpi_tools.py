"""Spinning Up's MPI tools under their own names: `spinup.utils.mpi_tools` becomes `mpi_util_spinup.mpi_tools`.

Differences: dtypes and shapes are kept (there all became float32), waiting ranks sleep, the bits do not depend on the
MPI library, and one rank needs no MPI. `comm` is a communicator; None: all ranks.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mpi_util.collectives.bcast import bcast
from mpi_util.collectives.channel import channel_of
from mpi_util.collectives.gather import all_accum_batches
from mpi_util.collectives.reduce import all_mean, all_reduce, all_sum
from mpi_util.errors import BatchError, MpiUtilError, rank_mismatch
from mpi_util.launch import api as start
from mpi_util.ranks.identity import Comm, nworkers, rank

from .statistics import statistics

_FUNCTIONS = {
    "SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum,
    "LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor,
    "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
}  # fmt: skip

proc_id = rank
num_procs = nworkers
mpi_sum: Callable[..., Any] = all_sum  # of a list too, which gives an array
mpi_avg: Callable[..., Any] = all_mean


def mpi_fork(n: int, bind_to_core: bool = False) -> None:
    """`mpi_util.mpi_fork`, but it returns in the ranks only, and ends the process that the user started.

    `bind_to_core` overrides `taskset`. It is not for programs in which rank 0 updates alone, with one core then.
    """
    if start.mpi_fork(n, bind_to_core=bind_to_core) == "parent":
        sys.exit()


def msg(m: Any, string: str = "") -> None:
    """Prints one line: `Message from <rank>: <string>`, a tab, and `m`. Not collective."""
    print(f"Message from {rank()}: {string} \t {m}\n", end="", flush=True)


def allreduce(sendbuf: Any, recvbuf: Any, op: Any = None, *, comm: Comm = None) -> None:
    """Collective: combines the arrays of all ranks elementwise into `recvbuf`, on every rank, in rank order.

    Args:
        sendbuf: array-like; same dtype and shape on every rank. MPI.IN_PLACE or None: the values are in `recvbuf`.
        recvbuf: writable array of the same dtype and size, or what shares its memory with NumPy, such as a CPU tensor.
        op: as for `mpi_op`.

    Raises what `mpi_op` does, and BatchError: `recvbuf` cannot be written in place, or cannot hold the result.
    """
    target = _buffer("allreduce", recvbuf)
    mpi = sys.modules.get("mpi4py.MPI")
    in_place = sendbuf is None or (mpi is not None and sendbuf is mpi.IN_PLACE)
    source = target if in_place else np.asarray(sendbuf)
    if (source.dtype, source.size) != (target.dtype, target.size):
        raise BatchError(
            f"allreduce: sendbuf is {source.dtype} {source.shape} and recvbuf {target.dtype} {target.shape}; "
            "give both the same dtype and size"
        )
    target[...] = mpi_op(source, op, comm=comm).reshape(target.shape)


def broadcast(x: Any, root: int = 0, *, comm: Comm = None) -> None:
    """Collective: overwrites `x` on every rank with rank `root`'s values.

    Args:
        x: as `allreduce`'s `recvbuf`; same dtype and shape on every rank.
        root: the rank that sends; the same on every rank.

    Raises:
        RankMismatchError: on every rank, if dtypes, shapes or roots differ.
        BatchError: on every rank, if on one `x` cannot be written in place.
        MpiUtilError: on every rank, if there is no rank `root`.
    """
    channel = channel_of(comm)

    def checked_root() -> int:
        _buffer("broadcast", x)
        return root

    def check_same(roots: list[int]) -> list[int]:
        if len(set(roots)) > 1:
            raise rank_mismatch("broadcast: root must be the same on every rank", roots)
        if root not in range(channel.size):
            raise MpiUtilError(f"broadcast: root must be a rank, 0 to {channel.size - 1}; got {root!r}")
        return roots

    channel.agree("broadcast", checked_root, check_same)
    array = _buffer("broadcast", x)
    if root:
        array[...] = all_accum_batches(array[None][: channel.rank == root], comm=comm)[0]
    else:
        bcast(array, comm=comm)


def mpi_op(x: Any, op: Any, *, comm: Comm = None) -> Any:
    """Collective: `x` combined elementwise over the ranks, on every rank, in rank order.

    Args:
        x: as for `mpi_util.all_sum`, or a list, which becomes an array.
        op: MPI.SUM, PROD, MAX, MIN or a logical or bitwise one; None: MPI.SUM; or a NumPy function of two arrays, which
            needs no mpi4py. The same on every rank. A sum counts bools; MAX and MIN return NaN if any value is NaN.

    Returns what `mpi_util.all_sum` does, of x's dtype (sums of bools: int64).

    Raises:
        RankMismatchError: on every rank, if dtypes, shapes or operations differ.
        MpiUtilError: an operation that is not elementwise, such as MPI.MAXLOC, or that is a user's own.
    """
    if not (op is None or isinstance(op, np.ufunc)):
        mpi = sys.modules.get("mpi4py.MPI")
        name = next((name for name in _FUNCTIONS if mpi is not None and op == getattr(mpi, name)), None)
        if name is None:
            names = ", ".join(_FUNCTIONS)
            raise MpiUtilError(f"mpi_op takes MPI's {names} or a NumPy function of two arrays; got {op!r}")
        op = _FUNCTIONS[name]
    return all_sum(x, comm=comm) if op in (None, np.add) else all_reduce(x, op, comm=comm)


def mpi_statistics_scalar(x: Any, with_min_and_max: bool = False, *, comm: Comm = None) -> tuple[np.float32, ...]:
    """Collective: mean and standard deviation of the samples of all ranks together, each sample counting once.

    Args:
        x: samples: an array, tensor, list or number of any shape; as many as this rank has, possibly none.
        with_min_and_max: return the extremes too.

    Returns:
        (mean, std), or (mean, std, min, max), float32 as in Spinning Up, calculated in float64, the same bits on every
        rank; std divides by the number of samples. If no rank has any: NaN, NaN, infinity, -infinity.

    Raises BatchError on every rank: values on one are not real numbers.
    """
    found = statistics("mpi_statistics_scalar", {"x": x}, comm)["x"]
    if not found.n:
        found = found._replace(min=math.inf, max=-math.inf)
    with np.errstate(over="ignore"):
        return tuple(np.float32(value) for value in found[: 4 if with_min_and_max else 2])


def _buffer(call: str, x: Any) -> np.ndarray:
    """`x`, or an array over its memory. Raises BatchError if there is no such array, or it is read-only."""
    array = np.asarray(x)
    if array.dtype.hasobject or not array.flags.writeable or (array is not x and array.base is None):
        raise BatchError(f"{call}: the values of a {type(x).__name__} cannot be written in place; give a NumPy array")
    return array
