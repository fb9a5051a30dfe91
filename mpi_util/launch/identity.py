"""Who this process is: a rank of a job (which one, of how many), the process that started the ranks, or neither."""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from ..errors import LaunchError
from ..host.process import process

if TYPE_CHECKING:
    from mpi4py import MPI

# What launchers set for each rank: hydra (MPICH, Intel MPI) and srun's PMI; Open MPI; PMIx, which srun uses too and
# which has no size.
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")  # number of ranks on its machine
RANK_PID = "MPI_UTIL_RANK_PID"  # set by each rank, for the processes that it starts

Comm: TypeAlias = "MPI.Comm | None"  # what comm= takes; None: the world


def world() -> Comm:
    """MPI.COMM_WORLD if this process is a rank of an MPI job or has started MPI itself; None in a single process."""
    started = sys.modules.get("mpi4py.MPI")  # asked first: each look into os.environ takes 0.5 us
    if (started is not None and started.Is_initialized()) or (under_launcher() and not in_child_of_rank()):
        from mpi4py import MPI

        return MPI.COMM_WORLD
    return None


def rank() -> int:
    """This process's rank in the world; 0 in a single process. Does not start MPI."""
    return env_rank() if under_launcher() else (comm.Get_rank() if (comm := world()) else 0)


def nworkers() -> int:
    """Number of ranks in the world; 1 in a single process. Does not start MPI."""
    return env_size() if under_launcher() else (comm.Get_size() if (comm := world()) else 1)


def local_size() -> int:
    """Number of ranks on this machine, if the launcher has set it; else of all. Does not start MPI."""
    return first_number(_LOCAL_SIZE_VARIABLES, nworkers())


class Role:
    """What this process is to a job. `is_parent`: it has started the ranks."""

    is_parent = False


def check_no_parent() -> None:
    """Raises LaunchError in the process that started ranks: a program that went on there would run once more."""
    if process.of(Role).is_parent:
        raise LaunchError(
            "this process has started the ranks, which have ended, and has nothing to compute; "
            "write `if mpi_fork(n) == 'parent': sys.exit()`"
        )


def under_launcher() -> bool:
    """True in a rank that an MPI launcher has started. A batch shell of Slurm is none."""
    return any(variable in os.environ for variable in _RANK_VARIABLES)


def in_child_of_rank() -> bool:
    """True in a process that a rank has started: it has the launcher's environment, and is no rank."""
    return under_launcher() and os.environ.get(RANK_PID, str(os.getpid())) != str(os.getpid())


def env_rank() -> int:
    """This process's rank in the launcher's environment; 0 without a launcher."""
    return first_number(_RANK_VARIABLES, 0)


def env_size() -> int:
    """The number of ranks in the launcher's environment; 1 without a launcher."""
    return first_number(_SIZE_VARIABLES, 1) if under_launcher() else 1


def first_number(names: tuple[str, ...], otherwise: int, environment: Mapping[str, str] = os.environ) -> int:
    """The value of the first of these environment variables that is set."""
    return next((int(environment[name]) for name in names if name in environment), otherwise)
