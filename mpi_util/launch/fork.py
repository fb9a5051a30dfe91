"""Starts this script again as N ranks under the MPI launcher, and waits for them. Nothing here starts MPI."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
from typing import Literal

from ..cluster.hosts import Hosts, find
from ..errors import LaunchError, UsageError
from ..host.cores import UPDATE_THREADS, usable_cores
from ..ranks import runner
from ..ranks.failure import call_site
from ..ranks.identity import (
    RANK_PID,
    Role,
    check_tasks,
    forget_launcher,
    in_child_of_rank,
    is_multiprocess,
    under_launcher,
)
from ..ranks.state import process
from ..ranks.threads import environment as threads_environment
from .launcher import ENVIRONMENT, ask_library, find_launcher
from .verdict import Verdict

_DEPTH = "MPI_UTIL_DEPTH"  # of jobs within jobs
_STDIN = "MPI_UTIL_STDIN"  # what rank 0 opens as its standard input
_FILES, _FILES_OF_RANK = 32, 4  # of one process at most; 2 to 16 ranks needed 38 to 87


def mpi_fork(
    n: int | None, gpu_pct: float = 0.0, bind_to_core: bool = False, threads: int | None = None, max_restarts: int = 0,
    hosts: str | None = None, hostfile: str | os.PathLike[str] | None = None, tag_output: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
) -> Literal["parent", "child"]:  # fmt: skip
    """`mpi_util.mpi_fork` (collectives/start.py), without the preparation of the ranks."""
    for name, value, least in (("n", n, 1), ("threads", threads, 1), ("max_restarts", max_restarts, 0)):
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__") or value < least):
            raise UsageError(f"mpi_fork: {name} is a whole number of at least {least}; got {value!r}")
    role = process.of(Role)
    role.is_parent = False  # in a notebook it may have been
    if gpu_pct:
        os.environ.setdefault("MPI_UTIL_GPU_PCT", str(gpu_pct))
    if RANK_PID not in os.environ and not is_multiprocess():
        role.owner = os.getpid()  # of a program that forks first, to go into the background, this is the rank
    if in_child_of_rank():
        if n in (1, None) or is_multiprocess():
            return "child"
        raise LaunchError(f"mpi_fork({n}) in a process that rank {role.rank} has forked: it cannot start ranks")
    if under_launcher() or role.job:
        _write_whole_lines()
        if (path := os.environ.pop(_STDIN, "")) and role.rank == 0:
            try:
                _open_stdin(path)
            except OSError:  # where /proc is closed to it, rank 0 reads nothing
                _open_stdin(os.devnull)
        if role.rank == 0 and n not in (role.size, None) and role.size:
            here = f"already under an MPI launcher with {role.size} ranks; n={n} is ignored"
            print(f"mpi_util: {call_site()}: {here}", file=sys.stderr)
        if role.rank == 0 and max_restarts and not role.job:
            print("mpi_util: under an MPI launcher max_restarts is ignored; start without it", file=sys.stderr)
        return "child"
    if n != 1:
        check_tasks(lambda: ask_library()[0])
    forget_launcher()
    depth = int(os.environ.get(_DEPTH, "0"))
    find_hosts = functools.partial(find, hosts, hostfile, nested=depth > 0)
    where = find_hosts()
    n = (sum(where.slots.values()) or usable_cores()) if n is None else int(n)
    if n == 1 and not max_restarts and not (where.slots and where.asked):
        return "child"
    if is_multiprocess():
        raise LaunchError("mpi_fork starts the program again, so it cannot be called in a process of multiprocessing")
    if depth > 1:
        raise LaunchError(f"mpi_fork({n}) in a rank of a job that a rank has started: does the program start itself?")
    others = bool(where.slots) and (n > 1 or where.asked)
    program = _command_of_rank()
    environment = _rank_environment(gpu_pct, bind_to_core, threads) | {_DEPTH: str(depth + 1)}
    stdin, environment[_STDIN] = _stdin_for_ranks(others)
    found = find_launcher() if n > 1 or others else None
    log_dir = _made(log_dir)
    sys.stdout.flush()
    sys.stderr.flush()

    from .restarts import run  # only the parent needs these
    from .supervise import Job

    def start(more: dict[str, str], hosts: Hosts) -> tuple[Verdict, str]:
        """Runs the job once."""
        where = hosts if others else None
        job, command = Job(n, environment | more, where, _script(), tag_output, log_dir), program
        if found:
            family, launcher = found
            options = family.options(bind_to_core, bool(tag_output or log_dir), job.places, job.rsh)
            command = [launcher, "-n", str(n), *options, *program]
        return job.run(command, stdin), job.saved

    _allow_files(n)
    try:
        status = run(start, find_hosts, max_restarts)
    except OSError as error:
        raise LaunchError(f"cannot start {n} ranks: {error}") from None
    if status:
        sys.exit(status)
    role.is_parent = True
    return "parent"


def _allow_files(n: int) -> None:
    """Raises the limit of open files if the launcher of n ranks would fail for it, with lines that do not say so."""
    needed, (soft, hard) = _FILES + _FILES_OF_RANK * n, resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: no limit
    if 0 <= hard < needed:
        raise LaunchError(f"cannot start {n} ranks: they need {needed} open files, and `ulimit -n` allows {hard}")
    if 0 <= soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _write_whole_lines() -> None:
    """Makes print() write each line at once and in one piece.

    The ranks run with PYTHONUNBUFFERED, so that nothing is lost when one is killed. But that writes each argument of
    print() on its own, and mixes the lines of several ranks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _command_of_rank() -> list[str]:
    """Our own command line once more, with runner.py between the interpreter's flags and the program."""
    in_ipython = hasattr(builtins, "__IPYTHON__")
    script = getattr(sys.modules["__main__"], "__file__", None) if in_ipython else None
    if script and os.path.abspath(sys.argv[0]) == os.path.abspath(script):  # %run, in a notebook too
        return [sys.executable, runner.__file__, *sys.argv]
    if in_ipython or hasattr(sys, "ps1") or not sys.executable or sys.argv[0] in ("", "-"):
        raise LaunchError(
            "mpi_fork starts the program again, so it needs a script (or -m, -c): save it to a file; in a notebook "
            "begin its cell with %%writefile program.py, then %run program.py"
        )
    flags, program = _split(sys.orig_argv[1:])
    if os.path.basename(program[0]) == os.path.basename(_script()):  # not so with -m, -c, or a folder
        program[0] = _found_from_here(program[0], _script())
    return [sys.executable, *flags, runner.__file__, *program]


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(flags of the interpreter, program with its arguments): `-uBm module` is `-uB` and `-m module`."""
    flags, rest = list[str](), [*arguments]
    while rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        with_value = None if option.startswith("--") else re.search("[cmWX]", option)  # attached, or the next argument
        if option == "--check-hash-based-pycs":
            flags += [option, rest.pop(0)]
        elif with_value is None:
            flags.append(option)
        else:
            at = with_value.start()
            flags += [option[:at]] * (at > 1)
            named = ["-" + option[at], option[at + 1 :] or rest.pop(0)]
            if option[at] in "cm":
                return flags, [*named, *rest]
            flags += named
    return flags, rest


def _found_from_here(script: str, path: str) -> str:
    """The script as on the command line, or its path where the program has called os.chdir since."""
    with contextlib.suppress(OSError):
        if os.path.samefile(script, path):
            return script
    return path


def _made(log_dir: str | os.PathLike[str] | None) -> str:
    """The folder for the ranks' output, which is made; "": there is none. LaunchError: it cannot be."""
    try:
        os.makedirs(log_dir or ".", exist_ok=True)
    except OSError as error:
        raise LaunchError(f"mpi_fork: log_dir cannot be made: {error}") from None
    return os.path.abspath(log_dir) if log_dir else ""


def _script() -> str:
    """The program's file, as it is on the command line; "": there is none."""
    return getattr(sys.modules["__main__"], "__file__", None) or ""


def _stdin_for_ranks(others: bool) -> tuple[int | None, str]:
    """(the launcher's stdin, what rank 0 opens in its place): ours, but no terminal in the background.

    A launcher would read what is for the shell or the next program of a loop, as rank 0 may never read; and Open MPI's
    passes on no end of the input. Args: others: other hosts, to which only a launcher passes it on.
    """
    path, nothing = f"/proc/{os.getpid()}/fd/0", (subprocess.DEVNULL, os.devnull)
    try:
        mine, terminal = os.stat(0), os.isatty(0)
        if sys.__stdin__ is None or os.path.samestat(mine, os.stat(os.devnull)):
            return nothing
        if terminal and os.tcgetpgrp(0) != os.getpgrp():
            return nothing
    except OSError:
        return nothing
    # after su /proc is closed: it is another user's
    opens = not stat.S_ISSOCK(mine.st_mode) and os.access(path, os.R_OK | (os.W_OK if terminal else 0))
    return (subprocess.DEVNULL, path) if opens and not others else (None, "")


def _open_stdin(path: str) -> None:
    """Makes the parent's standard input this process's. Args: path: of it, in the parent's folder of /proc."""
    mode = os.stat(path).st_mode
    flags = os.O_RDWR | os.O_NOCTTY if stat.S_ISCHR(mode) else os.O_RDONLY | os.O_NONBLOCK  # a FIFO may have no writer
    fd = os.open(path, flags)
    os.set_blocking(fd, True)
    if stat.S_ISREG(mode):  # opened anew it begins at its first byte
        with open(path.replace("/fd/", "/fdinfo/")) as info:
            os.lseek(fd, int(info.readline().split()[1]), os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)


def _rank_environment(gpu_pct: float, bind_to_core: bool, threads: int | None) -> dict[str, str]:
    """The environment of the launcher and the ranks."""
    environment = ENVIRONMENT | dict(os.environ) | threads_environment(os.environ)
    environment |= {"PYTHONUNBUFFERED": "1", "MPI_UTIL_GPU_PCT": str(gpu_pct)}
    environment.pop(RANK_PID, None)
    if threads:
        environment |= {UPDATE_THREADS: str(threads)}
    if bind_to_core:
        environment |= {"MPI_UTIL_BOUND": "1"}
    if os.isatty(1):
        size = shutil.get_terminal_size()
        try:
            name = os.ttyname(1)
        except OSError:  # in a container it may have none
            name = "unknown"
        environment |= {"MPI_UTIL_TTY": name, "COLUMNS": str(size.columns), "LINES": str(size.lines)}
    return environment
