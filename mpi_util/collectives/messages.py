"""Small messages between the ranks of one communicator; the receiver is woken if it sleeps.

A rank that ends reports it to rank 0, rank 0 to all, and none exits before it knows of the others: one that ended
silently would look like a slow one, and its MPI_Finalize would wait for the others with a busy core.
"""

import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ..errors import MpiUtilError, RankLeftError, RankMismatchError
from ..host.process import process
from ..host.waiting import wait_until
from ..launch import failure
from ..launch.reap import JOB_VARIABLE
from ..launch.watchdog import Watchdog
from .peers import Peers

CALL, REPLY, ERROR, DATA, LEAVE, WAITING = range(6)
"""Kinds of messages. Their payloads:

CALL: (collective call, its number, file:line of the program, what the rank brings); to rank 0.
REPLY: (number of the call, rank 0's answer). ERROR: an MpiUtilError, to be raised. DATA: anything, within a call.
LEAVE: (exit status, reason or "") of a rank that ends.
WAITING: as CALL, of a rank that waits elsewhere than in `Channel.agree`.
"""
WAITS = " (waiting)"  # what WAITING adds to the name of the call
TAG = 1
_INTERRUPTED_S = 0.5

Message = tuple[int, Any]  # kind, payload


class Background(list[Callable[[], None]]):
    """What rank 0 calls while it waits for a message on any channel. With anything to call it polls, not sleeps."""


class Messages:
    """The messages of one rank."""

    comm: Any  # over which they go, and `peers`, who are woken: both set when there is more than one rank
    peers: Peers

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.calls = 0  # collective calls that this rank has begun
        self.failed: dict[int, int] = {}  # on rank 0: the call of each rank that it has answered unread, by an error
        self.ended: dict[int, tuple[int, str]] = {}  # ranks that have ended, with exit status and reason
        self.early = defaultdict[int, list[Message]](list)  # from ranks that are further on than this one

    def send(self, dest: int, payload: Any) -> None:
        """Small message to `dest`, which calls `receive` sooner or later."""
        self.post(dest, DATA, payload)

    def receive(self, source: int, op: str, serves: bool = False) -> Any:
        """The next message of `send` from `source`; raises MpiUtilError if that has failed, or is in another call.

        `serves`: it answers at its own end, too, while it waits for the other ranks.
        """
        kind, payload = self.expect(source, op, serves)
        if kind == ERROR:
            raise payload
        if kind != DATA:
            raise RankMismatchError(f"{op}: rank {source} did not finish it, and went on to {payload[0]}")
        return payload

    def post(self, dest: int, kind: int, payload: Any) -> None:
        """Sends and wakes; returns when the message has left (at once, but for one too large for MPI to keep)."""
        request = self.comm.Isend(pickle.dumps((kind, payload), pickle.HIGHEST_PROTOCOL), dest, TAG)
        self.peers.wake(dest)
        self.wait(request.Test, dest)

    def expect(self, source: int, op: str, serves: bool = False) -> Message:
        """The next message from `source` to a rank that is in the call `op`. RankLeftError if it has ended instead."""
        at_work = source not in self.ended or (serves and not self.ended[source][0])
        if at_work and (message := self.next(source)):
            kind, payload = message
            if kind == CALL and self.is_late(source, payload):
                return self.expect(source, op)
            if kind == WAITING:
                waits_here = payload[1] >= self.calls  # else it has got since what it waited for
                return (CALL, (*payload, None)) if waits_here else self.expect(source, op)
            if kind != LEAVE:
                return kind, payload
            self.ended[source] = payload
            if serves:
                return self.expect(source, op, serves)
        raise self.left_error(op, source)

    def is_late(self, source: int, call: Any) -> bool:
        """True for a CALL that was answered, by an error, before it came. Only the first one after that can be."""
        number: int = call[1]
        return self.failed.pop(source, 0) == number

    def left_error(self, op: str, source: int) -> RankLeftError:
        """That this rank waits for one that has ended."""
        status, reason = self.ended[source]
        text = f" with status {status}{f' ({reason})' if reason else ''}" if status else ""
        error = RankLeftError(f"{op}: rank {source} has ended{text} while rank {self.rank} waits for it")
        # that it has ended, and why, is reported by mpi_fork's parent if there is one
        error.silent, error.status = self.rank > 0 or (status > 0 and JOB_VARIABLE in os.environ), status or 1
        return error

    def next(self, source: int, end: float | None = None) -> Message | None:
        """The next message from `source`, or None at time `end` (of time.perf_counter)."""
        if self.early[source]:
            return self.early[source].pop(0)
        background = process.of(Background)

        def arrived() -> Any:
            for call in background:
                call()
            return self.comm.improbe(source, TAG) or (end is not None and time.perf_counter() > end)

        message = self.wait(arrived, source, woken=not background)
        return None if message is True else message.recv()

    def poll(self) -> tuple[int, Message] | None:
        """(source, message) of a message that is there, from rank 0, or on rank 0 from any rank; None without one."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self.comm.improbe(0 if self.rank else MPI.ANY_SOURCE, TAG, status)
        return (status.source, message.recv()) if message else None

    def wait(self, test: Callable[[], Any], peer: int, woken: bool = False) -> Any:
        """Sleeps until `test` comes true, which is up to rank `peer`. `woken`: that rank wakes this one then."""
        sleep = self.peers.pipe.sleep if woken and peer in self.peers.wake_fds else None
        return wait_until(test, sleep, process.of(Watchdog))

    def announce_end(self, status: int, reason: str) -> None:
        """This rank ends with that exit status."""
        for k in self._concerned():
            self.post(k, LEAVE, (status, reason))

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
            message = self.next(k, until)
            if message is None and op:
                failure.fail(
                    f"mpi_util: rank 0 has ended while rank {k} waits for it in {op}; all ranks must leave a loop "
                    "together, such as by `if mpi_util.all_sum(stop): break`"
                )
            if message is None:
                return False
            kind, payload = message
            if kind == LEAVE:
                self.ended[k] = payload
            elif kind in (CALL, WAITING) and payload[1] > self.calls and self.rank == 0 and not end:
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
