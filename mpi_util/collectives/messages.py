"""Small messages between the ranks of one communicator; the receiver is woken if it sleeps.

Between a leader and the others of its machine they go through shared memory (rings.py), between other ranks through
MPI; either way in order.

A rank that ends reports it to rank 0, rank 0 to all, and none exits before it knows of the others: one that ended
silently would look like a slow one, and its MPI_Finalize would wait for the others with a busy core.
"""

import io
import math
import os
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from ..errors import BatchError, MpiUtilError, RankLeftError, RankMismatchError
from ..host.reap import JOB_VARIABLE
from ..host.waiting import SPIN_S, wait_until
from ..ranks import failure
from ..ranks.state import process
from ..ranks.watchdog import Watchdog
from .peers import Peers
from .rings import LARGE

CALL, CALLS, REPLY, REPLIES, ERROR, DATA, LEAVE, WAITING = range(8)
"""Kinds of messages. Their payloads:

CALL: (collective call, its number, file:line of the program, what the rank brings); to its leader.
CALLS: as CALL, of a leader for all ranks below it in the tree: [(message, ranks that sent it), ...]; to the next one.
REPLY: (number of the call, rank 0's answer); of a leader all below get the same.
REPLIES: (number of the call, [(REPLY, ranks that get it), ...]), to a leader.
ERROR: an MpiUtilError, to be raised. DATA: anything, within a call; also an MpiUtilError, to be raised.
LEAVE: (exit status, reason or "", number of the last call that it has answered, as rank 0) of a rank that ends.
WAITING: as CALL, of a rank that waits elsewhere than in `Channel.agree`.
"""
WAITS = " (waiting)"  # what WAITING adds to the name of the call
_TAG = 1
_LARGE_TAG = 4  # of those that a ring announces
_INTERRUPTED_S = 0.5

Message = bytes  # its kind, and its payload, pickled


def packed(kind: int, payload: Any) -> Message:
    """A message; equal ones have equal bytes. BatchError: something of the user's in it cannot be pickled."""
    message = io.BytesIO()
    message.write(bytes([kind]))
    try:
        pickle.dump(payload, message, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # of whatever object
        raise BatchError(f"pickle does not take this: {error}") from None
    return message.getvalue()


def opened(message: Message) -> tuple[int, Any]:
    """Its kind and payload."""
    return message[0], pickle.loads(memoryview(message)[1:])  # noqa: S301 - of this job's own ranks


class Background(list[Callable[[], None]]):
    """What rank 0 calls while it waits for a message on any channel. With anything to call it polls, not sleeps."""


class Messages:
    """The messages of one rank.

    Attributes:
        calls: how many collective calls this rank has begun.
        failed: of each rank below this one in the tree, the call that has failed before its message was read.
        ended: ranks that have ended, with the payload of their LEAVE.
        answered: on rank 0, the number of the last call of which it has sent the answers.
        inbox: what has come and was not read yet, by the rank that sent it; no list in it is empty.
    """

    comm: Any  # over which they go, and `peers`, who are woken: both set by `connect`
    peers: Peers

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.calls = rank, size, 0
        self.failed: dict[int, int] = {}
        self.ended: dict[int, tuple[int, str, int]] = {}
        self.answered = 0
        self.inbox: dict[int, list[Message]] = {}

    def connect(self, comm: Any, peers: Peers) -> None:
        """To be called where there is more than one rank."""
        from mpi4py import MPI

        self.comm, self.peers, self._any, self._status = comm, peers, MPI.ANY_SOURCE, MPI.Status()

    def send(self, dest: int, payload: Any) -> None:
        """Small message to `dest`, which calls `receive` sooner or later."""
        self.post(dest, DATA, payload)

    def receive(self, source: int, op: str, serves: bool = False) -> Any:
        """The next message of `send` from `source`; raises MpiUtilError if that has failed, or is in another call.

        `serves`: it answers at its own end, too, while it waits for the other ranks.
        """
        kind, payload = self._expect(source, op, serves)
        if isinstance(payload, MpiUtilError):
            if self._is_over(payload):
                return self.receive(source, op, serves)
            raise payload
        if kind != DATA:
            raise RankMismatchError(f"{op}: rank {source} did not finish it, and went on to {payload[0]}")
        return payload

    def fail(self, op: str, error: BaseException, ranks: Iterable[int], waiting: Iterable[int] = ()) -> None:
        """This rank cannot do its part of the call: others raise the error too, unless they are done with the call.

        Args:
            ranks: those others. waiting: of an error that came from another rank only these are notified.
        """
        if not isinstance(error, Exception):
            return  # an interrupt, which all get
        shown = portable(op, self.rank, error)
        shown.call, shown.silent = self.calls, True  # this rank reports it
        for k in {*(waiting if isinstance(error, MpiUtilError) and error.call else ranks)} - {self.rank}:
            self.send(k, shown)

    def _is_over(self, error: MpiUtilError) -> bool:
        return 0 < error.call < self.calls

    def post(self, dest: int, kind: int, payload: Any) -> None:
        """Sends and wakes; returns when the message has left (at once, but for one too large for MPI to keep)."""
        self.post_all({dest: packed(kind, payload)})

    def post_all(self, messages: Mapping[int, Message]) -> None:
        """Sends all, and only then wakes: a rank that wakes may take the core that this one runs on."""
        sent = list[Any]()
        for k, message in messages.items():
            in_ring = k in (rings := self.peers.rings).ranks
            if not in_ring or len(message) > LARGE:
                sent.append(self.comm.Isend(message, k, _LARGE_TAG if in_ring else _TAG))
                message = b""  # a large one is announced in the ring
            if in_ring and not rings.write(k, message):
                self.wait(partial(rings.write, k, message))
        for k in messages:
            self.peers.wake(k)
        for request in sent:
            if not request.Test():
                self.wait(request.Test)

    def _expect(self, source: int, op: str, serves: bool) -> tuple[int, Any]:
        """(kind, payload) of what comes next from `source` in the call `op`. RankLeftError if it has ended instead."""
        while source not in self.ended or (serves and not self.ended[source][0]):
            _, message = self.next([source])
            kind, payload = opened(message)
            if kind == LEAVE:
                self.ended[source] = payload
            elif kind == WAITING and payload[1] < self.calls:
                continue  # it has got since what it waited for
            elif kind not in (CALL, CALLS) or not self.is_late(source, message):
                return kind, payload
        raise self.left_error(op, source)

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
        self, awaited: Collection[int], others: Collection[int] = (), end: float = math.inf
    ) -> tuple[int, Message]:
        """(rank, message): the next one from these ranks; (-1, b"") at time `end` (of time.perf_counter).

        Args: others: those who may send that something is wrong.
        """
        background = process.of(Background)

        def first() -> int | None:
            for k, queue in self.inbox.items():
                if k in awaited or (k in others and queue[0][0] not in (CALL, CALLS)):
                    return k
            return None

        source = first()

        def arrived() -> bool:
            nonlocal source
            for call in background:
                call()
            self.poll()
            source = first()
            return source is not None or time.perf_counter() > end

        if source is None and not arrived():
            by_mpi = bool(background) or not all(k in self.peers.wake_fds for k in awaited)
            self.wait(arrived, partial(self.peers.sleep, self.peers.rings.news), by_mpi)
        return (-1, b"") if source is None else (source, self.take(source))

    def raise_failure(self) -> None:
        """Raises what other ranks have reported: for a rank that waits for bytes, not for messages."""
        self.poll()
        for source, queue in [*self.inbox.items()]:
            kind, payload = opened(queue[0])
            if kind == DATA and isinstance(payload, MpiUtilError):
                self.take(source)
                if not self._is_over(payload):
                    raise payload
            elif kind == LEAVE and payload[0]:
                self.ended[source] = payload
                raise self.left_error(process.of(failure.FailureState).call, source)

    def take(self, source: int) -> Message:
        """The first message from that rank in the inbox."""
        queue = self.inbox[source]
        message = queue.pop(0)
        if not queue:
            del self.inbox[source]
        return message

    def poll(self) -> None:
        """Takes all that has come into the inbox."""
        rings = self.peers.rings
        for source, message in rings.take():
            self.inbox.setdefault(source, []).append(message or self.wait(partial(self._by_mpi, source, _LARGE_TAG))[1])
        if 0 not in rings.ranks and len(rings.ranks) < self.size - 1:
            while received := self._by_mpi(None, _TAG):
                self.inbox.setdefault(received[0], []).append(received[1])

    def _by_mpi(self, source: int | None, tag: int) -> tuple[int, Message] | None:
        """(rank, message), if one has come from `source` by MPI; None: from any rank."""
        status = self._status
        message = self.comm.Improbe(self._any if source is None else source, tag, status)
        if message is None:
            return None
        buffer = bytearray(status.Get_count())
        message.Recv(buffer)
        return status.source, bytes(buffer)

    def wait(
        self,
        test: Callable[[], Any],
        sleep: Callable[[float], bool] | None = None,
        by_mpi: bool = True,
        spin_s: float = SPIN_S,
    ) -> Any:
        """Waits until `test` comes true. Args: sleep, by_mpi, spin_s: as of `wait_until`."""
        return wait_until(test, sleep, process.of(Watchdog), by_mpi, spin_s)

    def announce_end(self, status: int, reason: str) -> None:
        """This rank ends with that exit status."""
        for k in self._concerned():
            self.post(k, LEAVE, (status, reason, self.answered))

    def wait_for_ends(self, end: float | None) -> bool:
        """True when the others have ended too; False if not by time `end` (of time.perf_counter; None: waits for ever).

        If they cannot end, as one waits for this rank, rank 0 ends the job.
        """
        return all(self._wait_for_end(k, end) for k in self._concerned())

    def _concerned(self) -> range:
        """The ranks that this one sends its exit status, and whose it receives."""
        return range(1) if self.rank else range(1, self.size)

    def _wait_for_end(self, k: int, end: float | None) -> bool:
        until, op = end, ""
        while k not in self.ended:
            source, message = self.next([k], end=math.inf if until is None else until)
            if source < 0 and op:
                failure.fail(
                    f"mpi_util: rank 0 has ended while rank {k} waits for it in {op}; all ranks must leave a loop "
                    "together, such as by `if mpi_util.all_sum(stop): break`"
                )
            if source < 0:
                return False
            kind, payload = opened(message)
            if kind == LEAVE:
                self.ended[k] = payload
            elif kind in (CALL, CALLS, WAITING) and payload[1] > self.calls and self.rank == 0 and not end:
                # it waits for this rank; or its call was interrupted too, by a Ctrl-C, and then its end follows
                op = f"{payload[0].removesuffix(WAITS)} at {payload[2]}"
                until = time.perf_counter() + _INTERRUPTED_S
        return True


def portable(op: str, rank: int, error: Exception, name_rank: bool = False) -> MpiUtilError:
    """An error as the other ranks get it: a copy if it is one of this package's, else its text."""
    if isinstance(error, MpiUtilError):
        copy = type(error)(f"rank {rank}: {error}" if name_rank else str(error))
        copy.status = error.status
        return copy
    return MpiUtilError(f"{op}: rank {rank} failed with {type(error).__name__}: {error}")
