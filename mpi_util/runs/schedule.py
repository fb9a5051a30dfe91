"""Runs experiments, some at a time; a failed one does not keep the others from running, and Ctrl-C leaves nothing."""

import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, NamedTuple

from .experiment import Experiment

OUTPUT = "output.txt"
_LOOK_S = 0.05
_PATIENCE_S = 10.0  # a run that is told to stop has this long to save what it has done
_LAST_PATIENCE_S = 3.0  # after it was told twice
_TAIL_BYTES, _TAIL_LINES, _SHORT_TAIL = 1 << 16, 60, 15
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Result(NamedTuple):
    """What became of a run.

    Attributes:
        name: of the run, with its seed.
        status: "done", "done before", "failed", "stopped" (by a signal to this process) or "not run".
        code: its exit status, negative for a signal; None if it was not run now, or could not be started.
        seconds: that it took.
        folder: its results.
    """

    name: str
    status: str
    code: int | None
    seconds: float
    folder: Path


def run_all(
    experiments: list[Experiment], max_parallel: int = 1, skip_finished: bool = False
) -> tuple[list[Result], int]:
    """Runs the experiments in their order, and prints a line about each.

    One at a time, they print to our output. Several at a time, each prints to output.txt in its folder, and what a
    failed one printed last is repeated here.

    Args:
        max_parallel: number of runs at a time.
        skip_finished: leaves out those whose folder holds a finished run of the same configuration.

    Returns:
        (a Result for each experiment, the signal that stopped them or 0).
    """
    results = {e: Result(e.name, "not run", None, 0.0, e.folder) for e in experiments}
    waiting = deque(experiments)
    running: dict[Experiment, IO[bytes] | None] = {}  # and where it prints

    def end(experiment: Experiment, status: str, code: int | None = None) -> None:
        results[experiment] = Result(experiment.name, status, code, experiment.seconds, experiment.folder)
        print(f"{experiment.name}: {_ending(results[experiment])}", flush=True)

    with _Stop() as stop:
        while running or (waiting and not stop.signum):
            while waiting and len(running) < max_parallel and not stop.signum:
                experiment = waiting.popleft()
                if skip_finished and experiment.finished():
                    end(experiment, "done before")
                    continue
                try:
                    running[experiment] = _start(experiment, max_parallel > 1)
                except OSError as error:
                    print(f"{experiment.name}: {error}", file=sys.stderr)
                    end(experiment, "failed")
            for experiment, output in list(running.items()):
                if (code := experiment.poll()) is not None:
                    del running[experiment]
                    if output:
                        output.close()
                        if code and not stop.signum:
                            print(_tail(experiment), flush=True)
                    end(experiment, "done" if not code else "stopped" if stop.signum else "failed", code)
            stop.pass_on(list(running))
            if running:
                time.sleep(_LOOK_S)
    return list(results.values()), stop.signum


def table(results: list[Result]) -> str:
    """The results as a table: name, status, seconds, folder."""
    rows = [("run", "status", "seconds", "folder")]
    rows += [(r.name, _status(r), f"{r.seconds:.1f}" if r.seconds else "", str(r.folder)) for r in results]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows
    )


def _status(result: Result) -> str:
    return f"failed ({result.code})" if result.status == "failed" and result.code else result.status


def _ending(result: Result) -> str:
    return _status(result) + (f" after {result.seconds:.1f} s" if result.seconds else f", in {result.folder}")


def _start(experiment: Experiment, apart: bool) -> IO[bytes] | None:
    """Starts a run. Returns its output file, to be closed when it has ended, if it is to print `apart`."""
    where = f", prints to {experiment.folder / OUTPUT}" if apart else ""
    print(f"{experiment.name}: started on {experiment.num_cpu} process(es){where}", flush=True)
    if not apart:
        experiment.start()
        return None
    experiment.folder.mkdir(parents=True, exist_ok=True)
    output = open(experiment.folder / OUTPUT, "ab")  # noqa: SIM115
    experiment.start(output)
    return output


def _tail(experiment: Experiment) -> str:
    """What a run printed last, from the traceback on if there is one, each line with the run's name."""
    with open(experiment.folder / OUTPUT, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith("Traceback")), default=len(lines) - _SHORT_TAIL)
    return "\n".join(f"{experiment.name} | {line}" for line in lines[max(0, last - 1, len(lines) - _TAIL_LINES) :])


class _Stop:
    """Passes signals on to the runs: the first asks them to end, the second asks again, the third kills.

    The first two are repeated by themselves after a while, so one Ctrl-C is enough.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._due: deque[tuple[float, int]] = deque()  # (when at the latest, what to send)
        self._hurry = False

    def __enter__(self) -> "_Stop":
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                    self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, _frame: object) -> None:
        if not self.signum:
            self.signum, now = signum, time.monotonic()
            last = now + _PATIENCE_S
            self._due.extend([(now, signum), (last, signum), (last + _LAST_PATIENCE_S, signal.SIGKILL)])
        else:
            self._hurry = True

    def pass_on(self, running: list[Experiment]) -> None:
        """Sends what is due."""
        if self._due and (self._hurry or time.monotonic() >= self._due[0][0]):
            self._hurry = False
            signum = self._due.popleft()[1]
            for experiment in running:
                experiment.signal(signum)
