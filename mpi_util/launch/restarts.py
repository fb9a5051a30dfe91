"""Starts a failed job again, in the waiting parent (`run`); what a rank saves for the next start (`saved`)."""

import json
import os
from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from ..ranks.failure import print_line, write_record
from ..ranks.identity import first_number
from .verdict import Verdict

RESTARTS, _SAVED = "MPI_UTIL_RESTARTS", "MPI_UTIL_SAVED"


def restarts() -> int:
    """How often mpi_fork has started this program again after a failure."""
    return first_number((RESTARTS,), 0)


def last_saved() -> Any:
    """What `saved` was given last before the restart; None at the first start, or if nothing was saved."""
    return json.loads(os.environ.get(_SAVED, "null"))


def saved(note: Any) -> None:
    """Gives `mpi_fork(n, max_restarts=...)` a note from which the program can resume: see `mpi_util.last_saved`.

    Call it on rank 0 after each checkpoint. Not collective; elsewhere, and without max_restarts, it has no effect. A
    failure that repeats itself while the note stays the same ends the job.

    Args:
        note: what JSON can hold, such as {"path": "policy.npz", "iteration": 20}; up to 100 KB. NumPy's numbers and
            arrays, and paths, become numbers, lists and text; all keys become text.

    Raises UsageError: JSON cannot hold it.
    """

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else os.fspath(value)

    try:
        write_record("saved", json.loads(json.dumps(note, default=plain)))
    except (TypeError, ValueError) as error:
        raise UsageError(f"saved: the note must be what JSON can hold: {error}") from None


def run(start: Callable[[dict[str, str]], tuple[Verdict, str]], max_restarts: int) -> int:
    """Runs the job, and again after failures; returns the status of the last start.

    Args: start: runs it once, given more of its environment; returns how it ended, and what it has saved.
    """
    last, note, restart = ("", ""), "null", 0
    while True:
        verdict, saved = start({RESTARTS: str(restart), _SAVED: note})
        note, restart = saved or note, restart + 1
        then = ""
        if verdict.cause and max_restarts:
            then = f"; restart {restart} of {max_restarts}"
            if restart > max_restarts:
                then = f"; not restarted: all {max_restarts} restarts are used"
            if (verdict.cause, note) == last:
                then = "; not restarted: it has failed in the same way twice, without progress"
        for text in filter(None, (verdict.last_words.strip("\n"), verdict.line and verdict.line + then)):
            print_line(text)
        if not then.startswith("; restart"):
            return verdict.status
        last = verdict.cause, note
