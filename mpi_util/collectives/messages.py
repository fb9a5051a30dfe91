"""Small messages between the ranks of one communicator, in the process of each; the receiver is woken if it sleeps.

`Peers` knows which ranks share a machine, and how they wake each other. The messages are MPI's, point to point, and
arrive in the order of sending. A rank that ends well tells rank 0, and rank 0 all; none exits before it hears that all
have: in MPI_Finalize it would take nothing more, and what is not taken may hold up messages between others (MPICH). A
rank that fails aborts the job instead (ranks/failure.py).
"""

import contextlib
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import BatchError, MpiUtilError, RankLeftError, RankMismatchError, UsageError, first_line
from ..host.reap import JOB_VARIABLE
from ..host.segments import Ticket, attach
from ..host.waiting import PAUSE_S, WakePipe, wait_until
from ..ranks import failure
from ..ranks.identity import world
from ..ranks.state import state
from ..ranks.watchdog import Watchdog

# Kinds of messages, with their payloads
CALL = 0  # (collective call, its number, file:line of the program, what the rank contributes), to rank 0
REPLY = 1  # (number of the call, rank 0's answer)
ERROR = 2  # an MpiUtilError, to be raised
DATA = 3  # (number of the call, anything), within a call; an MpiUtilError is raised where it is received
LEAVE = 4  # (exit status, reason or "", number of the last call that it has answered, as rank 0) of a rank that ends
_TAG = 1
_INTERRUPTED_S = 0.5

Message = bytes  # its kind, and its payload, pickled


def packed(kind: int, payload: Any) -> Message:
    """A message; equal ones have equal bytes. BatchError: something of the user's in it cannot be pickled."""
    try:
        return bytes([kind]) + pickle.dumps(payload, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # of whatever object
        raise BatchError(f"pickle does not take this: {first_line(error)}") from None


def opened(message: Message) -> tuple[int, Any]:
    return message[0], pickle.loads(memoryview(message)[1:])  # noqa: S301 - of this job's own ranks


class Background(list[Callable[[], None]]):
    """What rank 0 calls while it waits for a message on any channel. With anything to call it polls, not sleeps."""


class Peers:
    """Collective: this rank's view of the ranks on its machine."""

    def __init__(self, comm: Any, rank: int):
        from mpi4py import MPI

        self.pipe = WakePipe()  # by which this rank is woken
        self.wake_fds = dict[int, int]()  # rank -> its pipe, of the other ranks with which this one shares memory
        together = comm.Split_type(MPI.COMM_TYPE_SHARED)
        # to test or to measure what ranks on several machines do: as if they were spread over them in equal blocks
        pretended = int(os.environ.get("MPI_UTIL_MACHINES", "0"))
        everyone = MPI.COMM_WORLD
        here = together.Split(everyone.Get_rank() * pretended // everyone.Get_size())
        rows = all_of(together, [rank, self.pipe.write_fd, *(state(Watchdog).ticket or Ticket(0, 0, 0, 0))])
        # of the notes of the ranks of this machine, as MPI knows it, but for those that have no shared memory
        self.tickets = {k: Ticket(*its) for k, _, *its in rows if any(its)}
        pipes = {k: fd for k, fd, *_ in rows}
        lowest, *_ = ranks = [row[0] for row in all_of(here, [rank])]
        reaches: list[int] = [k == rank or (rank in self.tickets and self._open(k, pipes[k])) for k in ranks]
        reach = np.array(all_of(here, reaches), bool)
        shared = [k for i, k in enumerate(ranks) if reach[0, i] and reach[i, 0]]  # it and the lowest reach each other
        here.Free()
        together.Free()
        leaders = np.array(all_of(comm, [lowest if rank in shared else rank, lowest]))
        # for each rank of the communicator the lowest rank of its machine, with which it shares memory
        self.machine: list[int] = leaders[:, 0].tolist()
        # the ranks that cannot share it; each counts as a machine of its own
        self.apart: list[int] = np.flatnonzero(leaders[:, 0] != leaders[:, 1]).tolist()
        for k in self.wake_fds.keys() - set(shared if rank in shared else []):
            os.close(self.wake_fds.pop(k))

    def _open(self, k: int, pipe: int) -> bool:
        with contextlib.suppress(OSError):
            if ticket := self.tickets.get(k):
                os.close(attach(ticket)[0])
                self.wake_fds[k] = WakePipe.open(ticket.pid, pipe)
                return True
        return False

    def close(self) -> None:
        while self.wake_fds:
            os.close(self.wake_fds.popitem()[1])
        self.pipe.close()


def all_of(comm: Any, own: list[int]) -> list[list[int]]:
    """Collective: the integers of all ranks, as many of each."""
    found = np.empty((comm.Get_size(), len(own)), np.int64)
    request = comm.Iallgather(np.array(own, np.int64), found)
    wait_until(request.Test)
    rows: list[list[int]] = found.tolist()
    return rows


def members_of(comm: Any) -> list[int]:
    """The rank in the world of each rank of a communicator; negative: it is in another world, or a member of a team."""
    group, everyone = comm.Get_group(), world()
    translate = type(group).Translate_ranks  # a static method in mpi4py 3
    return [*translate(group, [*range(group.Get_size())], everyone.Get_group() if everyone else group)]


class Messages:
    """The messages of one rank."""

    peers: Peers  # who are woken
    members: list[int]  # the rank in the world of each rank
    leaving = list[Any]()  # of all channels: requests whose memory MPI may still use, after an error or a rank's end
    calls = answered = 0  # collective calls that this rank has begun; the last of which rank 0 has sent the answers
    waiting: tuple[threading.Thread, str] | None = None  # the thread that waits in a call, and that call

    def __init__(self, rank: int, size: int, comm: Any, peers: Peers | None):
        """Args: comm: over which they go; None, and no peers: there is only one rank."""
        self.rank, self.size = rank, size
        self.failed: dict[int, int] = {}  # on rank 0, for each rank the call that failed before its message was read
        self.ended: dict[int, tuple[int, str, int]] = {}  # ranks that have ended, with the payload of their LEAVE
        self.inbox: dict[int, list[Message]] = {}  # by sender, what has come and was not read yet; no list is empty
        self._concerned = range(1) if rank else range(1, size)  # the ranks that exchange their ends with this one
        if peers:
            from mpi4py import MPI

            self.comm, self.peers, self._any, self._status = comm, peers, MPI.ANY_SOURCE, MPI.Status()
            self._background, self._watchdog, self.members = state(Background), state(Watchdog), members_of(comm)

    def send(self, ranks: Iterable[int], data: Any) -> None:
        """Sends something small to these ranks, which call `receive` in the same collective call."""
        self.post_all(dict.fromkeys(ranks, packed(DATA, (self.calls, data))))

    def receive(self, source: int, op: str, serves: bool = False, end: float = math.inf) -> Any:
        """The next `send` of `source` in this call; None at time `end`. MpiUtilError: it failed, or is in another call.

        Args: serves: the program of `source` may have ended: while it waits for the other ranks it still answers.
        """
        while source not in self.ended or (serves and not self.ended[source][0]):
            _, message = self.next([source], end=end, serves=serves)
            if not message:
                return None
            kind, payload = opened(message)
            if kind == LEAVE:
                self.ended[source] = payload
            elif kind == DATA:
                number, data = payload
                if number < self.calls:
                    continue  # left over from a call that failed or was interrupted
                if isinstance(data, MpiUtilError):
                    raise data
                return data
            elif kind != CALL or not self.is_late(source, message):
                self.inbox[source] = [message, *self.inbox.get(source, ())]  # of the call in which it is now
                raise (
                    payload
                    if kind == ERROR
                    else RankMismatchError(f"{op}: rank {source} did not finish it, and went on to {payload[0]}")
                )
        raise self.left_error(op, source)

    def fail(self, op: str, error: Exception, ranks: Iterable[int]) -> None:
        """This rank cannot do its part of the call: those ranks raise the error too, unless they are done with it."""
        self.send({*ranks} - {self.rank}, portable(op, self.rank, error))

    def post_all(self, messages: Mapping[int, Message], end: float = math.inf) -> None:
        """Sends all, and only then wakes: a rank that wakes may take the core that this one runs on.

        Returns when they have left: at once if MPI has room to keep them; or at `end`; or when no rank will take them.
        """
        sent = {k: self.comm.Isend(message, k, _TAG) for k, message in messages.items()}
        self._wake(sent)

        def all_have_left() -> bool:
            if not (left := [k for k, request in sent.items() if not request.Test()]):
                return True
            self._wake(self.peers.wake_fds)  # what one that sleeps has not taken may leave no room for these
            if not self.waiting or self.waiting[0] is threading.current_thread():  # else that thread takes what comes
                self.poll()  # two ranks may send each other something large
            if messages[left[0]][0] == LEAVE:  # a rank that has ended takes it before it exits
                return time.perf_counter() > end
            over = self.ended | {k: opened(m)[1] for k, queue in self.inbox.items() for m in queue if m[0] == LEAVE}
            return (0 in over and over[0][2] < self.calls) or all(k in over for k in left)

        try:
            if sent:
                self.wait(all_have_left, lambda seconds: self.peers.pipe.sleep(min(seconds, PAUSE_S)))
        finally:
            self.leaving.extend(filter(None, sent.values()))

    def _wake(self, ranks: Iterable[int]) -> None:
        for k in ranks:
            if k in self.peers.wake_fds:  # else it polls
                WakePipe.wake(self.peers.wake_fds[k])

    def is_late(self, source: int, message: Message) -> bool:
        """True for a call that was answered, by an error, before it came. Only the first one after that can be."""
        number = self.failed.pop(source, 0)
        return number > 0 and opened(message)[1][1] == number

    def left_error(self, op: str, source: int) -> RankLeftError:
        """That this rank waits for one that has ended."""
        status, reason, _ = self.ended[source]
        text = f" with status {status}" * bool(status) + f" ({reason})" * bool(reason)
        error = RankLeftError(f"{op}: rank {source} has ended{text} while rank {self.rank} waits for it")
        # that it has ended, and why, is reported by mpi_fork's parent if there is one
        error.silent, error.status = self.rank > 0 or (status > 0 and JOB_VARIABLE in os.environ), status or 1
        return error

    def next(
        self, awaited: Collection[int], others: Collection[int] = (), end: float = math.inf, serves: bool = False
    ) -> tuple[int, Message]:
        """(rank, message): the next from these ranks, or from `others` that something is wrong; (-1, b"") at `end`.

        Args: serves: those ranks may send it whatever they wait for themselves.
        """

        def first() -> int | None:
            for k, queue in self.inbox.items():
                if k in awaited or (k in others and queue[0][0] != CALL):
                    return k
            return None

        source = first()

        def arrived() -> bool:
            nonlocal source
            for call in self._background:
                call()
            self.poll()
            source = first()
            return source is not None or time.perf_counter() > end

        if source is None and not arrived():
            woken = not self._background and all(k in self.peers.wake_fds for k in awaited)
            needed = () if serves or end < math.inf else awaited
            self.wait(arrived, self.peers.pipe.sleep, by_mpi=not woken, awaited=lambda: needed)
        if source is None:
            return -1, b""
        message, *rest = self.inbox.pop(source)
        if rest:
            self.inbox[source] = rest
        return source, message

    def poll(self) -> None:
        """Takes all that has come into the inbox."""
        while (message := self.comm.Improbe(self._any, _TAG, self._status)) is not None:
            buffer = bytearray(self._status.Get_count())
            message.Recv(buffer)
            self.inbox.setdefault(self._status.source, []).append(bytes(buffer))

    def wait(
        self, test: Callable[[], Any], sleep: Callable[[float], bool] | None = None,
        by_mpi: bool = True, awaited: Callable[[], Iterable[int]] | None = None,
    ) -> Any:  # fmt: skip
        """Waits until `test` comes true.

        Args: sleep, by_mpi: as of `wait_until`. awaited: in a call; gives ranks that must do their part of it.
        """
        if awaited is None:
            return wait_until(test, sleep, self._watchdog, by_mpi)
        self.check_thread(call := state(failure.FailureState).call)
        before, self.waiting = self.waiting, (threading.current_thread(), call)
        try:
            return wait_until(test, sleep, self._watchdog, by_mpi, lambda: (self.members, awaited()))
        finally:
            self.waiting = before

    def check_thread(self, op: str) -> None:
        """UsageError: another thread of this rank is in a call."""
        if self.waiting and self.waiting[0] is not (here := threading.current_thread()):
            other = f"thread {self.waiting[0].name!r} of this rank is in {self.waiting[1]}"
            fix = "the collective calls of a rank come from one thread (only `deal` may be shared)"
            raise UsageError(f"{op}, in thread {here.name!r}: {other}; {fix}")

    def announce_end(self, status: int, reason: str, end: float) -> None:
        """Tells the ranks whose ends `wait_for_ends` awaits. Args: end: when to stop trying, of time.perf_counter."""
        self.post_all(dict.fromkeys(self._concerned, packed(LEAVE, (status, reason, self.answered))), end)

    def wait_for_ends(self, end: float) -> bool:
        """True when the others have ended too; False if not by time `end`, of time.perf_counter.

        If they cannot end, as one waits for this rank, rank 0 ends the job.
        """
        for k in self._concerned:
            until, op = end, ""
            while k not in self.ended:
                source, message = self.next([k], end=until)
                if source < 0 and op:
                    fix = "all ranks must leave a loop together, such as by `if mpi_util.all_sum(stop): break`"
                    failure.fail(f"mpi_util: rank 0 has ended while rank {k} waits for it in {op}; {fix}")
                if source < 0:
                    return False
                kind, payload = opened(message)
                if kind == LEAVE:
                    self.ended[k] = payload
                elif kind == CALL and payload[1] > self.calls and self.rank == 0 and end == math.inf:
                    # it waits for this rank; or its call was interrupted too, by a Ctrl-C, and then its end follows
                    op = f"{payload[0]} at {payload[2]}"
                    until = time.perf_counter() + _INTERRUPTED_S
        if self.rank == 0:
            self.announce_end(0, "", end)
        return self.rank == 0 or self.next([0], end=end)[0] == 0


def portable(op: str, rank: int, error: Exception, name_rank: bool = False) -> MpiUtilError:
    """An error as the other ranks get it: a copy if it is one of this package's, else its text; this one reports it."""
    copy = MpiUtilError(f"{op}: rank {rank} failed with {failure.describe(error)}")
    if isinstance(error, MpiUtilError):
        copy = MpiUtilError(text := f"rank {rank}: {error}" if name_rank else str(error))
        with contextlib.suppress(TypeError):  # a class that is made from something else
            copy = type(error)(text)
        copy.status = error.status
    copy.silent = True
    return copy
