"""`mpi_fork` and `nslots`: run in the process that the user starts, which then waits as the parent, and in each rank.

The parent's own modules are loaded inside `start_ranks`, so a rank loads none of them; `mpi_util/cluster/` is loaded
inside `hosts_module`, where several machines are named.
"""

import io
import os
import socket
import stat
import sys
from types import ModuleType
from typing import Literal

from ..collectives.channel import channel_of, cluster_module, open_teams
from ..errors import LaunchError, UsageError, whole_number
from ..host.cores import UPDATE_THREADS, usable_cores
from ..ranks import failure, identity
from ..ranks.console import mark_lines, print0_once
from ..ranks.identity import Role, in_child_of_rank, multiprocess_parent, under_launcher
from ..ranks.records import DEPTH, STDIN
from ..ranks.state import state
from ..ranks.threads import Threads

HOSTS = "MPI_UTIL_HOSTS"


def mpi_fork(
    n: int | None = None, gpu_pct: float = 0.0, bind_to_core: bool = False, threads: int | None = None,
    max_restarts: int = 0, hosts: str | None = None, hostfile: str | os.PathLike[str] | None = None,
    tag_output: bool = False, log_dir: str | os.PathLike[str] | None = None,
    output: Literal["all", "rank0"] = "all", exit: bool = False, ranks_per_env: int | None = None,
) -> Literal["parent", "child"]:  # fmt: skip
    """Starts this script again as `n` ranks, and waits for them. Call it before heavy imports.

    What is above the call runs in every rank, and in the process that waits. Where a launcher (mpiexec, srun) has
    started several ranks nothing is started, and their number counts instead of `n`. A program that a rank has started,
    as by subprocess, may start a job of its own; from its os.environ the launcher's variables are removed.

    An uncaught exception, or an exit with a non-zero status, ends all ranks; docs/names.md lists what else changes in a
    rank: hooks, signals, standard streams, environment variables, and the threads of BLAS, torch and TensorFlow.

    Args:
        n: number of ranks; 1 runs in this process, without MPI. None: one for each slot of the hosts, or usable core.
        gpu_pct: share of the GPU's memory, 0 to 1, for each rank's TensorFlow session and JAX; 0: as much as they need.
        bind_to_core: bind each rank to a core, shared where there are fewer; rank 0 then has one core for its update.
        threads: of rank 0's BLAS, torch and TensorFlow while it updates; None: chosen as above, by cores. Sums that are
            cut into other parts have other last bits, so give a number where results must not depend on the machine.
        max_restarts: how often the ranks are started again, from the program's beginning, after a rank or MPI failed.
            Not under mpiexec; not after a signal from the user, status 2, an end that all ranks agreed on, or the same
            failure twice in a row while `mpi_util.saved` was given nothing new. `mpi_util.restarts` counts; n may be 1.
        hosts: where the ranks run: `h1:4,h2:4`, four on each, which ssh reaches without a password, with the same
            interpreter, packages, program and folder as here; the ranks get the environment of this process. Rank 0 is
            on the first. None: MPI_UTIL_HOSTS; else, in a batch script of Slurm, the hosts that it has given.
        hostfile: the same, as a file with a line for each host: `h1:4`, `h1 slots=4` or `h1`, which is one rank. It is
            read again before each restart, which leaves out hosts that cannot be used.
        tag_output: each line that the Python code of a rank prints below this call begins with `[rank]`, or with
            `[rank@host]` on several machines.
        log_dir: a folder, on the rank's machine, for files rank-0.txt, rank-1.txt, ... with what that code prints; it
            is printed as well. Existing files are appended to.
        output: "rank0": what other ranks print to stdout below this call is only in `log_dir`; `msg` uses stderr.
        exit: the process that has started the ranks ends here, in place of returning "parent".
        ranks_per_env: each environment (`simulator`) runs on this number of the `n` ranks: a worker, and members, whose
            `rank` is `nworkers` or more. `rank`, `nworkers` and all collective calls are of the workers.

    Returns:
        "child" in a rank, and in a process that a rank has started: go on. "parent" in the process that has started the
        ranks, once they have ended well: return.

    Raises:
        HostError: hosts cannot be used: each is named, with the reason. Nothing has been started.
        LaunchError: no MPI library, or no launcher that belongs to it, or no script to be started again, or the system
            refuses what `n` ranks need, such as open files.
        UsageError: a number that is not a count; another `output`; `ranks_per_env` does not divide the ranks.
        SystemExit: in the parent, with the status of the rank that failed first (128 + signal for a signal), after one
            line on stderr that names it; with `exit`, also with status 0.
    """
    _open_standard_streams()
    try:
        if error := state(Role).error:
            raise error
        if output not in ("all", "rank0"):
            raise UsageError(f'mpi_fork: output is "all" or "rank0"; got {output!r}')
        side = start_ranks(n, gpu_pct, max_restarts, hosts, hostfile, bind_to_core, threads, ranks_per_env)
    except (LaunchError, UsageError, KeyboardInterrupt):
        failure.install()  # so that it is reported in one line
        raise
    if side == "child" and not in_child_of_rank():
        failure.install()
        if output == "rank0" and identity.rank():
            failure.hide_stdout()
        if threads:
            os.environ[UPDATE_THREADS] = str(threads)
        if not any(name.startswith(("XLA_CLIENT_", "XLA_PYTHON_CLIENT_")) for name in os.environ):
            # else JAX takes three quarters of the GPU's memory in each process that opens it
            share = ("XLA_CLIENT_MEM_FRACTION", str(gpu_pct)) if gpu_pct else ("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
            os.environ.update([share])
        channel = channel_of()  # from here on each rank knows when another ends, however early
        if (tag_output or log_dir) and under_launcher():
            host = f"@{socket.gethostname()}" * any(channel.machine)
            mark_lines(f"[{identity.rank()}{host}] " * tag_output, log_dir)
        state(Role).ranks_per_env = ranks_per_env or 0
        if ranks_per_env and ranks_per_env > 1:
            open_teams(ranks_per_env)
        state(Threads).start(identity.rank() == 0)
        if threads and threads > (cores := usable_cores()):
            print0_once(f"mpi_util: {threads} threads on {cores} core{'s' * (cores > 1)}: the same bits, but slower")
    if side == "parent" and exit:
        sys.exit()
    return side


def start_ranks(
    n: int | None, gpu_pct: float = 0.0, max_restarts: int = 0, hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None, bind_to_core: bool = False, threads: int | None = None,
    ranks_per_env: int | None = None,
) -> Literal["parent", "child"]:  # fmt: skip
    """`mpi_fork` without the preparation of the ranks."""
    ones = ("n", n), ("threads", threads), ("ranks_per_env", ranks_per_env)
    for name, value, least in [(*one, 1) for one in ones] + [("max_restarts", max_restarts, 0)]:
        if value is not None:
            whole_number(f"mpi_fork: {name}", value, least)
    role = state(Role)
    role.is_parent = False  # in a notebook it may have been
    if gpu_pct:
        os.environ["MPI_UTIL_GPU_PCT"] = str(gpu_pct)
    if ranks_per_env and not os.path.isdir(f"{os.path.dirname(__file__)}/../simulators"):
        raise LaunchError("mpi_fork: ranks_per_env= needs mpi_util/simulators/, which is missing")
    size = role.size if under_launcher() else n
    if ranks_per_env and size and size % ranks_per_env:
        fix = f"start a multiple of ranks_per_env={ranks_per_env}"
        error = UsageError(f"mpi_fork: {size} ranks cannot be shared by environments; {fix}")
        error.silent = role.rank > 0
        raise error
    if identity.RANK_PID not in os.environ and not multiprocess_parent():
        role.owner = os.getpid()  # of a program that forks first, to go into the background, this is the rank
    if in_child_of_rank():
        if n in (1, None) or multiprocess_parent():
            return "child"
        raise LaunchError(f"mpi_fork({n}) in a process that rank {role.rank} has forked: it cannot start ranks")
    if under_launcher() or role.job:
        _become_rank(role, n)
        return "child"
    identity.forget_launcher()
    named = hosts or hostfile or os.environ.get(HOSTS)  # Slurm's hosts are not for a single rank
    cluster = hosts_module(hosts, hostfile, nested=os.environ.get(DEPTH, "0") != "0") if n != 1 or named else None
    if n == 1 and not max_restarts and not cluster:
        return "child"
    from . import fork

    per_env = ranks_per_env or 1
    find = (lambda: cluster.find(hosts, hostfile).in_teams(per_env)) if cluster else None
    return fork.start(None if n is None else int(n), max_restarts, find, bind_to_core, per_env)


def nslots(hosts: str | None = None, hostfile: str | os.PathLike[str] | None = None) -> int:
    """How many ranks the hosts of `mpi_fork` have room for; 0: none are named. In a rank, the number of ranks."""
    if under_launcher() or state(Role).job:  # also of a single rank; a hostfile need not be on every host
        return identity.nworkers()
    if not (hosts or hostfile or os.environ.get(HOSTS)):
        return 0
    cluster = hosts_module(hosts, hostfile)
    return sum(cluster.find(hosts, hostfile).slots.values()) if cluster else 0


def hosts_module(hosts: str | None, hostfile: str | os.PathLike[str] | None, nested: bool = False) -> ModuleType | None:
    """`mpi_util.cluster.hosts`, where the arguments, MPI_UTIL_HOSTS or Slurm name hosts; None: ranks run here.

    Args: nested: the caller is a rank, whose own job stays on its machine unless the arguments name hosts.
    """
    by_environment = {HOSTS: os.environ.get(HOSTS), "Slurm": os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1"}
    named = {"hosts=": hosts is not None, "hostfile=": hostfile is not None} | ({} if nested else by_environment)
    if not (by := next((name for name, is_given in named.items() if is_given), "")):
        return None
    module: ModuleType = cluster_module("..cluster.hosts", f"{by} names hosts")
    return module


def _open_standard_streams() -> None:
    """Opens /dev/null for standard streams that are closed (`>&-`, daemons), or a file that we open would be one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _become_rank(role: Role, n: int | None) -> None:
    """In a rank: its output and rank 0's input, and a note on an `n` that has no effect here."""
    for stream in (sys.stdout, sys.stderr):
        # The ranks run with PYTHONUNBUFFERED, so that nothing is lost when one is killed. But that writes each argument
        # of print() on its own, and mixes the lines of several ranks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    if (path := os.environ.pop(STDIN, "")) and role.rank == 0:
        try:
            _open_stdin(path)
        except OSError:  # where /proc is closed to it, rank 0 reads nothing
            _open_stdin(os.devnull)
    elif role.job and role.rank:
        _open_stdin(os.devnull)  # hydra gives it a pipe that never ends
    if role.rank == 0 and n not in (role.size, None) and role.size:
        here = f"already under an MPI launcher with {role.size} ranks; n={n} is ignored"
        print(f"mpi_util: {failure.call_site()}: {here}", file=sys.stderr)


def _open_stdin(path: str) -> None:
    """Makes the parent's standard input this process's. Args: path: of it, in the parent's folder of /proc."""
    mode = os.stat(path).st_mode
    flags = os.O_RDWR | os.O_NOCTTY if stat.S_ISCHR(mode) else os.O_RDONLY | os.O_NONBLOCK  # a FIFO may have no writer
    fd = os.open(path, flags)
    os.set_blocking(fd, True)
    if stat.S_ISREG(mode):  # opened again it begins at its first byte
        with open(path.replace("/fd/", "/fdinfo/")) as info:
            os.lseek(fd, int(info.readline().split()[1]), os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
