"""Watches, in the waiting parent, that all ranks come to mpi_fork: until then no watchdog of theirs can run.

A rank may hang above mpi_fork (an import from a network file system), be stopped, or never return from MPI_Init; the
others wait for it there.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..host import reap
from ..ranks.failure import print_line
from ..ranks.runner import STACK_SIGNAL
from ..ranks.state import state
from ..ranks.watchdog import Watchdog

_LOOK_S, _ANSWER_S = 1.0, 0.5
_WORDS_S = 2.0  # a launcher that has said something may start no rank for so long
_STAGES = "not started", "above mpi_fork", "in MPI_Init, or waiting there for others"


class Arrivals:
    """Args: n_ranks: of the job. record: gives that of a rank. said: what the launcher has said that is not shown."""

    def __init__(self, n_ranks: int, folder: Path, record: Callable[[int], dict[str, Any]], said: Callable[[], str]):
        self._folder, self._job, self._record, self._said = folder, str(folder), record, said
        self._waiting = set(range(n_ranks))  # those that have not come
        self._last_step = "mpi" if n_ranks > 1 else "shm"  # of a record; a single rank starts no MPI
        self._none_yet = True  # no rank has begun
        self._looked_at, self._waited = time.monotonic(), 0.0  # without the time for which this process was stopped
        self._due = state(Watchdog).after_s or float("inf")

    def look(self) -> str:
        """To be called often. Returns: why the job ends, where the watchdog is to end it; else ""."""
        now = time.monotonic()
        if not self._waiting or now - self._looked_at < _LOOK_S:
            return ""
        self._waited += min(now - self._looked_at, 2 * _LOOK_S)
        self._looked_at, waited = now, self._waited
        records = {rank: self._record(rank) for rank in self._waiting}
        self._waiting = {rank for rank, record in records.items() if self._last_step not in record}
        self._none_yet = self._none_yet and not any(records.values())
        if self._none_yet and waited > _WORDS_S and (said := self._said()):
            print_line(said.strip("\n"))
        if not self._waiting or waited < self._due:
            return ""
        return self._report(waited, {rank: records[rank] for rank in sorted(self._waiting)})

    def _report(self, waited: float, records: dict[int, dict[str, Any]]) -> str:
        self._due = 2 * waited
        stages = {rank: bool(record) + ("shm" in record) for rank, record in records.items()}
        missing = {rank: records[rank] for rank, stage in stages.items() if stage == min(stages.values())}
        own = [record["pid"] for record in missing.values() if record and reap.belongs(record["pid"], self._job)]
        stopped = [f"process {pid} is stopped, `kill -CONT {pid}` continues it" for pid in filter(reap.is_stopped, own)]
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        what = "; ".join([f"{names}: {_STAGES[min(stages.values())]}", *stopped])
        if state(Watchdog).kill:
            return f"the watchdog ends the job after {waited:.3g} s: {what}"
        stacks = [f"stack of rank {rank}:\n{text}" for rank, text in self._stacks(missing).items() if text]
        print_line("\n".join([
            f"mpi_util: after {waited:.3g} s not all ranks have come: {what}. This is a report, not an error. The "
            f"next one is due after {self._due:.3g} s (MPI_UTIL_WATCHDOG; 0: never)", *stacks,
        ]))  # fmt: skip
        return ""

    def _stacks(self, records: dict[int, dict[str, Any]]) -> dict[int, str]:
        """What Python is doing in these ranks, where it answers."""
        for record in filter(None, records.values()):
            if reap.belongs(record["pid"], self._job) and reap.catches(record["pid"], STACK_SIGNAL):
                reap.send(record["pid"], STACK_SIGNAL)
        time.sleep(_ANSWER_S)
        found = {}
        for rank in records:
            path = self._folder / f"stack-{rank}"
            found[rank] = path.read_text(errors="replace").rstrip() if path.exists() else ""
            if found[rank]:
                os.truncate(path, 0)
        return found
