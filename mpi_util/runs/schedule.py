"""Runs experiments, several at once; a failed one does not stop the others, and Ctrl-C leaves no process behind."""

import contextlib
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from ..errors import MpiUtilError
from .experiment import Experiment

_OUTPUT = "output.txt"
_POLL_S = 0.05
_GRACE_S = 10.0  # time to save its work for a run that is asked to stop
_LAST_GRACE_S = 3.0  # after it was asked again
_TAIL_BYTES, _TAIL_LINES, _SHORT_TAIL = 1 << 16, 60, 15
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Result(NamedTuple):
    """The outcome of a run."""

    name: str  # with its seed
    status: str  # "done", "done before", "failed", "stopped" (by a signal to this process) or "not run"
    code: int | None  # exit status, negative for a signal; None if it was not run now, or could not be started
    seconds: float  # how long it ran
    folder: Path  # of its results


class ExperimentError(MpiUtilError):
    """Experiments have failed; the others have run. Its `results` are those of all of them."""

    results: list[Result]


class Schedule:
    """Runs experiments in order, and prints a line about each.

    If several may run at once, each prints to output.txt in its folder, and the last lines of a failed one are repeated
    here. Signals are forwarded: the first asks the runs to end, the second asks again, the third kills. After the
    first, the others follow by themselves after a while: one Ctrl-C is enough.

    A `grid` skips those whose folder holds a finished run of the same configuration, and prints a table at the end.
    """

    def __init__(self, experiments: list[Experiment], max_parallel: int = 1, grid: bool = False):
        self._results = {e: Result(e.name, "not run", None, 0.0, e.folder) for e in experiments}
        self._waiting, self._running = deque(experiments), list[Experiment]()
        self._max_parallel, self._grid = max_parallel, grid
        self._signum = 0  # which stopped them
        self._due: deque[tuple[float, int]] = deque()  # (latest time, signal to send)

    def run(self) -> list[Result]:
        """A Result for each experiment. Raises: as `ExperimentGrid.run`, but no UsageError."""
        with contextlib.ExitStack() as handlers:
            if threading.current_thread() is threading.main_thread():
                for signum in _SIGNALS:
                    if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                        handlers.callback(signal.signal, signum, signal.signal(signum, self._receive))
            while self._running or (self._waiting and not self._signum):
                while self._waiting and len(self._running) < self._max_parallel and not self._signum:
                    self._start(self._waiting.popleft())
                self._collect()
                self._forward()
                if self._running:
                    time.sleep(_POLL_S)
        results = list(self._results.values())
        if self._grid:
            print(f"\n{_table(results)}", flush=True)
        if self._signum:
            raise SystemExit(128 + self._signum)
        if failed := [result for result in results if result.status == "failed"]:
            names, one = ", ".join(result.name for result in failed), f"failed with status {failed[0].code}"
            many = f"{len(failed)} of {len(results)} experiments failed: {names}"
            error = ExperimentError(many if self._grid else f"experiment {names} {one}")
            error.results = results
            raise error
        return results

    def _start(self, experiment: Experiment) -> None:
        if self._grid and experiment.finished():
            return self._end(experiment, "done before")
        output = experiment.folder / _OUTPUT if self._max_parallel > 1 else None
        where = f", prints to {output}" if output else ""
        print(f"{experiment.name}: started on {experiment.num_cpu} process(es){where}", flush=True)
        try:
            experiment.start(output)
            self._running.append(experiment)
        except OSError as error:
            print(f"{experiment.name}: {error}", file=sys.stderr)
            self._end(experiment, "failed")

    def _collect(self) -> None:
        """Records the runs that have ended."""
        for experiment in list(self._running):
            if (code := experiment.poll()) is not None:
                self._running.remove(experiment)
                if code and not self._signum and self._max_parallel > 1:
                    print(_tail(experiment), flush=True)
                self._end(experiment, "done" if not code else "stopped" if self._signum else "failed", code)

    def _end(self, experiment: Experiment, status: str, code: int | None = None) -> None:
        result = Result(experiment.name, status, code, experiment.seconds, experiment.folder)
        self._results[experiment] = result
        after = f" after {result.seconds:.1f} s" if result.seconds else f", in {result.folder}"
        print(f"{experiment.name}: {_status(result)}{after}", flush=True)

    def _receive(self, signum: int, _frame: object) -> None:
        if not self._signum:
            self._signum, last = signum, time.monotonic() + _GRACE_S
            self._due.extend([(0.0, signum), (last, signum), (last + _LAST_GRACE_S, signal.SIGKILL)])
        elif self._due:
            self._due[0] = 0.0, self._due[0][1]

    def _forward(self) -> None:
        """Sends the signal that is due."""
        if self._due and time.monotonic() >= self._due[0][0]:
            signum = self._due.popleft()[1]
            for experiment in self._running:
                experiment.signal(signum)


def _table(results: list[Result]) -> str:
    """The results as a table: name, status, seconds, folder."""
    rows = [("run", "status", "seconds", "folder")]
    rows += [(r.name, _status(r), f"{r.seconds:.1f}" if r.seconds else "", str(r.folder)) for r in results]
    a, b, c = (max(len(row[i]) for row in rows) for i in range(3))
    return "\n".join(f"{name:<{a}}  {status:<{b}}  {seconds:>{c}}  {folder}" for name, status, seconds, folder in rows)


def _status(result: Result) -> str:
    return f"failed ({result.code})" if result.status == "failed" and result.code else result.status


def _tail(experiment: Experiment) -> str:
    """The last lines that a run printed, from the traceback on if there is one, each with the run's name."""
    with open(experiment.folder / _OUTPUT, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith("Traceback")), default=len(lines) - _SHORT_TAIL)
    return "\n".join(f"{experiment.name} | {line}" for line in lines[max(0, last - 1, len(lines) - _TAIL_LINES) :])
