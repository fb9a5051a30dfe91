"""`mpi_fork` as programs call it: starts the ranks, and in each of them prepares failure, channel and threads."""

import os
from typing import Literal

from ..collectives.channel import channel_of
from ..errors import LaunchError, UsageError
from ..host.cores import UPDATE_THREADS, usable_cores
from ..ranks import failure
from ..ranks import threads as pools
from ..ranks.console import print0_once
from ..ranks.identity import check_variables, in_child_of_rank, rank
from ..ranks.state import open_standard_streams, process
from . import fork


def mpi_fork(
    n: int | None = None,
    gpu_pct: float = 0.0,
    bind_to_core: bool = False,
    threads: int | None = None,
    max_restarts: int = 0,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    tag_output: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
) -> Literal["parent", "child"]:
    """Starts this script again as `n` ranks, and waits for them. Call it before heavy imports.

    What is above the call runs in every rank, and in the process that waits. Where a launcher (mpiexec, srun) has
    started several ranks nothing is started, and their number counts instead of `n`. A program that a rank has started,
    as by subprocess, may start a job of its own; from its os.environ the launcher's variables are removed. What the
    user has set (OMP_NUM_THREADS and the like, torch.set_num_threads) stays; MPI_UTIL_CORES limits the cores. In a
    rank, with n = 1 too, it changes:

    - sys.excepthook, threading.excepthook, atexit: an uncaught exception, or an exit with a non-zero status, ends all
      ranks; the others leave together. Below an `mpiexec` of yours that status is not known to the others.
    - BLAS and torch: one thread; on rank 0 all cores from a gather to the next collective call. TensorFlow: see
      `setup_tensorflow_for_mpi`.
    - os.environ: the number of threads (OMP_NUM_THREADS, ...) and MPI_UTIL_THREADS, _UPDATE_THREADS, _RANK_PID and
      _GPU_PCT; from the launcher also MPI_UTIL_JOB, _BOUND, _TTY, _RESTARTS, _SAVED, _DEPTH, PYTHONUNBUFFERED, and for
      a terminal COLUMNS and LINES.
    - sys.meta_path: an entry that gives torch its threads when it is imported; it wraps torch.set_num_threads.
    - stdin: from here on rank 0's is this program's, of which nothing is read before; the others have none.
    - stdout and stderr: written line by line; /dev/null where they are closed. SIGRTMAX - 3: the watchdog's.
    - A rank is killed when its launcher dies (PR_SET_PDEATHSIG). Rank 0 may run on all cores of its machine's ranks.

    Other signals and their masks stay; the process that waits catches SIGINT, SIGTERM and SIGHUP while it does, and
    raises its soft limit of open files (`ulimit -Sn`) if that is too low for `n`.

    Args:
        n: number of ranks; 1 runs in this process, without MPI. None: one for each slot of the hosts, or without hosts
            one for each usable core.
        gpu_pct: share of the GPU's memory, 0 to 1, for each rank's TensorFlow session; 0: as much as it needs.
        bind_to_core: bind each rank to a core (shared where there are more ranks than cores); rank 0 then has one core
            for its update.
        threads: of rank 0's BLAS, torch and TensorFlow while it updates; None: one for each usable core. Sums that are
            cut into other parts have other last bits, so give a number where results must not depend on the machine.
        max_restarts: how often the ranks are started again, from the program's beginning, after a rank or MPI failed.
            Not after a signal from the user, status 2, an end that all ranks agreed on, or the same failure twice in a
            row while `mpi_util.saved` was given nothing new. `mpi_util.restarts` counts them. With n = 1 too.
        hosts: where the ranks run: `h1:4,h2:4`, four on each, which ssh reaches without a password, with the same
            interpreter, packages, program and folder as here; the ranks get the environment of this process. Rank 0 is
            on the first. None: MPI_UTIL_HOSTS; else, in a batch script of Slurm, the hosts that it has given.
        hostfile: the same, as a file with a line for each host: `h1:4`, `h1 slots=4` or `h1`, which is one rank. It is
            read again before each restart, which leaves out hosts that cannot be used.
        tag_output: each line that a rank prints begins with `[rank@host]`, or `[rank]` on one machine.
        log_dir: a folder, on this machine, for files rank-0.txt, rank-1.txt, ... with what each rank prints; it is
            printed as well. Existing files are appended to.

    Returns:
        "child" in a rank, and in a process that a rank has started: go on. "parent" in the process that has started the
        ranks, once they have ended well: return.

    Raises:
        HostError: hosts cannot be used: each is named, with the reason. Nothing has been started.
        LaunchError: no MPI library, or no launcher that belongs to it, or no script to be started again, or the system
            refuses what `n` ranks need, such as open files.
        UsageError: a number that is not a count.
        SystemExit: in the parent, with the status of the rank that failed first (128 + signal for a signal), after one
            line on stderr that names it.
    """
    open_standard_streams()
    try:
        check_variables()
        side = fork.mpi_fork(n, gpu_pct, bind_to_core, threads, max_restarts, hosts, hostfile, tag_output, log_dir)
    except (LaunchError, UsageError, KeyboardInterrupt):
        failure.install()  # so that it is reported in one line
        raise
    if side == "child" and not in_child_of_rank():
        failure.install()
        if threads:
            process.set_environment({UPDATE_THREADS: str(threads)})
        channel_of()  # from here on each rank knows when another ends, however early
        pools.start(rank() == 0)
        if threads and threads > (cores := usable_cores()):
            print0_once(f"mpi_util: {threads} threads on {cores} core{'s' * (cores > 1)}: the same bits, but slower")
    return side
