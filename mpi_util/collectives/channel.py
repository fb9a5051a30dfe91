"""The channel of a communicator, over which its ranks agree.

Every collective of this package is built on `Channel.agree`: each rank lets rank 0 know which call it is in and what it
brings; rank 0 checks, decides, and answers each one. That is where a difference between ranks is found, so an error is
raised on all of them and no rank is left waiting. Bulk data moves elsewhere (transport.py), after all have agreed.

Messages go up a tree (`Tree`), in which equal ones are joined, and the answers down again: so rank 0's work does not
grow with the number of ranks on a machine. Bad news do not: each rank tells rank 0 when it ends, and rank 0 all.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import MpiUtilError, RankLeftError, RankMismatchError, UsageError, rank_mismatch
from ..host.cores import update_threads, usable_cores
from ..host.segments import Attached, Pool
from ..host.waiting import wait_until
from ..ranks import failure, threads
from ..ranks.identity import Comm, check_launcher, check_no_parent, world
from ..ranks.state import States, process
from ..ranks.watchdog import Watchdog
from .messages import (
    CALL,
    CALLS,
    ERROR,
    LEAVE,
    REPLIES,
    REPLY,
    WAITING,
    WAITS,
    Message,
    Messages,
    opened,
    packed,
    portable,
)
from .peers import Peers

FAN = 32  # leaders that send to one other

Brought = TypeVar("Brought")
Answer = TypeVar("Answer")


class Tree:
    """How messages come to rank 0, and its answers back: by the machines' leaders, and the tree of these.

    Attributes:
        above: the rank to which this one sends.
        below: for each rank that sends to this one all ranks whose messages come so, itself among them.
    """

    def __init__(self, machine: Sequence[int], rank: int):
        """Args: machine: for each rank its leader."""
        leaders = sorted(set(machine))
        here: dict[int, list[int]] = {leader: [] for leader in leaders}
        for k, leader in enumerate(machine):
            here[leader].append(k)
        self.above, self.below = machine[rank], dict[int, list[int]]()
        if rank in here:
            i = leaders.index(rank)
            self.above = leaders[max(0, i - 1) // FAN]
            for j in range(FAN * i + 1, min(FAN * i + FAN + 1, len(leaders))):
                self.below[leaders[j]] = sorted(k for d in _descendants(j, len(leaders)) for k in here[leaders[d]])
            self.below |= {k: [k] for k in here[rank] if k != rank}


def _descendants(i: int, n: int) -> list[int]:
    """Of `n` leaders, number `i` and all those below it."""
    found: list[int] = []
    last = range(i, i + 1)
    while last := range(last.start, min(last.stop, n)):
        found += last
        last = range(FAN * last.start + 1, FAN * last[-1] + FAN + 1)
    return found


class OpenChannels(list["Channel"]):
    """The channels of this process that have more than one rank."""


class UnreadableReply(Exception):
    """Rank 0's answer has come, and an object of the program in it cannot be made here; its cause says why."""


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
        self.tree = Tree(self.machine, self.rank)
        self.leader = self.machine[self.rank]
        # if this rank is a leader: the others that share its memory
        self.members = [k for k in range(self.size) if self.machine[k] == self.rank and k != self.rank]

    def _connect(self, comm: Any) -> None:
        failure.install()
        failure.register_mpi()
        self.comm, request = comm.Idup()
        wait_until(request.Test)
        self.peers = Peers(comm, self.rank)
        self.messages.connect(self.comm, self.peers)
        process.of(OpenChannels).append(self)
        self.machine = self.peers.machine
        if self.peers.apart and self.rank == 0:
            slower = "cannot share memory with others of their machine; they use MPI, slower"
            failure.print_line(f"mpi_util: ranks {self.peers.apart} {slower}")

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
        try:
            mine = packed(CALL, (*self._place(op), bring()))
        except Exception as error:
            own_error, shown = error, portable(op, self.rank, error, name_rank=True)
            shown.silent = True  # this rank reports it
            mine = packed(ERROR, shown)
        awaited = set(self.tree.below)  # those from whom nothing has come yet
        try:
            found = self._collect(op, mine, awaited)
            return self._decide(found, decide) if self.rank == 0 else self._ask(op, found)
        except UnreadableReply as error:  # the call has not failed: the others have their answers
            raise error.__cause__ or error from None
        except Exception as error:
            self._fail_all(portable(op, 0, error), awaited)
            raise own_error or error from None

    def _collect(self, op: str, mine: Message, awaited: set[int]) -> dict[Message, list[int]]:
        """What this rank and those below it bring: each message, with the ranks that have sent it."""
        messages, found = self.messages, {mine: [self.rank]}
        concerns = range(self.size) if self.rank == 0 else range(1)  # rank 0 hears of all, the others of rank 0's
        for k in messages.ended:
            raise self._left(op, k)
        while awaited:
            source, message = messages.next(awaited, concerns)
            kind = message[0]
            if kind == LEAVE:
                messages.ended[source] = opened(message)[1]
                raise self._left(op, source)
            if source not in awaited:
                if kind == ERROR:
                    raise opened(message)[1]
            elif kind == CALLS and not messages.is_late(source, message):
                for each, ranks in opened(message)[1][3]:
                    found.setdefault(each, []).extend(ranks)
                awaited.remove(source)
            elif (
                kind == ERROR
                or (kind == CALL and not messages.is_late(source, message))
                or (kind == WAITING and opened(message)[1][1] >= messages.calls)  # else it has gone on since
            ):
                found.setdefault(message, []).append(source)
                awaited.remove(source)
        return found

    def _decide(self, found: dict[Message, list[int]], decide: Callable[[list[Brought]], Sequence[Answer]]) -> Answer:
        """Rank 0 checks what all bring, and answers them."""
        each = [(*opened(message), ranks) for message, ranks in found.items()]
        if errors := [(min(ranks), error) for kind, error, ranks in each if kind == ERROR]:
            raise min(errors, key=lambda of: of[0])[1]
        calls = {k: call for _, call, ranks in each for k in ranks}
        if len({call[:2] for _, call, _ in each}) > 1:
            self._check_calls([calls[k][:3] for k in range(self.size)], range(self.size))
        try:
            answers = decide([calls[k][3] for k in range(self.size)])
        except RankMismatchError as error:
            if len({call[2] for _, call, _ in each}) == 1:
                raise
            raise rank_mismatch(f"{error}\ncalled at", [calls[k][2] for k in range(self.size)]) from None
        # an answer that several get, as the same object, is pickled once
        keys = [*map(id, answers)]
        made = {k: packed(REPLY, (self.messages.calls, each)) for k, each in dict(zip(keys[1:], answers[1:])).items()}
        self._pass_on([b"", *map(made.__getitem__, keys[1:])])
        self.messages.answered = self.messages.calls
        return answers[0]

    def _ask(self, op: str, found: dict[Message, list[int]]) -> Any:
        """Another rank sends on what was found, and passes the answers on. Returns: its own."""
        messages, below = self.messages, self.tree.below
        mine = next(iter(found))
        messages.post_all({self.tree.above: packed(CALLS, (*self._place(op), [*found.items()])) if below else mine})
        while True:  # what a call that failed or was interrupted has left is dropped
            source, message = messages.next([self.tree.above], range(1))
            try:
                kind, payload = opened(message)
            except Exception as error:  # of a class of the program
                messages.post_all(dict.fromkeys(below, message))
                raise UnreadableReply from error
            if kind in (REPLY, REPLIES) and payload[0] == messages.calls:
                break
            if kind == ERROR:
                raise payload
            if kind == LEAVE:
                messages.ended[source] = payload
                if payload[2] < messages.calls:  # else the answer, which comes by the leader, may be slower
                    raise messages.left_error(op, source)
        if kind == REPLY:  # the same for all
            messages.post_all(dict.fromkeys(below, message))
            return payload[1]
        replies = {k: reply for reply, ranks in payload[1] for k in ranks}
        self._pass_on(replies)
        try:
            return opened(replies[self.rank])[1][1]
        except Exception as error:
            raise UnreadableReply from error

    def _pass_on(self, replies: Sequence[Message] | Mapping[int, Message]) -> None:
        """Sends the replies, by rank, to those below this one."""
        down = {}
        for k, ranks in self.tree.below.items():
            parts: dict[Message, list[int]] = {reply: [] for reply in map(replies.__getitem__, ranks)}
            if len(parts) == 1:
                (down[k],) = parts
                continue
            for each in ranks:
                parts[replies[each]].append(each)
            down[k] = packed(REPLIES, (self.messages.calls, [*parts.items()]))
        self.messages.post_all(down)

    def _place(self, op: str) -> tuple[str, int, str]:
        """Where this rank is: the call, its number, `file:line` of the program."""
        return op, self.messages.calls, failure.call_site()

    def _check_calls(self, calls: list[tuple[str, int, str]], ranks: Sequence[int]) -> None:
        """Raises RankMismatchError unless the ranks are in the same (call, its number, where in the program)."""
        if len({call[:2] for call in calls}) > 1:
            sites = [f"{op} at {site}" for op, _, site in calls]
            what = "ranks are in different collective calls; all must make the same calls in the same order"
            raise rank_mismatch(what, sites, ranks)

    def _fail_all(self, error: MpiUtilError, unread: Collection[int]) -> None:
        """The call has failed: what the ranks hold together is void, and the others raise `error`, if this is rank 0.

        Args:
            unread: the ranks below this one whose message has not been read. It comes later, and is then dropped.
        """
        self.page = None
        error.silent = True  # on the others: this rank reports it
        self.messages.failed = dict.fromkeys(unread, self.messages.calls)
        if self.rank == 0:
            self.messages.post_all(dict.fromkeys(range(1, self.size), packed(ERROR, error)))

    def report_waiting(self, op: str) -> None:
        """Lets rank 0 know that this rank waits elsewhere than in `agree`, in case rank 0 waits for it there."""
        op, number, site = self._place(op)
        self.messages.post(0, WAITING, (op + WAITS, number, site))

    def _left(self, op: str, source: int) -> RankLeftError:
        """That a rank has ended which this one waits for. Rank 0, where it ends, says so, and has to know."""
        if self.rank:
            self.report_waiting(op)
        return self.messages.left_error(op, source)

    def check_messages(self, op: str, arrived: Callable[[], list[bool]] = list) -> None:
        """A rank that waits elsewhere than in `agree` looks for messages that say why another one does not arrive.

        Rank 0 gets those of all ranks, and passes on what it finds; the others get rank 0's. `arrived`: for each rank
        whether it has arrived. One that has may be further on already; its messages can wait.

        Raises:
            RankMismatchError: a rank is in another call. RankLeftError: it has ended.
        """
        messages, unread = self.messages, set(self.tree.below)
        messages.poll()
        # what was early in the last round may be about this one
        came = [(source, message) for source, queue in messages.inbox.items() for message in queue]
        messages.inbox.clear()
        try:
            for source in messages.ended:
                raise self._left(op, source)
            while came:
                source, message = came.pop(0)
                (kind, payload), there = opened(message), arrived()
                # an error from a rank that has arrived, while others have not, is about this call
                if there and (all(there) or (there[source] and kind != ERROR)):
                    messages.inbox.setdefault(source, []).append(message)
                elif kind == LEAVE:
                    messages.ended[source] = payload
                    raise self._left(op, source)
                elif kind == ERROR:
                    raise payload
                elif kind in (CALL, CALLS) and not messages.is_late(source, message):
                    unread.discard(source)
                    self._check_calls([self._place(op), payload[:3]], [self.rank, source])
        except MpiUtilError as error:
            self._fail_all(portable(op, 0, error), unread)
            raise
        finally:
            for source, message in came:
                messages.inbox.setdefault(source, []).append(message)

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

    process.of(failure.FailureState).leave = _leave_all
    if comm == MPI.COMM_WORLD:
        if (whole := kept.world) is None:
            check_launcher(MPI.Get_library_version(), comm.Get_size())
            whole = kept.world = Channel(comm)
            infos = whole.peers.infos if whole.size > 1 else {}
            notes = [(infos[k].pid, infos[k].ticket) if k in infos else (0, None) for k in range(whole.size)]
            process.of(Watchdog).join(whole.rank, whole.peers.note if infos else None, notes)
            if whole.rank == 0:
                threads.take_cores([infos[k].pid for k in infos if k in whole.here() and k != whole.rank])
            threads.start(whole.rank == 0, whole.peers.of_rank_0(update_threads()) if infos else 0)
        return whole
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise UsageError(f"comm must be a communicator of one group that this rank is in (MPI.Intracomm); got {comm!r}")
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
