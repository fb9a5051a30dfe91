"""The channel of a communicator: the one interface through which the collective calls reach the other ranks.

It runs in the process of each rank. `Channel` is for ranks that share one machine: a flat star around rank 0, and memory
that all of them map. A call first comes to an agreement (`agree`): each rank sends rank 0 what it contributes, rank 0
checks it, decides, and answers each one. Differences between ranks are found there, so an error is raised on all of them
and no rank is left waiting. Then the bytes move, by `collect`, `spread` or `add_up`.

For ranks on several machines opening.py makes a `cluster.channel.ClusterChannel`, a subclass. It overrides:

- `_receive_calls`, `_send_replies`, `_ask` (rank 0, rank 0, the others): how contributions get to rank 0 and its answers
  back. Each rank gets one answer to each call, and rank 0 learns of every rank that failed, left or is in another call.
- `collect_targets`, `collect`: when `collect` returns on rank 0 each piece of every rank lies at its place in the block.
- `spread_sources`, `spread`: `spread` returns on each rank a block with rank 0's bytes.
- `add_up`: the same bits as here: rows are combined in rank order, whichever machine they come from.
- `counter_kind`: the class of the counter that `deal` shares.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..errors import MpiUtilError, RankMismatchError, rank_mismatch
from ..host.segments import Attached, Pool, Ticket, private
from ..host.waiting import wait_until
from ..ranks import failure, threads
from ..ranks.console import print0_once
from ..ranks.identity import Comm, world
from ..ranks.state import States, process
from .barrier import Reduction, SharedBarrier, add_up
from .counter import Counter
from .messages import CALL, ERROR, LEAVE, REPLY, WAITING, Message, Messages, opened, packed, portable
from .peers import Peers

_PART_BYTES = 1 << 20  # of a message where there is no shared memory
WRITTEN = "written"

Contribution = TypeVar("Contribution")
Answer = TypeVar("Answer")
Piece = tuple[int, int]
"""Byte offset in rank 0's block, number of bytes."""


class BlockAddress(NamedTuple):
    """Where another rank finds a block of memory that this one has leased."""

    ticket: Ticket
    live: frozenset[int]  # the owner's segments that still exist


class RowTarget(NamedTuple):
    """Rank 0's answer in a gather: where a rank puts its rows."""

    starts: list[int]  # for each of its arrays the byte offset in the block
    address: BlockAddress | None = None  # of the block; None: there is no shared memory, so the rows are sent by MPI
    block: np.ndarray | None = None  # on rank 0: uint8
    writers: tuple[int, ...] = ()  # on rank 0: the other ranks that have any rows


class BlockSource(NamedTuple):
    """Rank 0's answer in a broadcast: where a rank finds rank 0's bytes."""

    nbytes: int
    address: BlockAddress | None = None  # None: there is no shared memory, so they come by MPI
    block: np.ndarray | None = None  # on rank 0: uint8
    receivers: Sequence[int] = ()  # on rank 0: the ranks to which they are sent by MPI


class OpenChannels(list["Channel"]):
    """The channels of this process that have more than one rank."""


class UnreadableReply(Exception):
    """Rank 0's answer has come, and an object of the program in it cannot be made here; its cause says why."""


class Channel:
    """Collective: the private channel of a communicator whose ranks share one machine; make it with `channel_of`.

    Attributes:
        rank, size: in the communicator.
        comm: a duplicate of it; None in a single process.
        whole: True if all ranks of the job are in it.
        above: the rank to which this one sends its messages: rank 0.
        below: the ranks that send theirs to this one: for rank 0 all others.
        machine: for each rank the lowest rank of its machine.
        states: what other modules keep for this communicator, each made as `kind(channel)`.
        pool, attached: shared memory that this rank owns, and that it maps.
        version: of the weights that were sent last.
        barrier: the page on which ranks add up gradients (barrier.py), once there is one.
    """

    barrier: SharedBarrier | None = None
    peers: Peers  # only with more than one rank
    counter_kind: type[Counter] = Counter

    def __init__(self, comm: Any = None, peers: Peers | None = None):
        self.rank: int = comm.Get_rank() if comm else 0
        self.size: int = comm.Get_size() if comm else 1
        everyone = world()
        self.whole = everyone is None or self.size == everyone.Get_size()
        self.comm: Any = None
        self.messages = Messages(self.rank, self.size)
        self.above, self.below = 0, [*range(1, self.size)] if self.rank == 0 else list[int]()
        self.machine = peers.machine if peers else [0]
        self.pool, self.attached = Pool(), Attached()
        self.states = States(self)
        self.version = 0
        if peers:
            self.comm, request = comm.Idup()
            wait_until(request.Test)
            self.peers = peers
            self.messages.connect(self.comm, peers)
            process.of(OpenChannels).append(self)

    def enter(self, op: str) -> None:
        """This rank begins a collective call, or a part of one."""
        failure.enter(op)
        self.messages.calls += 1
        if self.whole and self.rank == 0:
            threads.beside()

    # ---------------------------------------------------------------- agree

    def agree(
        self,
        op: str,
        contribute: Callable[[], Contribution],
        decide: Callable[[list[Contribution]], Sequence[Answer]],
    ) -> Answer:
        """Collective: rank 0 looks at what all ranks contribute and answers each of them.

        Args:
            op: name of the collective call, the same on all ranks.
            contribute: called on every rank: gives something small that can be pickled. What it raises is raised on
                every rank, so that a rank that fails while it prepares leaves no rank waiting and none a call ahead.
            decide: called on rank 0: contributions in rank order -> answers in rank order; rank 0's own is not pickled.
                What it raises is raised on every rank.

        Returns: this rank's answer.

        Raises:
            RankMismatchError: ranks are in different calls. RankLeftError: a rank ended while others are in this call.
        """
        self.enter(op)
        own_error: Exception | None = None
        try:
            mine = packed(CALL, (*self.call_id(op), contribute()))
        except Exception as error:
            own_error, shown = error, portable(op, self.rank, error, name_rank=True)
            shown.silent = True  # this rank reports it
            mine = packed(ERROR, shown)
        awaited = set(self.below)  # those whose message has not been read
        try:
            if self.rank:
                return self._ask(op, mine)
            return self._decide(self._receive_calls(op, mine, awaited), decide)
        except UnreadableReply as error:  # the call has not failed: the others have their answers
            raise error.__cause__ or error from None
        except Exception as error:
            self.fail_all(portable(op, 0, error), awaited)
            raise own_error or error from None

    def _receive_calls(self, op: str, mine: Message, awaited: set[int]) -> dict[int, Message]:
        """Rank 0: the message (CALL, ERROR or WAITING) of each rank; removes from `awaited` those that have come.

        Raises: the error of a rank that fails, or RankLeftError, as soon as it is known.
        """
        messages, found = self.messages, {self.rank: mine}
        for k in messages.ended:
            raise messages.left_error(op, k)
        while awaited:
            source, message = messages.next(awaited, range(self.size))
            kind = message[0]
            if kind == LEAVE:
                messages.ended[source] = opened(message)[1]
                raise messages.left_error(op, source)
            if source not in awaited:
                if kind == ERROR:
                    raise opened(message)[1]
            elif (
                kind == ERROR
                or (kind == CALL and not messages.is_late(source, message))
                or (kind == WAITING and opened(message)[1][1] >= messages.calls)  # else it has gone on since
            ):
                found[source] = message
                awaited.remove(source)
        return found

    def _decide(self, found: Mapping[int, Message], decide: Callable[[list[Contribution]], Sequence[Answer]]) -> Answer:
        """Rank 0 checks what all contribute, and answers them."""
        read = {message: opened(message) for message in set(found.values())}
        each = {k: read[found[k]] for k in sorted(found)}
        for kind, error in each.values():
            if kind == ERROR:
                raise error
        calls = [call for _, call in each.values()]
        self.check_calls([call[:3] for call in calls], range(self.size))
        try:
            answers = decide([call[3] for call in calls])
        except RankMismatchError as error:
            if len({call[2] for call in calls}) == 1:
                raise
            raise rank_mismatch(f"{error}\ncalled at", [call[2] for call in calls]) from None
        # an answer that several get, as the same object, is pickled once
        made = {id(answer): answer for answer in answers[1:]}
        replies = {key: packed(REPLY, (self.messages.calls, answer)) for key, answer in made.items()}
        self._send_replies({k: replies[id(answers[k])] for k in range(1, self.size)})
        self.messages.answered = self.messages.calls
        return answers[0]

    def _send_replies(self, replies: Mapping[int, Message]) -> None:
        """Rank 0 sends each rank its answer."""
        self.messages.post_all(replies)

    def _ask(self, op: str, mine: Message) -> Any:
        """Another rank sends its message to rank 0. Returns: the answer."""
        messages = self.messages
        messages.post_all({self.above: mine})
        if messages.ended:
            raise messages.left_error(op, 0)
        while True:  # what a call that failed or was interrupted has left is dropped
            _, message = messages.next([self.above], [0])
            try:
                kind, payload = opened(message)
            except Exception as error:  # of a class of the program
                raise UnreadableReply from error
            if kind == REPLY and payload[0] == messages.calls:
                return payload[1]
            if kind == ERROR:
                raise payload
            if kind == LEAVE:
                messages.ended[0] = payload
                if payload[2] < messages.calls:  # else the answer is on its way
                    raise messages.left_error(op, 0)

    def call_id(self, op: str) -> tuple[str, int, str]:
        """Where this rank is: the call, its number, `file:line` of the program."""
        return op, self.messages.calls, failure.call_site()

    def check_calls(self, calls: Sequence[tuple[str, int, str]], ranks: Sequence[int]) -> None:
        """Raises RankMismatchError unless the ranks are in the same (call, its number, where in the program)."""
        if len({call[:2] for call in calls}) > 1:
            sites = [f"{op} at {site}" for op, _, site in calls]
            what = "ranks are in different collective calls; all must make the same calls in the same order"
            raise rank_mismatch(what, sites, ranks)

    def fail_all(self, error: MpiUtilError, unread: set[int]) -> None:
        """The call has failed on this rank. On rank 0: all others raise `error`.

        Args: unread: the ranks whose message has not been read. It comes later, and is then dropped.
        """
        self.barrier = None  # one of the ranks may not have it
        error.silent = True  # on the others: this rank reports it
        self.messages.failed = dict.fromkeys(unread, self.messages.calls)
        if self.rank == 0:
            self.messages.post_all(dict.fromkeys(range(1, self.size), packed(ERROR, error)))

    # ---------------------------------------------------------------- move bytes

    def lease(self, nbytes: int) -> tuple[np.ndarray, BlockAddress | None]:
        """A block, uint8, that the other ranks of this machine can map; where that fails, private memory, and None.

        For rank 0, while it decides: then no other rank uses what was leased in the call before.
        """
        if self.size > 1 and nbytes:
            try:
                block, ticket = self.pool.lease(nbytes)
                return block, BlockAddress(ticket, self.pool.live)
            except OSError as error:
                slower = "ranks of this machine use MPI instead, which is slower"
                print0_once(f"mpi_util: no shared memory ({error}); {slower}")
        return private(nbytes), None

    def map(self, address: BlockAddress) -> Any:
        """The memory of a block that another rank has leased."""
        return self.attached.map(*address)

    def collect_targets(self, nbytes: int, pieces: Sequence[Sequence[Piece]]) -> Sequence[RowTarget]:
        """Rank 0, while it decides: each rank's answer, in rank order, for a block in which the rows of all come together.

        Args:
            nbytes: size of the block.
            pieces: for each rank the places of its arrays in the block.
        """
        writers = tuple(k for k in range(1, self.size) if any(n for _, n in pieces[k]))
        block, address = self.lease(nbytes) if writers else (private(nbytes), None)
        starts = [[start for start, _ in own] for own in pieces]
        return [RowTarget(starts[0], None, block, writers), *(RowTarget(each, address) for each in starts[1:])]

    def collect(self, op: str, target: Any, arrays: Sequence[np.ndarray]) -> None:
        """Collective, after the agreement: the rows of all ranks come into rank 0's block.

        Args:
            op: name of the collective call.
            target: this rank's, of `collect_targets`.
            arrays: this rank's, one for each of its pieces.

        Returns: on rank 0, when all rows are in `target.block`; elsewhere, when `arrays` may change again.
        """
        if target.block is not None:
            write_rows(target.block, arrays, target.starts)
            for k in target.writers:
                while (found := self.messages.receive(k, op)) != WRITTEN:
                    start, part = found
                    target.block[start : start + len(part)] = part
            return
        if not any(array.nbytes for array in arrays):
            return
        try:
            if target.address:
                write_rows(self.map(target.address), arrays, target.starts)
            else:
                for array, start in zip(arrays, target.starts):
                    whole = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                    for at in range(0, len(whole), _PART_BYTES):
                        self.messages.send(self.above, (start + at, whole[at : at + _PART_BYTES]))
            self.messages.send(self.above, WRITTEN)
        except Exception as error:
            self.messages.fail(op, error, [self.above])
            raise

    def spread_sources(self, nbytes: int, fill: Callable[[np.ndarray], object]) -> Sequence[BlockSource]:
        """Rank 0, while it decides: each rank's answer, in rank order, for a block of bytes that all ranks get.

        Args:
            nbytes: size of the block.
            fill: writes the bytes into the block, uint8.
        """
        block, address = self.lease(nbytes)
        fill(block)
        others = [BlockSource(nbytes, address)] * (self.size - 1)
        return [BlockSource(nbytes, None, block, () if address else self.below), *others]

    def spread(self, op: str, source: Any) -> np.ndarray:
        """Collective, after the agreement: rank 0's bytes, uint8, on every rank; to be read before the next call.

        Args:
            op: name of the collective call.
            source: this rank's, of `spread_sources`.
        """
        if source.address:
            return np.ndarray((source.nbytes,), np.uint8, self.map(source.address))
        block: np.ndarray = private(source.nbytes) if source.block is None else source.block
        for at in range(0, source.nbytes, _PART_BYTES):
            part = block[at : at + _PART_BYTES]
            for k in source.receivers:
                self.messages.send(k, part)
            if source.block is None:
                part[:] = self.messages.receive(self.above, op)
        return block

    def add_up(self, reduction: Reduction) -> np.ndarray:
        """Collective: the arrays of all ranks, combined in rank order, as a block of the reduction's layout.

        The block is the same on every rank, and is to be read before the next call.

        Args: reduction: what this rank adds, and how.
        """
        return add_up(self, reduction)

    def counter(self) -> Counter:
        """Collective at its first call: what `deal` counts with; the ranks of this machine share it."""
        return self.states.of(self.counter_kind)

    def close(self) -> None:
        """Collective: frees what belongs to the channel, when the user's communicator is freed."""
        if self.comm is None:
            return
        self.comm.Free()
        self.barrier = None
        self.states.close()
        self.peers.close()
        self.pool.close()
        process.of(OpenChannels).remove(self)


def paired(answers: Sequence[Answer], value: Any) -> list[tuple[Answer, Any]]:
    """Each answer with the same value. Answers that are one object stay one, which is pickled once."""
    pairs = {id(answer): (answer, value) for answer in answers}
    return [pairs[id(answer)] for answer in answers]


def write_rows(block: Any, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> None:
    """Copies each array, in whatever memory order it is, to its offset in `block`, row-major."""
    for array, start in zip(arrays, starts):
        np.copyto(np.ndarray(array.shape, array.dtype, block, start), array)


class Kept:
    """The channels of this process that live as long as it does, and where others are kept."""

    alone: Channel | None = None
    world: Channel | None = None
    keyval: int | None = None  # the attribute under which a user's communicator keeps its channel until it is freed


def channel_of(comm: Comm = None) -> Channel:
    """Collective at its first call for a communicator: its channel. None: the world, or without MPI this process."""
    kept = process.of(Kept)
    if comm is None and kept.world is not None and kept.world.size > 1:
        return kept.world
    from .opening import open_channel

    return open_channel(comm)
