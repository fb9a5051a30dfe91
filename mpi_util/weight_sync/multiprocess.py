"""The scheme between processes of one machine."""

import multiprocessing
import os
from multiprocessing.process import BaseProcess
from typing import Any

from ..errors import UsageError
from .connection import Address
from .publisher import Publisher
from .scheme import WeightSyncScheme
from .subscriber import Subscriber
from .worker import Event, Worker


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weights from one process to others of its machine, started in any way: spawn, fork, forkserver.

    The scheme itself is given to the workers, after `init_on_sender` and before they start; what travels with it is an
    address with a key. The bytes of an update are written once, into shared memory. Arguments: `WeightSyncScheme`.
    An example: docs/weight_sync.md.
    """

    _address = Address("", b"", 0)  # of the sender's publisher, once there is one

    def __getstate__(self) -> dict[str, Any]:
        kept = ("strategy", "sync", "timeout", "_coalesce", "_on_dead", "_wire_dtype", "_address")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _start_role(self, call: str) -> None:
        if self._sender is not None and self._address.pid != os.getpid():  # forked from the sender's process
            self._reset()
        super()._start_role(call)

    def _worker_index(self, given: int | None) -> int:
        if not self._address.name:
            raise UsageError(
                "init_on_receiver: this scheme has no sender; call init_on_sender before it is given to the workers"
            )
        return super()._worker_index(given)

    def _open_publisher(self, workers: dict[int, Worker], name: str) -> "Processes":
        publisher = Processes(workers, name)
        self._address = publisher.address
        return publisher

    def _subscribe(self, worker: int, name: str) -> Subscriber:
        return Subscriber(self._address, worker, name)


class Processes(Publisher):
    """A publisher whose workers are processes."""

    def __init__(self, workers: dict[int, Worker], name: str):
        super().__init__(workers, name)
        self._children: dict[int | None, BaseProcess] = {}  # by process id

    def check_absent(self, workers: list[Worker]) -> None:
        """Marks them if too few children are left: before a child connects, its index is not known."""
        connected = {worker.pid for worker in self.workers.values()}
        self._children |= {child.pid: child for child in multiprocessing.active_children()}
        strangers = [child for pid, child in self._children.items() if pid not in connected]
        ended = [child for child in strangers if not child.is_alive()]
        if ended and len(strangers) - len(ended) < len(workers):
            text = ", ".join(f"{child.name} with status {child.exitcode}" for child in ended)
            why = f"it has not connected, and of the processes started too few are left; these have ended: {text}"
            for worker in workers:
                worker.apply(Event.DIED, 0, why)
