"""The scheme between the ranks of an MPI job, on one machine or several."""

import os
import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from mpi_util.collectives.channel import Channel, channel_of
from mpi_util.errors import SyncTimeoutError, UsageError
from mpi_util.host.waiting import wait_until
from mpi_util.ranks.identity import Comm

from .connection import Address, Deadline
from .publisher import Publisher
from .relay import ADDRESS, DOWN, LEFT, UP, Forwarding, Header, Line, Lines, Relay, in_flight
from .scheme import WeightSyncScheme
from .sections import Section
from .worker import Event, Report, Worker

_NAP_S = 1e-3
_INTRODUCE_S = 5e-3
_PATIENCE_S = 1.0  # with a rank that does not receive what is sent to it


class MPIWeightSyncScheme(WeightSyncScheme):
    """Collective: weights from one rank to the others. All ranks of `comm` make it, in the same order.

    Worker k is the k-th rank that is not the sender: with `sender=0`, worker k is rank k + 1. Only making it is
    collective; from then on each rank runs at its own pace. Ranks of one machine share memory; between machines an
    update is sent along a tree, once to each machine. That needs an MPI with threads (MPI_THREAD_MULTIPLE, the default
    of mpi4py), and the lowest rank of each machine, its relay, to run until the sender shuts down.

    Args:
        comm: communicator; None: all ranks.
        sender: rank of the sender in it.

    The other arguments are those of `WeightSyncScheme`. Under common launchers a rank that is killed ends the job,
    whatever `on_dead`.
    """

    def __init__(self, *args: Any, comm: Comm = None, sender: int = 0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._channel = channel_of(comm)
        if not 0 <= sender < self._channel.size:
            raise UsageError(f"sender={sender}; there are {self._channel.size} ranks")
        self._root, self._ranks = sender, self._channel.size - 1
        self._line: Any = None  # in a single process
        if self._channel.comm:
            from mpi4py import MPI

            if any(self._channel.machine) and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                raise UsageError("ranks on several machines need an MPI with threads: MPI_THREAD_MULTIPLE")
            self._line = self._channel.states.of(Lines).next(sender)

    def shutdown(self) -> None:
        if self._line is not None and not self._closed:
            self._line.close(tell=not self._connected)
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

    def _open_publisher(self, workers: dict[int, Worker], name: str) -> "Ranks":
        return Ranks(self._channel, self._line, self._root, workers, name)

    def _find_publisher(self, name: str) -> Address:
        if self._address.name:  # the sender sends it once
            return self._address
        rank, machine, deadline = self._channel.rank, self._channel.machine, Deadline(self.timeout)
        source = here if (here := machine[rank]) not in (rank, machine[self._root]) else self._root
        message: Any = wait_until(lambda: self._line.take(ADDRESS, source) or not deadline.left)
        if message is True:
            raise SyncTimeoutError(f"rank {source} has not begun to send {name} within {self.timeout:g} s")
        _, (address, name) = message
        if address is None:  # this rank is the relay of its machine
            members = self._channel.members
            workers = [_worker_of(k, self._root) for k in (rank, *members)]
            address = Relay(self._line, workers, name).publisher.address
            for k in members:
                self._line.post((address, name), k, ADDRESS)
        self._address = address
        return self._address


class Ranks(Publisher):
    """A publisher whose workers are ranks: it sends to those of other machines through the relays of these."""

    def __init__(self, channel: Channel, line: Line, root: int, workers: dict[int, Worker], name: str):
        super().__init__(workers, name)
        self._line, self._root = line, root
        self._relays: dict[int, list[Worker]] = {}  # by the rank of each: the workers of its machine
        self._ready: set[int] = set()  # those relays that receive
        self._introduction: threading.Thread | None = None
        self._stop = threading.Event()
        for rank, leader in enumerate(channel.machine):
            if rank == root:
                continue
            worker = workers[_worker_of(rank, root)]
            if leader != channel.machine[root]:
                worker.relay = leader
                self._relays.setdefault(leader, []).append(worker)
            if worker.relay in (None, rank):
                line.post((None if worker.relay == rank else self.address, name), rank, ADDRESS)

    def open(self) -> None:
        super().open()
        if self._relays and self._introduction is None:
            self._introduction = threading.Thread(target=self._introduce, daemon=True)
            self._introduction.start()

    def _introduce(self) -> None:
        """In a thread: relays get what was sent before they were ready, whatever this rank does meanwhile."""
        while not self._stop.wait(_INTRODUCE_S) and self._ready != self._relays.keys():
            self._receive_reports()

    def publish(
        self, workers: list[Worker], version: int, nbytes: int, layout: bytes, fill: Callable[[np.ndarray], None]
    ) -> Section:
        """Writes once into this machine's memory, and sends that along a tree to the machines of the other workers."""
        with self._lock:
            section = super().publish(workers, version, nbytes, layout, fill)
            forwarded = self._forward(self._ready)
        deadline = Deadline(_PATIENCE_S)
        wait_until(lambda: not any(each.busy() for each in forwarded) or not deadline.left)
        return section

    def _forward(self, relays: Collection[int]) -> list[Forwarding]:
        """Sends what waits for the workers of these relays."""
        waiting: dict[Section, list[Worker]] = {}
        for worker in (worker for relay in relays for worker in self._relays[relay]):
            if worker.waiting is not None:
                waiting.setdefault(worker.waiting, []).append(worker)
                worker.waiting = None
        found = []
        for section, workers in waiting.items():
            path = [self._root, *sorted({worker.relay for worker in workers if worker.relay is not None})]
            indices, layout = [worker.index for worker in workers], section.description
            header = Header(next(self._line.bulk_tags), section.version, section.nbytes, layout, indices, path)
            found.append(forwarding := Forwarding(self._line, header))
            forwarding.send(section.block(section.nbytes))
            section.users.append(forwarding.busy)
        return found

    def poll(self, timeout: float, of: Worker | None = None) -> list[Report]:
        if not self._relays:
            return super().poll(timeout, of)
        deadline = Deadline(timeout)
        self._receive_reports()
        while not (reports := super().poll(min(_NAP_S, deadline.left))) and deadline.left:
            self._receive_reports()
        return reports

    def _receive_reports(self) -> None:
        with self._lock:
            while message := self._line.take(UP):
                relay, report = message
                if report is None:
                    self._ready.add(relay)
                    self._forward([relay])
                else:
                    self._report(report)

    def check_absent(self, workers: list[Worker]) -> None:
        """Marks those whose rank has ended its program."""
        for worker in workers:
            rank = worker.index + (worker.index >= self._root)
            if self._line.take(LEFT, rank):
                worker.apply(Report(Event.DIED, worker.index, 0, f"rank {rank} has ended"))

    def close(self) -> None:
        if self._relays and not self.closed and self.address.pid == os.getpid():  # not forked from the sender
            self._stop.set()
            if self._introduction is not None:
                self._introduction.join()
            for rank in self._relays:
                self._line.post(None, rank, DOWN)
            deadline = Deadline(_PATIENCE_S)
            wait_until(lambda: not in_flight() or not deadline.left)
        super().close()


def _worker_of(rank: int, root: int) -> int:
    return rank - (rank > root)
