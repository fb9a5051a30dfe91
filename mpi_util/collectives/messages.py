"""Small messages between the ranks of one communicator; the receiver is woken if it sleeps."""

import pickle
import time
from collections.abc import Callable
from typing import Any

from ..errors import MpiUtilError, RankLeftError, RankMismatchError
from ..host.process import process
from ..host.waiting import wait_until
from ..launch import failure
from .peers import Peers

CALL, REPLY, ERROR, DATA, LEAVE, WAITING = range(6)
"""Kinds of messages. Their payloads:

CALL: (collective call, its number, file:line of the program, what the rank brings); to rank 0.
REPLY: rank 0's answer. ERROR: an MpiUtilError, to be raised. DATA: anything, within a call.
LEAVE: the exit status of a rank that ends. WAITING: as CALL, of a rank that waits elsewhere than in `Channel.agree`.
"""
WAITS = " (waiting)"  # what WAITING adds to the name of the call
TAG = 1

Message = tuple[int, Any]  # kind, payload


class Background:
    """What rank 0 does while it waits for a message on any channel. With anything in `calls` it polls, not sleeps."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []


class Messages:
    """The messages of one rank.

    Attributes:
        comm, peers: over which they go, and who is woken; set when there is more than one rank.
        calls: number of collective calls that this rank has begun.
        failed_call: number of the last call that rank 0 has ended with an error, which others may still enter.
        ended: ranks that have ended, with their exit status.
    """

    comm: Any
    peers: Peers

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.calls = 0
        self.failed_call = 0
        self.ended: dict[int, int] = {}
        self._early: dict[int, list[Message]] = {}  # from ranks that are further on than this one

    def send(self, dest: int, payload: Any) -> None:
        """Small message to `dest`, which calls `receive` sooner or later."""
        self.post(dest, DATA, payload)

    def send_failure(self, dest: int, op: str, error: Exception) -> None:
        """Instead of `send`, where this rank has failed: `dest` raises it in its `receive`."""
        self.post(dest, ERROR, portable(op, self.rank, error))

    def fail_all(self, error: MpiUtilError) -> None:
        """Rank 0: all others raise `error`, which this rank reports."""
        error.silent, self.failed_call = True, self.calls
        for k in range(1, self.size):
            self.post(k, ERROR, error)

    def receive(self, source: int, op: str) -> Any:
        """The next message of `send` from `source`; sleeps until it is there.

        Raises:
            MpiUtilError: `source` has failed instead, or has gone on to another call.
        """
        kind, payload = self.expect(source, op)
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

    def expect(self, source: int, op: str) -> Message:
        """The next message from `source` to a rank that is in the call `op`. RankLeftError if it has ended instead."""
        if source not in self.ended and (message := self.next(source)):
            kind, payload = message
            if kind == CALL and payload[1] == self.failed_call:  # its sender has been sent the error
                return self.expect(source, op)
            if kind == WAITING:
                waits_here = payload[1] >= self.calls  # else it has got since what it waited for
                return (CALL, (*payload, None)) if waits_here else self.expect(source, op)
            if kind != LEAVE:
                return kind, payload
            self.ended[source] = payload
        raise self.left_error(op, source)

    def left_error(self, op: str, source: int) -> RankLeftError:
        """That this rank waits for one that has ended."""
        status = self.ended[source]
        text = f" (status {status})" if status else ""
        error = RankLeftError(f"{op}: rank {source} has ended{text} while rank {self.rank} waits for it")
        error.silent, error.status = self.rank > 0, status or 1
        return error

    def next(self, source: int, end: float | None = None) -> Message | None:
        """The next message from `source`, or None at time `end` (of time.perf_counter)."""
        if self._early.get(source):
            return self._early[source].pop(0)
        background = process.of(Background).calls

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

    def postpone(self, source: int, message: Message) -> None:
        """Keeps what `poll` has received for `next`."""
        self._early.setdefault(source, []).append(message)

    def wait(self, test: Callable[[], Any], peer: int, woken: bool = False) -> Any:
        """Sleeps until `test` comes true, which is up to rank `peer`; the watchdog reports if that takes too long.

        Args:
            woken: `peer` wakes this rank when it is so far.
        """
        pid = self.peers.infos[peer].pid if peer in self.peers.wake_fds else None
        sleep = self.peers.pipe.sleep if pid and woken else None
        return wait_until(test, sleep, lambda: failure.report_missing(self.rank, peer, pid), failure.watchdog_s())


def portable(op: str, rank: int, error: Exception, name_rank: bool = False) -> MpiUtilError:
    """An error as the other ranks get it: a copy if it is one of this package's, else its text."""
    if isinstance(error, MpiUtilError):
        copy = type(error)(f"rank {rank}: {error}" if name_rank else str(error))
        copy.status = error.status
        return copy
    return MpiUtilError(f"{op}: rank {rank} failed with {type(error).__name__}: {error}")
