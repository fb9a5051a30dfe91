"""Memory that ranks of a machine share for a while (`lease`), and bytes of rank 0's for all ranks (`broadcast`).

Rank 0 fills one block, and every rank takes from it; between machines the block travels along a tree of their leaders.
This begins with `Channel.agree`, so all ranks are there and know the plan.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import RankLeftError
from ..host.segments import ALIGN, STORES_IN_ORDER, Ticket, private
from ..program.console import print0_once
from .channel import Channel

_FIRST_BULK_TAG, _BULK_TAGS = 8, 1 << 13  # twice as many stay below the 32767 that every MPI has
_STREAM_BYTES = 1 << 22
_BULK_SPIN_S = 5e-3  # a part takes less, as a rule; and some MPI moves at each test only a little of it
_PART_BYTES = 1 << 22  # forwarded while the next part comes
_FAILED = -1


class Place(NamedTuple):
    """Rank 0's answer: where this rank's bytes go, or come from."""

    ticket: Ticket | None  # of rank 0's segment; None: the bytes go through MPI
    live: frozenset[int]  # rank 0's segments that still exist
    plan: Any  # of the caller


def lease(channel: Channel, nbytes: int) -> tuple[np.ndarray, Ticket | None]:
    """A leader: uint8 array of `nbytes` that the others of its machine can map; private memory where that fails."""
    if channel.size > 1 and nbytes and channel.members:
        try:
            return channel.pool.lease(nbytes)
        except OSError as error:
            print0_once(f"mpi_util: no shared memory ({error}); ranks of this machine use MPI instead, which is slower")
    return private(nbytes), None


def places(channel: Channel, ticket: Ticket | None, plan: Any) -> list[Place]:
    """Rank 0's answers to all ranks; those of other machines get no ticket."""
    # equal answers are one object, which is then pickled once
    here, elsewhere = (Place(each, channel.pool.live, plan) for each in (ticket, None))
    return [here if leader == channel.machine[0] else elsewhere for leader in channel.machine]


def bulk_tag(channel: Channel, which: int = 0) -> int:
    """One of two of this call alone: what another one has left, as it failed, must not arrive in this one."""
    return _FIRST_BULK_TAG + 2 * (channel.messages.calls % _BULK_TAGS) + which


def wait_for_all(channel: Channel, requests: list[Any]) -> None:
    """Waits until these are done; raises what another rank has reported meanwhile."""

    def sleep(seconds: float) -> bool:
        channel.messages.raise_failure()
        time.sleep(seconds)
        return False

    for request in requests:
        channel.messages.wait(request.Test, sleep, spin_s=_BULK_SPIN_S)


def broadcast(
    channel: Channel,
    op: str,
    describe: Callable[[], Any],
    decide: Callable[[list[Any]], tuple[int, Any]],
    write: Callable[[np.ndarray], Iterator[int]],
    take: Callable[[np.ndarray, Callable[[int], None]], None],
) -> Any:
    """Collective: rank 0 sends a block of bytes to all ranks.

    Args:
        op: name of the collective call.
        describe: every rank: something small and picklable, for rank 0. What it raises is raised on every rank.
        decide: rank 0: what all have described -> (number of bytes, answer for all ranks); raises an MpiUtilError if
            the ranks do not fit together. Where the number of bytes is 0 only the answer is sent.
        write: rank 0: fills the block, uint8, from its start on; yields now and then how many bytes are there.
        take: the others: reads the block, which is valid only now. It gets a function too, to be called with the number
            of bytes to read up to; that returns when they have arrived.

    Returns: the answer of rank 0, on every rank.
    """
    block, streams = np.empty(0, np.uint8), False

    def write_all() -> None:
        progress = _progress(block)
        for progress[0] in write(block[:-ALIGN]):
            pass
        progress[0] = len(block)

    def places_of_all(described: list[Any]) -> list[Place]:
        nonlocal block, streams
        nbytes, answer = decide(described)
        ticket = None
        if nbytes:
            block, ticket = lease(channel, nbytes + ALIGN)
            # the others copy what is there while rank 0 writes the rest: pays where every rank has a core
            streams = bool(ticket) and STORES_IN_ORDER and nbytes >= _STREAM_BYTES and channel.core_each
            _progress(block)[0] = 0
            if not streams:
                write_all()
        return places(channel, ticket, (nbytes, answer))

    try:
        place = channel.agree(op, describe, places_of_all)
        if streams:
            write_all()
    except BaseException:
        if streams:
            _progress(block)[0] = _FAILED
        raise
    nbytes, answer = place.plan
    if nbytes and channel.rank == 0:
        to = [*([] if place.ticket else channel.members), *_neighbours(channel)[1]]
        wait_for_all(channel, _send_parts(channel, block, to))
    elif nbytes:
        block = _arrived(channel, place, nbytes + ALIGN)
        take(block[:-ALIGN], partial(_wait_for_bytes, channel, _progress(block)))
    return answer


def _progress(block: np.ndarray) -> np.ndarray:
    """The last cache line of a block: int64 (1,), the number of bytes that are there; all, or _FAILED."""
    return block[-ALIGN:][:8].view(np.int64)


def _wait_for_bytes(channel: Channel, progress: np.ndarray, wanted: int) -> None:
    """Waits until `wanted` bytes of the block are there: as a rule for less time than it takes to sleep and wake."""
    if 0 <= progress[0] < wanted:
        channel.messages.wait(lambda: not 0 <= progress[0] < wanted)
    if progress[0] == _FAILED:
        raise RankLeftError("rank 0 failed while it was sending; part of what this rank has is new, part old")


def successors(i: int, n: int) -> list[int]:
    """To which of `n` machines number `i` forwards what began at number 0: a binomial tree.

    After k rounds 2**k of them have it; the one to be served first serves the most others. Number `i` has it from `i`
    without its highest bit.
    """
    return [i + (1 << k) for k in range(i.bit_length(), n.bit_length()) if i + (1 << k) < n]


def _neighbours(channel: Channel) -> tuple[int, list[int]]:
    """(the leader from which this one has a block, those to which it forwards it)."""
    leaders = sorted(set(channel.machine))
    i = leaders.index(channel.rank)
    return leaders[i - (1 << i.bit_length() >> 1)], [leaders[j] for j in successors(i, len(leaders))]


def parts(block: np.ndarray) -> list[np.ndarray]:
    """The pieces in which a block travels between machines."""
    return [block[start : start + _PART_BYTES] for start in range(0, len(block), _PART_BYTES)]


def _send_parts(channel: Channel, block: np.ndarray, to: Sequence[int]) -> list[Any]:
    """Begins to send the block to these ranks; a request for each part."""
    tag = bulk_tag(channel)
    return [channel.comm.Isend(part, k, tag) for part in parts(block) for k in to]


def _arrived(channel: Channel, place: Place, nbytes: int) -> np.ndarray:
    """The block as it arrives at this rank, which sends it on if it is the leader of its machine."""
    ticket, live = place.ticket, place.live
    leads = channel.leader == channel.rank
    if ticket is None and not leads and channel.leader:
        ticket, live = channel.messages.receive(channel.leader, "weights")
    if ticket is not None:
        return np.ndarray((nbytes,), np.uint8, channel.attached.map(ticket, live))
    source, onward = _neighbours(channel) if leads else (channel.leader, [])
    block, ticket = lease(channel, nbytes)
    under_way = []
    tag = bulk_tag(channel)
    for part, request in [(part, channel.comm.Irecv(part, source, tag)) for part in parts(block)]:
        wait_for_all(channel, [request])
        under_way += _send_parts(channel, part, onward)
    for k in channel.members:
        channel.messages.send(k, (ticket, channel.pool.live))
    if ticket is None:
        under_way += _send_parts(channel, block, channel.members)
    wait_for_all(channel, under_way)
    return block
