"""mpi_util: run a batch reinforcement-learning program on N processes by adding about eight lines.

All ranks collect rollouts; `rank0_accum_batches` gathers them to rank 0; rank 0 alone updates, with the whole machine,
because the others sleep; `rank0_bcast_wts` sends the weights back. Importing this starts no MPI and no framework.
"""

from typing import TYPE_CHECKING, Any, Literal

from . import comm as _comm
from . import tensorflow_setup as _tensorflow_setup
from .console import msg, print0
from .cores import usable_cores
from .deal import deal, share
from .errors import (
    BatchError,
    LaunchError,
    MissingFrameworkError,
    MpiUtilError,
    RankLeftError,
    RankMismatchError,
    SyncTimeoutError,
    UsageError,
    WeightsError,
    WorkerError,
    WorkerLeftError,
)
from .failure import during, fail
from .gather import all_accum_batches, rank0_accum_batches, rank0_gather
from .reductions import all_mean, all_sum, bcast
from .running import merge_moments
from .seeding import rank_seed, set_global_seeds, stream
from .signals import StopRequest
from .tensorflow_setup import setup_tensorflow_for_mpi
from .timing import Phases, steps_sec, timeit
from .weights import all_avg_wts, chksum, rank0_bcast_wts

__version__ = "0.1.0"

rank: int
nworkers: int
tf_config: Any  # a tf.compat.v1.ConfigProto

__all__ = [
    "BatchError", "LaunchError", "MissingFrameworkError", "MpiUtilError", "Phases", "RankLeftError",
    "RankMismatchError", "StopRequest", "SyncTimeoutError", "UsageError", "WeightsError", "WorkerError",
    "WorkerLeftError", "all_accum_batches", "all_avg_wts", "all_mean", "all_sum", "bcast", "chksum", "deal",
    "during", "fail", "merge_moments", "mpi_fork", "msg", "nworkers", "print0", "rank", "rank0_accum_batches",
    "rank0_bcast_wts", "rank0_gather", "rank_seed", "set_global_seeds", "setup_tensorflow_for_mpi", "share",
    "steps_sec", "stream", "timeit", "usable_cores",
]  # fmt: skip


def mpi_fork(n: int, gpu_pct: float = 0.0, bind_to_core: bool = False) -> Literal["parent", "child"]:
    """Starts this script again as `n` ranks, and waits for them. Call it before heavy imports.

    What stands above it runs in every rank, and in the process that waits. In a rank it changes these things of the
    interpreter: an uncaught exception, or an exit with a non-zero status, ends all ranks; NumPy's BLAS, torch and
    TensorFlow have one thread (with n = 1 too), and on rank 0 all cores from a gather to the next collective call. What
    the user has set (OMP_NUM_THREADS and the like, torch.set_num_threads) stays; MPI_UTIL_CORES limits the cores.

    Args:
        n: number of ranks; 1 runs in this process, without MPI.
        gpu_pct: share of the GPU's memory, 0 to 1, for each rank's TensorFlow session; 0: as much as it needs.
        bind_to_core: bind each rank to a core; rank 0 then has one core for its update.

    Returns:
        "child" in a rank (go on), "parent" in the process that started them (they have ended well: return).

    Raises:
        LaunchError: no MPI library, or no launcher that belongs to it, or a bad `n`.
        SystemExit: in the parent, with the status of the rank that failed.
    """
    from . import failure, launch, threads

    side = launch.mpi_fork(n, gpu_pct, bind_to_core)
    if side == "child" and not launch.in_child_of_rank():
        failure.install()
        _comm.channel_of()  # from here on each rank knows when another ends, however early
        threads.start(_comm.rank() == 0)
    return side


if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> Any:
        """`rank`, `nworkers`, `tf_config`: right whenever they are read, before and after MPI starts, or without."""
        if name in ("rank", "nworkers"):
            return getattr(_comm, name)()
        if name == "tf_config":
            return _tensorflow_setup.tf_config()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
