"""The small messages by which ranks agree: a star with rank 0 in its middle.

Every collective of this package is built on `Channel.agree`: each rank tells rank 0 which call it is in and what it
brings; rank 0 checks, decides, and answers each one. That is where a difference between ranks is found, so an error is
raised on all of them and nobody is left waiting. Bulk data moves elsewhere (transport.py), after all have agreed.
"""

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..errors import MpiUtilError, RankLeftError, RankMismatchError, rank_mismatch
from ..host import threads
from ..host.cores import usable_cores
from ..host.presence import Presence, lowest_rank_here
from ..host.segments import Attached, Pool
from ..host.waiting import Doorbell, wait_until
from ..launch import failure

_MESSAGE_TAG, _TICKET_TAG = 1, 2
_CALL, _REPLY, _ERROR, _DATA, _LEAVE, _NOTICE = range(6)
_INTERRUPTED_S = 0.5
_WAITS = " (waiting)"  # marks a call whose rank waits elsewhere than in `agree`

Brought = TypeVar("Brought")
Answer = TypeVar("Answer")


class Channel:
    """Collective: the private channel of a communicator; make it with `channel_of`.

    Attributes:
        rank, size: of this process in the communicator.
        machine: for each rank the lowest rank of its machine, with which it shares memory ("leader").
        members: the ranks, other than this one, that share this rank's memory if it is a leader.
        core_each: True if there are no more ranks than cores that this rank may use.
        whole: True if all ranks of the job are in it.
    """

    def __init__(self, comm: Any = None):
        self.rank: int = comm.Get_rank() if comm else 0
        self.size: int = comm.Get_size() if comm else 1
        self.whole = comm is None or self.size == _world_size()
        self.machine = [0]
        self.comm: Any = None
        self.bells: dict[int, int] = {}
        self.pool, self.attached = Pool(), Attached()
        self.left: dict[int, int] = {}  # ranks that have ended, with their status
        self._calls = 0
        self._serve_ticket: Callable[[Any], Any] | None = None
        self.version = 0  # of the weights that rank 0 sent last
        self.dealer: Any = None  # made by the first deal
        self.board: Any = None  # made by the first call that meets there
        self._early: dict[int, list[tuple[int, Any]]] = {}  # messages from ranks that are further on than this one
        self.core_each = self.size <= usable_cores()  # asked once: it reads files
        if self.size > 1:
            self._connect(comm)
        self.leader = self.machine[self.rank]
        self.members = [k for k in range(self.size) if self.machine[k] == self.rank and k != self.rank]
        self.remote_leaders = sorted(set(self.machine) - {self.machine[0]})

    def _connect(self, comm: Any) -> None:
        failure.install()
        failure.register_mpi()
        open_channels.append(self)
        self._presence = Presence()
        self.bell = self._presence.bell
        duplicate, request = comm.Idup()
        wait_until(request.Test)
        self.comm = duplicate
        self.machine = list(range(self.size))
        self.cards = self.agree("start", lambda: self._presence.card, lambda cards: [cards] * self.size)
        lowest = lowest_rank_here(comm, self.rank)
        leaders = self.agree("start", lambda: (self._reach(lowest), lowest), lambda leaders: [leaders] * self.size)
        self.machine = [leader for leader, _ in leaders]
        apart = [k for k, (leader, lowest) in enumerate(leaders) if leader != lowest]
        if apart and self.rank == 0:
            failure.say(
                f"mpi_util: ranks {apart} cannot share memory with others of their machine; they use MPI, slower"
            )
        for k, card in enumerate(self.cards):
            if k != self.rank and self.machine[k] == self.rank:
                self.bells[k] = Doorbell.open(card.pid, card.bell_fd)

    def _reach(self, leader: int) -> int:
        """`leader` if its memory and bell open from here, else this rank: it then counts as a machine of its own."""
        if leader == self.rank:
            return leader
        bell = self._presence.reach(self.cards[leader])
        if bell is None:
            return self.rank
        self.bells[leader] = bell
        return leader

    def enter(self, op: str) -> None:
        """This rank begins a collective call, or a part of one."""
        failure.enter(op)
        self._calls += 1
        if self.whole and self.rank == 0:
            threads.beside()

    def agree(
        self,
        op: str,
        bring: Callable[[], Brought],
        decide: Callable[[list[Brought]], Sequence[Answer]],
    ) -> Answer:
        """Collective: rank 0 looks at what all ranks bring and answers each of them.

        Args:
            op: name of the collective call, the same on all ranks.
            bring: called on every rank: the small picklable thing that it brings. What it raises is raised on every
                rank, so that a rank that fails while it prepares leaves nobody waiting and nobody a call ahead.
            decide: used on rank 0: list of what all have brought, in rank order -> list of answers in rank order. What
                it raises is raised on every rank.

        Returns:
            This rank's answer.

        Raises:
            RankMismatchError: ranks are in different calls.
            RankLeftError: a rank ended while others are in this call.
        """
        self.enter(op)
        own_error: Exception | None = None
        mine: tuple[int, Any]
        try:
            mine = (_CALL, (op, self._calls, failure.call_site(), bring()))
        except Exception as error:
            own_error = error
            portable = _portable(op, self.rank, error, name_rank=True)
            portable.silent = True  # this rank reports it
            mine = (_ERROR, portable)
        if self.rank:
            self.tell(0, *mine)
            kind, payload = self._hear(0, op)
            if kind == _ERROR:
                self.board = None
                raise own_error or payload
            answer: Answer = payload
            return answer
        try:
            heard: list[tuple[int, Any]] = [mine, *(self._hear(k, op) for k in range(1, self.size))]
            for kind, payload in heard:
                if kind == _ERROR:
                    raise payload
            self._check_calls([call[:3] for _, call in heard], range(self.size))
            answers = decide([brought for _, (*_, brought) in heard])
            messages = self._pickle_answers(answers)
        except Exception as error:
            self.board = None
            self._tell_all(_portable(op, 0, error))
            raise own_error or error from None
        self._send_answers(messages)
        return answers[0]

    def _pickle_answers(self, answers: Sequence[Any]) -> list[bytes]:
        """One message for each other rank; an answer that several get, as the same object, is pickled once."""
        messages: list[bytes] = []
        for k in range(1, self.size):
            same = k > 1 and answers[k] is answers[k - 1]
            messages.append(messages[-1] if same else pickle.dumps((_REPLY, answers[k]), pickle.HIGHEST_PROTOCOL))
        return messages

    def _send_answers(self, messages: list[bytes]) -> None:
        """Rank 0 sends all answers, and only then rings: a rank that wakes may take the core that rank 0 runs on."""
        requests = [self.comm.Isend(message, k, _MESSAGE_TAG) for k, message in enumerate(messages, 1)]
        for fd in self.bells.values():
            Doorbell.ring(fd)
        for k, request in enumerate(requests, 1):
            self.wait(request.Test, k)

    def _check_calls(self, calls: list[tuple[str, int, str]], ranks: Sequence[int]) -> None:
        """Raises RankMismatchError unless the ranks are in the same (call, its number, where in the program)."""
        if len({call[:2] for call in calls}) > 1:
            sites = [f"{op} at {site}" for op, _, site in calls]
            what = "ranks are in different collective calls; all must make the same calls in the same order"
            raise rank_mismatch(what, sites, ranks)

    def send(self, dest: int, payload: Any) -> None:
        """Small message to `dest`, outside of `agree`; `dest` is in `receive` or comes to it on its own."""
        self.tell(dest, _DATA, payload)

    def send_failure(self, dest: int, op: str, error: Exception) -> None:
        """Instead of `send`, where this rank has failed: `dest` raises it in its `receive`."""
        self.tell(dest, _ERROR, _portable(op, self.rank, error))

    def receive(self, source: int, op: str) -> Any:
        """The next message of `send` from `source`; sleeps until it is there.

        Raises:
            MpiUtilError: `source` has failed instead, or has gone on to another call.
        """
        kind, payload = self._hear(source, op)
        if kind == _ERROR:
            raise payload
        if kind != _DATA:
            raise RankMismatchError(f"{op}: rank {source} did not finish it, and went on to {payload[0]}")
        return payload

    def tell(self, dest: int, kind: int, payload: Any) -> None:
        """Sends and rings; returns when the message has left (at once, but for one too large for MPI to keep)."""
        request = self.comm.Isend(pickle.dumps((kind, payload), pickle.HIGHEST_PROTOCOL), dest, _MESSAGE_TAG)
        self.ring(dest)
        self.wait(request.Test, dest)

    def wait(self, test: Callable[[], Any], peer: int, rung: bool = False) -> Any:
        """Sleeps until `test` comes true, which is up to rank `peer`; the watchdog speaks up when that takes too long.

        Args:
            rung: `peer` rings this rank's bell when it is so far.
        """
        pid = self.cards[peer].pid if peer in self.bells else None
        sleep = self.bell.sleep if pid and rung else None
        return wait_until(test, sleep, lambda: failure.report_missing(self.rank, peer, pid), failure.watchdog_s())

    def ring(self, dest: int) -> None:
        """Wakes `dest`, if it is on this machine."""
        if dest in self.bells:
            Doorbell.ring(self.bells[dest])

    def _hear(self, source: int, op: str) -> tuple[int, Any]:
        """(kind, payload) of the next message from `source`; a rank that has ended instead is an error."""
        if source not in self.left and (message := self.next_message(source)):
            kind, payload = message
            if kind == _NOTICE:
                waits_here = payload[1] >= self._calls  # else it has been served since
                return (_CALL, (*payload, None)) if waits_here else self._hear(source, op)
            if kind != _LEAVE:
                return kind, payload
            self.left[source] = payload
        raise self._left_error(op, source)

    def _left_error(self, op: str, source: int) -> RankLeftError:
        status = self.left[source]
        text = f" (status {status})" if status else ""
        error = RankLeftError(f"{op}: rank {source} has ended{text} while rank {self.rank} waits for it")
        error.silent, error.status = self.rank > 0, status or 1
        return error

    def notice(self, op: str) -> None:
        """Tells rank 0 that this rank waits elsewhere than in `agree`, in case it waits for this rank there."""
        self.tell(0, _NOTICE, (op + _WAITS, self._calls, failure.call_site()))

    def look_out(self, op: str, came: Callable[[], list[bool]] = list) -> None:
        """A rank that waits on the board looks for messages that say why another does not come there.

        Rank 0 hears from all, and tells all; the others hear from rank 0.

        Args:
            came: for each rank whether it has come. One that has may be further on already; what it says can wait.

        Raises:
            RankMismatchError: a rank is in another call. RankLeftError: it has ended. Then the board is given up.
        """
        try:
            for source in self.left:
                raise self._left_error(op, source)
            while heard := self._overhear():
                source, (kind, payload) = heard
                arrived = came()
                if arrived and (all(arrived) or arrived[source]):
                    self._early.setdefault(source, []).append((kind, payload))
                elif kind == _LEAVE:
                    self.left[source] = payload
                    raise self._left_error(op, source)
                elif kind == _ERROR:
                    raise payload
                elif kind == _CALL:
                    self._check_calls([(op, self._calls, failure.call_site()), payload[:3]], [self.rank, source])
        except MpiUtilError as error:
            self.board = None
            if self.rank == 0:
                self._tell_all(_portable(op, 0, error))
            raise

    def _overhear(self) -> tuple[int, tuple[int, Any]] | None:
        """(source, message) of a message that is there."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self.comm.improbe(0 if self.rank else MPI.ANY_SOURCE, _MESSAGE_TAG, status)
        return (status.source, message.recv()) if message else None

    def _tell_all(self, error: MpiUtilError) -> None:
        """Rank 0: all others raise `error`, which this rank reports."""
        error.silent = True
        for k in range(1, self.size):
            self.tell(k, _ERROR, error)

    def next_message(self, source: int, end: float | None = None) -> tuple[int, Any] | None:
        """The next message from `source`, or None at time `end` (of time.perf_counter).

        While rank 0 waits it deals tickets to the ranks of other machines, which cannot ring it.
        """
        if self._early.get(source):
            return self._early[source].pop(0)

        def arrived() -> Any:
            for channel in _serving:
                channel.poll_tickets()
            return self.comm.improbe(source, _MESSAGE_TAG) or (end is not None and time.perf_counter() > end)

        message = self.wait(arrived, source, rung=not _serving)
        return None if message is True else message.recv()

    def poll_tickets(self) -> None:
        """Rank 0 answers ranks of other machines that ask for a ticket (deal.py)."""
        while self._serve_ticket and (message := self.comm.improbe(tag=_TICKET_TAG)):
            asking, question = message.recv()
            self.tell(asking, _DATA, self._serve_ticket(question))

    def serve_tickets(self, answer: Callable[[Any], Any]) -> None:
        """From now on rank 0 answers what ranks of other machines ask, while it waits in whatever channel."""
        self._serve_ticket = answer
        _serving.append(self)

    def ask_ticket(self, question: Any) -> Any:
        """The answer of rank 0's `serve_ticket`."""
        self.wait(self.comm.isend((self.rank, question), 0, _TICKET_TAG).Test, 0)
        return self.receive(0, "deal")

    def open_bells(self) -> None:
        """Opens the bells of all ranks of this machine, where before only its leader and the others can ring."""
        for k, card in enumerate(self.cards):
            if k != self.rank and self.machine[k] == self.machine[self.rank] and k not in self.bells:
                with contextlib.suppress(OSError):  # then it wakes up by itself
                    self.bells[k] = Doorbell.open(card.pid, card.bell_fd)

    def pids_here(self) -> list[int]:
        """The process ids of the other ranks of this machine."""
        here = [k for k in range(self.size) if self.machine[k] == self.leader and k != self.rank]
        return [self.cards[k].pid for k in here]

    def close(self) -> None:
        """Collective: frees what belongs to the channel, when the user's communicator is freed."""
        if self.comm is None:
            return
        self.comm.Free()
        self.board = None
        for fd in self.bells.values():
            os.close(fd)
        self.pool.close()
        for part in (self._presence, self.dealer):
            if part is not None:
                part.close()
        if self in _serving:
            _serving.remove(self)
        open_channels.remove(self)

    def say_leave(self, status: int) -> None:
        """Tells the others that this rank ends."""
        for k in range(1, self.size) if self.rank == 0 else [0]:
            self.tell(k, _LEAVE, status)

    def await_leaves(self, end: float | None) -> bool:
        """Waits until the others have ended too, or, if that cannot be because one waits for this rank, says so.

        Returns:
            False if not all have ended at time `end` (of time.perf_counter; None: wait for ever).
        """
        for k in range(1, self.size) if self.rank == 0 else [0]:
            until, op = end, ""
            while k not in self.left:
                message = self.next_message(k, until)
                if message is None and op and self.rank == 0:
                    failure.fail(
                        f"mpi_util: rank 0 has ended while rank {k} waits for it in {op}; all ranks must leave a loop "
                        "together, such as by `if mpi_util.all_sum(stop): break`"
                    )
                if message is None:
                    return False
                kind, payload = message
                if kind == _LEAVE:
                    self.left[k] = payload
                elif kind in (_CALL, _NOTICE) and payload[1] > self._calls and self.rank == 0 and not end:
                    # it waits for this rank; or its call was interrupted too, by a Ctrl-C, and then its leave follows
                    op = f"{payload[0].removesuffix(_WAITS)} at {payload[2]}"
                    until = time.perf_counter() + _INTERRUPTED_S
        return True


def _world_size() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_size()


def _portable(op: str, rank: int, error: Exception, name_rank: bool = False) -> MpiUtilError:
    """An error as the other ranks get it: a copy if it is one of this package's, else what it said."""
    if isinstance(error, MpiUtilError):
        copy = type(error)(f"rank {rank}: {error}" if name_rank else str(error))
        copy.status = error.status
        return copy
    return MpiUtilError(f"{op}: rank {rank} failed with {type(error).__name__}: {error}")


open_channels: list[Channel] = []  # with more than one rank
_serving: list[Channel] = []  # those whose rank 0 this is, and which ranks of other machines ask for tickets
