"""How ranks fail: one report, all stop at once, no rank is left waiting.

`install` is called when a rank starts its part (mpi_fork, or the first collective call). From then on an uncaught
exception ends the whole job, so does an exit with a non-zero status, and a rank whose launcher dies dies too.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

from ..errors import MpiUtilError
from ..host.process import process
from . import reap
from .identity import RANK_PID, Role, in_child_of_rank, under_launcher

_FIRST_REPORT_S = 1.0  # ranks that share an error wait this long for rank 0 to print it and to end the job
_LEAVE_S = 0.5  # a rank that exits with a non-zero status ends the job unless all others end within this time
# hydra drops what it has not read of a rank's stderr when the rank aborts: without a pause 4 of 30 reports were cut
_LAST_WORDS_S = 0.1
_PR_SET_PDEATHSIG = 1
_HIGH_FD = 200  # above what MPI opens, below the lowest limits
_WHERE = "_mpi_util_where"
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # the whole package
_STDLIB = os.path.dirname(os.__file__)  # its own modules, such as functools; site-packages is below it


class _Rank:
    """What this process is doing, for the report when it fails."""

    pid = 0  # until `install`; a process that is forked from a rank has another one, and is none
    call = ""  # the collective call that it is in
    status, reason = 0, ""  # of the last sys.exit
    leave: Callable[[int, float | None], bool] | None = None  # (status, seconds to wait) -> whether all ranks leave

    def __init__(self) -> None:
        self.where: dict[str, Any] = {}  # the phases that it is in, and their details


def install() -> None:
    """Makes failure on this rank the failure of the whole job. Does nothing when called again."""
    rank = process.of(_Rank)
    if rank.pid or in_child_of_rank():
        return
    rank.pid = os.getpid()
    process.set(sys, "excepthook", _report_and_stop)
    process.set(threading, "excepthook", _thread_failed)
    _watch_exit_status()
    atexit.register(_end_together)
    process.undo.callback(atexit.unregister, _end_together)
    if under_launcher() or process.of(Role).job:
        process.set_environment({RANK_PID: str(os.getpid())})
        die_with_parent()
        _register()
    if hasattr(signal, "SIGUSR1") and watchdog_s():
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def enter(op: str) -> None:
    """Notes the collective call that this rank is in."""
    rank = process.of(_Rank)
    rank.call = op
    rank.status = 0  # a program that goes on after sys.exit has caught it


@contextlib.contextmanager
def during(phase: str, **details: Any) -> Iterator[None]:
    """Names what the rank is doing, e.g. `during("rollout", episode=17)`, for the report of an exception inside."""
    rank = process.of(_Rank)
    before = rank.where
    rank.where = before | {"phase": phase, **details}
    try:
        yield
    except BaseException as error:
        if not hasattr(error, _WHERE):
            setattr(error, _WHERE, rank.where)  # when it is reported, this block has been left
        raise
    finally:
        rank.where = before


def stop_all(status: int, reason: str, place: str = "") -> NoReturn:
    """Ends every rank now. The launcher's parent reports `reason` and exits with `status`; `place`: where it was."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # RuntimeError: a signal came within a flush
            stream.flush()
    write_record("failed", {"status": status, "reason": reason, "place": place, "time": time.time()})
    if (mpi := _running_mpi()) and mpi.COMM_WORLD.size > 1:
        time.sleep(_LAST_WORDS_S)
        mpi.COMM_WORLD.Abort(status)
    os._exit(status)


def fail(line: str, status: int = 1) -> NoReturn:
    """Ends the whole job because of something that this rank found: one line, no traceback. Does not return."""
    _report(line)
    stop_all(status, line)


def _report(text: str) -> None:
    """Prints what ends the job. Where several ranks fail, the first report is the only one."""
    try:
        if job := process.of(Role).job:
            open(os.path.join(job, "reported"), "x").close()
    except FileExistsError:
        time.sleep(_FIRST_REPORT_S)  # the rank that reports ends the job
        return
    except OSError:  # the job's folder has gone
        pass
    print_line(text)


def _thread_failed(args: Any) -> None:
    """threading.excepthook: a thread may end by SystemExit; any other exception ends the job."""
    if args.exc_type is not SystemExit:
        _report_and_stop(args.exc_type, args.exc_value, args.exc_traceback)


def _report_and_stop(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook: one report, tagged with rank, phase and episode, then the end of the job."""
    rank = process.of(_Rank)
    if os.getpid() != rank.pid:
        sys.__excepthook__(kind, error, trace)
        return
    tag = f"rank {process.of(Role).rank}" if under_launcher() else "mpi_util"
    status = 130 if kind is KeyboardInterrupt else getattr(error, "status", 1)
    if kind is KeyboardInterrupt:
        _report(f"{tag}: interrupted (Ctrl-C)")
    elif getattr(error, "silent", False):
        time.sleep(_FIRST_REPORT_S)  # another rank prints it
    elif isinstance(error, MpiUtilError):
        _report(f"{tag}: {_place(trace)}{kind.__name__}: {error}")
    else:
        where = ", ".join(f"{key} {value}" for key, value in getattr(error, _WHERE, rank.where).items())
        text = "".join(traceback.format_exception(kind, error, trace))
        _report(f"{tag}{f' ({where})' if where else ''}: uncaught exception\n{text.rstrip()}")
    reason = f"{kind.__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    place = f"{_place(trace)}{getattr(error, _WHERE, rank.where)}"
    if under_launcher():
        stop_all(status, reason, place)
    write_record("failed", {"status": status, "reason": reason, "place": place, "time": time.time()})
    rank.status = status
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(status)  # from an excepthook: what the process ends with; else it would be 1


def call_site() -> str:
    """`file:line` from which the program has called this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _place(trace: TracebackType | None) -> str:
    """`file:line: ` of the innermost line that is neither ours nor the standard library's: where the call was made."""
    files = ((f, f.filename) for f in traceback.extract_tb(trace))
    frames = [f for f, name in files if not name.startswith(_HERE) and os.path.dirname(name) != _STDLIB]
    return f"{os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}: " if frames else ""


def print_line(text: str) -> None:
    """One write, so that reports of several ranks do not mix within a line."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _watch_exit_status() -> None:
    """Remembers the status given to sys.exit. When atexit functions run, the SystemExit is gone, and its status is a C
    variable of the interpreter: no hook, and not even the garbage collector's list of objects, shows it any more.
    """
    original, rank = sys.exit, process.of(_Rank)

    def exit(status: Any = None, /) -> NoReturn:
        rank.status = 0 if status is None else status if isinstance(status, int) else 1
        rank.reason = "" if status is None or isinstance(status, int) else str(status).partition("\n")[0]
        original(status)

    process.set(sys, "exit", exit)


def _end_together() -> None:
    """At exit: all ranks end in order, or, if this one has a non-zero status and others work on, none does."""
    rank = process.of(_Rank)
    if os.getpid() != rank.pid:
        return
    _record_end()
    status, reason = rank.status, rank.reason or f"exit status {rank.status}"
    if not _running_mpi():
        if status and under_launcher():
            stop_all(status, reason)
        if status:
            write_record("failed", {"status": status, "in_order": True})
        return
    record = {"status": status, "reason": reason, "time": time.time(), "in_order": False}
    if status:
        write_record("failed", record)
    together = rank.leave is not None and rank.leave(status, _LEAVE_S if status else None)
    if status and not together:
        stop_all(status, reason)
    elif status:
        write_record("failed", record | {"in_order": True}, again=True)


def on_leave(leave: Callable[[int, float | None], bool]) -> None:
    """Registers how the ranks end together."""
    process.of(_Rank).leave = leave


def _running_mpi() -> Any:
    """The module mpi4py.MPI, if MPI has been started and not ended; else None."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def watchdog_s() -> float:
    """Seconds after which a waiting rank reports which one is missing (MPI_UTIL_WATCHDOG; 0, the default: never)."""
    return float(os.environ.get("MPI_UTIL_WATCHDOG", "0"))


def report_missing(rank: int, source: int, pid: int | None) -> None:
    """The watchdog's report: which rank waits for which, in which call, and both stacks.

    Only ranks 0 and 1 report: if rank 0 is the one that hangs, rank 1 waits for it, and else rank 0 waits.
    """
    if rank > 1:
        return
    print_line(f"mpi_util: rank {rank} has waited {watchdog_s():g} s for rank {source} in {process.of(_Rank).call}")
    faulthandler.dump_traceback(all_threads=False)
    if pid:
        print_line(f"mpi_util: stack of rank {source} (pid {pid}) follows")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


def die_with_parent() -> None:
    """A process whose parent (a rank's: the launcher) is killed is killed too, even while it computes (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _register() -> None:
    """Records this rank's pid for the launcher's parent, and opens the FIFO whose closing shows that the rank ended."""
    write_record("rank", {"pid": os.getpid(), "shm": []})
    with contextlib.suppress(OSError):
        path = os.path.join(process.of(Role).job, f"alive-{process.of(Role).rank}")
        fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # Linux closes the files of a dying process from the highest number down. The FIFO must go before the sockets at
        # whose closing hydra kills the other ranks, or it is not clear which one died first.
        alive = fcntl.fcntl(fifo, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
        process.undo.callback(os.close, alive)
        os.close(fifo)


def register_mpi() -> None:
    """After MPI has started: names its files in /dev/shm, which a killed job would leave, and watches for its end."""
    from mpi4py import MPI

    write_record("rank", {"pid": os.getpid(), "shm": sorted(reap.mapped_segments(os.getpid()))})
    # MPI_Finalize deletes the attributes of COMM_SELF first
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_record_end), True)


def _record_end(*_: Any) -> None:
    """This rank ends in order: its death is not to be taken for a failure."""
    write_record("ended", {})


def write_record(kind: str, content: Any, again: bool = False) -> None:
    """Writes a small file, whole or not at all, into the folder that the launcher's parent watches, if there is one."""
    job = process.of(Role).job
    path = os.path.join(job, f"{kind}-{process.of(Role).rank}")
    if not job or (kind == "failed" and not again and os.path.exists(path)):
        return  # the first reason that a rank gives is the cause; what follows from it is not
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile("w", dir=job, prefix=".", delete=False) as file:
            json.dump(content, file, default=lambda number: number.tolist())  # NumPy's
        os.replace(file.name, path)
