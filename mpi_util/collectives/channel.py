"""The channel of a communicator, over which its ranks agree: a star with rank 0 in its middle.

Every collective of this package is built on `Channel.agree`: each rank sends rank 0 which call it is in and what it
brings; rank 0 checks, decides, and answers each one. That is where a difference between ranks is found, so an error is
raised on all of them and no rank is left waiting. Bulk data moves elsewhere (transport.py), after all have agreed.
"""

import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from ..errors import MpiUtilError, RankMismatchError, rank_mismatch
from ..host import threads
from ..host.cores import usable_cores
from ..host.process import States, process
from ..host.segments import Attached, Pool
from ..host.waiting import wait_until
from ..launch import failure
from ..launch.identity import Comm, check_launcher, check_no_parent, world
from ..launch.watchdog import Watchdog
from .messages import CALL, DATA, ERROR, LEAVE, REPLY, TAG, WAITING, WAITS, Message, Messages, portable
from .peers import Peers

Brought = TypeVar("Brought")
Answer = TypeVar("Answer")


class OpenChannels(list["Channel"]):
    """The channels of this process that have more than one rank."""


class Channel:
    """Collective: the private channel of a communicator; make it with `channel_of`."""

    peers: Peers  # the ranks on this machine; only with more than one rank

    def __init__(self, comm: Any = None):
        self.rank: int = comm.Get_rank() if comm else 0
        self.size: int = comm.Get_size() if comm else 1
        everyone = world()
        self.whole = everyone is None or self.size == everyone.Get_size()  # all ranks of the job are in it
        self.comm: Any = None  # a duplicate of the communicator; None in a single process
        self.messages = Messages(self.rank, self.size)
        self.machine = [0]  # for each rank its leader: the lowest rank of its machine, with which it shares memory
        self.pool, self.attached = Pool(), Attached()  # shared memory that this rank owns, and that it maps
        self.states = States(self)  # what other modules keep for this communicator, each made as `kind(channel)`
        self.page: Any = None  # the ranks' barrier page; forgotten when an agreement fails, as one may not have it
        self.core_each = self.size <= usable_cores()  # asked once: it reads files
        self.version = 0  # of the weights that were sent last
        if self.size > 1:
            self._connect(comm)
        self.leader = self.machine[self.rank]
        # if this rank is a leader: the others that share its memory
        self.members = [k for k in range(self.size) if self.machine[k] == self.rank and k != self.rank]

    def _connect(self, comm: Any) -> None:
        failure.install()
        failure.register_mpi()
        self.comm, request = comm.Idup()
        wait_until(request.Test)
        self.messages.comm = self.comm
        self.messages.peers = self.peers = peers = Peers(comm, self.rank)
        process.of(OpenChannels).append(self)
        peers.infos = self.agree("start", lambda: peers.own, lambda infos: [infos] * self.size)
        self.machine = self.agree("start", peers.reach, lambda reached: [peers.machines(reached)] * self.size)
        peers.keep(self.here())
        apart = [k for k, leader in enumerate(self.machine) if leader != peers.infos[k].lowest]
        if apart and self.rank == 0:
            slower = "cannot share memory with others of their machine; they use MPI, slower"
            failure.print_line(f"mpi_util: ranks {apart} {slower}")

    def here(self) -> list[int]:
        """The ranks that share memory with this one, itself among them."""
        return [k for k in range(self.size) if self.machine[k] == self.machine[self.rank]]

    def enter(self, op: str) -> None:
        """This rank begins a collective call, or a part of one."""
        failure.enter(op)
        self.messages.calls += 1
        if self.whole and self.rank == 0:
            threads.beside()

    def agree(
        self, op: str, bring: Callable[[], Brought], decide: Callable[[list[Brought]], Sequence[Answer]]
    ) -> Answer:
        """Collective: rank 0 looks at what all ranks bring and answers each of them.

        Args:
            op: name of the collective call, the same on all ranks.
            bring: called on every rank: the small picklable thing that it brings. What it raises is raised on every
                rank, so that a rank that fails while it prepares leaves no rank waiting and none a call ahead.
            decide: used on rank 0: list of what all have brought, in rank order -> list of answers in rank order. What
                it raises is raised on every rank.

        Returns: this rank's answer.

        Raises:
            RankMismatchError: ranks are in different calls. RankLeftError: a rank ended while others are in this call.
        """
        self.enter(op)
        own_error: Exception | None = None
        mine: Message
        try:
            mine = (CALL, (op, self.messages.calls, failure.call_site(), bring()))
        except Exception as error:
            own_error, shown = error, portable(op, self.rank, error, name_rank=True)
            shown.silent = True  # this rank reports it
            mine = (ERROR, shown)
        if self.rank:
            self.messages.post(0, *mine)
            kind, payload = self._read(0, op)
            if kind == ERROR:
                self.page = None
                raise own_error or payload
            return cast(Answer, payload[1])
        received: list[Message] = [mine]
        try:
            for k in range(1, self.size):
                received.append(self._read(k, op))
            for kind, payload in received:
                if kind == ERROR:
                    raise payload
            self._check_calls([call[:3] for _, call in received], range(self.size))
            try:
                answers = decide([brought for _, (*_, brought) in received])
            except RankMismatchError as error:
                if len(set(sites := [call[2] for _, call in received])) == 1:
                    raise
                raise rank_mismatch(f"{error}\ncalled at", sites) from None
            self._answer(answers)
        except Exception as error:
            self._fail_all(portable(op, 0, error), range(1, len(received)))
            raise own_error or error from None
        return answers[0]

    def _read(self, source: int, op: str) -> Message:
        """The next message of an agreement. What a call that failed or was interrupted has left is dropped."""
        while True:
            kind, payload = self.messages.expect(source, op)
            if kind != DATA and (kind != REPLY or payload[0] == self.messages.calls):
                return kind, payload

    def _place(self, op: str) -> tuple[str, int, str]:
        """Where this rank is: the call, its number, `file:line` of the program."""
        return op, self.messages.calls, failure.call_site()

    def _answer(self, answers: Sequence[Any]) -> None:
        """Rank 0 sends all answers, and only then wakes: a rank that wakes may take the core that rank 0 runs on.

        An answer that several get, as the same object, is pickled once.
        """
        packed: list[bytes] = []
        message = b""
        for k in range(1, self.size):
            if k == 1 or answers[k] is not answers[k - 1]:
                message = pickle.dumps((REPLY, (self.messages.calls, answers[k])), pickle.HIGHEST_PROTOCOL)
            packed.append(message)
        requests = [self.comm.Isend(message, k, TAG) for k, message in enumerate(packed, 1)]
        for k in self.peers.wake_fds if requests else ():
            self.peers.wake(k)
        for k, request in enumerate(requests, 1):
            self.messages.wait(request.Test, k)

    def _check_calls(self, calls: list[tuple[str, int, str]], ranks: Sequence[int]) -> None:
        """Raises RankMismatchError unless the ranks are in the same (call, its number, where in the program)."""
        if len({call[:2] for call in calls}) > 1:
            sites = [f"{op} at {site}" for op, _, site in calls]
            what = "ranks are in different collective calls; all must make the same calls in the same order"
            raise rank_mismatch(what, sites, ranks)

    def _fail_all(self, error: MpiUtilError, read: Iterable[int]) -> None:
        """The call has failed: what the ranks hold together is void, and the others raise `error`.

        Args:
            read: the ranks whose CALL has been read. Those of the others come later, and are then dropped.
        """
        self.page = None
        error.silent = True  # on the others: this rank reports it
        for k in range(1, self.size) if self.rank == 0 else ():
            self.messages.failed[k] = 0 if k in read else self.messages.calls
            self.messages.post(k, ERROR, error)

    def report_waiting(self, op: str) -> None:
        """Lets rank 0 know that this rank waits elsewhere than in `agree`, in case rank 0 waits for it there."""
        op, number, site = self._place(op)
        self.messages.post(0, WAITING, (op + WAITS, number, site))

    def check_messages(self, op: str, arrived: Callable[[], list[bool]] = list) -> None:
        """A rank that waits elsewhere than in `agree` looks for messages that say why another one does not arrive.

        Rank 0 gets those of all ranks, and passes on what it finds; the others get rank 0's. `arrived`: for each rank
        whether it has arrived. One that has may be further on already; its messages can wait.

        Raises:
            RankMismatchError: a rank is in another call. RankLeftError: it has ended.
        """
        messages, read = self.messages, -1
        early = [(source, message) for source, kept in messages.early.items() for message in kept]
        messages.early.clear()  # what was early in the last round may be about this one
        try:
            for source in messages.ended:
                raise messages.left_error(op, source)
            while received := early.pop(0) if early else messages.poll():
                source, (kind, payload) = received
                there = arrived()
                # an error from a rank that has arrived, while others have not, is about this call
                if there and (all(there) or (there[source] and kind != ERROR)):
                    messages.early[source].append((kind, payload))
                elif kind == LEAVE:
                    messages.ended[source] = payload
                    raise messages.left_error(op, source)
                elif kind == ERROR:
                    raise payload
                elif kind == CALL and not messages.is_late(source, payload):
                    read = source
                    self._check_calls([self._place(op), payload[:3]], [self.rank, source])
        except MpiUtilError as error:
            self._fail_all(portable(op, 0, error), [read])
            raise
        finally:
            for source, message in early:
                messages.early[source].append(message)

    def close(self) -> None:
        """Collective: frees what belongs to the channel, when the user's communicator is freed."""
        if self.comm is None:
            return
        self.comm.Free()
        self.page = None
        self.states.close()
        self.peers.close()
        self.pool.close()
        process.of(OpenChannels).remove(self)


class _Channels:
    """The channels of this process that live as long as it does, and where others are kept."""

    alone: Channel | None = None
    world: Channel | None = None
    keyval: int | None = None  # the attribute under which a user's communicator keeps its channel until it is freed


def channel_of(comm: Comm = None) -> Channel:
    """Collective at its first call for a communicator: its channel. None: the world, or without MPI this process."""
    try:
        return _channel_of(comm)
    except MpiUtilError:
        failure.install()  # so that it is reported in one line
        raise


def _channel_of(comm: Comm) -> Channel:
    check_no_parent()
    comm = comm if comm is not None else world()
    kept = process.of(_Channels)
    if comm is None:
        kept.alone = kept.alone or Channel()
        return kept.alone
    from mpi4py import MPI

    process.of(failure.Rank).leave = _leave_all
    if comm == MPI.COMM_WORLD:
        if (whole := kept.world) is None:
            check_launcher(MPI.Get_library_version(), comm.Get_size())
            whole = kept.world = Channel(comm)
            infos = []
            if whole.size > 1:
                infos = whole.peers.infos
                process.of(Watchdog).join(whole.rank, whole.peers.note, [(info.pid, info.ticket) for info in infos])
            others = [infos[k].pid for k in whole.here() if k != whole.rank]
            threads.start(whole.rank == 0, others)
        return whole
    if kept.keyval is None:
        kept.keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, channel: channel.close())
    channel = comm.Get_attr(kept.keyval)
    if not isinstance(channel, Channel):
        channel = Channel(comm)
        comm.Set_attr(kept.keyval, channel)
    return channel


def _leave_all(status: int, reason: str, seconds: float | None) -> bool:
    """This process ends: announces it on every channel, and waits for the others there."""
    process.of(Watchdog).at_end()
    channels = process.of(OpenChannels)
    for channel in channels:
        channel.messages.announce_end(status, reason)
    end = None if seconds is None else time.perf_counter() + seconds
    together = process.of(_Channels).world is not None and all(each.messages.wait_for_ends(end) for each in channels)
    process.of(Watchdog).at_end()
    return together
