"""Brings pieces of memory of all ranks into one block of rank 0's.

The ranks of rank 0's machine write them there, each to its place. On another machine all write into a block of their
leader's: its pieces in the order in which they lie in rank 0's block, without gaps. So what lies together there is one
message, from memory to memory; small pieces that lie apart travel together, and rank 0 copies them to their places.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..host.process import process
from ..host.segments import Ticket, private
from .channel import Channel
from .transport import bulk_tag, lease, parts, wait_for_all

_SMALL = 1 << 16  # bytes; what is smaller is copied once more rather than sent as a message of its own
_FULL = 1 << 22  # bytes of small pieces in one message
WRITTEN = "written"

Piece = tuple[int, int]
"""Byte offset in rank 0's block, number of bytes."""


class Share(NamedTuple):
    """Rank 0's answer: what a rank has to do."""

    ticket: Ticket | None  # of rank 0's block, for the ranks of its machine
    live: frozenset[int]  # rank 0's segments that still exist
    starts: list[int]  # where each of this rank's pieces goes in the block of its machine
    messages: list[int]  # if it leads another machine: how many bytes each message to rank 0 has
    writers: list[int]  # and the others there that have any


class Collection:
    """Rank 0's side. All that it does before `finish` takes no time of the other ranks'.

    Attributes:
        block: uint8.
        shares: of all ranks.
    """

    def __init__(self, channel: Channel, nbytes: int, pieces: list[list[Piece]]):
        """Args: pieces: of each rank, in the order in which it brings them."""
        self._channel = channel
        writers = dict[int, list[int]]()
        for k, own in enumerate(pieces):
            if channel.machine[k] != k and any(n for _, n in own):
                writers.setdefault(channel.machine[k], []).append(k)
        self._writers = writers.get(0, [])
        self.block, ticket = lease(channel, nbytes) if self._writers else (private(nbytes), None)
        live = channel.pool.live
        self.shares = [Share(ticket, live, [start for start, _ in own], [], []) for own in pieces]
        self._incoming: dict[int, list[list[Piece]]] = {}
        for leader in {*channel.machine} - {0}:
            machine = [k for k, its in enumerate(channel.machine) if its == leader]
            starts, runs = _image({k: pieces[k] for k in machine})
            self._incoming[leader] = _in_messages(runs)
            for k in machine:
                self.shares[k] = Share(None, frozenset(), starts[k], [], [])
            sizes = [sum(n for _, n in message) for message in self._incoming[leader]]
            self.shares[leader] = Share(None, frozenset(), starts[leader], sizes, writers.get(leader, []))

    def finish(self, own: Sequence[np.ndarray]) -> None:
        """Receives from the other machines, writes rank 0's own pieces, and returns when all are there."""
        channel, tag = self._channel, bulk_tag(self._channel)
        streams = [[(leader, pieces) for pieces in messages] for leader, messages in self._incoming.items()]
        in_turns = [each for turn in itertools.zip_longest(*streams) for each in turn if each]
        under_way = [(self._memory(pieces), pieces, leader) for leader, pieces in in_turns]
        requests = [channel.comm.Irecv(memory, leader, tag) for memory, _, leader in under_way]
        try:
            write(self.block, own, self.shares[0].starts)
            wait_for_writers(channel, self.block, self._writers, "gather")
            for request, (memory, pieces, _) in zip(requests, under_way):
                wait_for_all(channel, [request])
                if len(pieces) > 1:
                    put(self.block, pieces, memory)
        except BaseException:
            process.of(Abandoned).append((requests, under_way, self.block))
            raise

    def _memory(self, pieces: list[Piece]) -> np.ndarray:
        """Where a message goes to."""
        start, n = pieces[0]
        return self.block[start : start + n] if len(pieces) == 1 else np.empty(sum(n for _, n in pieces), np.uint8)


class Abandoned(list[Any]):
    """Memory into which other ranks or MPI may still write, of calls that failed."""


def bring(channel: Channel, share: Share, own: Sequence[np.ndarray]) -> None:
    """A rank other than 0 brings its pieces."""
    leads = channel.leader == channel.rank
    if not leads and not any(array.nbytes for array in own):
        return
    concerned = {0, *share.writers} if leads else {0, channel.leader}
    try:
        if leads:
            _send_image(channel, share, own)
            return
        ticket, live = share.ticket, share.live
        if channel.leader:
            ticket, live = channel.messages.receive(channel.leader, "gather")
        if ticket is not None:
            write(channel.attached.map(ticket, live), own, share.starts)
        else:
            send_pieces(channel, own, share.starts)
        channel.messages.send(channel.leader, WRITTEN)
    except Exception as error:
        channel.messages.fail("gather", error, concerned)
        raise


def _send_image(channel: Channel, share: Share, own: Sequence[np.ndarray]) -> None:
    """The leader of another machine sends what that has."""
    block, ticket = lease(channel, sum(share.messages))
    for k in share.writers:
        channel.messages.send(k, (ticket, channel.pool.live))
    try:
        write(block, own, share.starts)
        wait_for_writers(channel, block, share.writers, "gather")
        ends = list(itertools.accumulate(share.messages, initial=0))
        tag = bulk_tag(channel)
        wait_for_all(channel, [channel.comm.Isend(block[a:b], 0, tag) for a, b in itertools.pairwise(ends)])
    except BaseException:
        process.of(Abandoned).append(block)
        raise


def write(block: Any, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> None:
    """Copies each array, in whatever memory order it is, to its offset in `block`, row-major."""
    for array, start in zip(arrays, starts):
        np.copyto(np.ndarray(array.shape, array.dtype, block, start), array)


def put(block: np.ndarray, pieces: list[Piece], data: np.ndarray) -> None:
    """Copies bytes that lie one behind the other to their places."""
    at = 0
    for start, n in pieces:
        block[start : start + n] = data[at : at + n]
        at += n


def send_pieces(channel: Channel, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> None:
    """Where there is no shared memory."""
    for array, start in zip(arrays, starts):
        whole = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for part in parts(whole):
            channel.messages.send(channel.leader, (start, part))
            start += len(part)


def wait_for_writers(channel: Channel, block: np.ndarray, writers: list[int], op: str) -> None:
    """A leader waits for the others of its machine."""
    for k in writers:
        while (found := channel.messages.receive(k, op)) != WRITTEN:
            start, part = found
            block[start : start + len(part)] = part


def _image(pieces: dict[int, list[Piece]]) -> tuple[dict[int, list[int]], list[Piece]]:
    """How a machine's pieces, by rank, lie in its leader's block.

    Returns: for each rank the offsets of its pieces there; what the block holds: the runs of bytes in rank 0's block.
    """
    starts, runs, end = {k: [0] * len(own) for k, own in pieces.items()}, list[Piece](), 0
    for start, n, k, i in sorted(
        (start, n, k, i) for k, own in pieces.items() for i, (start, n) in enumerate(own) if n
    ):
        starts[k][i] = end
        end += n
        if runs and sum(runs[-1]) == start:
            runs[-1] = runs[-1][0], runs[-1][1] + n
        else:
            runs.append((start, n))
    return starts, runs


def _in_messages(runs: list[Piece]) -> list[list[Piece]]:
    """The runs in messages: parts of a large one, or several small ones."""
    found: list[list[Piece]] = []
    room = 0
    for start, n in runs:
        if n >= _SMALL:
            found += [[(start + at, min(_FULL, n - at))] for at in range(0, n, _FULL)]
            room = 0
            continue
        if n > room:
            found.append([])
            room = _FULL
        found[-1].append((start, n))
        room -= n
    return found
