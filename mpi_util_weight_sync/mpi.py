"""The scheme between the ranks of an MPI job; each rank makes it, and one of them is the sender.

Ranks that share memory with the sender connect to it as processes do. Those of other machines exchange messages with it
over MPI, each for itself (mpi_messages.py).
"""

import contextlib
import os
import threading
import weakref
from typing import Any

from mpi_util.collectives.channel import Channel, channel_of
from mpi_util.errors import SyncTimeoutError, UsageError
from mpi_util.host.waiting import wait_until

from .connection import Address, Deadline, Kind, ProtocolError, frame, parse
from .mpi_messages import ADDRESS, TO_SENDER, SenderLink, TagSpace, WorkerLink, unfinished
from .publisher import ANSWERS, Publisher
from .scheme import WeightSyncScheme
from .subscriber import Subscriber
from .worker import State, Worker

_PATIENCE_S = 1.0  # of a sender that ends, with what MPI has not sent yet


class MPIWeightSyncScheme(WeightSyncScheme):
    """Collective: weights from one rank to the others. All ranks of `comm` make it, in the same order.

    Worker k is the k-th rank that is not the sender: with `sender=0`, worker k is rank k + 1. Only making it is
    collective; from then on each rank runs at its own pace. Ranks of one machine share memory. To each rank of another
    machine the sender sends an update over MPI, which needs an MPI with threads (MPI_THREAD_MULTIPLE, the default of
    mpi4py).

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
            from mpi4py import MPI

            if any(channel.machine) and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                raise UsageError("ranks on several machines need an MPI with threads: MPI_THREAD_MULTIPLE")
            self._tags = TagSpace(channel)
            if channel.rank != sender:
                self._end = weakref.finalize(self, _end, self._tags, sender, os.getpid())

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
        worker = _worker_of(rank := self._channel.rank, self._root)
        if given not in (None, worker):
            raise UsageError(f"worker_idx={given}: rank {rank} is worker {worker}")
        return worker

    def _open_publisher(self, workers: dict[int, Worker], name: str) -> Publisher:
        if self._tags is None:
            return super()._open_publisher(workers, name)
        return RankPublisher(self._channel, self._tags, self._root, workers, name)

    def _subscribe(self, worker: int, name: str) -> Subscriber:
        tags: Any = self._tags  # there is another rank, the sender
        root = self._root
        if not self._address.name:  # the sender sends it once
            deadline = Deadline(self.timeout)
            found: Any = wait_until(lambda: tags.take(ADDRESS, root) or not deadline.left)
            if found is True:
                raise SyncTimeoutError(f"rank {root} has not begun to send {name} within {self.timeout:g} s")
            _, key, pid, text = parse(found[1], [Kind.ADDRESS])
            self._address = Address(text, key, pid)
        machine = self._channel.machine
        far = machine[self._channel.rank] != machine[root]
        return Subscriber(self._address, worker, name, SenderLink(tags, root) if far else None)


class RankPublisher(Publisher):
    """A publisher whose workers are ranks. It serves those of other machines over MPI, also in a thread of its own."""

    def __init__(self, channel: Channel, tags: TagSpace, root: int, workers: dict[int, Worker], name: str):
        super().__init__(workers, name)
        self._tags, self._root = tags, root
        self._far = len(set(channel.machine)) > 1
        self._links: dict[int, WorkerLink] = {}  # by rank, of those that have connected over MPI
        self._server = threading.Thread(target=self._serve, daemon=True, name="mpi_util weight sync: other machines")
        for rank in range(channel.size):
            if rank != root:
                tags.post(frame(Kind.ADDRESS, self.address.key, self.address.pid, self.address.name), rank, ADDRESS)

    def open(self) -> None:
        first = self._thread is None
        super().open()
        if first and self._far:
            self._server.start()

    def _serve(self) -> None:  # in a thread, so that receivers are served whatever this rank does meanwhile
        while not self.closed:
            wait_until(lambda: self.closed or self._look())

    def _sleep(self, timeout: float) -> None:
        if not self._far:
            return super()._sleep(timeout)
        deadline = Deadline(timeout)
        wait_until(lambda: self._look() or self._changed or self._epoll.poll(0) or not deadline.left)

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
        worker, link = self.workers[_worker_of(rank, self._root)], self._links.get(rank)
        kind, *items = message = parse(data, (Kind.HELLO, Kind.FETCH, Kind.ENDED, *ANSWERS))
        if kind is Kind.HELLO:
            _, index, name = items
            self._links[rank] = WorkerLink(self._tags, rank)
            with contextlib.suppress(ProtocolError):  # it is refused, and knows it
                self._admit(self._links[rank], index, name)
        elif kind is Kind.ENDED and (link is not None or worker.state is State.ABSENT):
            self._disconnect(worker, why := f"rank {rank} has ended")
            if worker.state is State.ABSENT:
                worker.ended(why)
            self._changed = True
        elif link is not None and worker.connection is link:
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


def _end(tags: TagSpace, sender: int, pid: int) -> None:
    """Reports to the sender, which may wait for this rank, that its program ends or has dropped the scheme."""
    if os.getpid() == pid:  # not forked from a rank
        tags.post(frame(Kind.ENDED), sender, TO_SENDER)


def _worker_of(rank: int, root: int) -> int:
    return rank - (rank > root)
