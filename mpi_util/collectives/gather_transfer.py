"""Brings pieces of memory of all ranks into one block of rank 0's.

The ranks of rank 0's machine write them there, each to its place. On another machine they write into a block of their
leader's: its pieces in the order in which they lie in rank 0's block, without gaps. So what lies together there is one
message, from memory to memory; small pieces that lie apart travel together, and rank 0 copies them to their places.
Large pieces of the leader's are sent from where they are, while the other ranks write theirs.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..host.segments import Ticket, private
from ..ranks.state import process
from .channel import Channel
from .transport import bulk_tag, lease, parts, wait_for_all

_SMALL = 1 << 16  # bytes; what is smaller is copied once more rather than sent as a message of its own
_FULL = 1 << 22  # bytes of small pieces in one message
WRITTEN = "written"
_SEVERAL = -1  # in place of a rank: its pieces, and others'

T = TypeVar("T")

Piece = tuple[int, int]
"""Byte offset in rank 0's block, number of bytes."""


class Share(NamedTuple):
    """Rank 0's answer: what a rank has to do."""

    ticket: Ticket | None  # of rank 0's block, for the ranks of its machine
    live: frozenset[int]  # rank 0's segments that still exist
    starts: list[int]  # where each of this rank's pieces goes in the block of its machine
    messages: list[tuple[int, int]]  # if it leads another machine, of each message to rank 0: bytes, whose they are
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
            messages = _in_messages(runs)
            self._incoming[leader] = [pieces for pieces, _ in _in_order(messages, leader)]
            for k in machine:
                self.shares[k] = Share(None, frozenset(), starts[k], [], [])
            sizes = [(sum(n for _, n in pieces), owner) for pieces, owner in messages]
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
    block, ticket = lease(channel, sum(n for n, _ in share.messages))
    for k in share.writers:
        channel.messages.send(k, (ticket, channel.pool.live))
    try:
        ends = itertools.accumulate((n for n, _ in share.messages), initial=0)
        messages = [(range(a, b), owner) for (a, b), (_, owner) in zip(itertools.pairwise(ends), share.messages)]
        awaited, requests, tag = [channel.rank, *share.writers], [], bulk_tag(channel)
        for where, owner in _in_order(messages, channel.rank):
            memory = _of_one(own, share.starts, where) if owner == channel.rank else None
            if memory is None:
                for k in [k for k in awaited if owner in (k, _SEVERAL)]:
                    awaited.remove(k)
                    if k == channel.rank:
                        write(block, own, share.starts)
                    else:
                        wait_for_writers(channel, block, [k], "gather")
                memory = block[where.start : where.stop]
            requests.append(channel.comm.Isend(memory, 0, tag))
        wait_for_all(channel, requests)
    except BaseException:
        process.of(Abandoned).append(block)
        raise


def _in_order(messages: list[tuple[T, int]], leader: int) -> list[tuple[T, int]]:
    """The messages of a machine as they are sent: those of the leader's first."""
    return sorted(messages, key=lambda message: message[1] != leader)


def _of_one(own: Sequence[np.ndarray], starts: Sequence[int], where: range) -> np.ndarray | None:
    """These bytes of an image, if they lie so in one of the arrays."""
    for array, start in zip(own, starts):
        if start <= where.start and where.stop <= start + array.nbytes and array.flags.c_contiguous:
            return array.reshape(-1).view(np.uint8)[where.start - start : where.stop - start]
    return None


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


def _image(pieces: dict[int, list[Piece]]) -> tuple[dict[int, list[int]], list[tuple[Piece, int]]]:
    """How a machine's pieces, by rank, lie in its leader's block.

    Returns: for each rank the offsets of its pieces there; what the block holds: the runs of bytes in rank 0's block,
        and whose they are. Large pieces of two ranks are two runs.
    """
    starts, runs, end = {k: [0] * len(own) for k, own in pieces.items()}, list[tuple[Piece, int]](), 0
    for start, n, k, i in sorted(
        (start, n, k, i) for k, own in pieces.items() for i, (start, n) in enumerate(own) if n
    ):
        starts[k][i] = end
        end += n
        (before, length), owner = runs[-1] if runs else ((0, 0), k)
        if before + length == start and (owner == k or max(length, n) < _SMALL):
            runs[-1:] = [((before, length + n), k if owner == k else _SEVERAL)]
        else:
            runs.append(((start, n), k))
    return starts, runs


def _in_messages(runs: list[tuple[Piece, int]]) -> list[tuple[list[Piece], int]]:
    """The runs in messages, each with whose it is: parts of a large one, or several small ones."""
    found: list[tuple[list[Piece], int]] = []
    room = 0
    for (start, n), owner in runs:
        if n >= _SMALL:
            found += [([(start + at, min(_FULL, n - at))], owner) for at in range(0, n, _FULL)]
            room = 0
            continue
        if n > room:
            found.append(([], _SEVERAL))
            room = _FULL
        found[-1][0].append((start, n))
        room -= n
    return found
