"""`mpi_fork` as programs call it: starts the ranks, and in each of them prepares failure, channel and threads."""

from typing import Literal

from ..host import threads
from ..launch import failure, fork
from ..launch.identity import in_child_of_rank, rank
from .comm import channel_of


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
    side = fork.mpi_fork(n, gpu_pct, bind_to_core)
    if side == "child" and not in_child_of_rank():
        failure.install()
        channel_of()  # from here on each rank knows when another ends, however early
        threads.start(rank() == 0)
    return side
