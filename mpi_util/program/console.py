"""Printing when many ranks share one terminal."""

import sys
from typing import Any

from ..host.process import process
from ..launch.identity import nworkers, rank


class _Printed(set[str]):
    """The lines that this process has printed."""


def print0(*args: Any, **kwargs: Any) -> None:
    """`print` on rank 0, nothing elsewhere. Not collective."""
    if rank() == 0:
        print(*args, **kwargs)


def print0_once(text: str) -> None:
    """Prints a line on rank 0, to stderr, the first time that it is given."""
    printed = process.of(_Printed)
    if rank() == 0 and text not in printed:
        printed.add(text)
        print(text, file=sys.stderr, flush=True)


def msg(*args: Any, sep: str = " ") -> None:
    """Prints one whole line tagged with the rank, such as `[rank 3] ready`. Not collective."""
    width = len(str(nworkers() - 1))
    print(f"[rank {rank():>{width}}] {sep.join(map(str, args))}\n", end="", flush=True)
