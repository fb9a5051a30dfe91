"""The scheme between processes of one machine."""

import multiprocessing
import os
from multiprocessing.process import BaseProcess
from typing import Any

from ..errors import UsageError
from .hub import Event, Fill, Hub
from .layout import Layout
from .port import Address, Port
from .scheme import WeightSyncScheme


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weights from one process to others of its machine, started in any way: spawn, fork, forkserver.

    The scheme itself is given to the workers, after `init_on_sender` and before they start; what travels with it is an
    address. The bytes of an update are written once, into shared memory, however many workers there are.

    Args: see `WeightSyncScheme`.

    Example:
        scheme = MultiProcessWeightSyncScheme()
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
        for i in range(2):
            multiprocessing.Process(target=worker, args=(scheme, i), daemon=True).start()
        scheme.connect()
        ...
        scheme.send()

        def worker(scheme, i):
            scheme.init_on_receiver(model_id="policy", worker_idx=i, model=make_policy())
            scheme.connect()
            while True:
                with scheme.frozen():
                    rollout()
    """

    _address = Address("", b"")  # of the sender's hub, once there is one

    def __getstate__(self) -> dict[str, Any]:
        kept = ("strategy", "sync", "timeout", "_coalesce", "_on_dead", "_wire_dtype", "_verify", "_address")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _start_role(self, call: str) -> None:
        if self._sender is not None and self._pid != os.getpid():
            self._forget()  # this process was forked from the sender's
        super()._start_role(call)

    def shutdown(self) -> None:
        """See `WeightSyncScheme`; in a process that was forked from the sender's it leaves the sender alone."""
        if self._sender is not None and self._pid != os.getpid():
            self._forget()
        super().shutdown()

    def _check_receiver(self, worker: int) -> None:
        if not self._address.name:
            raise UsageError(
                "init_on_receiver: this scheme has no sender; call init_on_sender before it is given to the workers"
            )

    def _open_transport(self, workers: list[int], who: str) -> "Processes":
        transport = Processes(workers, who)
        self._address, self._pid = transport.hub.address, os.getpid()
        return transport

    def _make_port(self, worker: int, who: str) -> Port:
        return Port(self._address, worker, who)


class Processes:
    """The workers of one hub: the transport of a sender."""

    def __init__(self, workers: list[int], who: str):
        self.hub = Hub(workers, who)
        self._children: dict[int, BaseProcess] = {}  # by process id: children of this process that are no workers yet

    def publish(self, workers: list[int], version: int, layout: Layout, fill: Fill) -> None:
        """Writes once into shared memory, and tells the workers."""
        self.hub.open()
        self.hub.publish(workers, version, layout, fill)

    def poll(self, timeout: float, of: int | None = None) -> list[Event]:
        """What workers have told."""
        events = self.hub.poll(timeout, of)
        if timeout and not events:
            self.hub.check_alive()
        return events

    def missing(self, workers: list[int]) -> dict[int, str]:
        """A child that ends before it connects cannot be told by its index: it counts if too few are left."""
        if not workers:
            return {}
        known = set(self.hub.pids.values())
        self._children |= {child.pid: child for child in multiprocessing.active_children() if child.pid}
        strangers = [child for pid, child in self._children.items() if pid not in known]
        ended = [child for child in strangers if not child.is_alive()]
        if not ended or len(strangers) - len(ended) >= len(workers):
            return {}
        text = ", ".join(f"{child.name} with status {child.exitcode}" for child in ended)
        reason = f"it has not connected, and of the processes started too few are left; these have ended: {text}"
        return dict.fromkeys(workers, reason)

    def close(self) -> None:
        """Lets the workers go."""
        self.hub.close()
