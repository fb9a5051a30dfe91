"""The sender's side of a scheme: who gets what, who has answered, who is gone."""

import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

from ..errors import SyncTimeoutError, UsageError, WorkerError, WorkerLeftError
from .hub import Event, Fill
from .layout import Layout, Plans, Weights, pack
from .recipe import Recipe

_LOOK_S = 1.0  # how often a sender that waits looks whether the workers live


class Transport(Protocol):
    """How the sender reaches its workers."""

    def publish(self, workers: list[int], version: int, layout: Layout, fill: Fill) -> None:
        """Brings a version to these workers; `fill` writes it into a block and returns its checksum."""

    def poll(self, timeout: float, of: int | None = None) -> list[Event]:
        """What workers have told, waiting for it, or for what worker `of` tells, up to `timeout` seconds."""
        ...

    def missing(self, workers: list[int]) -> dict[int, str]:
        """Those of these workers, which have never come, that cannot come any more, with the reason."""
        ...

    def close(self) -> None:
        """Ends in order."""


class Sender:
    """Sends the weights of one model.

    Args:
        recipe: whose, to whom.
        who: names the model in messages.
        coalesce, on_dead, wire_dtype: of the scheme.

    Attributes:
        version: sent last. sent, acked: by worker, the version sent to it, and acknowledged by it, last.
    """

    def __init__(
        self,
        recipe: Recipe,
        transport: Transport,
        who: str,
        coalesce: bool,
        on_dead: str,
        wire_dtype: str | None,
    ):
        self.recipe, self._transport, self._who = recipe, transport, who
        self._coalesce, self._on_dead, self._wire_dtype = coalesce, on_dead, wire_dtype
        self.version = 0
        self.sent: dict[int, int] = {}
        self.acked: dict[int, int] = {}
        self._answered: dict[int, int] = {}  # by worker: the last version that it has taken, or failed to take
        self._gone: dict[int, str] = {}  # worker -> why; "" if it left in order
        self._lost: dict[int, str] = {}  # worker -> why it died with a version unanswered, until that is told
        self._ready: set[int] = set()
        self._errors: list[WorkerError] = []
        self._layouts: dict[int, Layout] = {}
        self._plans = Plans()

    def versions(self) -> dict[int, int]:
        """By worker: the version acknowledged last; 0 before the first."""
        self.take_in(self._transport.poll(0))
        return {worker: self.acked.get(worker, 0) for worker in self.recipe.workers}

    def close(self) -> None:
        """Tells all that nothing more comes."""
        self._plans.forget()
        self._transport.close()

    def send(
        self, weights: Any, worker_ids: int | list[int] | None, one_by_one: bool, timeout: float | None, began: float
    ) -> list[int]:
        """Sends a new version. Returns the workers that will have it.

        Args:
            one_by_one: where each gets its own, one has it before the next one's is made.
            timeout, began: as in `wait`.
        """
        self.take_in(self._transport.poll(0))
        self._raise_errors()
        workers = self._addressed(worker_ids)
        self._lost.clear()
        if not self._coalesce:
            self.wait({worker: self.sent.get(worker, 0) for worker in workers}, timeout, began)
        version = self.version + 1
        for group, thing in self.recipe.shares(weights, workers):
            for layout, members in self._by_layout(group, thing):
                base = None if weights is None else self._base_of(thing)
                plan = self._plans.plan(thing, layout, "the weights given", "the model of init_on_sender", base)
                self._transport.publish(members, version, layout, partial(pack, plan))
                self.version = version
                self.sent.update(dict.fromkeys(members, version))
            if one_by_one and len(group) < len(workers):
                self._await(dict.fromkeys(group, version), timeout, began)
        self.version = version
        return workers

    def _base_of(self, thing: Any) -> Weights | None:
        """The model of phase 1, which knows what a state dict leaves out and what is tied in it."""
        model = self.recipe.model()
        return None if model is None or model is thing else Weights(model)

    def _addressed(self, worker_ids: int | list[int] | None) -> list[int]:
        everybody = self.recipe.workers
        if worker_ids is None:
            died = {worker: why for worker in everybody if (why := self._gone.get(worker))}
            if died and self._on_dead == "raise":
                raise self._left_error(died)
            workers = [worker for worker in everybody if worker not in self._gone]
            if everybody and not workers:
                raise self._left_error(self._gone)
            return workers
        workers = list(worker_ids) if isinstance(worker_ids, Iterable) else [worker_ids]
        unknown = [worker for worker in workers if worker not in everybody]
        if unknown:
            raise UsageError(f"send: there is no worker {unknown[0]}; there are {everybody}")
        if gone := {worker: self._gone[worker] for worker in workers if worker in self._gone}:
            raise self._left_error(gone)
        return list(dict.fromkeys(workers))

    def _by_layout(self, group: list[int], thing: Any) -> list[tuple[Layout, list[int]]]:
        """Workers by the layout of what they get; the first weights of a worker say what that is."""
        if any(worker not in self._layouts for worker in group):
            layout = Layout.of(self._plans.weights(thing), self._wire_dtype)
            for worker in group:
                self._layouts.setdefault(worker, layout)
        found: dict[int, tuple[Layout, list[int]]] = {}
        for worker in group:
            layout = self._layouts[worker]
            found.setdefault(id(layout), (layout, []))[1].append(worker)
        return list(found.values())

    def wait(self, wanted: dict[int, int], timeout: float | None, began: float) -> None:
        """Until each worker has answered to its version, or a newer one; then raises what went wrong.

        Args:
            timeout: seconds from `began` (of time.perf_counter) on; None: for ever.
        """
        self._await(wanted, timeout, began)
        self._raise_errors()
        lost, self._lost = self._lost, {}
        died = {worker: why for worker in wanted if (why := self._gone.get(worker) or lost.get(worker))}
        if died and self._on_dead == "raise":
            raise self._left_error(died)

    def _await(self, wanted: dict[int, int], timeout: float | None, began: float) -> None:
        end = None if timeout is None else began + timeout
        pause = 0.0
        while missing := [k for k, v in wanted.items() if self._answered.get(k, 0) < v and k not in self._gone]:
            left = _LOOK_S if end is None else end - time.perf_counter()
            if left <= 0:
                raise self._late_error(missing, timeout)
            self.take_in(self._transport.poll(min(pause, left), missing[-1]))
            pause = _LOOK_S
            self._gone |= self._transport.missing([k for k in missing if k not in self._ready])

    def _raise_errors(self) -> None:
        """What workers have reported, as one error: the first one's, with the text of all."""
        errors, self._errors = self._errors, []
        if errors:
            error = WorkerError("\n".join(map(str, errors)))
            error.worker, error.traceback = errors[0].worker, errors[0].traceback
            raise error

    def take_in(self, events: list[Event]) -> None:
        """Notes what workers have told."""
        for kind, worker, version, text in events:
            if kind in ("new", "back"):
                self._gone.pop(worker, None)
                if kind == "new":  # another process: it owes nothing
                    self._answered[worker] = self.sent.get(worker, 0)
                else:
                    self._ready.add(worker)
            elif kind == "ready":
                self._ready.add(worker)
                self._gone.pop(worker, None)
                self._answered[worker] = self.acked[worker] = 0
            elif kind == "ack":
                self.acked[worker] = max(version, self.acked.get(worker, 0))
                self._answered[worker] = max(version, self._answered.get(worker, 0))
            elif kind == "error":
                self._answered[worker] = max(version, self._answered.get(worker, 0), 0 if version else self.version)
                error = WorkerError(f"worker {worker} could not take version {version or 1}:\n{text.rstrip()}")
                error.worker, error.traceback = worker, text
                self._errors.append(error)
            else:
                if text and self._answered.get(worker, 0) < self.sent.get(worker, 0):
                    self._lost[worker] = text  # whoever comes in its place
                self._gone[worker] = text
                self._ready.discard(worker)

    def _left_error(self, gone: dict[int, str]) -> WorkerLeftError:
        text = "; ".join(f"worker {k}: {why or 'it has shut down'}" for k, why in sorted(gone.items()))
        return WorkerLeftError(f"{self._who} cannot be sent to {text}")

    def _late_error(self, missing: list[int], timeout: float | None) -> SyncTimeoutError:
        text = "; ".join(
            f"worker {k} has version {self.acked.get(k, 0)}" if k in self._ready else f"worker {k} has not connected"
            for k in missing
        )
        who = self._who
        return SyncTimeoutError(f"{who}, version {self.version}: no answer within {timeout:g} s: {text}")
