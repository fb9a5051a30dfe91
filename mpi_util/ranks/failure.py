"""How a rank fails, in the rank's process: one report, all ranks stop at once, no rank is left waiting.

`install` is called when a rank starts its part (mpi_fork, or the first collective call). From then on each way to end,
of which runner.py sees the status, has the effect that docs/architecture.md says.
"""

import atexit
import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

from ..errors import LaunchError, MpiUtilError, UsageError, first_line
from ..host import reap
from . import runner
from .identity import OF_SERVER, RANK_PID, Role, forget_launcher, in_child_of_rank, under_launcher
from .records import Failure, write_record
from .state import state

_FIRST_REPORT_S = 1.0  # other ranks with the same error give the one that reports this long to print it and end the job
_LEAVE_S = 0.5  # a rank that exits with a non-zero status ends the job unless all others end within this time
# hydra drops the part of a rank's stderr that it has not read when the rank aborts: it cut 4 of 30 reports
_LAST_WORDS_S = 0.1
_LONGEST_REPORT, _LONGEST_REASON = 8000, 200  # characters: a message may hold a whole array
# `timeout` and some shells send a signal to the process and again to its group, Slurm to the parent and to the ranks
SAME_SIGNAL_S = 0.3
_WHERE, _PR_SET_PDEATHSIG = "_mpi_util_where", 1
# files of this package, of those beside it whose names begin with its name, and of `python -m`
OURS = re.compile(rf"(?:<frozen |{re.escape(os.path.dirname(os.path.dirname(__file__)))}(?:_\w+)?/)")
_STDLIB = os.path.dirname(os.__file__)  # folder of functools and others; site-packages is below it


class FailureState:
    """What this process does, for the report when it fails.

    Attributes:
        pid: of the rank; 0 until `install`. call: the last collective call.
        is_fork: True in a process that a rank has forked; the other attributes are still the rank's.
        hook: of the program, which shows a traceback; None: none since `install`.
        where: the current phase and its details. on_phase: called when it has changed.
        end: how the program ended, if runner.py has seen it.
        leave: how all ranks end together: (status, reason, seconds to wait) -> whether all of them do.
        shown: where stdout is not shown, a stream that is.
    """

    pid = 0
    is_fork = False
    call = ""
    shown: TextIO | None = None
    end: Failure | None = None
    on_phase: Callable[[], None] | None = None
    leave: Callable[[int, str, float | None], bool] | None = None
    hook: Callable[..., object] | None = None

    def __init__(self) -> None:
        self.where: dict[str, Any] = {}

    def at(self, where: dict[str, Any]) -> None:
        self.where = where
        if self.on_phase:
            self.on_phase()


def install() -> None:
    """Makes failure on this rank the failure of the whole job. Does nothing when called again."""
    mine = state(FailureState)
    if mine.pid or in_child_of_rank():
        return
    mine.pid = os.getpid()
    os.register_at_fork(after_in_child=lambda: setattr(state(FailureState), "is_fork", True))
    sys.excepthook = _report_and_stop
    threading.excepthook = lambda args: _report_and_stop(*args[:3])  # type: ignore[arg-type]
    if runs := sys.modules.get(runner.NAME):
        vars(runs)["on_end"] = _note_end
    atexit.register(_end_together)
    if under_launcher() or state(Role).job:
        os.environ[RANK_PID] = str(os.getpid())
        os.environ.setdefault("OMPI_MCA_opal_signal", "")  # Open MPI prints 25 lines of C functions at a crash
        with contextlib.suppress(OSError, AttributeError):  # it dies with its parent, even while it computes (Linux)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        write_record("rank", {"pid": os.getpid(), "shm": []})  # it has come to mpi_fork


def enter(op: str) -> None:
    """Notes that this rank begins a collective call. UsageError in a process that a rank has forked."""
    if in_child_of_rank() and under_launcher():
        what = f"was forked by rank {state(Role).rank}, or started by its multiprocessing, and is no rank itself"
        fix = "it cannot take part in collective calls; let the rank make them"
        raise UsageError(f"{op}: this process {what}: {fix}")
    state(FailureState).call = op


@contextlib.contextmanager
def during(phase: str, **details: Any) -> Iterator[None]:
    """Names what the rank is doing, e.g. `during("rollout", episode=17)`, for the report of an exception inside."""
    mine = state(FailureState)
    before = mine.where
    mine.at(before | {"phase": phase, **details})
    try:
        yield
    except BaseException as error:
        if not hasattr(error, _WHERE):
            setattr(error, _WHERE, mine.where)  # it is reported after this block has been left
        raise
    finally:
        mine.at(before)


def stop_all(failure: Failure) -> NoReturn:
    """Ends every rank now, and exits with its status. The launcher's parent reports why."""
    _flush()
    _record(failure)
    if (mpi := _running_mpi()) and mpi.COMM_WORLD.size > 1:
        time.sleep(_LAST_WORDS_S)
        mpi.COMM_WORLD.Abort(failure.status)
    if mpi:  # a single rank: no launcher or parent removes its files in /dev/shm
        reap.remove(reap.mpi_files(os.getpid()))
    os._exit(failure.status)


def fail(line: str, status: int = 1) -> NoReturn:
    """Ends the whole job with one line, and no traceback. Does not return. Not collective."""
    _report(line)
    stop_all(Failure(status, _shorten(line, _LONGEST_REASON), reported=True))


def _report(text: str) -> bool:
    """Prints why the job ends. If several ranks fail, only the first one prints; False on the others."""
    try:
        if job := state(Role).job:
            open(os.path.join(job, "reported"), "x").close()
    except FileExistsError:
        time.sleep(_FIRST_REPORT_S)  # the rank that reports ends the job
        return False
    except OSError:  # the job's folder has gone
        pass
    print_line(_shorten(text, _LONGEST_REPORT))
    return True


def _report_and_stop(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The hook of sys and threading: one report, tagged with rank, phase and episode; then the job ends."""
    if kind is SystemExit:  # a thread may end with it
        return
    is_fork, number = state(FailureState).is_fork, state(Role).rank
    tag = (state(Role).name or f"rank {number}") if under_launcher() else "mpi_util"
    tag = f"process {os.getpid()}, forked by rank {number}" if is_fork else tag
    hook = None
    if kind is KeyboardInterrupt:
        text = f"{tag}: interrupted (Ctrl-C)"
    elif isinstance(error, MpiUtilError):
        text = f"{tag}: {_line_of(trace)}{kind.__name__}: {error}"
    else:
        where = named(getattr(error, _WHERE, state(FailureState).where))
        text = f"{tag}{f' ({where})' if where else ''}: uncaught exception"
        hook = None if is_fork else state(FailureState).hook
        text += "" if hook else "\n" + "".join(traceback.format_exception(kind, error, trace)).rstrip()
    if is_fork:
        return print_line(_shorten(text, _LONGEST_REPORT))
    failure = _failure_of(error)
    if getattr(error, "silent", False):
        time.sleep(_FIRST_REPORT_S)  # another rank prints it, and ends the job
        failure = failure._replace(reported=False)  # if it could not, the parent says why
    elif _report(text) and hook:
        try:
            hook(kind, error, trace)
        except Exception:
            print_line("".join(traceback.format_exception(kind, error, trace)).rstrip())
    if under_launcher():
        stop_all(failure)
    _record(failure)
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(failure.status)  # the process ends with it; without it, with status 1


def _failure_of(error: BaseException) -> Failure:
    known = isinstance(error, MpiUtilError)
    status = 130 if isinstance(error, KeyboardInterrupt) else error.status if isinstance(error, MpiUtilError) else 1
    place = f"{type(error).__name__} {_line_of(error.__traceback__)}{_phase(error)}"
    return Failure(status, describe(error), place, reported=known)


def named(where: dict[str, Any]) -> str:
    """A phase and its details, such as `phase rollout, episode 17`."""
    return ", ".join(f"{key} {value}" for key, value in where.items())


def _phase(error: BaseException) -> str:
    """The phase in which it was raised, without details: episode numbers differ from one failure to the next."""
    return str(getattr(error, _WHERE, state(FailureState).where).get("phase", ""))


def describe(error: BaseException) -> str:
    """`ValueError: first line of the message`; the message may be long, or fail."""
    try:
        text = first_line(error)
    except Exception:
        text = "its __str__ fails"
    return _shorten(f"{type(error).__name__}: {text}".rstrip(": "), _LONGEST_REASON)


def _shorten(text: str, longest: int) -> str:
    """Cuts the middle out of a text that is longer than about `longest` characters."""
    left_out, part = len(text) - longest, longest // 2
    return f"{text[:part]} ... ({left_out:,} characters left out) ... {text[-part:]}" if left_out > 0 else text


def program_frame() -> FrameType:
    """That of the program which has called this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (OURS.match(name := frame.f_code.co_filename) or name == contextlib.__file__):
        frame = frame.f_back
    return frame


def call_site() -> str:
    """`file:line` from which the program has called this package."""
    frame = program_frame()
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _line_of(trace: TracebackType | None) -> str:
    """`file:line: ` of the program's innermost line: neither this package's nor the standard library's."""
    files = ((f, f.filename) for f in traceback.extract_tb(trace))
    frames = [f for f, name in files if not OURS.match(name) and os.path.dirname(name) != _STDLIB]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: " if frames else ""


def print_line(text: str) -> None:
    """Prints to stderr in one write, so that ranks do not mix their lines; nothing if stderr is closed."""
    _flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text + "\n")
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # AttributeError: there is no stream; RuntimeError: a signal has interrupted a flush
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            stream.flush()


def hide_stdout(path: str = os.devnull) -> None:
    """From here on stdout goes to nothing, or to a file. Of `msg` it is stderr then. LaunchError: as `opened`."""
    state(FailureState).shown = sys.stderr
    sys.stdout.flush()
    os.dup2(fd := opened(path), 1)
    os.close(fd)


def opened(path: str) -> int:
    """A descriptor of a file of log_dir, which is made, or appended to. LaunchError: it cannot be."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        # the last: a FIFO that no one reads is refused
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise LaunchError(f"log_dir: {error}") from None


def _note_end(error: BaseException) -> None:
    """Notes what ends the program. runner.py calls it."""
    mine = state(FailureState)
    mine.end = _exit_of(error) if isinstance(error, SystemExit) else _failure_of(error)
    if sys.excepthook is not _report_and_stop and under_launcher():  # the program has set one since `install`
        mine.hook, sys.excepthook = sys.excepthook, _report_and_stop


def _exit_of(error: SystemExit) -> Failure:
    code, text = error.code, error.code is not None and not isinstance(error.code, int)
    said = [describe(error).removeprefix("SystemExit: ")] if text else []
    reason = "; ".join(filter(None, (*said, named(getattr(error, _WHERE, {})))))
    status = 1 if text else int(code or 0) & 0xFF
    return Failure(status, reason, _phase(error)) if status else Failure(0)


def _end_together() -> None:
    """An atexit function: all ranks end in order, or the job is aborted if this one failed and others still work."""
    mpi, end, several = _running_mpi(), Failure(0), under_launcher()
    if runner.NAME in sys.modules:
        end = state(FailureState).end or end
    elif error := getattr(sys, "last_value", None):  # an uncaught exception, whatever hook the program has set
        end = _failure_of(error)
    elif several:
        end = Failure(0, "only its launcher knows with which status")
    if state(FailureState).is_fork:
        if mpi:  # mpi4py would call MPI_Finalize, which waits for ever in a forked process
            _flush()
            os._exit(end.status)
        return
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)  # Python restores the signals' defaults before MPI ends, and they end the process
    if end.status and several:
        _record(end)
    elif end.status and mpi:  # such as a rank of no job that was refused: Open MPI leaves its files then
        reap.remove(reap.mpi_files(os.getpid()))
    together = _leave(end)
    if end.status and (together or not several):
        _record(end._replace(in_order=True), again=several)
    elif end.status and mpi:
        from mpi4py.run import set_abort_status

        _flush()
        time.sleep(_LAST_WORDS_S)
        set_abort_status(end.status)  # mpi4py aborts the job once Python has ended the program and its files


def _leave(end: Failure) -> Any:
    """Records that this rank ends in order, so that its death is no failure. True: all ranks end together, now."""
    write_record("ended", {})
    mine = state(FailureState)
    leave, mine.leave = mine.leave, None
    try:
        return leave and leave(end.status, end.reason, _LEAVE_S if end.status else None)
    except SystemExit as error:  # of a signal's handler; Python would go on, and the others wait for this rank for ever
        stop_all(_exit_of(error))
    except BaseException as error:
        _report_and_stop(type(error), error, error.__traceback__)


def _record(failure: Failure, again: bool = False) -> None:
    """Records a failure for mpi_fork's parent: the first one, which is the cause of those that follow."""
    if again or not os.path.exists(os.path.join((role := state(Role)).job, f"failed-{role.rank}")):
        write_record("failed", failure._replace(time=time.time())._asdict())


def _running_mpi() -> Any:
    """The module mpi4py.MPI, if MPI has been started and not ended; else None."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def register_mpi() -> None:
    """After MPI has started: records its files, which a killed job leaves, and later its end."""
    from mpi4py import MPI

    write_record("rank", {"pid": os.getpid(), "shm": sorted(reap.mpi_files(os.getpid())), "mpi": True})
    with contextlib.suppress(ValueError, TypeError):  # a thread, or a handler that is not Python's
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGHUP))  # UCX, in MPICH, has taken it for its debug mode
    forget_launcher(OF_SERVER)  # an MPI program that this rank starts is alone, and not this rank once more
    # MPI_Finalize, which the program may call, deletes the attributes of COMM_SELF first
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: _leave(Failure(0))), True)
