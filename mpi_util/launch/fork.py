"""Starts this script again as N ranks under the MPI launcher, and once more after a failure.

Runs in the waiting parent; nothing here starts MPI.
"""

import builtins
import contextlib
import functools
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from ..errors import LaunchError
from ..host.cores import usable_cores
from ..ranks import runner
from ..ranks.failure import print_line
from ..ranks.identity import RANK_PID, Role, multiprocess_parent
from ..ranks.records import DEPTH, RESTARTS, SAVED, STDIN
from ..ranks.state import state
from ..ranks.threads import environment as threads_environment
from .launcher import ENVIRONMENT, check_tasks, find_launcher
from .monitor import ProcessMonitor
from .supervise import Job
from .verdict import Verdict

_FILES, _FILES_OF_RANK = 32, 4  # of one process at most; 2 to 16 ranks needed 38 to 87
_PROCESSES, _PROCESSES_OF_RANK = 4, 3  # with MPICH's threads; 2 ranks needed 10, of Open MPI more
_ROOM_BYTES = 256 << 10  # for the job's folder: with 2 ranks of Open MPI 140 kB, with 16 of MPICH 132


def start(
    n: int | None, max_restarts: int, find_hosts: Callable[[], Any] | None = None, bind_to_core: bool = False,
    per_env: int = 1,
) -> Literal["parent", "child"]:  # fmt: skip
    """`mpi_fork` in the parent; returns "child" at once where one rank is enough, which is this process.

    Args: find_hosts: the `cluster.hosts.Hosts` of the ranks; None: all run on this machine. Others: as for `mpi_fork`.
    """
    if n != 1:
        check_tasks()
        if not os.path.exists("/proc/self/stat"):
            raise LaunchError("mpi_fork sees its ranks in /proc, which is not mounted here: mount -t proc proc /proc")
    if not os.path.isfile(runner.__file__):
        archive = os.path.dirname(os.path.dirname(os.path.dirname(runner.__file__)))
        raise LaunchError(f"mpi_fork: mpi_util is in the archive {archive}, and ranks run files of it; unpack it")
    depth = int(os.environ.get(DEPTH, "0"))
    where = find_hosts() if find_hosts else None
    if n is None:
        n = (sum(where.slots.values()) if where else 0) or usable_cores()
        n = max(per_env, n - n % per_env)
    others = where if where and where.slots and (n > 1 or where.asked) else None
    if n == 1 and not max_restarts and not others:
        return "child"
    if multiprocess_parent():
        raise LaunchError("mpi_fork starts the program again, so it cannot be called in a process of multiprocessing")
    if depth > 1:
        raise LaunchError(f"mpi_fork({n}) in a rank of a job that a rank has started: does the program start itself?")
    # a launcher takes a colon for the beginning of another program
    program = [runner.COLON if word == ":" else word for word in _command_of_rank()]
    environment = _rank_environment(bind_to_core) | {DEPTH: str(depth + 1)}
    stdin, environment[STDIN] = _stdin_for_ranks(others is not None)
    found = find_launcher() if n > 1 or others else None
    sys.stdout.flush()
    sys.stderr.flush()

    def start_once(more: dict[str, str]) -> tuple[Verdict, str]:
        variables = environment | more
        on_hosts = others and functools.partial(others.open_monitor, find_hosts, variables, _script())
        job, command = Job(n, variables, on_hosts or ProcessMonitor), program
        if found:
            family, launcher = found
            flags = (family.bound_flags if bind_to_core else family.flags).split()
            command = [launcher, "-n", str(n), *flags, *job.monitor.options(family.name), *program]
        return job.run(command, stdin), job.saved

    try:
        _check_limits(n, 0 if others else n)
        status = _run(start_once, max_restarts)
    except OSError as error:
        raise LaunchError(f"cannot start {n} ranks: {error}") from None
    if status:
        sys.exit(status)
    state(Role).is_parent = True
    return "parent"


def _run(start: Callable[[dict[str, str]], tuple[Verdict, str]], max_restarts: int) -> int:
    """Runs the job by `start`, which is given more variables, and again after failures; returns the last status."""
    last, note, restart = ("", ""), "null", 0
    while True:
        verdict, saved = start({RESTARTS: str(restart), SAVED: note})
        note, restart = saved or note, restart + 1
        then = ""
        if verdict.cause and max_restarts:
            then = f"; restart {restart} of {max_restarts}"
            if restart > max_restarts:
                then = f"; not restarted: all {max_restarts} restarts are used"
            if (verdict.cause, note) == last:
                then = "; not restarted: it has failed in the same way twice, without progress"
        for text in filter(None, (verdict.last_words.strip("\n"), verdict.line and verdict.line + then)):
            print_line(text)
        if not then.startswith("; restart"):
            return verdict.status
        last = verdict.cause, note


def _check_limits(n: int, n_here: int) -> None:
    """Raises LaunchError where n ranks, n_here of them on this machine, need more than the system gives.

    Launchers then hang, or say something else. The soft limit of open files is raised.
    """
    cannot, (soft, hard) = f"cannot start {n} ranks:", resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: no limit
    if 0 <= hard < (files := _FILES + _FILES_OF_RANK * n):
        raise LaunchError(f"{cannot} they need {files} open files, and `ulimit -n` allows {hard}")
    if 0 <= soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    room = shutil.disk_usage(folder := tempfile.gettempdir())
    if room.total and room.free < _ROOM_BYTES:  # a file system without a size shows none
        raise LaunchError(f"{cannot} {folder} has less than {_ROOM_BYTES >> 10} kB free; set TMPDIR to another")
    processes, over = _PROCESSES + _PROCESSES_OF_RANK * n_here, threading.Event()
    stack_bytes = threading.stack_size(1 << 16)
    with ThreadPoolExecutor(processes) as pool:  # a thread for each that waits, and threads count as processes
        try:
            for _ in range(processes):
                pool.submit(over.wait)
        except RuntimeError:
            raise LaunchError(f"{cannot} they need {processes} more processes, and `ulimit -u` allows less") from None
        finally:
            over.set()
            threading.stack_size(stack_bytes)


def _command_of_rank() -> list[str]:
    """Our own command line once more, with runner.py between the interpreter's flags and the program."""
    in_ipython = hasattr(builtins, "__IPYTHON__")
    script = getattr(sys.modules["__main__"], "__file__", None) if in_ipython else None
    if script and os.path.abspath(sys.argv[0]) == os.path.abspath(script):  # %run, in a notebook too
        return [sys.executable, runner.__file__, *sys.argv]
    if in_ipython or hasattr(sys, "ps1") or not sys.executable or sys.argv[0] in ("", "-"):
        fix = "save it to a file; in a notebook begin its cell with %%writefile program.py, then %run program.py"
        raise LaunchError(f"mpi_fork starts the program again, so it needs a script (or -m, -c): {fix}")
    flags, program = _split(sys.orig_argv[1:])
    if os.path.basename(program[0]) == os.path.basename(_script()):  # not so with -m, -c, or a folder
        # where the program has called os.chdir since, its path
        same = all(map(os.path.exists, (program[0], _script()))) and os.path.samefile(program[0], _script())
        program[0] = program[0] if same else _script()
    return [sys.executable, *flags, runner.__file__, *program]


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(flags of the interpreter, program with its arguments): `-uBm module` is `-uB` and `-m module`."""
    flags, rest = list[str](), [*arguments]
    while rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        with_value = None if option.startswith("--") else re.search("[cmWX]", option)  # attached, or the next argument
        if with_value is None:
            flags.append(option)
        else:
            at = with_value.start()
            flags += [option[:at]] * (at > 1)
            named = ["-" + option[at], option[at + 1 :] or rest.pop(0)]
            if option[at] in "cm":
                return flags, [*named, *rest]
            flags += named
    return flags, rest


def _script() -> str:
    """The program's file, as it is on the command line; "": there is none."""
    return getattr(sys.modules["__main__"], "__file__", None) or ""


def _stdin_for_ranks(others: bool) -> tuple[int | None, str]:
    """The launcher's stdin, and the path that rank 0 opens as its own: this process's stdin, as a rule.

    Not through the launcher: it would read ahead what is for the shell or the next program of a loop, and Open MPI's
    does not pass on the end of the input. But only the launcher reaches `others`: other hosts. A terminal of which this
    job is in the background gives nothing.
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


def _rank_environment(bind_to_core: bool) -> dict[str, str]:
    environment = ENVIRONMENT | dict(os.environ) | threads_environment(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    environment.pop(RANK_PID, None)
    environment |= {"MPI_UTIL_BOUND": "1"} if bind_to_core else {}
    if os.isatty(1):
        size = shutil.get_terminal_size()
        name = "unknown"
        with contextlib.suppress(OSError):  # in a container it may have none
            name = os.ttyname(1)
        environment |= {"MPI_UTIL_TTY": name, "COLUMNS": str(size.columns), "LINES": str(size.lines)}
    return environment
