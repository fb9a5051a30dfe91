"""The scheme between the ranks of an MPI job; each rank makes it, and one of them is the sender.

To and from other machines the messages of connection.py travel over MPI. A receiver that is ready asks (FETCH), and
gets the newest version, or the next one as soon as there is one: UPDATE, then its bytes. So nothing large is sent to a
rank that does not look for it.
"""

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from mpi_util.collectives.channel import Channel, channel_of
from mpi_util.errors import SyncTimeoutError, UsageError
from mpi_util.host.segments import private
from mpi_util.host.waiting import wait_until

from .connection import Address, Deadline, Kind, ProtocolError, frame, parse
from .publisher import ANSWERS, Publisher, State, Worker
from .receiver import Subscriber
from .scheme import WeightSyncScheme
from .sections import Content, Section

_PATIENCE_S = 1.0  # of a sender that ends, with what MPI has not sent yet
ADDRESS, TO_RECEIVER, TO_SENDER, BULK, _TAGS = range(5)  # tags of a scheme, and their number
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

        if any(channel.machine) and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UsageError("ranks on several machines need an MPI with threads: MPI_THREAD_MULTIPLE")
        if channel not in _comms:
            comm, request = channel.comm.Idup()
            wait_until(request.Test)
            _comms[channel] = comm, itertools.count()
        self._mpi, (self._comm, numbers), self._pid = MPI, _comms[channel], os.getpid()
        highest: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # 2**28 or more today: no program makes as many schemes
        self._first = _TAGS * next(numbers) % (highest - _TAGS)

    def post(self, data: bytes, rank: int, tag: int) -> None:
        if os.getpid() == self._pid:  # not forked from the rank
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
        self._closed = False

    def send(self, kind: Kind, *items: Any) -> None:
        self._tags.post(frame(kind, *items, text_bytes=_EAGER_BYTES), self._rank, self._tag)

    def close(self) -> None:
        """Ends `receive` at a receiver's end. Nothing is given back: the tags are the scheme's."""
        self._closed = True


class WorkerLink(_Link):
    """The sender's end. What the rank has sent is put into `inbox`."""

    def __init__(self, tags: TagSpace, rank: int):
        super().__init__(tags, rank, TO_RECEIVER)
        self.inbox: list[tuple[Any, ...]] = []
        self.asked = False  # True: the rank has asked for an update, and has not got it

    def receive(self, timeout: float, expected: Collection[Kind]) -> list[tuple[Any, ...]]:
        messages, self.inbox = self.inbox, []
        return messages

    def send_update(self, section: Section, live: list[int], unread: int) -> None:
        """Sends what a section contains, which stays as it is until that is done. BlockingIOError: it has not asked."""
        if not self.asked:
            raise BlockingIOError
        self.asked, content = False, section.memory[: section.size]
        self.send(Kind.UPDATE, section.version, section.nbytes, 0, len(content), [])
        requests = self._tags.bulk(True, content, self._rank)
        section.users.append(lambda: unfinished(requests) > 0)


class SenderLink(_Link):
    """A receiver's end, and its `Reader`: asks for the next update, and delivers it once its weights are here."""

    def __init__(self, tags: TagSpace, rank: int):
        super().__init__(tags, rank, TO_SENDER)
        self._asked = False
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


class MPIWeightSyncScheme(WeightSyncScheme):
    """Collective: weights from one rank to the others. All ranks of `comm` make it, in the same order.

    Worker k is the k-th rank that is not the sender: with `sender=0`, worker k is rank k + 1. Only making it is
    collective; from then on each rank runs at its own pace. Ranks of one machine connect as processes do, and share
    memory. To each rank of another machine the sender sends an update over MPI, which needs an MPI with threads
    (MPI_THREAD_MULTIPLE, the default of mpi4py).

    Args: comm: communicator; None: all ranks. sender: rank of the sender in it. The others: as of `WeightSyncScheme`.
    Under common launchers a rank that is killed ends the job, whatever `on_dead`.
    """

    def __init__(self, *args: Any, comm: Any = None, sender: int = 0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._channel = channel = channel_of(comm)
        if not 0 <= sender < channel.size:
            raise UsageError(f"sender={sender}; there are {channel.size} ranks")
        self._root, self._ranks = sender, channel.size - 1
        self._tags: TagSpace | None = None  # None: in a single process
        if channel.comm:
            self._tags = TagSpace(channel)
            if channel.rank != sender:  # the sender may wait for this rank when its program ends or drops the scheme
                self._end = weakref.finalize(self, self._tags.post, frame(Kind.ENDED), sender, TO_SENDER)

    def shutdown(self) -> None:
        if self._tags is not None and not self._closed and self._channel.rank != self._root:
            self._end.detach() if self._connected else self._end()  # one that has connected says BYE
        super().shutdown()

    def __reduce__(self) -> Any:
        raise UsageError("an MPIWeightSyncScheme cannot be sent to another process; each rank makes its own")

    def _start_role(self, call: str) -> None:
        super()._start_role(call)
        if (self._channel.rank == self._root) != (call == "init_on_sender"):
            raise UsageError(f"{call} on rank {self._channel.rank}: rank {self._root} is the sender (sender=)")

    def _worker_index(self, given: int | None) -> int:
        worker = (rank := self._channel.rank) - (rank > self._root)
        if given not in (None, worker):
            raise UsageError(f"worker_idx={given}: rank {rank} is worker {worker}")
        return worker

    def _open_publisher(self, workers: dict[int, Worker], name: str) -> Publisher:
        return RankPublisher(self._channel, self._tags, self._root, workers, name)

    def _subscribe(self, worker: int, name: str) -> Subscriber:
        tags: Any = self._tags  # there is another rank, the sender
        root = self._root
        if not self._address.name:  # the sender sends it once
            deadline = Deadline(self.timeout)
            found: Any = wait_until(lambda: tags.take(ADDRESS, root) or not deadline.left)
            if found is True:
                raise SyncTimeoutError(f"rank {root} has not begun to send {name} within {self.timeout:g} s")
            self._address = Address(*parse(found[1], [Kind.ADDRESS])[1:])
        machine = self._channel.machine
        far = machine[self._channel.rank] != machine[root]
        return Subscriber(self._address, worker, name, SenderLink(tags, root) if far else None)


class RankPublisher(Publisher):
    """A publisher whose workers are ranks. It serves those of other machines over MPI, also in a thread of its own."""

    def __init__(self, channel: Channel, tags: Any, root: int, workers: dict[int, Worker], name: str):
        super().__init__(workers, name)
        self._tags = tags
        self._by_rank = dict(zip([rank for rank in range(channel.size) if rank != root], workers.values()))
        self._far = len(set(channel.machine)) > 1
        self._server = threading.Thread(target=self._serve, daemon=True, name="mpi_util weight sync: other machines")
        for rank in self._by_rank:
            tags.post(frame(Kind.ADDRESS, *self.address), rank, ADDRESS)

    def open(self) -> None:
        if self._far and self._thread is None:
            self._server.start()
        super().open()

    def _serve(self) -> None:  # in a thread, so that receivers are served whatever this rank does meanwhile
        while not self.closed:
            wait_until(lambda: self.closed or self._look())

    def _sleep(self, timeout: float) -> None:
        if not self._far:
            return super()._sleep(timeout)
        deadline = Deadline(timeout)
        wait_until(lambda: self._look() or self._changed or self._selector.select(0) or not deadline.left)

    def _look(self) -> bool:
        """Takes what has come over MPI; True if something has, or some of what was sent has arrived."""
        with self._lock:
            before = unfinished()
            found = False
            while not self.closed and (message := self._tags.take(TO_SENDER)):
                self._take(*message)
                found = True
            return found or unfinished() < before

    def _take(self, rank: int, data: bytes) -> None:
        """A message of a rank; one of this machine sends only that it ends."""
        worker = self._by_rank[rank]
        link = worker.connection if isinstance(worker.connection, WorkerLink) else None
        kind, *items = message = parse(data, (Kind.HELLO, Kind.FETCH, Kind.ENDED, *ANSWERS))
        if kind is Kind.HELLO:
            _, index, name = items
            with contextlib.suppress(ProtocolError):  # it is refused, and knows it
                self._admit(WorkerLink(self._tags, rank), index, name)
        elif kind is Kind.ENDED and (link is not None or worker.state is State.ABSENT):
            self._disconnect(worker)
            worker.ended(f"rank {rank} has ended")
            self._changed = True
        elif link is not None:
            if kind is Kind.FETCH:
                link.asked = True
            else:
                link.inbox.append(message)
            self._receive(worker)

    def check_absent(self, workers: list[Worker]) -> None:
        self._look()

    def close(self) -> None:
        if self.closed or self.address.pid != os.getpid():  # forked from the sender
            return
        super().close()
        if self._far:
            if self._server.is_alive() and self._server is not threading.current_thread():  # which may collect garbage
                self._server.join()
            deadline = Deadline(_PATIENCE_S)
            wait_until(lambda: not unfinished() or not deadline.left)
