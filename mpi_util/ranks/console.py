"""Printing when many ranks share one terminal, in each rank's process: lines, rates, times, phases, writers."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar, cast

from ..errors import UsageError
from . import failure
from .identity import nworkers, rank
from .state import state

Made = TypeVar("Made")


class _Printed(set[str]):
    """The lines that this process has printed."""


def print0(*args: Any, **kwargs: Any) -> None:
    """`print` on rank 0, nothing elsewhere. Not collective."""
    if rank() == 0:
        print(*args, **kwargs)


def print_once(text: str) -> None:
    """Prints a line to stderr, once for each text. Not collective."""
    if text not in (printed := state(_Printed)):
        printed.add(text)
        failure.print_line(text)


def print0_once(text: str) -> None:
    """`print_once` on rank 0, nothing elsewhere."""
    if rank() == 0:
        print_once(text)


def msg(*args: Any, sep: str = " ") -> None:
    """Prints one whole line tagged with the rank, such as `[rank 3] ready`. Not collective."""
    width, shown = len(str(nworkers() - 1)), state(failure.FailureState).shown
    print(f"[rank {rank():>{width}}] {sep.join(map(str, args))}\n", end="", flush=True, file=shown)


class _Marked:
    """`write` of a stream, each line of which begins with a tag, and goes into a file too. Args: file: None: none."""

    def __init__(self, write: Callable[[str], int], tag: str, file: int | None):
        self._write, self._tag, self._file, self._begins = write, tag, file, True

    def __call__(self, text: str) -> int:
        try:
            os.write(self._file, text.encode(errors="replace")) if self._file is not None else None
        except OSError as error:  # a full disk
            self._file = None
            print_once(f"mpi_util: log_dir: {error}; nothing more is written there")
        marked = re.sub(r"(?<=\n)(?=.)|(?<=\r)(?=[^\n])", self._tag, text, flags=re.DOTALL)  # \r: of a progress bar
        self._write(self._tag * (self._begins and text != "") + marked)
        self._begins = text.endswith(("\n", "\r")) if text else self._begins
        return len(text)


def mark_lines(tag: str, folder: str | os.PathLike[str] | None) -> None:
    """From here on lines that Python code prints begin with a tag, and are in a file of the folder. LaunchError: no."""
    file = failure.opened(os.path.join(folder, f"rank-{rank()}.txt")) if folder else None
    for stream in (sys.stdout, sys.stderr):  # not in place of it: a handler of logging may have it already
        stream.write = _Marked(stream.write, tag, file)  # type: ignore[method-assign]


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


def on_rank0(make: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
    """`make(*args, **kwargs)` on rank 0; on the others a stand-in on which any call does nothing. Not collective.

        writer = mpi_util.on_rank0(SummaryWriter, "runs/mine")

    The stand-in is false. Its attributes, its items and what its calls return are the stand-in again. It can be set,
    compared, formatted, copied and used in `with`; a loop over it is refused. It cannot be gathered or pickled.

    Raises: UsageError: `make` cannot be called.
    """
    if not callable(make):
        raise UsageError(f'on_rank0 takes what makes it, as in on_rank0(SummaryWriter, "runs/x"); got {make!r:.99}')
    return make(*args, **kwargs) if rank() == 0 else cast(Made, _OnRank0())


class _OnRank0:
    def _itself(self, *_: Any, **__: Any) -> Any:
        return self

    def _false(self, *_: Any) -> Any:
        return False

    __call__ = __getitem__ = __enter__ = __iadd__ = __isub__ = __copy__ = __deepcopy__ = _itself
    __setattr__ = __delattr__ = __setitem__ = __delitem__ = __exit__ = _false
    __contains__ = __len__ = __lt__ = __le__ = __gt__ = __ge__ = _false

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # by which Python and NumPy ask what it is
            raise AttributeError(name)
        return self

    def __iter__(self) -> NoReturn:
        fix = "loop over range(n), or over tqdm(range(n), disable=mpi_util.rank > 0)"
        raise UsageError(f"a loop over what on_rank0 has made would end at once on this rank; {fix}")

    def __repr__(self, *_: Any) -> str:
        return "<on rank 0 alone>"

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("what on_rank0 has made is on rank 0 alone, and can be neither gathered nor pickled")

    __format__, __reduce_ex__ = __repr__, __array__
    dtype = shape = property(_itself)  # by which it is taken for an array, and __array__ tells what it is
