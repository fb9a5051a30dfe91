"""Finds and ends the processes of one job, and removes what they leave; in the parent, an agent, or a guard.

A process belongs to the job when its environment names the job's folder, so a process that got the id of another one
is never touched; or when its session does, as processes that set their title (Ray, Redis) show no environment.

Run as a program, with the folder as its argument, this file is the job's guard, which sleeps on its standard input.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

JOB_VARIABLE = "MPI_UTIL_JOB"

# of /proc/<pid>/stat
STAT_PARENT, STAT_SESSION, STAT_FLAGS, STAT_BEGAN, STAT_MEMORY, STAT_ENVIRONMENT_END = 4, 6, 9, 22, 23, 51
STAT_EXIT_STATUS = 52
# linux/pidfd.h: struct pidfd_info in its first version, whose last member is exit_code; _IOWR(0xFF, 11, that struct)
_PIDFD_INFO_BYTES, _PIDFD_INFO_EXIT = 64, 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11

# Nothing is made there. Files of MPI are removed that this job's own processes had open, or that no process has.
_SHM, _TMP = "/dev/shm", "/tmp"  # noqa: S108
_MPI_FILE = re.compile(
    r"/dev/shm/(?:mpich_shm_|sm_segment\.|vader_segment\.)[^\s/]+|/tmp/hydra_hwloc_xmlfile_[^\s/]+"  # noqa: S108
)
_KILL_PATIENCE_S, _KILL_PAUSE_S = 5.0, 0.005
_MOST_SCANS = 2000  # a chain took up to 80 on a busy machine; not a time, which also passes while this process waits
_EXEC_PATIENCE_S = 1.0
_EXITING = 0x4  # PF_EXITING of linux/sched.h


def belongs(pid: int, job_dir: str, variable: str = JOB_VARIABLE) -> bool:
    """True if a living process is one of this job's and this user's: another user's may only pretend to be.

    A process within execve shows no environment, so this waits for its end.
    """
    proc, deadline = Path(f"/proc/{pid}"), time.monotonic() + _EXEC_PATIENCE_S
    try:
        while not (shown := (proc / "environ").read_bytes()) and time.monotonic() < deadline:
            if not stat_field(pid, STAT_MEMORY) or stat_field(pid, STAT_ENVIRONMENT_END):
                break  # it has ended, or is the kernel's; or its environment is really empty
            time.sleep(_KILL_PAUSE_S)
        shown = shown or (proc / "environ").read_bytes()
        if f"{variable}={job_dir}".encode() not in shown.split(b"\0"):
            session = stat_field(pid, STAT_SESSION) or 0
            began = int(Path(job_dir, f"session-{session}").read_text())  # recorded by a rank
            if stat_field(session, STAT_BEGAN) not in (None, began):  # None: the leader has ended
                return False
        return f"\nUid:\t{os.getuid()}\t" in (proc / "status").read_text()
    except (OSError, ValueError):  # no such process, or its session is no rank's
        return False


def job_processes(job_dir: str, stop: bool = False, variable: str = JOB_VARIABLE) -> list[int]:
    """The ids of the job's living processes: launcher, proxies, ranks, and the processes that these started.

    A process may fork and exit between two scans, so this scans until none has vanished, but not more than _MOST_SCANS
    times: processes of others come and go too. `stop`: each is stopped as soon as it is found, so that it cannot.
    """
    found: list[int] = []
    seen = {os.getpid()}
    for _ in range(_MOST_SCANS):
        new = {int(name) for name in os.listdir("/proc") if name.isdecimal()} - seen
        for pid in sorted(new, reverse=True):  # the youngest may be the next one to end
            if belongs(pid, job_dir, variable):
                found.append(pid)
                send(pid, signal.SIGSTOP) if stop else None
        # one that is ending can fork no more, though the kernel may take a second to free its memory
        flags = (stat_field(pid, STAT_FLAGS) for pid in new)
        if found or all(each is not None and not each & _EXITING for each in flags):
            break
        seen |= new
    return found


def send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def stat_field(pid: int, number: int, states: str = "") -> int | None:
    """A number of /proc/<pid>/stat, counted from 1; None: no such process, or in none of `states` ("ZX": has ended)."""
    try:  # the second field, the name in brackets, may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[number - 3]) if not states or fields[0] in states else None


def is_alive(pid: int) -> bool:
    return stat_field(pid, STAT_FLAGS, "RSDTtIKWP") is not None  # all but Z and X, in one look


def is_stopped(pid: int) -> bool:
    return stat_field(pid, STAT_FLAGS, "Tt") is not None


def catches(pid: int, signum: int) -> bool:
    """True if the process handles a signal, which may end it otherwise."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)
    return False


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def exit_code(pid: int, pidfd: int) -> int | None:
    """A process's exit code, negative for a signal; None if it was reaped and Linux is older than 6.15."""
    status, info = stat_field(pid, STAT_EXIT_STATUS, "ZX"), struct.pack("Q", _PIDFD_INFO_EXIT)
    if status is None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: there is no pidfd
            info = fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info.ljust(_PIDFD_INFO_BYTES, b"\0"))
            if struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
                (status,) = struct.unpack_from("i", info, _PIDFD_INFO_BYTES - 4)
    return None if status is None else os.waitstatus_to_exitcode(status)


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object that a rank wrote in the job's folder; {} where there is none that can be read."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def guard(job_dir: str, variable: str = JOB_VARIABLE) -> Any:
    """Starts this file, which calls `end_job` when this process ends. Returns: a subprocess.Popen."""
    import subprocess  # not in the guard

    words, none = [sys.executable, "-I", "-S", __file__, job_dir, variable], subprocess.DEVNULL
    env = {name: value for name, value in os.environ.items() if not name.startswith("MPI_UTIL_")}  # if of another job
    return subprocess.Popen(words, 0, None, subprocess.PIPE, none, none, env=env, start_new_session=True)  # noqa: S603


def kill_processes(job_dir: str, variable: str = JOB_VARIABLE) -> None:
    """Kills whatever is left of the job, and removes the files of MPI that the killed processes cannot remove."""
    files: set[str] = set()
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while pids := job_processes(job_dir, True, variable):
        for pid in pids:
            files |= mpi_files(pid)
        for pid in pids:  # only now: when the launcher dies, the others may end and show nothing any more
            send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(_KILL_PAUSE_S)
    remove(files)


def end_job(job_dir: str, variable: str = JOB_VARIABLE) -> None:
    """Kills whatever is left of the job, then removes its shared memory files and its folder.

    MPI's shared memory is named by what each rank recorded ("shm" in rank-<k>) and by what the living ones have mapped:
    a killed rank cannot remove it. Nothing names the memory of a rank that ended while MPI started: then files go that
    were made since and that no process maps. Hydra leaves its descriptions of the machine where a rank fails.
    """
    kill_processes(job_dir, variable)
    made = [read_record(record).get("shm", ()) for record in Path(job_dir).glob("rank-*")]
    remove(path for paths in made for path in paths if _MPI_FILE.fullmatch(path))
    with contextlib.suppress(OSError):
        begun = min((path.stat().st_ctime for path in Path(job_dir).glob("alive-*")), default=math.inf)
        unused = map(str, unused_files(begun))
        remove(path for path in unused if not all(made) or path.startswith(_TMP))
    shutil.rmtree(job_dir, ignore_errors=True)


def remove(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def unused_files(since: float = 0.0) -> list[Path]:
    """This user's files of MPI, changed at that time (of time.time()) or later, that no process maps or has open."""
    found = []
    for path in (*Path(_SHM).glob("*"), *Path(_TMP).glob("hydra_*")):
        with contextlib.suppress(OSError):
            if _MPI_FILE.fullmatch(str(path)) and path.stat().st_uid == os.geteuid() and path.stat().st_mtime >= since:
                found.append(path)
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")] if found else []
    used = {path for pid in pids for path in mpi_files(pid)}
    return [path for path in found if str(path) not in used]


def mpi_files(pid: int) -> set[str]:
    """The files of MPI that this process maps or has open: hydra's proxy has its description of the machine open."""
    names = ""
    with contextlib.suppress(OSError):
        names = Path(f"/proc/{pid}/maps").read_text()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it has just been closed
                names += "\n" + os.readlink(f"/proc/{pid}/fd/{fd}")
    return set(_MPI_FILE.findall(names))


if __name__ == "__main__":
    for _signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_signum, signal.SIG_IGN)  # they are for the parent
    sys.stdin.buffer.read()  # until the parent has ended; one that comes to its own end kills this process first
    end_job(*sys.argv[1:])
