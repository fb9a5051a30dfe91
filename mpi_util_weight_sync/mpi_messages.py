"""The messages of a scheme over MPI; in the sender's rank, and in receivers' ranks on other machines.

They are those of connection.py. A receiver that is ready asks (FETCH), and gets the newest version, or the next one as
soon as there is one: UPDATE, then its bytes. So nothing large is sent to a rank that does not look for it.

No rank is woken, because only MPI knows what has come: both sides look, with the pauses of `wait_until`.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from mpi_util.collectives.channel import Channel
from mpi_util.host.segments import private
from mpi_util.host.waiting import wait_until

from .connection import Deadline, Kind, frame, parse
from .sections import Content, Section

ADDRESS, TO_RECEIVER, TO_SENDER, BULK = range(4)  # tags of a scheme
_TAGS = 4
_EAGER_BYTES = 3 << 10  # every MPI sends a message of that size at once, even if the sender does not call MPI again
_PART_BYTES = 1 << 20  # MPI moves bytes only while it is tested, and the pauses of a wait begin again with each part

_comms: weakref.WeakKeyDictionary[Channel, tuple[Any, Iterator[int]]] = weakref.WeakKeyDictionary()
_requests: list[Any] = []  # of all schemes: MPI uses their memory until they are done
_testing = threading.Lock()  # MPI forbids two threads to test one request


def unfinished(requests: list[Any] = _requests) -> int:
    """How many of these requests are not done; forgets the others."""
    with _testing:
        requests[:] = [request for request in requests if not request.Test()]
        return len(requests)


def _keep(requests: list[Any]) -> list[Any]:
    """Returns requests, and keeps them until they are done: no rank needs to wait for them."""
    unfinished()
    with _testing:
        _requests.extend(requests)
    return requests


class TagSpace:
    """Collective: the messages of one scheme, kept apart from those of others by their tags.

    All schemes of a communicator use one duplicate of it, as MPICH has room for some 2,000 communicators.
    """

    def __init__(self, channel: Channel):
        from mpi4py import MPI

        if channel not in _comms:
            comm, request = channel.comm.Idup()
            wait_until(request.Test)
            _comms[channel] = comm, itertools.count()
        self._mpi, (self._comm, numbers) = MPI, _comms[channel]
        highest: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # 2**28 or more today: no program makes as many schemes
        self._first = _TAGS * next(numbers) % (highest - _TAGS)

    def post(self, data: bytes, rank: int, tag: int) -> None:
        _keep([self._comm.Isend([data, self._mpi.BYTE], rank, self._first + tag)])

    def take(self, tag: int, source: int | None = None) -> tuple[int, bytes] | None:
        """(rank, bytes) of a message that is there; from any rank if `source` is None."""
        status = self._mpi.Status()
        source = self._mpi.ANY_SOURCE if source is None else source
        message = self._comm.Improbe(source, self._first + tag, status)
        if not message:
            return None
        content = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([content, self._mpi.BYTE])
        return status.source, bytes(content)

    def bulk(self, sends: bool, block: np.ndarray, rank: int) -> list[Any]:
        """The requests by which a block is sent, or arrives; it must stay as it is until all are done."""
        move = self._comm.Isend if sends else self._comm.Irecv
        parts: list[Any] = [block[start : start + _PART_BYTES] for start in range(0, len(block), _PART_BYTES)]
        return _keep([move(part, rank, self._first + BULK) for part in parts])


class _Link:
    """One end of the messages between the sender and a rank of another machine; it has the calls of a `Connection`."""

    fds, pid = (), 0  # which are another machine's

    def __init__(self, tags: TagSpace, rank: int, tag: int):
        self._tags, self._rank, self._tag = tags, rank, tag

    def send(self, kind: Kind, *items: Any) -> None:  # of a long text the end
        if kind.rest == "s":
            *items, text = items  # type: ignore[assignment]
            items = (*items, text.encode(errors="replace")[-_EAGER_BYTES:].decode(errors="replace"))
        self._tags.post(frame(kind, *items), self._rank, self._tag)


class WorkerLink(_Link):
    """The sender's end. What the rank has sent is put into `inbox`."""

    def __init__(self, tags: TagSpace, rank: int):
        super().__init__(tags, rank, TO_RECEIVER)
        self.inbox: list[tuple[Any, ...]] = []
        self.asked = False  # True: the rank has asked for an update, and has not got it

    def receive(self, timeout: float, expected: Collection[Kind]) -> list[tuple[Any, ...]]:
        messages, self.inbox = self.inbox, []
        return messages

    def send_update(self, data: bytes, section: Section, unread: int) -> None:
        """Sends what a section contains, which stays as it is until that is done. BlockingIOError: it has not asked."""
        if not self.asked:
            raise BlockingIOError
        self.asked, content = False, section.content()
        self.send(Kind.UPDATE, section.version, section.nbytes, 0, len(content), [])
        requests = self._tags.bulk(True, content, self._rank)
        section.users.append(lambda: unfinished(requests) > 0)

    def close(self) -> None:
        """Does nothing: the tags are the scheme's."""


class SenderLink(_Link):
    """A receiver's end, and its `Reader`: asks for the next update, and delivers it once its weights are here."""

    def __init__(self, tags: TagSpace, rank: int):
        super().__init__(tags, rank, TO_SENDER)
        self._closed = self._asked = False
        self._update: tuple[Any, ...] = ()  # the message whose weights are arriving; (): none
        self._transfer: list[Any] = []  # the requests by which they arrive
        self._coming = self._content = Content(0, private(0), private(0))  # these weights, and those delivered last

    def receive(self, timeout: float, expected: Collection[Kind]) -> list[tuple[Any, ...]]:
        """Waits up to `timeout` seconds for messages. EOFError: this end is closed."""
        deadline, messages = Deadline(timeout), list[tuple[Any, ...]]()
        while True:
            wait_until(lambda: self._closed or self._step(messages, expected) or not deadline.left)
            if self._closed:
                raise EOFError
            if messages or not deadline.left:
                return messages

    def _step(self, messages: list[tuple[Any, ...]], expected: Collection[Kind]) -> bool:
        """Takes the next step, if there is one: adds to `messages` what is to be delivered. True: it has."""
        if self._update:
            before = len(self._transfer)
            if left := unfinished(self._transfer):
                return left < before
            messages.append(self._update)
            self._update, self._content = (), self._coming
            self._asked = False
        elif found := self._tags.take(TO_RECEIVER, self._rank):
            kind, *items = message = parse(found[1], expected)
            if kind is not Kind.UPDATE:
                messages.append(message)
                return True
            version, nbytes, _, size, _ = items
            memory = private(size)  # each version gets new memory: that of the last one may still be in use
            self._update, self._coming = message, Content(version, memory[:nbytes], memory[nbytes:])
            self._transfer = self._tags.bulk(False, memory, self._rank)
        elif not self._asked:
            self._asked = True
            self.send(Kind.FETCH)
        else:
            return False
        return True

    @contextlib.contextmanager
    def reading(self, ticket: Any, discard: bool = False) -> Iterator[Content]:
        """What was delivered last; it is this process's own."""
        yield self._content

    def keep(self, live: Any) -> None:
        """Does nothing: the memory is given back when nothing refers to it."""

    def close(self) -> None:
        self._closed = True
