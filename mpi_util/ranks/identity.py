"""Who this process is, in any process: a rank of a job (which one, of how many), the parent of ranks, or neither."""

import contextlib
import os
import re
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import LaunchError
from ..host.reap import JOB_VARIABLE, STAT_PARENT, name_of, stat_field
from .state import state

if TYPE_CHECKING:
    from mpi4py import MPI

# Variables in which launchers number the ranks, and count them. Open MPI's come first, because its mpiexec may run in a
# shell of srun, which sets one of the others: PMI, as hydra (MPICH, Intel MPI) does, or PMIx, which has no count.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpiexec"),
    "PMI_RANK": ("PMI_SIZE", "MPICH's mpiexec"),
    "PMIX_RANK": ("SLURM_STEP_NUM_TASKS", "srun"),
}
_NAMES_A_RANK = re.compile(r"(PMI|PMIX|OMPI_COMM_WORLD)_(RANK|SIZE|FD|NAMESPACE)")
_PMIX_PORT = re.compile(r"tcp4://[\d.]+:(\d+)")  # in PMIX_SERVER_URI2 and others
RANK_PID = "MPI_UTIL_RANK_PID"  # each rank sets it for the processes that it starts
_NUMBERS = (*_LAUNCHERS, *(size for size, _ in _LAUNCHERS.values()), RANK_PID, "MPI_UTIL_DEPTH", "MPI_UTIL_RESTARTS")
# Variables that launchers and mpi_fork set for a rank, and that ranks of another job must not see. MCA: the user's own.
FOR_RANKS = re.compile(
    r"(PMI2?|OMPI_MCA_(ess|orte)|HYDI)_|(PMIX|PRTE)_(?!MCA_)|OMPI_(?!MCA_|ALLOW_)|MPI_LOCAL(NRANKS|RANKID)$|"
    r"OMPI_MCA_(num_procs|initial_wdir|PREFIXES)$|MPI_UTIL_(BOUND|TTY|RESTARTS|SAVED)$"
)
OF_SERVER = re.compile(r"PMI_(FD|PORT)$|PMIX_(?!MCA_|RANK$)")  # how MPI reaches its launcher
_MPI_CODE = re.compile(rb" r-xp .*/libmpi\S*$", re.MULTILINE)  # in /proc/<pid>/maps
_LAUNCHES = re.compile("mpiexec|mpirun|hydra|prte|orte|srun|slurmstepd")  # /proc/<pid>/comm begins with it
_IMPORTED_IN = os.getpid()  # a process with another id has been forked since
BEGAN_IN = os.path.realpath("/proc/self/cwd")  # the program may change it above mpi_fork, and ranks do that themselves
_OTHERS_S = 3.0  # the other ranks give rank 0 this long to report a wrong launcher before they end the job

Comm: TypeAlias = "MPI.Comm | None"  # what comm= takes; None: the world


class Role:
    """What this process is to a job.

    Attributes:
        is_parent: it has started the ranks. rank, size: as the launcher says.
        launcher: its name, in a rank of several and in processes forked from one; "" elsewhere, also in a program that
            a rank has started, though that inherits the launcher's variables.
        variable: the environment variable in which the launcher numbers its ranks.
        job: the folder of records for mpi_fork's parent, in a rank that mpi_fork has started; else "".
        owner: the process id of the rank that this process is or belongs to.
        error: why the launcher's variables make no sense.
        ranks_per_env: as mpi_fork was given; 0: it was not. With more than one (`open_teams`) also
        place: (rank, number of workers), where members of teams come after all workers.
        name: in reports. team: its communicator. workers: that of the workers, on a worker.
    """

    is_parent = False
    rank, size, launcher, variable = 0, 1, "", ""
    error: LaunchError | None = None
    ranks_per_env, name = 0, ""
    place: tuple[int, int] | None = None
    team: Any = None
    workers: Any = None

    def __init__(self) -> None:
        self.owner = here = multiprocess_parent() or _IMPORTED_IN
        job = os.environ.get(JOB_VARIABLE, "")
        self.job = job if os.path.isdir(job) else ""  # else left behind
        try:
            numbers = {name: number_in(name) for name in _NUMBERS if name in os.environ}
        except LaunchError as error:
            self.error = error
            return
        self.owner = numbers.get(RANK_PID, here)
        found = [name for name, (size, _) in _LAUNCHERS.items() if name in numbers and numbers.get(size, 1) > 1]
        # others that come first may have been left in the shell in which this launcher was started
        self.variable = next(filter(_reachable, found), next(iter(found), ""))
        if _is_of_rank(self.variable, self.owner, here):
            self.job = ""
        elif self.variable:
            if self.owner != here:  # a rank has started its launcher
                self.owner, self.job = here, ""
            size, self.launcher = _LAUNCHERS[self.variable]
            self.rank, self.size = numbers[self.variable], numbers[size]
            if self.variable == "PMI_RANK" and "MPI_LOCALNRANKS" not in os.environ:
                self.launcher = "srun"


def rank_variables() -> dict[str, str]:
    """The environment variables by which a process takes itself for a rank."""
    return {name: value for name, value in sorted(os.environ.items()) if _NAMES_A_RANK.fullmatch(name)}


def _reachable(variable: str) -> bool | None:
    """Whether MPI can reach the launcher that has set this variable; None: nothing says how."""
    if variable == "PMI_RANK":  # each rank has a socket, which Python's subprocess closes; PMIx: a server on a port
        with contextlib.suppress(OSError, ValueError):
            return stat.S_ISSOCK(os.fstat(int(os.environ["PMI_FD"])).st_mode) if "PMI_FD" in os.environ else None
        return False
    servers = [value for name, value in os.environ.items() if name.startswith("PMIX_SERVER_URI")]
    ports = {int(match[1]) for match in map(_PMIX_PORT.search, servers) if match}
    with contextlib.suppress(OSError):
        listening = Path("/proc/net/tcp").read_text()
        return any(f":{port:04X} 00000000:0000 0A " in listening for port in ports) if ports else None
    return None


def multiprocess_parent() -> int:
    """The parent of a process of multiprocessing, also while that imports the main module again; elsewhere 0."""
    known = sys.modules.get("multiprocessing.process")
    if parent := known and known.parent_process():
        return int(parent.pid or 0)
    if getattr(sys.modules.get("__mp_main__"), "__name__", "") != "__mp_main__":
        return 0
    pid = os.getppid()
    with contextlib.suppress(OSError):
        if b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
            pid = stat_field(pid, STAT_PARENT) or pid
    return pid


def _is_of_rank(variable: str, owner: int, here: int) -> bool:
    """True if a rank has started this program, whose process is `here`: a parent is `owner`, or runs MPI as that rank.

    Between the launcher and a rank there are only shells and other processes that start it.
    """
    mine, pid = f"{variable}={os.environ.get(variable)}".encode(), stat_field(here, STAT_PARENT) or 0
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        while variable and pid > 1 and pid != owner:
            if _LAUNCHES.match(name_of(pid)):
                return False  # a launcher, perhaps started by a rank: this is one of that launcher's ranks
            runs_mpi = _MPI_CODE.search(Path(f"/proc/{pid}/maps").read_bytes())
            if runs_mpi and mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return True
            pid = stat_field(pid, STAT_PARENT) or 0
    return owner != here


def forget_launcher(names: re.Pattern[str] = FOR_RANKS) -> None:
    """Removes launchers' variables from the environment, so that processes started here are not taken for ranks."""
    for name in filter(names.match, list(os.environ)):
        del os.environ[name]


def world() -> Comm:
    """MPI.COMM_WORLD, or of teams the workers, in a rank of an MPI job, or if it has started MPI itself; else None."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if (mpi is None or not mpi.Is_initialized()) and under_launcher() and not in_child_of_rank():
        import mpi4py

        level, mpi4py.rc.initialize, mpi4py.rc.finalize = mpi4py.rc.thread_level, False, True
        from mpi4py import MPI as mpi

        check_launcher(mpi.Get_library_version())
        mpi.Init_thread(getattr(mpi, f"THREAD_{level.upper()}"))
    return (state(Role).workers or mpi.COMM_WORLD) if mpi is not None and mpi.Is_initialized() else None


def rank() -> int:
    """This process's rank in the world; 0 in a single process, and in mpi_fork's parent. Does not start MPI."""
    role = state(Role)
    return (role.place or (role.rank, 0))[0] if role.launcher else (comm.Get_rank() if (comm := world()) else 0)


def nworkers() -> int:
    """Number of ranks in the world; 1 in a single process. Does not start MPI."""
    role = state(Role)
    return (role.place or (0, role.size))[1] if role.launcher else comm.Get_size() if (comm := world()) else 1


def check_no_parent() -> None:
    """Raises LaunchError in the process that started ranks, whose program would run once more; and `Role.error`."""
    if error := state(Role).error:
        raise error
    if state(Role).is_parent:
        fix = "write `mpi_fork(n, exit=True)`, or `if mpi_fork(n) == 'parent': sys.exit()`"
        raise LaunchError(f"this process has started the ranks, which have ended, and has nothing to compute; {fix}")


def check_launcher(library: str, size: int = 0) -> None:
    """Raises LaunchError where this process cannot reach the ranks that its launcher's variables name.

    Either the launcher has gone, or it and the library are of different MPIs: MPICH then ends the process, or every
    rank is alone in a world of its own. Args: library: its version. size: of the world; 0: MPI has not started.
    """
    role = state(Role)
    fits = ("Open MPI" in library) == ("Open MPI" in role.launcher) or role.launcher == "srun"
    if "MPICH configure:" in library and "pmix" not in library:  # its MPI_Init would end the process
        fits = fits and role.variable != "PMIX_RANK"
    reachable = _reachable(role.variable)
    if not role.launcher or (size == role.size if size else fits and reachable is not False):
        return
    why = f"variables that were left behind (`unset {' '.join(rank_variables())}`), or a rank started in another way"
    if role.job:
        why = "above mpi_fork the program has closed files that it did not open (os.closerange)"
    who = f"rank {role.rank} of {role.size} of {role.launcher}"
    error = LaunchError(f"by its environment this is {who}, which it cannot reach: {why}")
    if reachable:
        name = " ".join(library.replace("Version:", "").splitlines()[0].partition(",")[0].split())
        use = "the mpiexec of that library, or mpi_fork without mpiexec"
        if role.launcher == "srun":
            use = f"srun {srun_option(library)}, or mpi_fork without srun"
        what = f"{role.launcher} has started {role.size} processes, but with mpi4py's library, {name},"
        error = alone(what, use, role.rank)
    role.launcher = ""
    raise error


def alone(what: str, use: str, number: int) -> LaunchError:
    """For each of several processes that know nothing of one another: number 0 reports it, the others wait for that."""
    error = LaunchError(f"{what} each of them is alone; use {use}")
    error.silent = number > 0
    time.sleep(_OTHERS_S * error.silent)
    return error


def srun_option(library: str) -> str:
    return "--mpi=pmix" if "Open MPI" in library else "--mpi=pmi2"


def under_launcher() -> bool:
    """True in one of several ranks that an MPI launcher has started. A batch shell of Slurm is no rank."""
    return bool(state(Role).launcher)


def in_child_of_rank() -> bool:
    """True in a process that a rank has forked, or started by multiprocessing: it belongs to the rank."""
    role = state(Role)
    return bool(role.launcher or role.job) and role.owner != os.getpid()


def number_in(name: str, otherwise: int = 0) -> int:
    """The value of a variable, if it is set. LaunchError: it is not a whole number of at least 0."""
    if name in os.environ and not re.fullmatch(r"[0-9]{1,18}", os.environ[name]):
        wrong = f"{name} is {os.environ[name]!r}, as no launcher sets it for a rank"
        raise LaunchError(f"{wrong}; where it was left behind: `unset {name}`")
    return int(os.environ.get(name, otherwise))
