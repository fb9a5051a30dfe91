"""Who this process is: a rank of a job (which one, of how many), the process that started the ranks, or neither."""

import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import LaunchError
from ..host.process import process
from .reap import JOB_VARIABLE, STAT_PARENT, stat_field

if TYPE_CHECKING:
    from mpi4py import MPI

# What launchers set for each rank: its number, and theirs. Open MPI's mpiexec first, as it may run in a shell of srun,
# which sets one of the others: hydra (MPICH, Intel MPI) and srun's PMI; PMIx, which has no size.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpiexec"),
    "PMI_RANK": ("PMI_SIZE", "MPICH's mpiexec"),
    "PMIX_RANK": ("SLURM_STEP_NUM_TASKS", "srun"),
}
_LOCAL_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")  # number of ranks on its machine
RANK_PID = "MPI_UTIL_RANK_PID"  # set by each rank, for the processes that it starts
# What launchers, and mpi_fork, set for a rank: not for the ranks of another job. MCA: the user's parameters.
_FOR_RANKS = re.compile(
    r"(PMI2?|OMPI_MCA_(ess|orte)|HYDI)_|(PMIX|PRTE)_(?!MCA_)|OMPI_(?!MCA_|ALLOW_)|MPI_LOCAL(NRANKS|RANKID)$|"
    r"OMPI_MCA_(num_procs|initial_wdir|PREFIXES)$|MPI_UTIL_(BOUND|TTY|RESTARTS|SAVED)$"
)
_MPI_CODE = re.compile(rb" r-xp .*/libmpi\S*$", re.MULTILINE)  # in /proc/<pid>/maps
_OTHERS_S = 3.0  # rank 0 has this long to report a wrong launcher before the end of another rank ends the job

Comm: TypeAlias = "MPI.Comm | None"  # what comm= takes; None: the world


class Role:
    """What this process is to a job.

    Attributes:
        is_parent: it has started the ranks.
        launcher: the name of the launcher, if this is one of several ranks or belongs to one (`in_child_of_rank`). A
            program of its own that a rank has started has the variables of the rank's launcher, but no launcher.
        rank, size: as the launcher says; size is 0 if it does not say it.
        job: the folder for what mpi_fork's parent is to know, in a rank that it has started; else "".
        owner: the process id of that rank.
    """

    is_parent = False

    def __init__(self) -> None:
        variable = next((variable for variable in _LAUNCHERS if variable in os.environ), "")
        multiprocess = is_multiprocess()
        here = os.getppid() if multiprocess else os.getpid()
        self.owner = int(os.environ.get(RANK_PID, here))
        own_program = not multiprocess and (self.owner != here or _ancestor_is_rank(variable))
        self.job = "" if own_program else os.environ.get(JOB_VARIABLE, "")
        size_variable, self.launcher = _LAUNCHERS.get(variable, ("", ""))
        if variable == "PMI_RANK" and "MPI_LOCALNRANKS" not in os.environ:
            self.launcher = "srun"
        self.rank, self.size = first_number((variable,), 0), first_number((size_variable,), 0)
        if own_program or not variable or self.size == 1:
            self.launcher, self.rank, self.size = "", 0, 1


def is_multiprocess() -> bool:
    """True in a process that multiprocessing has started, also while that runs the program's top level once more."""
    known = sys.modules.get("multiprocessing.process")
    again = getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__"
    return again or (known is not None and known.parent_process() is not None)


def _ancestor_is_rank(variable: str) -> bool:
    """True if a process between the launcher and this one runs MPI: then that is the rank, also without mpi_util.

    Shells and others that only start the rank do not.
    """
    mine, pid = f"{variable}={os.environ.get(variable)}".encode(), os.getppid()
    try:
        while mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if _MPI_CODE.search(Path(f"/proc/{pid}/maps").read_bytes()):
                return True
            pid = stat_field(pid, STAT_PARENT) or 0
    except OSError:  # it has ended, or is another user's
        pass
    return False


def forget_launcher() -> None:
    """Removes what launchers have set from the environment: the processes that this one starts are no ranks of it."""
    for name in filter(_FOR_RANKS.match, list(os.environ)):
        del os.environ[name]


def world() -> Comm:
    """MPI.COMM_WORLD if this process is a rank of an MPI job or has started MPI itself; None in a single process."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if (mpi is None or not mpi.Is_initialized()) and under_launcher() and not in_child_of_rank():
        import mpi4py

        level, mpi4py.rc.initialize, mpi4py.rc.finalize = mpi4py.rc.thread_level, False, True
        from mpi4py import MPI as mpi

        check_launcher(mpi.Get_library_version())
        mpi.Init_thread(getattr(mpi, f"THREAD_{level.upper()}"))
    return mpi.COMM_WORLD if mpi is not None and mpi.Is_initialized() else None


def rank() -> int:
    """This process's rank in the world; 0 in a single process, and in mpi_fork's parent. Does not start MPI."""
    role = process.of(Role)
    return role.rank if role.launcher else (comm.Get_rank() if (comm := world()) else 0)


def nworkers() -> int:
    """Number of ranks in the world; 1 in a single process. Does not start MPI if the launcher says it."""
    role = process.of(Role)
    return (role.size if role.launcher else 0) or (comm.Get_size() if (comm := world()) else 1)


def local_size() -> int:
    """Number of ranks on this machine, if the launcher has set it; else of all. Does not start MPI."""
    return first_number(_LOCAL_SIZE_VARIABLES, nworkers())


def check_no_parent() -> None:
    """Raises LaunchError in the process that started ranks: a program that went on there would run once more."""
    if process.of(Role).is_parent:
        raise LaunchError(
            "this process has started the ranks, which have ended, and has nothing to compute; "
            "write `if mpi_fork(n) == 'parent': sys.exit()`"
        )


def check_launcher(library: str, size: int = 0) -> None:
    """Raises LaunchError where launcher and library are of different MPIs, so that the ranks do not find each other.

    MPICH then ends the process, or every rank is alone in a world of its own.

    Args:
        library: version of the MPI library. size: of the world; 0: MPI has not started.
    """
    role = process.of(Role)
    fits = ("Open MPI" in library) == ("Open MPI" in role.launcher) or role.launcher == "srun"
    left = not size and "PMI_FD" in os.environ and not os.path.exists(f"/proc/self/fd/{os.environ['PMI_FD']}")
    if not role.launcher or (size == role.size if size and role.size else fits and not left):
        return
    name = " ".join(library.replace("Version:", "").splitlines()[0].partition(",")[0].split())
    left_over = " ".join(filter(os.environ.get, _LAUNCHERS))
    error = LaunchError(
        f"{role.launcher} has started {role.size} processes, but with mpi4py's library, {name}, each of them is alone; "
        f"use the mpiexec of that library, or mpi_fork without mpiexec (if you did: `unset {left_over}`)"
    )
    error.silent = role.rank > 0
    if role.rank:
        time.sleep(_OTHERS_S)
    role.launcher = ""
    raise error


def under_launcher() -> bool:
    """True in a rank that an MPI launcher has started with others. A batch shell of Slurm is none."""
    return bool(process.of(Role).launcher)


def in_child_of_rank() -> bool:
    """True in a process that a rank has forked, or started by multiprocessing: it belongs to the rank, and is none."""
    role = process.of(Role)
    return bool(role.launcher or role.job) and role.owner != os.getpid()


def first_number(names: tuple[str, ...], otherwise: int, environment: Mapping[str, str] = os.environ) -> int:
    """The value of the first of these environment variables that is set."""
    return next((int(environment[name]) for name in names if name in environment), otherwise)
