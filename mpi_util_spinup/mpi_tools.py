"""Spinning Up's MPI tools, on every rank: `spinup.utils.mpi_tools`; and `mpi_moments` of OpenAI's baselines.

Dtypes and shapes are kept (in Spinning Up all became float32). `comm` is a communicator; None: all ranks. Other
operations than sum and mean are mpi4py's own.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import mpi_util
from mpi_util import BatchError, MpiUtilError, all_accum_batches
from mpi_util.arrays.adapters import adapter_for
from mpi_util.collectives.channel import channel_of
from mpi_util.ranks.identity import Comm, nworkers, rank

proc_id = rank
num_procs = nworkers
mpi_sum: Callable[..., Any] = mpi_util.all_sum  # a list becomes an array
mpi_avg: Callable[..., Any] = mpi_util.all_mean


def mpi_fork(n: int, bind_to_core: bool = False) -> None:
    """`mpi_util.mpi_fork`, but it returns in the ranks only, and ends the process that the user started.

    Args: bind_to_core: gives each rank one core, also against `taskset`: not where rank 0 alone updates.
    """
    if mpi_util.mpi_fork(n, bind_to_core=bind_to_core) == "parent":
        sys.exit()


def msg(m: Any, string: str = "") -> None:
    """Prints one line: `Message from <rank>: <string>`, a tab, and `m`. Not collective."""
    print(f"Message from {rank()}: {string} \t {m}\n", end="", flush=True)


def broadcast(x: Any, root: int = 0, *, comm: Comm = None) -> None:
    """Collective: overwrites `x` on every rank with rank `root`'s values.

    Args: x: a writable array, or an object with NumPy's memory, such as a CPU tensor; same dtype and shape everywhere.
    Raises, on every rank: RankMismatchError: dtypes, shapes or roots differ. BatchError: on one rank `x` cannot be
        written in place. MpiUtilError: there is no rank `root`.
    """
    channel = channel_of(comm)

    def check() -> None:
        _buffer(x)
        if root not in range(channel.size):
            raise MpiUtilError(f"broadcast: root must be a rank, 0 to {channel.size - 1}; got {root!r}")

    channel.agree(f"broadcast(root={root})", check, lambda answers: answers)
    array = _buffer(x)
    array[...] = all_accum_batches(array[None][: channel.rank == root], comm=comm)[0]


def mpi_statistics_scalar(x: Any, with_min_and_max: bool = False, *, comm: Comm = None) -> tuple[np.float32, ...]:
    """Collective: mean and standard deviation of the samples of all ranks together, each sample counting once.

    Args: x: samples: an array, tensor, list or number of any shape; as many as this rank has, possibly none.
    Returns: (mean, std), or (mean, std, min, max), float32 as in Spinning Up, calculated in float64, the same bits on
        every rank; std divides by the number of samples. If no rank has any: NaN, NaN, infinity, -infinity.
    Raises BatchError on every rank: values on one are not real numbers.
    """
    found = statistics("mpi_statistics_scalar", "x", x, comm)
    if not found.n:
        found = found._replace(min=math.inf, max=-math.inf)
    with np.errstate(over="ignore"):
        return tuple(np.float32(value) for value in found[: 4 if with_min_and_max else 2])


def mpi_moments(x: Any, axis: int = 0, comm: Comm = None, keepdims: bool = False) -> tuple[Any, Any, np.int64]:
    """Collective: mean, standard deviation and number of all ranks' samples along an axis, as in OpenAI's baselines.

    Args: x: array, tensor or list of real numbers, at least one axis. A rank may have any number of samples, or none.
    Returns: (mean, std, count): arrays of x's shape without the axis, or with 1 in its place (keepdims), of x's dtype
        if that is floating point, else float64; calculated in float64, the same bits on every rank. No sample: NaN.
    Raises RankMismatchError on every rank: the shapes differ in another axis, or the calls do.
    """
    array = adapter_for(x).to_array(x, numbers=True)
    total, n = mpi_sum((array.sum(axis, float, keepdims=True), array.shape[axis]), comm=comm)
    with np.errstate(all="ignore"):
        mean = total / n
        std = np.sqrt(mpi_sum(np.square(array - mean).sum(axis, keepdims=True), comm=comm) / n)
    shaped = [found if keepdims else found.squeeze(axis) for found in (mean, std)]
    return *(found.astype(array.dtype if array.dtype.kind == "f" else float) for found in shaped), n


class Statistics(NamedTuple):
    """Of `n` samples. All others are NaN if there is none."""

    mean: float
    std: float
    min: float
    max: float
    n: int


def statistics(op: str, key: str, samples: Any, comm: Comm = None) -> Statistics:
    """As `mpi_statistics_scalar`, for the call `op`. RankMismatchError on every rank: the samples' keys differ."""
    made: list[np.ndarray] = []

    def make() -> None:
        array = adapter_for(samples).to_array(samples, numbers=True)
        if array.dtype.kind not in "fiub":
            raise BatchError(f"'{key}' holds {array.dtype}, which has no mean; give real numbers")
        made.append(array.astype(float).ravel())

    channel_of(comm).agree(f"{op}({key})", make, lambda answers: answers)
    whole = all_accum_batches(made[0], comm=comm)
    with np.errstate(all="ignore"):  # infinite samples are allowed
        mean, std, low, high = (float(f(whole)) if whole.size else math.nan for f in (np.mean, np.std, np.min, np.max))
    return Statistics(mean, std, low, high, whole.size)


def _buffer(x: Any) -> np.ndarray:
    """`x`, or an array that shares its memory. Raises BatchError: there is none, or it is read-only."""
    array = np.asarray(x)
    if array.dtype.hasobject or not array.flags.writeable or (array is not x and array.base is None):
        raise BatchError(f"broadcast: a {type(x).__name__} cannot be written in place; give a NumPy array")
    return array
