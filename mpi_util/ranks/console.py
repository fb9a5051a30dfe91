"""Printing when many ranks share one terminal, in each rank's process: lines, rates, times, and phases."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from . import failure
from .identity import nworkers, rank
from .state import state


class _Printed(set[str]):
    """The lines that this process has printed."""


def print0(*args: Any, **kwargs: Any) -> None:
    """`print` on rank 0, nothing elsewhere. Not collective."""
    if rank() == 0:
        print(*args, **kwargs)


def print0_once(text: str) -> None:
    """Prints a line to stderr on rank 0, once for each text. Not collective."""
    printed = state(_Printed)
    if rank() == 0 and text not in printed:
        printed.add(text)
        print(text, file=sys.stderr, flush=True)


def msg(*args: Any, sep: str = " ") -> None:
    """Prints one whole line tagged with the rank, such as `[rank 3] ready`. Not collective."""
    width = len(str(nworkers() - 1))
    print(f"[rank {rank():>{width}}] {sep.join(map(str, args))}\n", end="", flush=True)


class _Last:
    """Times of the last calls of `steps_sec`, of `timeit`, and of `timeit` with a line of dashes; the steps so far."""

    steps_at = timed_at = looped_at = time.perf_counter()
    steps = 0


def steps_sec(n_steps: int) -> float:
    """Prints on rank 0, and returns, the rate since the last call, in steps per second. Not collective.

    Args: n_steps: steps made since the last call (since the import, at the first).
    """
    now, last = time.perf_counter(), state(_Last)
    rate = n_steps / max(now - last.steps_at, 1e-9)
    last.steps_at, last.steps = now, last.steps + n_steps
    print0(f"{rate:.0f} steps/s, {last.steps} steps in all")
    return rate


def timeit(label: str) -> float:
    """Prints on rank 0, and returns, the seconds since the last call. Not collective.

    Args: label: printed too; one of dashes alone, as at the end of a loop: since the last such line.
    """
    now, last = time.perf_counter(), state(_Last)
    elapsed, last.timed_at = now - last.timed_at, now
    if label and not label.strip("-"):
        elapsed, last.looped_at = now - last.looped_at, now
    print0(f"{label}: {elapsed:.6f} s")
    return elapsed


class Phases:
    """Seconds spent in each phase of an iteration; a failure inside a phase is reported with the phase's name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with failure.during(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds so far, and a new start."""
        taken, self.seconds = self.seconds, {}
        return taken
