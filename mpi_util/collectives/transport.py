"""Moves bulk bytes between rank 0 and the others: through shared memory on one machine, through MPI between machines.

Two moves. To rank 0 (`lease`, `places`, `put`, `finish`): every rank writes its pieces straight to their final place in
one block. From rank 0 (`spread`): it fills one block and every rank takes from it. Both begin with `Channel.agree`, so
everybody is there and knows the plan.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import RankLeftError
from ..host.segments import ALIGN, Ticket, private
from ..program.console import print0_once
from .channel import Answer, Channel

_MAX_BLOCK = 1 << 30  # bytes; MPI counts are 32-bit in libraries of before MPI 4
_BULK_TAG = 3
_STREAM_BYTES = 1 << 22
_FAILED = -1


class Place(NamedTuple):
    """Rank 0's answer: where this rank's bytes go to, or come from."""

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
    made: dict[tuple[bool, int], Place] = {}  # equal answers are one object, which is then pickled once
    keys = [(channel.machine[k] == channel.machine[0], id(plan)) for k, plan in enumerate(plans)]
    for (here, _), plan, key in zip(keys, plans, keys):
        made.setdefault(key, Place(ticket if here else None, live, plan))
    return [made[key] for key in keys]


def put(channel: Channel, place: Place, pieces: list[tuple[np.ndarray, int]]) -> None:
    """A rank other than 0 writes its pieces into rank 0's block.

    Args:
        pieces: (array, byte offset in the block) each.
    """
    if place.ticket is None:
        if not pieces:
            return
        channel.receive(0, "gather")  # rank 0 is ready for this rank's bytes
        whole = [np.ascontiguousarray(array) for array, _ in pieces]
        with _Blocks((a.__array_interface__["data"][0], a.nbytes) for a in whole) as blocks:
            channel.comm.Send(blocks.spec, 0, _BULK_TAG)
        return
    try:
        channel.attached.keep(place.ticket.pid, place.live)
        write(channel.attached.map(place.ticket), pieces)
    except Exception as error:
        channel.send_failure(0, "gather", error)
        raise
    channel.send(0, "written")


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
            channel.receive(k, "gather")
        elif pieces[k]:
            base = block.__array_interface__["data"][0]
            channel.send(k, "go")
            with _Blocks((base + offset, nbytes) for offset, nbytes in pieces[k]) as blocks:
                channel.comm.Recv(blocks.spec, k, _BULK_TAG)


class _Blocks:
    """An MPI datatype over pieces of memory anywhere in this process: one message without a packing copy of our own."""

    def __init__(self, pieces: Iterable[tuple[int, int]]):
        from mpi4py import MPI

        split = [
            (address + start, min(_MAX_BLOCK, nbytes - start))
            for address, nbytes in pieces
            for start in range(0, nbytes, _MAX_BLOCK)
        ]
        self.type = MPI.BYTE.Create_hindexed([n for _, n in split], [address for address, _ in split]).Commit()
        self.spec = [MPI.BOTTOM, 1, self.type]

    def __enter__(self) -> "_Blocks":
        return self

    def __exit__(self, *_: object) -> None:
        self.type.Free()


def spread(
    channel: Channel,
    op: str,
    bring: Callable[[], Any],
    check: Callable[[list[Any]], tuple[int, Answer]],
    fill: Callable[[np.ndarray], Iterator[int]],
    take: Callable[[np.ndarray, Callable[[int], None]], None],
) -> Answer:
    """Collective: rank 0 fills a block of bytes, every other rank takes from it.

    Args:
        bring: what this rank brings to the agreement (see `Channel.agree`).
        check: on rank 0: what all bring -> (number of bytes, answer for everybody); raises an MpiUtilError if ranks
            differ. Number of bytes 0: nothing is sent, only the answer.
        fill: on rank 0: writes into the block, uint8 of that many bytes, from its start on; yields now and then how
            many bytes are there.
        take: on the others: reads from the block; calls its second argument with the number of bytes that it wants to
            read up to, which returns when they are there. The block is only valid during the call.

    Returns:
        The answer, on every rank.
    """
    block, streams = np.empty(0, np.uint8), False

    def decide(brought: list[Any]) -> list[Place]:
        nonlocal block, streams
        nbytes, answer = check(brought)
        ticket = None
        if nbytes:
            block, ticket = lease(channel, nbytes + ALIGN)
            streams = ticket is not None and _streams(channel, nbytes)
            _progress(block)[0] = 0
            if not streams:
                _fill(block, fill)
        return places(channel, ticket, [(nbytes, answer)] * channel.size)

    try:
        place = channel.agree(op, bring, decide)
        if streams:
            _fill(block, fill)
    except BaseException:
        if streams:
            _progress(block)[0] = _FAILED
        raise
    nbytes: int = place.plan[0]
    answer: Answer = place.plan[1]
    if nbytes and channel.rank == 0:
        _send_to_machines(channel, block, place.ticket)
    elif nbytes:
        arrived = _arrive(channel, place, nbytes + ALIGN)
        take(arrived, lambda wanted: _wait_for_bytes(channel, _progress(arrived), wanted))
    return answer


def _streams(channel: Channel, nbytes: int) -> bool:
    """True if the others copy what is there while rank 0 still writes the rest.

    That pays for a large block, where every rank has a core. It needs a processor that shows stores to others in the
    order in which they were made.
    """
    in_order = platform.machine() in ("x86_64", "AMD64")
    return in_order and nbytes >= _STREAM_BYTES and channel.core_each


def _progress(block: np.ndarray) -> np.ndarray:
    """The last cache line of a block: int64 (1,), the number of bytes that are there; all, or _FAILED."""
    return block[-ALIGN:][:8].view(np.int64)


def _fill(block: np.ndarray, fill: Callable[[np.ndarray], Iterator[int]]) -> None:
    progress = _progress(block)
    for progress[0] in fill(block[:-ALIGN]):
        pass
    progress[0] = len(block)


def _wait_for_bytes(channel: Channel, progress: np.ndarray, wanted: int) -> None:
    """Waits until `wanted` bytes of the block are there: as a rule for less time than it takes to sleep and wake."""
    if not 0 <= progress[0] < wanted:
        there = progress[0]
    else:
        there = channel.wait(lambda: progress[0] if progress[0] >= wanted or progress[0] == _FAILED else None, 0)
    if there == _FAILED:
        raise RankLeftError("rank 0 failed while it was sending; part of what this rank has is new, part old")


def _send_to_machines(channel: Channel, block: np.ndarray, ticket: Ticket | None) -> None:
    """Rank 0 sends the block to one rank of each other machine, or to every rank where there is no shared memory."""
    to = [*([] if ticket else channel.members), *channel.remote_leaders]
    requests = [
        (channel.comm.Isend(block[start : start + _MAX_BLOCK], k, _BULK_TAG), k)
        for k in to
        for start in range(0, len(block), _MAX_BLOCK)
    ]
    for request, k in requests:
        channel.wait(request.Test, k)


def _arrive(channel: Channel, place: Place, nbytes: int) -> np.ndarray:
    """The block as it came to this rank."""
    if place.ticket is not None:
        channel.attached.keep(place.ticket.pid, place.live)
        return np.ndarray((nbytes,), np.uint8, channel.attached.map(place.ticket))
    source = 0 if channel.leader == channel.rank else channel.leader
    if source:
        ticket, live = channel.receive(source, "weights")
        if ticket is not None:
            channel.attached.keep(ticket.pid, live)
            return np.ndarray((nbytes,), np.uint8, channel.attached.map(ticket))
    block, ticket = lease(channel, nbytes)
    for start in range(0, nbytes, _MAX_BLOCK):
        channel.comm.Recv(block[start : start + _MAX_BLOCK], source, _BULK_TAG)
    for k in channel.members:
        channel.send(k, (ticket, channel.pool.live))
        if ticket is None:
            for start in range(0, nbytes, _MAX_BLOCK):
                channel.comm.Send(block[start : start + _MAX_BLOCK], k, _BULK_TAG)
    return block
