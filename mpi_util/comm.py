"""Who the ranks are, and the small messages by which they agree: a star with rank 0 in its middle.

Every collective of this package is built on `Channel.agree`: each rank tells rank 0 which call it is in and what it
brings; rank 0 checks, decides, and answers each one. That is where a difference between ranks is found, so an error is
raised on all of them and nobody is left waiting. Bulk data moves elsewhere (transport.py), after all have agreed.
"""

import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import failure
from .errors import MpiUtilError, RankLeftError, RankMismatchError
from .launch import env_rank, env_size, under_launcher, usable_cores
from .shared import Attached, Pool, Segment
from .waiting import Doorbell, wait_until

_MESSAGE_TAG, _TICKET_TAG = 1, 2
_CALL, _REPLY, _ERROR, _DATA, _LEAVE = range(5)
_TOKEN_PAGE = 4096  # bytes


def world():
    """MPI.COMM_WORLD if this process is a rank of an MPI job or has started MPI itself; None in a single process."""
    started = sys.modules.get("mpi4py.MPI")
    if under_launcher() or (started is not None and started.Is_initialized()):
        from mpi4py import MPI

        return MPI.COMM_WORLD
    return None


def rank() -> int:
    """This process's rank in the world; 0 in a single process. Does not start MPI."""
    return env_rank() if under_launcher() else (world().Get_rank() if world() else 0)


def nworkers() -> int:
    """Number of ranks in the world; 1 in a single process. Does not start MPI."""
    return env_size() if under_launcher() else (world().Get_size() if world() else 1)


class Card(NamedTuple):
    """What a rank tells the others about itself."""

    pid: int
    bell_fd: int
    token_fd: int
    token: bytes  # proves that /proc/<pid> is that rank, and not a namesake on another machine


class Channel:
    """Collective: the private channel of a communicator; make it with `channel_of`.

    Attributes:
        rank, size: of this process in the communicator.
        machine: for each rank the lowest rank of its machine, with which it shares memory ("leader").
        members: the ranks, other than this one, that share this rank's memory if it is a leader.
        core_each: True if there are no more ranks than cores that this rank may use.
    """

    def __init__(self, comm: Any = None):
        self.rank, self.size = (comm.Get_rank(), comm.Get_size()) if comm else (0, 1)
        self.machine = [0]
        self.comm = None
        self.bells: dict[int, int] = {}
        self.pool, self.attached = Pool(), Attached()
        self.serve_ticket: Callable[[Any], Any] | None = None  # set on rank 0 where ranks of other machines take part
        self.version = 0  # of the weights that rank 0 sent last
        self.dealer: Any = None  # made by the first deal
        if self.size > 1:
            self._connect(comm)
        self.core_each = self.size <= usable_cores()  # asked once: it reads files
        self.leader = self.machine[self.rank]
        self.members = [k for k in range(self.size) if self.machine[k] == self.rank and k != self.rank]
        self.remote_leaders = sorted(set(self.machine) - {self.machine[0]})

    def _connect(self, comm: Any) -> None:
        failure.install()
        failure.register_shm()
        self.bell = Doorbell()
        duplicate, request = comm.Idup()
        wait_until(request.Test)
        self.comm = duplicate
        self.machine = list(range(self.size))
        card = self._own_card()
        self.cards = self.agree("start", card, lambda cards: [cards] * self.size)
        lowest = _lowest_rank_here(comm, self.rank)
        leaders = self.agree("start", (self._reach(lowest), lowest), lambda leaders: [leaders] * self.size)
        self.machine = [leader for leader, _ in leaders]
        apart = [k for k, (leader, lowest) in enumerate(leaders) if leader != lowest]
        if apart and self.rank == 0:
            failure.say(
                f"mpi_util: ranks {apart} cannot share memory with others of their machine; they use MPI, slower"
            )
        for k, card in enumerate(self.cards):
            if k != self.rank and self.machine[k] == self.rank:
                self.bells[k] = Doorbell.open(card.pid, card.bell_fd)

    def _own_card(self) -> Card:
        token = secrets.token_bytes(16)
        try:
            self._token = Segment(_TOKEN_PAGE)
        except OSError:
            return Card(os.getpid(), -1, -1, token)
        self._token.map[: len(token)] = token
        return Card(os.getpid(), self.bell.write_fd, self._token.ticket.fd, token)

    def _reach(self, leader: int) -> int:
        """`leader` if its memory and bell open from here, else this rank: it then counts as a machine of its own."""
        card = self.cards[leader]
        if leader != self.rank:
            try:
                with open(f"/proc/{card.pid}/fd/{card.token_fd}", "rb") as file:
                    if file.read(len(card.token)) != card.token:
                        return self.rank
                self.bells[leader] = Doorbell.open(card.pid, card.bell_fd)
            except OSError:
                return self.rank
        return leader

    def agree(
        self, op: str, header: Any = None, decide: Callable[[list], Sequence] = lambda headers: [None] * len(headers)
    ) -> Any:
        """Collective: rank 0 looks at what all ranks bring and answers each of them.

        Args:
            op: name of the collective call, the same on all ranks.
            header: small picklable thing that this rank brings.
            decide: used on rank 0: list of all headers in rank order -> list of answers in rank order. An MpiUtilError
                that it raises is raised on every rank.

        Returns:
            This rank's answer.

        Raises:
            RankMismatchError: ranks are in different calls.
            RankLeftError: a rank ended while others are in this call.
        """
        failure.enter(op)
        if self.rank:
            self.tell(0, _CALL, (op, header))
            kind, answer = self._hear(0)
            if kind == _ERROR:
                raise answer
            return answer
        try:
            calls = [(op, header), *(self._hear(k, op)[1] for k in range(1, self.size))]
            self._check_calls([name for name, _ in calls])
            answers = decide([brought for _, brought in calls])
        except Exception as error:
            self._fail_together(op, error)
            raise
        self._answer(answers)
        return answers[0]

    def _answer(self, answers: Sequence) -> None:
        """Rank 0 sends all answers, and only then rings: a rank that wakes may take the core that rank 0 runs on."""
        requests, pickled, last = [], b"", self
        for k in range(1, self.size):
            if answers[k] is not last:
                last, pickled = answers[k], pickle.dumps((_REPLY, answers[k]), pickle.HIGHEST_PROTOCOL)
            requests.append(self.comm.Isend(pickled, k, _MESSAGE_TAG))
        for k in self.bells:
            self.ring(k)
        for k, request in enumerate(requests, 1):
            self.wait(request.Test, k)

    def _fail_together(self, op: str, error: Exception) -> None:
        """Makes every rank raise what went wrong on rank 0; they all wait for its answer now."""
        if isinstance(error, MpiUtilError):
            error.agreed = True
            told = error
        else:
            told = RankLeftError(f"{op}: rank 0 failed with {type(error).__name__}: {error}")
            told.agreed = True
        for k in range(1, self.size):
            self.tell(k, _ERROR, told)

    def _check_calls(self, names: list[str]) -> None:
        if len(set(names)) > 1:
            table = "\n".join(f"  rank {k}: {name}" for k, name in enumerate(names))
            raise RankMismatchError(
                f"ranks are in different collective calls; all must make the same calls in the same order:\n{table}"
            )

    def send(self, dest: int, payload: Any) -> None:
        """Small message to `dest`, outside of `agree`; `dest` is in `receive` or comes to it on its own."""
        self.tell(dest, _DATA, payload)

    def receive(self, source: int, op: str) -> Any:
        """The next message of `send` from `source`; sleeps until it is there."""
        return self._hear(source, op)[1]

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
        bell = self.bell if pid and rung else None
        return wait_until(test, bell, lambda: failure.report_missing(self.rank, peer, pid), failure.watchdog_s())

    def ring(self, dest: int) -> None:
        """Wakes `dest`, if it is on this machine."""
        if dest in self.bells:
            Doorbell.ring(self.bells[dest])

    def _hear(self, source: int, op: str = "") -> tuple[int, Any]:
        """(kind, payload) of the next message from `source`; a rank that has ended instead is an error."""
        kind, payload = self.next_message(source)
        if kind == _LEAVE:
            status = f" (status {payload})" if payload else ""
            error = RankLeftError(f"{op}: rank {source} has ended{status} while rank {self.rank} waits for it")
            error.agreed, error.status = self.rank > 0, payload or 1
            raise error
        return kind, payload

    def next_message(self, source: int, end: float | None = None) -> tuple[int, Any] | None:
        """The next message from `source`, or None at time `end` (of time.perf_counter).

        While rank 0 waits it deals tickets to the ranks of other machines, which cannot ring it.
        """

        def arrived():
            if self.serve_ticket:
                self.poll_tickets()
            return self.comm.improbe(source, _MESSAGE_TAG) or (end is not None and time.perf_counter() > end)

        message = self.wait(arrived, source, rung=not self.serve_ticket)
        return None if message is True else message.recv()

    def poll_tickets(self) -> None:
        """Rank 0 answers ranks of other machines that ask for a ticket (deal.py)."""
        while message := self.comm.improbe(tag=_TICKET_TAG):
            asking, question = message.recv()
            self.tell(asking, _DATA, self.serve_ticket(question))

    def ask_ticket(self, question: Any) -> Any:
        """The answer of rank 0's `serve_ticket`."""
        self.wait(self.comm.isend((self.rank, question), 0, _TICKET_TAG).Test, 0)
        return self.receive(0, "deal")

    def close(self) -> None:
        """Collective: frees what belongs to the channel, when the user's communicator is freed."""
        if self.comm is not None:
            self.comm.Free()
            for fd in self.bells.values():
                os.close(fd)
            self.bell.close()

    def leave(self, status: int, seconds: float | None = None) -> bool:
        """Collective: tells the others that this rank ends, and waits until they end too.

        Returns:
            False if not all of them have said so within `seconds` (None: wait for ever).
        """
        others = range(1, self.size) if self.rank == 0 else [0]
        for k in others:
            self.tell(k, _LEAVE, status)
        return failure.await_leaves(self, others, _LEAVE, seconds)


_keyval: Any = None  # under which a communicator of the user's keeps its channel until it is freed
_kept: dict[str, Channel] = {}  # the channels that live as long as the process


def channel_of(comm: Any = None) -> Channel:
    """Collective at its first call for a communicator: its channel.

    Args:
        comm: an mpi4py communicator; None: the world, or this process alone where there is no MPI.
    """
    comm = comm if comm is not None else world()
    if comm is None:
        if "alone" not in _kept:
            _kept["alone"] = Channel()
        return _kept["alone"]
    from mpi4py import MPI

    if comm == MPI.COMM_WORLD:
        if "world" not in _kept:
            _kept["world"] = Channel(comm)
            if comm.Get_size() > 1:
                failure.on_leave(_kept["world"].leave)
        return _kept["world"]
    global _keyval
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, channel: channel.close())
    channel = comm.Get_attr(_keyval)
    if channel is None:
        channel = Channel(comm)
        comm.Set_attr(_keyval, channel)
    return channel


def _lowest_rank_here(comm: Any, own_rank: int) -> int:
    """The lowest rank of `comm` on this rank's machine.

    MPI_UTIL_MACHINES=k pretends that the ranks are spread over k machines in equal blocks, to test or to measure what
    ranks on several machines do.
    """
    from mpi4py import MPI

    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    pretended = int(os.environ.get("MPI_UTIL_MACHINES", "0"))
    if pretended:
        whole, here = here, here.Split(own_rank * pretended // comm.Get_size())
        whole.Free()
    lowest = here.bcast(own_rank)
    here.Free()
    return lowest
