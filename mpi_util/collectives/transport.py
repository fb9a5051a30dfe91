"""Moves bulk bytes between rank 0 and the others: through shared memory on one machine, through MPI between machines.

Two directions. To rank 0 (`lease`, `places`, `put`, `finish`): every rank writes its pieces straight to their final
place in one block. From rank 0 (`broadcast`): it fills one block and every rank takes from it; between machines the
block travels along a tree of their leaders. Both begin with `Channel.agree`, so all ranks are there and know the plan.
"""

import contextlib
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import RankLeftError
from ..host.segments import ALIGN, Ticket, private
from ..program.console import print0_once
from .channel import Channel
from .messages import ERROR, portable

_MAX_BLOCK = 1 << 30  # bytes; MPI counts are 32-bit in libraries of before MPI 4
_BULK_TAG = 3
_STREAM_BYTES = 1 << 22
_PART_BYTES = 1 << 22  # forwarded while the next part comes
_FAILED = -1
STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")  # other ranks see stores in the order of their making


class Place(NamedTuple):
    """Rank 0's answer: where this rank's bytes go, or come from."""

    ticket: Ticket | None  # of rank 0's segment; None: the bytes go through MPI
    live: frozenset[int]  # rank 0's segments that still exist
    plan: Any  # of the caller


def lease(channel: Channel, nbytes: int) -> tuple[np.ndarray, Ticket | None]:
    """Rank 0: uint8 array of `nbytes` that the ranks of this machine can map, or private memory where that fails."""
    if channel.size > 1 and nbytes and channel.members:
        try:
            return channel.pool.lease(nbytes)
        except OSError as error:
            print0_once(f"mpi_util: no shared memory ({error}); ranks of this machine use MPI instead, which is slower")
    return private(nbytes), None


def places(channel: Channel, ticket: Ticket | None, plans: Sequence[Any]) -> list[Place]:
    """Rank 0's answers to all ranks; those of other machines get no ticket."""
    live = channel.pool.live
    made: dict[tuple[int, bool], Place] = {}  # equal answers are one object, which is then pickled once
    here = [leader == channel.machine[0] for leader in channel.machine]
    return [
        made.setdefault((id(plan), shares), Place(ticket if shares else None, live, plan))
        for plan, shares in zip(plans, here)
    ]


def put(channel: Channel, place: Place, pieces: list[tuple[np.ndarray, int]]) -> None:
    """A rank other than 0 writes its pieces, (array, byte offset in the block) each, into rank 0's block."""
    if place.ticket is None:
        if not pieces:
            return
        channel.messages.receive(0, "gather")  # rank 0 is ready for this rank's bytes
        whole = [np.ascontiguousarray(array) for array, _ in pieces]
        with _blocks((a.__array_interface__["data"][0], a.nbytes) for a in whole) as blocks:
            channel.comm.Send(blocks, 0, _BULK_TAG)
        return
    try:
        write(channel.attached.map(place.ticket, place.live), pieces)
    except Exception as error:
        channel.messages.post(0, ERROR, portable("gather", channel.rank, error))
        raise
    channel.messages.send(0, "written")


def write(block: Any, pieces: list[tuple[np.ndarray, int]]) -> None:
    """Copies each array, in whatever memory order it is, to its offset in `block`, row-major."""
    for array, offset in pieces:
        np.copyto(np.ndarray(array.shape, array.dtype, block, offset), array)


def finish(channel: Channel, block: np.ndarray, ticket: Ticket | None, pieces: list[list[tuple[int, int]]]) -> None:
    """Rank 0 waits until all ranks have written, and receives from those that cannot.

    Args:
        block: uint8 array on rank 0.
        pieces: for each rank its (byte offset, number of bytes) in `block`, in the order of its `put`.
    """
    for k in range(1, channel.size):
        if ticket is not None and channel.machine[k] == channel.machine[0]:
            channel.messages.receive(k, "gather")
        elif pieces[k]:
            base = block.__array_interface__["data"][0]
            channel.messages.send(k, "go")
            with _blocks((base + offset, nbytes) for offset, nbytes in pieces[k]) as blocks:
                channel.comm.Recv(blocks, k, _BULK_TAG)


@contextlib.contextmanager
def _blocks(pieces: Iterable[tuple[int, int]]) -> Iterator[list[Any]]:
    """What MPI sends or receives for pieces of memory anywhere in this process, as one message without packing."""
    from mpi4py import MPI

    cuts = [(address, nbytes, start) for address, nbytes in pieces for start in range(0, nbytes, _MAX_BLOCK)]
    sizes = [min(_MAX_BLOCK, nbytes - start) for _, nbytes, start in cuts]
    kind = MPI.BYTE.Create_hindexed(sizes, [address + start for address, _, start in cuts]).Commit()
    try:
        yield [MPI.BOTTOM, 1, kind]
    finally:
        kind.Free()


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
        return places(channel, ticket, [(nbytes, answer)] * channel.size)

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
        _wait_until_sent(channel, _send_parts(channel, block, to))
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
        channel.messages.wait(lambda: not 0 <= progress[0] < wanted, 0)
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


def _send_parts(channel: Channel, block: np.ndarray, to: Sequence[int]) -> list[tuple[Any, int]]:
    """Begins to send the block to these ranks; (request, rank) of each part."""
    return [(channel.comm.Isend(part, k, _BULK_TAG), k) for part in parts(block) for k in to]


def _wait_until_sent(channel: Channel, requests: list[tuple[Any, int]]) -> None:
    for request, k in requests:
        channel.messages.wait(request.Test, k)


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
    for part, request in [(part, channel.comm.Irecv(part, source, _BULK_TAG)) for part in parts(block)]:
        channel.messages.wait(request.Test, source)
        under_way += _send_parts(channel, part, onward)
    for k in channel.members:
        channel.messages.send(k, (ticket, channel.pool.live))
    if ticket is None:
        under_way += _send_parts(channel, block, channel.members)
    _wait_until_sent(channel, under_way)
    return block
