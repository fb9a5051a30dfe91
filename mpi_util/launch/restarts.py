"""Starts a failed job again, and gives the next start what the last one has saved."""

from collections.abc import Callable

from ..cluster.hosts import Hosts
from ..errors import HostError
from ..ranks.failure import print_line
from ..ranks.records import RESTARTS, SAVED
from .verdict import Verdict


def run(
    start: Callable[[dict[str, str], Hosts], tuple[Verdict, str]], find_hosts: Callable[[], Hosts], max_restarts: int
) -> int:
    """Runs the job, and again after failures; returns the status of the last start.

    Args:
        start: runs it once, given more of its environment, and the hosts; returns how it ended, and what it has saved.
        find_hosts: asked before each start; after the first one, those that cannot be used are left out.
    """
    last, note, restart = ("", ""), "null", 0
    while True:
        restart += 1
        more, hosts = {RESTARTS: str(restart - 1), SAVED: note}, find_hosts()
        try:
            verdict, saved = start(more, hosts)
        except HostError as error:
            if restart == 1 or not (hosts := hosts.without(set(error.hosts))).slots:
                raise
            for name, what in error.hosts.items():
                print_line(f"mpi_util: restarting without host {name}: {what}")
            verdict, saved = start(more, hosts)
        note = saved or note
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
