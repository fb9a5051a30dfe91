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
from ..ranks.console import print0_once
from .channel import Channel

_FIRST_BULK_TAG, _BULK_TAGS = 8, 1 << 13  # twice as many stay below the 32767 that every MPI has
_STREAM_BYTES = 1 << 22
_BULK_SPIN_S = 20e-3  # MPI moves what comes only while it is tested
_PART_BYTES = 1 << 20  # forwarded while the next part comes
_ALONG_BYTES = 1 << 17  # sent along with rank 0's answer to other machines, which saves a message
_FAILED = -1


class Place(NamedTuple):
    """Rank 0's answer: where this rank's bytes go, or come from."""

    ticket: Ticket | None  # of rank 0's segment; None: the bytes go through MPI
    live: frozenset[int]  # rank 0's segments that still exist
    plan: Any  # of the caller
    data: np.ndarray | None  # the bytes themselves, if they are few


def lease(channel: Channel, nbytes: int) -> tuple[np.ndarray, Ticket | None]:
    """A leader: uint8 array of `nbytes` that the others of its machine can map; private memory where that fails."""
    if channel.size > 1 and nbytes and channel.members:
        try:
            return channel.pool.lease(nbytes)
        except OSError as error:
            print0_once(f"mpi_util: no shared memory ({error}); ranks of this machine use MPI instead, which is slower")
    return private(nbytes), None


def places(channel: Channel, ticket: Ticket | None, plan: Any, data: np.ndarray | None = None) -> list[Place]:
    """Rank 0's answers to all ranks; those of other machines get no ticket, but the data if there are any."""
    # equal answers are one object, which is then pickled once
    here, elsewhere = (Place(each, channel.pool.live, plan, None if each else data) for each in (ticket, None))
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

    def places_of_all(described: list[Any]) -> list[Place]:
        nonlocal block, streams
        nbytes, answer = decide(described)
        if not nbytes:
            return places(channel, None, (nbytes, answer))
        block, ticket = lease(channel, nbytes + ALIGN)
        # the others copy what is there while rank 0 writes the rest: pays where every rank has a core
        streams = STORES_IN_ORDER and nbytes >= _STREAM_BYTES and (channel.core_each or any(channel.machine))
        _progress(block)[0] = 0
        if not streams:
            for _ in write(block[:-ALIGN]):
                pass
            _progress(block)[0] = nbytes
        data = block if nbytes <= _ALONG_BYTES and (any(channel.machine) or not ticket) else None
        return places(channel, ticket, (nbytes, answer), data)

    place = channel.agree(op, describe, places_of_all)
    nbytes, answer = place.plan
    if nbytes and channel.rank == 0:
        to = [*([] if place.ticket else channel.members), *_neighbours(channel)[1]] if nbytes > _ALONG_BYTES else []
        outgoing = _Outgoing(channel, op, block, to)
        with outgoing:
            for written in write(block[:-ALIGN]) if streams else ():
                outgoing.send(written)
            outgoing.send(nbytes)
    elif nbytes and place.data is not None:
        take(place.data[:-ALIGN], lambda wanted: None)
    elif nbytes:
        _take_as_it_comes(channel, op, place, nbytes, take)
    return answer


def _progress(block: np.ndarray) -> np.ndarray:
    """The last cache line of a block: int64 (1,), the number of bytes that are there; all, or _FAILED."""
    return block[-ALIGN:][:8].view(np.int64)


def _wait_for_bytes(channel: Channel, progress: np.ndarray, wanted: int) -> None:
    """Waits until `wanted` bytes of the block are there: as a rule for less time than it takes to sleep and wake."""
    if 0 <= progress[0] < wanted:
        channel.messages.wait(lambda: not 0 <= progress[0] < wanted, by_mpi=channel.core_each)
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


class _Outgoing:
    """A block of which this rank has more and more, and that others follow: in shared memory, and by MPI."""

    def __init__(self, channel: Channel, op: str, block: np.ndarray, to: Sequence[int]):
        self._channel, self._op, self._progress, self._to = channel, op, _progress(block), to
        self._parts = parts(block[:-ALIGN])
        self._begun, self._requests = 0, list[Any]()

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Waits until all is sent; after an error lets those know who wait for the rest."""
        if error is None:
            wait_for_all(self._channel, self._requests)
            return
        self._progress[0] = _FAILED
        self._channel.messages.fail(self._op, error, self._to, waiting=self._to)

    def send(self, nbytes: int) -> None:
        """So many bytes are there."""
        self._progress[0] = nbytes
        while self._begun < len(self._parts) and self._begun * _PART_BYTES + len(self._parts[self._begun]) <= nbytes:
            part, tag = self._parts[self._begun], bulk_tag(self._channel)
            self._requests += [self._channel.comm.Isend(part, k, tag) for k in self._to]
            self._begun += 1


def _take_as_it_comes(
    channel: Channel, op: str, place: Place, nbytes: int, take: Callable[[np.ndarray, Callable[[int], None]], None]
) -> None:
    """A rank other than 0 gets a block; the leader of a machine sends it on."""
    ticket, live = place.ticket, place.live
    leads = channel.leader == channel.rank
    if ticket is None and not leads and channel.leader:
        ticket, live = channel.messages.receive(channel.leader, op)
    if ticket is not None:
        block = np.ndarray((nbytes + ALIGN,), np.uint8, channel.attached.map(ticket, live))
        take(block[:-ALIGN], partial(_wait_for_bytes, channel, _progress(block)))
        return
    source, onward = _neighbours(channel) if leads else (channel.leader, [])
    block, ticket = lease(channel, nbytes + ALIGN)
    _progress(block)[0] = received = 0
    for k in channel.members:
        channel.messages.send(k, (ticket, channel.pool.live))
    tag, incoming = bulk_tag(channel), parts(block[:-ALIGN])
    requests = [channel.comm.Irecv(part, source, tag) for part in incoming]
    outgoing = _Outgoing(channel, op, block, [*onward, *([] if ticket else channel.members)])

    def wait_for(wanted: int) -> None:
        nonlocal received
        while received * _PART_BYTES < wanted:
            wait_for_all(channel, requests[received : received + 1])
            received += 1
            outgoing.send(min(received * _PART_BYTES, nbytes))

    with outgoing:
        take(block[:-ALIGN], wait_for)
        wait_for(nbytes)
