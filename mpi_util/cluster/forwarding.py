"""Moves bytes between the leaders of machines, in the middle of a call; it runs in the processes of the leaders.

All is non-blocking MPI, tested and slept between, so a leader that waits takes no core. Meanwhile it looks for messages
that say why the bytes will not come: an error of another rank in the same call, or the end of a rank.

benchmarks/leaders.py measures why broadcasts are MPI's own, and why rows come in parts that rank 0 copies.
"""

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives.messages import DATA, LEAVE, opened
from ..errors import MpiUtilError
from ..ranks import failure
from ..ranks.state import state

if TYPE_CHECKING:
    from ..collectives.channel import Piece
    from .channel import ClusterChannel

_PART_BYTES = 1 << 22
_AHEAD = 4  # parts for which rank 0 has memory at once
_BROADCAST_BYTES = 1 << 30  # at once: MPI counts to 2**31
_SPIN_S = 20e-3  # MPI moves what comes only while it is tested
_FIRST_TAG, _TAGS = 8, 1 << 14  # their sum stays below the 32767 that every MPI has


@contextlib.contextmanager
def kept_on_failure(channel: "ClusterChannel", requests: Collection[Any], spoils: bool = True) -> Iterator[None]:
    """If the block fails, the requests that it has begun are kept, and with them their memory, which MPI may still use.

    Args: spoils: they are collective: leaders may be out of step then, so later calls raise an error.
    """
    try:
        yield
    except BaseException:
        channel.messages.leaving.extend(requests)
        if spoils:
            channel.unusable = "a call between machines was interrupted; the program must be started again"
        raise


def tag_of_call(channel: "ClusterChannel") -> int:
    """A tag of this call: what a failed one has left must not arrive in this one."""
    return _FIRST_TAG + channel.messages.calls % _TAGS


def wait_for(channel: "ClusterChannel", requests: Sequence[Any]) -> None:
    """Waits until these are done. Raises what another rank, which would have to do its part, reports meanwhile."""

    messages = channel.messages

    def look_and_sleep(seconds: float) -> bool:
        messages.poll()
        for source, queue in messages.inbox.items():
            for kind, payload in [opened(message) for message in queue if message[0] in (DATA, LEAVE)]:
                if kind == DATA and payload[0] == messages.calls and isinstance(payload[1], MpiUtilError):
                    raise payload[1]
                if kind == LEAVE and payload[0]:  # it has ended in a failure
                    messages.ended[source] = payload
                    raise messages.left_error(state(failure.FailureState).call, source)
        time.sleep(seconds)
        return False

    for request in requests:
        messages.wait(request.Test, look_and_sleep, spin_s=_SPIN_S)


def broadcast(channel: "ClusterChannel", block: np.ndarray) -> None:
    """Collective of the leaders: rank 0's block, uint8, in that of each."""
    requests: list[Any] = []
    with kept_on_failure(channel, requests):
        for start in range(0, len(block), _BROADCAST_BYTES):
            requests.append(channel.between.Ibcast(block[start : start + _BROADCAST_BYTES]))
        wait_for(channel, requests)


def send(channel: "ClusterChannel", block: np.ndarray) -> None:
    """A leader sends rank 0 a block, uint8."""
    tag, starts = tag_of_call(channel), range(0, len(block), _PART_BYTES)
    requests = [channel.comm.Isend(block[start : start + _PART_BYTES], 0, tag) for start in starts]
    with kept_on_failure(channel, requests, False):
        wait_for(channel, requests)


@contextlib.contextmanager
def receiving(channel: "ClusterChannel", block: np.ndarray, pieces: Mapping[int, Sequence["Piece"]]) -> Iterator[None]:
    """Rank 0 receives what other leaders `send`, in parts from each in turn. What lies apart is copied to its places.

    The first parts may come while the `with` block runs.

    Args: block: uint8; rank 0's. pieces: by leader, where in it the bytes of its block belong, in their order.
    """
    tag, streams = tag_of_call(channel), [[(leader, part) for part in _in_parts(own)] for leader, own in pieces.items()]
    ahead = (each for turn in itertools.zip_longest(*streams) for each in turn if each)
    coming: deque[tuple[Any, np.ndarray, list[Piece]]] = deque()  # (request, its memory, where its bytes belong)

    def receive_next(memory: np.ndarray) -> None:
        for leader, part in itertools.islice(ahead, 1):
            (start, n), *more = part
            target = memory[: sum(n for _, n in part)] if more else block[start : start + n]
            coming.append((channel.comm.Irecv(target, leader, tag), memory, part))

    with kept_on_failure(channel, coming, False):
        for _ in range(_AHEAD):
            receive_next(np.empty(_PART_BYTES, np.uint8))
        yield
        while coming:
            request, memory, part = coming[0]
            wait_for(channel, [request])
            at = 0
            for start, n in part if len(part) > 1 else ():
                block[start : start + n] = memory[at : at + n]
                at += n
            coming.popleft()
            receive_next(memory)


def _in_parts(pieces: Sequence["Piece"]) -> list[list["Piece"]]:
    """The pieces in parts of `_PART_BYTES`, the last one of what is left; a piece may lie in several."""
    parts, at = list[list["Piece"]](), 0
    for start, n in pieces:
        while n:
            if at % _PART_BYTES == 0:
                parts.append([])
            taken = min(n, _PART_BYTES - at % _PART_BYTES)
            parts[-1].append((start, taken))
            start, n, at = start + taken, n - taken, at + taken
    return parts
