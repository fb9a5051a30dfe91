"""What a rank writes for mpi_fork's parent, in the rank's process: small files in the job's folder, read over there."""

import contextlib
import json
import math
import os
import tempfile
from typing import Any, NamedTuple

from ..errors import UsageError
from .identity import Role, number_in
from .state import state

# Variables that the parent sets for the ranks; DEPTH: of jobs within jobs; STDIN: what rank 0 opens as its own
RESTARTS, SAVED, DEPTH, STDIN = "MPI_UTIL_RESTARTS", "MPI_UTIL_SAVED", "MPI_UTIL_DEPTH", "MPI_UTIL_STDIN"
_LONGEST_NOTE = 100_000  # characters


class Failure(NamedTuple):
    """Why a rank ends, as it records it in failed-<k> before it does, or as the parent finds out."""

    status: int = 1  # with which it ends; negative: a signal; 0: without MPI_Finalize
    reason: str = ""  # in one line
    place: str = ""  # in the program: error, line and phase, the same where the failure is the same
    reported: bool = False  # the rank has printed the reason, in a line of its own
    in_order: bool = False  # all ranks have agreed to end with it, and need no help
    time: float = math.inf  # of time.time()
    who: str = ""


def write_record(kind: str, content: Any) -> None:
    """Writes {kind}-{rank}, whole or not at all, into the job's folder. Does nothing without a parent."""
    role = state(Role)
    with contextlib.suppress(OSError):
        if role.job:
            with tempfile.NamedTemporaryFile("w", dir=role.job, prefix=".", delete=False) as file:
                json.dump(content, file)
            os.replace(file.name, os.path.join(role.job, f"{kind}-{role.rank}"))


def restarts() -> int:
    """How often mpi_fork has started this program again after a failure."""
    return number_in(RESTARTS)


def last_saved() -> Any:
    """What `saved` was given last before the restart; None at the first start, or if nothing was saved."""
    return json.loads(os.environ.get(SAVED, "null"))


def saved(note: Any) -> None:
    """Tells `mpi_fork(n, max_restarts=...)` from what this program can continue: see `mpi_util.last_saved`.

    Call it on rank 0 after each checkpoint. Not collective; on other ranks, and without max_restarts, it has no effect.
    A failure that repeats itself while the note stays the same ends the job.

    Args:
        note: what JSON can hold, such as {"path": "policy.npz", "iteration": 20}; up to 100 KB. NumPy's numbers and
            arrays, and paths, become numbers, lists and text, paths absolute; all keys become text.

    Raises:
        UsageError: JSON cannot hold it.
    """

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else os.path.abspath(os.fspath(value))

    try:
        text = json.dumps(note, default=plain)
        if len(text) > _LONGEST_NOTE:  # the next start gets it in its environment, where Linux has room for 128 KB
            raise ValueError(f"it has {len(text):,} characters, and {_LONGEST_NOTE:,} is the most")
        write_record("saved", json.loads(text))
    except (TypeError, ValueError) as error:
        raise UsageError(f"saved: the note must be what JSON can hold: {error}") from None
