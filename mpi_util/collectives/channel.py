"""The channel of a communicator: the interface through which the collective calls reach the other ranks.

It runs in the process of each rank. A call begins with an agreement (`agree`, agreement.py); then the bytes move, by
`collect` and `spread`. `Channel` is for ranks that share one machine, and so memory that all of them map.

Where ranks lie on several machines, or cannot share memory, a subclass is loaded instead, cluster/channel.py. It
overrides how contributions reach rank 0, and answers and weights the ranks (`_receive_calls`, `_ask`, `spread`, ...).
"""

import contextlib
import importlib
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import LaunchError, MpiUtilError, UsageError
from ..host.cores import take_cores, update_threads
from ..host.segments import BlockAddress, Pool, private
from ..host.waiting import wait_until
from ..ranks import failure
from ..ranks.console import print0_once
from ..ranks.identity import Comm, Role, check_launcher, check_no_parent, world
from ..ranks.state import state
from ..ranks.threads import Threads
from ..ranks.watchdog import FIRST_CALL, Watchdog
from .agreement import Agreement, Answer, Before
from .messages import Background, Peers, all_of, members_of

_ENDED_S = 5.0  # within which it is known that a rank has ended
_PART_BYTES = 1 << 20  # of a message where there is no shared memory, at least but for the last

Piece = tuple[int, int]  # byte offset in rank 0's block, number of bytes


class Transfer(NamedTuple):
    """Rank 0's answer before bytes move: where a rank puts its rows in a gather, or finds rank 0's in a broadcast."""

    nbytes: int = 0  # of the block
    address: BlockAddress | None = None  # of the block; None: this rank cannot map it, so the bytes go by MPI
    block: np.ndarray | None = None  # on rank 0: uint8
    others: Sequence[int] = ()  # on rank 0: the ranks that have rows; in a broadcast those that get the bytes by MPI
    starts: Sequence[int] = ()  # in a gather: for each of the rank's arrays the byte offset in the block


class Channel(Agreement):
    """Collective: the private channel of a communicator whose ranks share one machine; make it with `channel_of`."""

    version = 0  # of the weights that were sent last
    counter_kind: Any = None  # on several machines the class of `deal`'s counter
    counter: Any = None  # `deal`'s, made at its first call

    def __init__(self, comm: Any = None, peers: Peers | None = None):
        self.comm: Any = None  # a duplicate of the communicator; None in a single process
        self.machine = [0]  # for each rank the lowest rank of its machine
        if peers:
            self.comm, request = comm.Idup()
            wait_until(request.Test)
            self.machine = peers.machine
        super().__init__(comm.Get_rank() if comm else 0, comm.Get_size() if comm else 1, self.comm, peers)
        self.pool = Pool()
        self.loops: dict[str, Any] = {}  # by phase, those that a program makes itself, around `collect`

    def lease(self, nbytes: int, users: Sequence[int]) -> tuple[np.ndarray, BlockAddress | None]:
        """A block, uint8, that those ranks of this machine can map; where that fails, private memory, and None.

        For rank 0, while it decides: then no other rank uses what was leased in the call before.
        """
        if users and nbytes:
            try:
                return self.pool.lease(nbytes)
            except OSError as error:
                slower = "ranks of this machine use MPI instead, which is slower"
                print0_once(f"mpi_util: no shared memory ({error}); {slower}")
        return private(nbytes), None

    def collect_targets(self, nbytes: int, pieces: Sequence[Sequence[Piece]]) -> Sequence[Transfer]:
        """Rank 0, while it decides: each rank's answer, for a block in which each rank's arrays have these places."""
        writers = tuple(k for k in range(1, self.size) if any(n for _, n in pieces[k]))
        block, address = self.lease(nbytes, [k for k in writers if self.machine[k] == 0])
        starts = [[start for start, _ in own] for own in pieces]
        here = [address if lowest == 0 else None for lowest in self.machine]
        others = (Transfer(nbytes, here[k], starts=starts[k]) for k in range(1, self.size))
        return [Transfer(nbytes, None, block, writers, starts[0]), *others]

    def collect(self, op: str, target: Any, arrays: Sequence[np.ndarray]) -> None:
        """Collective, after the agreement: the arrays of all ranks, one for each piece, come into rank 0's block.

        Returns: on rank 0, when all rows are in `target.block`; elsewhere, when `arrays` may change again.
        """
        if target.block is not None:
            write_rows(target.block, arrays, target.starts)
            for k in target.others:
                over = False
                while not over:
                    parts, over = self.messages.receive(k, op)
                    for start, part in parts:
                        target.block[start : start + len(part)] = part
            return
        if not any(array.nbytes for array in arrays):
            return
        try:
            parts, nbytes = list[tuple[int, np.ndarray]](), 0
            if target.address:
                write_rows(self._memory(op, target.address), arrays, target.starts)
            for array, start in () if target.address else zip(arrays, target.starts):
                whole = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                for at in range(0, len(whole), _PART_BYTES):
                    parts.append((start + at, whole[at : at + _PART_BYTES]))
                    nbytes += len(parts[-1][1])
                    if nbytes >= _PART_BYTES:
                        self.messages.send([0], (parts, False))
                        parts, nbytes = [], 0
            self.messages.send([0], (parts, True))
        except Exception as error:
            self.messages.fail(op, error, [0])
            raise

    def spread_sources(self, nbytes: int, fill: Callable[[np.ndarray], object]) -> Sequence[Transfer]:
        """Rank 0, while it decides: each rank's answer, for a block, uint8, that all ranks get; `fill` writes it."""
        block, address = self.lease(nbytes, self.below)
        fill(block)
        others = [Transfer(nbytes, address)] * (self.size - 1)
        return [Transfer(nbytes, None, block, () if address else self.below), *others]

    def spread(self, op: str, source: Any) -> np.ndarray:
        """Collective, after the agreement: rank 0's bytes, uint8, on every rank; to be read before the next call."""
        if source.address:
            return np.ndarray((source.nbytes,), np.uint8, self._memory(op, source.address))
        block: np.ndarray = private(source.nbytes) if source.block is None else source.block
        for at in range(0, source.nbytes, _PART_BYTES):
            part = block[at : at + _PART_BYTES]
            if source.block is None:
                part[:] = self.messages.receive(self.above, op)
            elif source.others:
                self.messages.send(source.others, part)
        return block

    def _memory(self, op: str, address: Any) -> Any:
        """What rank 0 shares. Where it has ended, the error that says so comes as from any wait for it."""
        try:
            return self.pool.map(address)
        except (FileNotFoundError, PermissionError):  # it ended: its parent has taken notice, or has not yet
            self.messages.receive(0, op, end=time.perf_counter() + _ENDED_S)
            raise  # it lives

    def close(self) -> None:
        """Collective: frees what belongs to the channel, when the user's communicator is freed."""
        if self.comm is None:
            return
        with contextlib.suppress(MpiUtilError):  # MpiUtilError: one has failed; else all have mapped what this frees
            self.agree("Comm.Free", lambda: None, lambda _: [None] * self.size)
        self.comm.Free()
        self.loops.clear()
        if self.counter:
            self.counter = self.counter.close()
        self.messages.peers.close()
        self.pool.close()
        state(Kept).open.remove(self)


def paired(answers: Sequence[Answer], value: Any) -> list[tuple[Answer, Any]]:
    """Each answer with the same value. Answers that are one object stay one, which is pickled once."""
    pairs = {id(answer): (answer, value) for answer in answers}
    return [pairs[id(answer)] for answer in answers]


def write_rows(block: Any, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> None:
    """Copies each array, in whatever memory order it is, to its offset in `block`, row-major."""
    for array, start in zip(arrays, starts):
        np.copyto(np.ndarray(array.shape, array.dtype, block, start), array)


class Kept:
    """The channels of this process."""

    alone: Channel | None = None
    world: Channel | None = None
    team: Channel | None = None  # of the ranks that share this one's environment
    told_unsent = False  # it was printed which attributes of models differ and are not sent
    keyval: int | None = None  # the attribute under which a user's communicator keeps its channel until it is freed

    def __init__(self) -> None:
        self.open: list[Channel] = []  # those with more than one rank


def channel_of(comm: Comm = None) -> Channel:
    """Collective at its first call for a communicator: its channel. None: the world, or without MPI this process."""
    kept = state(Kept)
    if comm is None and kept.world is not None and kept.world.size > 1:
        return kept.world
    try:
        return _find_or_open(comm)
    except MpiUtilError:
        failure.install()  # so that it is reported in one line
        raise


def _find_or_open(comm: Comm) -> Channel:
    check_no_parent()
    kept = state(Kept)
    comm = comm if comm is not None else world()
    if comm is None:
        kept.alone = kept.alone or Channel()
        return kept.alone
    from mpi4py import MPI

    state(failure.FailureState).leave = _leave_all
    if kept.team and comm == MPI.COMM_WORLD:
        fix = (
            "call mpi_util.simulator(make_env), which does not return there, above them, and leave comm=COMM_WORLD out"
        )
        raise UsageError(f"{state(Role).name}: members of teams take part in no collective calls; {fix}")
    if comm == world():
        if kept.world is None:
            check_launcher(MPI.Get_library_version(), comm.Get_size())
            kept.world = _open(comm)
        return kept.world
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise UsageError(f"comm must be a communicator of one group that this rank is in (MPI.Intracomm); got {comm!r}")
    if kept.keyval is None:
        kept.keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, channel: channel.close())
    channel = comm.Get_attr(kept.keyval)
    if not isinstance(channel, Channel):
        channel = _open(comm)
        comm.Set_attr(kept.keyval, channel)
    return channel


def _open(comm: Any) -> Channel:
    """Collective: a new channel, for one machine or for several. Rank 0 may use the cores of all its ranks here."""
    if comm.Get_size() == 1:
        channel = Channel(comm)
        if not channel.alone:
            state(Threads).start(True)
        return channel
    failure.install()
    failure.register_mpi()
    failure.enter(FIRST_CALL)
    members = members_of(comm)
    request, background = comm.Ibarrier(), state(Background)

    def come() -> bool:
        for serve in background:
            serve()
        return bool(request.Test())

    wait_until(come, None, state(Watchdog), awaited=lambda: (members, range(len(members))))
    peers = Peers(comm, rank := comm.Get_rank())
    if peers.apart and rank == 0:
        slower = "cannot share memory with others of their machine; they use MPI, slower"
        failure.print_line(f"mpi_util: ranks {peers.apart} {slower}")
    kind: type[Channel] = Channel
    if any(peers.machine):
        why = f"the ranks {'share no memory' if peers.apart else 'are on several machines'}"
        kind = cluster_module("..cluster.channel", why, silent=rank > 0).ClusterChannel
    state(Kept).open.append(channel := kind(comm, peers))
    state(Watchdog).tickets.update((members[k], ticket) for k, ticket in peers.tickets.items())
    if rank == 0 and "MPI_UTIL_BOUND" not in os.environ:
        take_cores([ticket.pid for k, ticket in peers.tickets.items() if k and peers.machine[k] == 0])
    state(Threads).start(rank == 0, all_of(channel.comm, [update_threads()])[0][0])
    return channel


def open_teams(k: int, comm: Comm = None) -> None:
    """Collective: each `k` neighbours become a team, for one environment. The first of each is a worker.

    From then on the workers are the world. The others, members of the teams, are not in it, and make no calls.
    """
    role, kept, everyone = state(Role), state(Kept), channel_of(comm).comm
    n, (number, member) = everyone.Get_size() // k, divmod(everyone.Get_rank(), k)
    role.team, workers, kept.world = everyone.Split(number, member), everyone.Split(member > 0, number), None
    role.place = (n + number * (k - 1) + member - 1 if member else number), n
    role.name = f"member {member} of worker {number}" if member else f"worker {number}"
    if not member:
        role.workers, kept.world = workers, _open(workers)
    kept.team = _open(role.team)


def cluster_module(name: str, why: str, silent: bool = False) -> Any:
    """A module of the folder cluster/. LaunchError: the folder was not copied. Args: why: it is needed."""
    try:
        return importlib.import_module(name, __package__)
    except ModuleNotFoundError as missing:
        if ".cluster" not in (missing.name or ""):
            raise
        error = LaunchError(f"{why}, but mpi_util/cluster/, which is needed for that, is missing")
        error.silent = silent
        raise error from None


def _leave_all(status: int, reason: str, seconds: float | None) -> bool:
    """This process ends: announces it on every channel, and waits for the others there."""
    state(Watchdog).at_end()
    kept = state(Kept)
    if not status:
        state(Before).run()
    end = math.inf if seconds is None else time.perf_counter() + seconds
    for channel in kept.open:
        channel.messages.announce_end(status, reason, end)
    together = (kept.world or kept.team) is not None and all(each.messages.wait_for_ends(end) for each in kept.open)
    state(Watchdog).at_end()
    return together
