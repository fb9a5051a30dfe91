"""How the ranks of a channel end: each says so to rank 0, rank 0 to all, and none leaves before it knows of the others.

A rank that would end silently could not be told from a slow one, and its MPI_Finalize would wait for the others with a
busy core.
"""

import time

from ..launch import failure
from . import messages as kinds
from .messages import Messages

_INTERRUPTED_S = 0.5


def announce(messages: Messages, status: int) -> None:
    """Sends the others this rank's exit status: it ends."""
    for k in _others(messages):
        messages.post(k, kinds.LEAVE, status)


def wait_for_others(messages: Messages, end: float | None) -> bool:
    """Waits until the others have ended too. If they cannot, as one waits for this rank, rank 0 ends the job.

    Returns:
        False if not all have ended at time `end` (of time.perf_counter; None: wait for ever).
    """
    return all(_wait_for(messages, k, end) for k in _others(messages))


def _others(messages: Messages) -> range:
    return range(1) if messages.rank else range(1, messages.size)


def _wait_for(messages: Messages, k: int, end: float | None) -> bool:
    until, op = end, ""
    while k not in messages.ended:
        message = messages.next(k, until)
        if message is None and op:
            failure.fail(
                f"mpi_util: rank 0 has ended while rank {k} waits for it in {op}; all ranks must leave a loop "
                "together, such as by `if mpi_util.all_sum(stop): break`"
            )
        if message is None:
            return False
        kind, payload = message
        if kind == kinds.LEAVE:
            messages.ended[k] = payload
        elif kind in (kinds.CALL, kinds.WAITING) and payload[1] > messages.calls and messages.rank == 0 and not end:
            # it waits for this rank; or its call was interrupted too, by a Ctrl-C, and then its leave follows
            op = f"{payload[0].removesuffix(kinds.WAITS)} at {payload[2]}"
            until = time.perf_counter() + _INTERRUPTED_S
    return True
