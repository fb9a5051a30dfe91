"""Starts a failed job again, in the waiting parent, with the note that the last start has saved."""

from collections.abc import Callable

from ..ranks.failure import print_line
from ..ranks.records import RESTARTS, SAVED
from .verdict import Verdict


def run(start: Callable[[dict[str, str]], tuple[Verdict, str]], max_restarts: int) -> int:
    """Runs the job by `start`, which is given more variables, and again after failures; returns the last status."""
    last, note, restart = ("", ""), "null", 0
    while True:
        verdict, saved = start({RESTARTS: str(restart), SAVED: note})
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
