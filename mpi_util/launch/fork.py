"""Starts this script again as N ranks under the MPI launcher, and waits for them. Nothing here starts MPI."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import subprocess
import sys
from typing import Literal

from ..errors import LaunchError
from ..host.cores import UPDATE_THREADS
from ..host.process import process
from ..host.threads import environment as threads_environment
from .identity import Role, env_rank, env_size, in_child_of_rank, under_launcher
from .launcher import Family, find_launcher, root_permission


def mpi_fork(
    n: int, gpu_pct: float = 0.0, bind_to_core: bool = False, threads: int | None = None
) -> Literal["parent", "child"]:
    """`mpi_util.mpi_fork` (collectives/start.py), without the preparation of the ranks."""
    for name, value in {"n": n, "threads": 1 if threads is None else threads}.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise LaunchError(f"mpi_fork: {name} is a whole number of at least 1; got {value!r}")
    process.of(Role).is_parent = False  # in a notebook it may have been
    if gpu_pct:
        os.environ.setdefault("MPI_UTIL_GPU_PCT", str(gpu_pct))
    if in_child_of_rank():
        if n == 1 or "multiprocessing.process" in sys.modules:  # which runs the program's top level once more
            return "child"
        raise LaunchError(f"mpi_fork({n}) in a process that rank {env_rank()} has started: it cannot start ranks")
    if under_launcher():
        _write_whole_lines()
        if n != env_size() and env_rank() == 0:
            print(f"mpi_util: already under an MPI launcher with {env_size()} ranks; n={n} is ignored", file=sys.stderr)
        return "child"
    if n == 1:
        return "child"
    program = [sys.executable, *_own_arguments()]
    family, launcher = find_launcher()

    from .supervise import Job  # only the parent needs it

    sys.stdout.flush()
    sys.stderr.flush()
    flags = family.bound_flags if bind_to_core else family.flags
    command = [launcher, "-n", str(n), *flags, *program]
    verdict = Job(n).run(command, rank_environment(family, gpu_pct, bind_to_core, threads), _stdin_for_ranks())
    for text in filter(None, (verdict.last_words.strip("\n"), verdict.line)):
        print(text, file=sys.stderr, flush=True)
    if verdict.status:
        sys.exit(verdict.status)
    process.of(Role).is_parent = True
    return "parent"


def _write_whole_lines() -> None:
    """Makes print() write each line at once and in one piece.

    The ranks run with PYTHONUNBUFFERED, so that nothing is lost when one is killed. But that writes each argument of
    print() on its own, and mixes the lines of several ranks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _own_arguments() -> list[str]:
    """What follows the interpreter on our command line: its flags, the script or -m or -c, the arguments."""
    in_ipython = hasattr(builtins, "__IPYTHON__")
    script = getattr(sys.modules["__main__"], "__file__", None) if in_ipython else None
    if script and os.path.abspath(sys.argv[0]) == os.path.abspath(script):  # %run, in a notebook too
        return list(sys.argv)
    if in_ipython or hasattr(sys, "ps1") or not sys.executable or sys.argv[0] in ("", "-"):
        raise LaunchError(
            "mpi_fork starts the program again, so it needs a script (or -m, -c): save it to a file; in a notebook "
            "begin its cell with %%writefile program.py, then %run program.py"
        )
    return sys.orig_argv[1:]


def _stdin_for_ranks() -> int | None:
    """The ranks' stdin: ours, but not a terminal in whose background we run (a launcher reads keys)."""
    try:
        in_background = os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return subprocess.DEVNULL
    return subprocess.DEVNULL if in_background else None


def rank_environment(family: Family, gpu_pct: float, bind_to_core: bool, threads: int | None) -> dict[str, str]:
    """The environment of the launcher and the ranks."""
    environment = family.environment | dict(os.environ) | root_permission() | threads_environment(os.environ)
    environment |= {"PYTHONUNBUFFERED": "1", "MPI_UTIL_GPU_PCT": str(gpu_pct)}
    if threads:
        environment |= {UPDATE_THREADS: str(threads)}
    if bind_to_core:
        environment |= {"MPI_UTIL_BOUND": "1"}
    if os.isatty(1):
        size = shutil.get_terminal_size()
        environment |= {"MPI_UTIL_TTY": "1", "COLUMNS": str(size.columns), "LINES": str(size.lines)}
    return environment
