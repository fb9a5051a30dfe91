"""Moves bytes between the leaders of machines, in the middle of a call, and adds them up; in the process of each rank.

All is non-blocking MPI, tested and slept between (`wait_for`), so a leader that waits takes no core.
benchmarks/leaders.py measures why broadcasts are MPI's own, and why rows come in parts that rank 0 copies.
"""

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives.agreement import SECOND
from ..collectives.messages import DATA, LEAVE, opened
from ..collectives.reduce import Reduction, add_in_messages
from ..errors import MpiUtilError
from ..host.segments import align
from ..ranks import failure
from ..ranks.state import state

if TYPE_CHECKING:
    from ..collectives.channel import Piece
    from .channel import ClusterChannel

_PART_BYTES = 1 << 22
_AHEAD = 4  # parts for which rank 0 has memory at once
_BROADCAST_BYTES = 1 << 30  # at once: MPI counts to 2**31
_SPIN_S = 20e-3  # MPI moves what comes only while it is tested
_ALONG, _TOGETHER = 1 << 18, 1 << 20  # bytes of a rank, of all, that go along with an agreement
_SUM_PART_BYTES, _SUM_PARTS = 1 << 18, 64  # small: the last machine waits for one from each before it; but not many
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
    """Waits until these are done. Raises why the bytes will not come: another rank's error in this call, or its end."""
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


def add_up(channel: "ClusterChannel", reduction: Reduction) -> Any:
    """Collective: `reduce.add_up` over machines, for the bits of one machine.

    The ranks of a machine write their arrays into memory that they share. The sum then goes from machine to machine in
    parts; each leader adds its ranks' arrays and sends it on. The last one broadcasts the results meanwhile, so a link
    carries every byte once in each direction, however many ranks there are.
    """
    most = min(_ALONG, _TOGETHER // channel.size)
    if (total := add_in_messages(channel, reduction, most=most)) is not None:
        return total
    here, size = channel.here, align(reduction.layout.nbytes)
    nbytes = (len(here) + 1) * size
    if channel.leads:
        block, address = channel.lease(nbytes, channel.below)
        for k in channel.below:
            channel.messages.send(k, address)
        shared = address is not None or not channel.below
    else:
        address = channel.messages.receive(channel.above, reduction.op)
        shared = address is not None
        block = np.frombuffer(channel.pool.map(address), np.uint8) if address else np.empty(nbytes, np.uint8)
    *rows, result = block[:nbytes].reshape(-1, size)

    def write() -> bool:
        reduction.write(rows[here.index(channel.rank)])
        return shared

    if not channel.agree(reduction.op + SECOND, write, lambda shared: [all(shared)] * channel.size):
        return add_in_messages(channel, reduction, 2 * SECOND)
    if channel.leads:
        with channel.reported(reduction.op):
            _add_up(channel, reduction, dict(zip(here, rows)), result)
        for k in channel.below:
            channel.messages.send(k, None)
    else:
        channel.messages.receive(channel.above, reduction.op)
    return result


def _parts_of_sum(reduction: Reduction, row: np.ndarray) -> list[np.ndarray]:
    """The arrays of a row, in which those of one dtype are one, in parts."""
    found = []
    for run in reduction.layout.runs(row):
        step = max(1, max(_SUM_PART_BYTES, reduction.layout.nbytes // _SUM_PARTS) // run.itemsize)
        found += [run[start : start + step] for start in range(0, len(run), step)]
    return found


def _add_up(channel: "ClusterChannel", reduction: Reduction, rows: dict[int, np.ndarray], result: np.ndarray) -> None:
    """What one leader does. Args: rows: of each rank of this machine; they are overwritten. result: gets the sum."""
    tag, requests = tag_of_call(channel), list[Any]()
    parts_of = {k: _parts_of_sum(reduction, row) for k, row in rows.items()}
    results = _parts_of_sum(reduction, result)
    # the sum goes along these: ranks of one machine whose numbers follow each other, and their leader
    neighbours = itertools.groupby(range(channel.size), channel.machine.__getitem__)
    hops = [(leader, [*ranks]) for leader, ranks in neighbours]
    own = [j for j, (leader, _) in enumerate(hops) if leader == channel.rank]
    tasks = [*itertools.product(range(len(results)), own)]  # (part, hop), in the order of all leaders
    last = hops[-1][0]
    root = channel.leaders.index(last)

    with kept_on_failure(channel, requests):
        if channel.rank != last:
            requests += [channel.between.Ibcast(part, root) for part in results]
        so_far = {(p, j): np.empty_like(results[p]) for p, j in tasks if j}
        coming = {(p, j): channel.comm.Irecv(part, hops[j - 1][0], tag) for (p, j), part in so_far.items()}
        requests += coming.values()
        for p, j in tasks:
            total, *others = (parts_of[k][p] for k in hops[j][1])
            if j:
                wait_for(channel, [coming[p, j]])
                np.add(so_far[p, j], total, out=total)
            for row in others:
                np.add(total, row, out=total)
            if j + 1 < len(hops):
                requests.append(channel.comm.Isend(total, hops[j + 1][0], tag))
                continue
            if reduction.divisor:
                np.divide(total, reduction.divisor, results[p])
            else:
                np.copyto(results[p], total)
            requests.append(channel.between.Ibcast(results[p], root))
        wait_for(channel, requests)
