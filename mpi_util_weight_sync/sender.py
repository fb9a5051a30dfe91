"""In the sender's process: makes each version, has it published, and waits for the answers."""

import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from mpi_util.arrays.layout import Layout, ModelCopier
from mpi_util.errors import SyncTimeoutError, UsageError, WorkerError

from .connection import Deadline, left
from .layout import Weights
from .publisher import Publisher, State, Worker

_CHECK_S = 1.0  # how often a sender that waits checks that the workers live


def worker_indices(given: dict[str, Any], num_workers: int | None, ranks: int | None) -> list[int]:
    """The indices of the workers. UsageError: the arguments of `init_on_sender` exclude each other, or one is missing.

    Args: given: those that say which weights are sent, without those that are None. ranks: number of workers under MPI.
    """
    sources: list[str] = [name for name in ("params_map", "context", "model", "weights") if name in given]
    if not sources:
        raise UsageError("init_on_sender: give model=, weights=, context= or params_map=")
    if len(sources) > 1:
        raise UsageError(f"init_on_sender: {sources[0]}= and {sources[1]}= exclude each other; leave one out")
    if "context" in given and "model_id" not in given:
        raise UsageError("init_on_sender: context= needs model_id=, which says where in it the model is")
    if not all(isinstance(k, int) and k >= 0 for k in given.get("params_map", ())):
        raise UsageError(f"init_on_sender: the keys of params_map= are worker indices: {[*given['params_map']]}")
    said = len(given["params_map"]) if "params_map" in given else getattr(given.get("context"), "num_workers", None)
    count = num_workers if num_workers is not None else ranks if said is None else said
    if said not in (None, count):
        raise UsageError(f"init_on_sender: num_workers= says {count} workers and {sources[0]}= {said}")
    if count is None or count < 0:
        raise UsageError(f"init_on_sender: how many workers? give num_workers= (it is {count})")
    indices = sorted(given.get("params_map", range(count)))
    if ranks is not None and indices != [*range(ranks)]:
        raise UsageError(f"init_on_sender: workers {indices}; the ranks beside the sender are workers 0 to {ranks - 1}")
    return indices


def _has_numbers(thing: Any) -> bool:
    return isinstance(thing, dict) and bool(thing) and all(type(key) is int for key in thing)


class Sender:
    """Sends the weights of one model; the publisher has the workers' records.

    Args: model: None: each worker has its own weights, `own`, by worker. drop: continue without workers that have died.
    """

    def __init__(self, model: Any, own: dict[int, Any], publisher: Publisher, drop: bool):
        self.model, self._own, self.publisher, self._drop = model, own, publisher, drop
        self.workers = publisher.workers

    def send(self, weights: Any, worker_ids: int | list[int] | None, sync: bool, deadline: Deadline) -> int:
        self.publisher.poll(0)
        self._raise_errors()
        by_worker = _has_numbers(weights) and not _has_numbers(self.model)
        own = weights if by_worker else self._own if weights is None else {}
        workers = self._addressed(list(own) if by_worker and worker_ids is None else worker_ids)
        if own and (lacking := [worker.index for worker in workers if worker.index not in own]):
            raise UsageError(f"send: there are no weights for worker {lacking[0]} among those by worker")
        version, thing = 0, self.model if weights is None else weights
        self.publisher.newest += not self.workers  # in a single rank
        things = [(worker, own.get(worker.index, thing)) for worker in workers]
        for group, layout, copier in list(self._copiers(things)):  # all are compared before one is sent
            version = self.publisher.publish(group, version, layout, copier.read)
        if sync:
            self.wait(workers, deadline)
        return version or self.publisher.newest

    def _copiers(self, things: list[tuple[Worker, Any]]) -> Iterator[tuple[list[Worker], Layout, ModelCopier]]:
        """(workers that get the same weights, the layout, the values). Args: things: workers with their weights."""
        groups: dict[tuple[int, Layout | None], list[Worker]] = {}
        for worker, thing in things:
            groups.setdefault((id(thing), worker.layout), []).append(worker)
        by_id = {id(thing): thing for _, thing in things}
        for (number, layout), group in groups.items():
            given = Weights.of(thing := by_id[number])
            # the model of phase 1 has what a state dict lacks: tied names, buffers that are not saved
            base = None if self.model is None or self.model is thing else Weights.of(self.model)
            if left_out := (base or given).left_out:
                name = self.publisher.name
                warnings.warn(f"{name}: parameters and buffers are sent, but '{left_out[0]}' is not", stacklevel=4)
            layout = layout or given.layout()  # a worker's first weights determine it
            yield group, layout, given.copier(layout, "the weights given", "the model of init_on_sender", base)

    def _addressed(self, worker_ids: int | list[int] | None) -> list[Worker]:
        if worker_ids is None:
            everyone = list(self.workers.values())
            workers = [worker for worker in everyone if not worker.gone]
            self._raise_left([worker for worker in everyone if worker.state is State.DEAD and not self._drop])
            self._raise_left([] if workers else everyone)
            return workers
        indices = dict.fromkeys(worker_ids if isinstance(worker_ids, Iterable) else [worker_ids])
        if unknown := [index for index in indices if index not in self.workers]:
            raise UsageError(f"send: there is no worker {unknown[0]!r}; there are {list(self.workers)}")
        workers = [self.workers[index] for index in indices]
        kept = [worker for worker in workers if not (self._drop and worker.state is State.DEAD)]
        self._raise_left([worker for worker in kept if worker.gone] if kept else workers)
        return kept

    def wait(self, workers: Collection[Worker], deadline: Deadline) -> None:
        """Waits until each has answered to the version sent to it, or a newer one; then raises what went wrong."""
        wanted = [(worker, worker.sent) for worker in workers]
        self.publisher.poll(0)
        while late := [worker for worker, n in wanted if worker.answered < n and not worker.gone]:
            absent = [worker for worker in late if worker.state is State.ABSENT]
            if absent and self.publisher.refusals:
                refusals, self.publisher.refusals = self.publisher.refusals, []
                raise UsageError("; ".join(refusals))
            if not deadline.left:
                self._raise_late(late, deadline.timeout)
            if absent:
                self.publisher.check_absent(absent)
            self.publisher.poll(min(_CHECK_S, deadline.left))
        self._raise_errors()
        # others that have died had answered before
        died = [w for w in workers if w.state is State.DEAD and w.answered < w.sent]
        self._raise_left([] if self._drop else died)

    def _raise_errors(self) -> None:
        failures, self.publisher.failures = self.publisher.failures, []
        if failures:
            texts = (f"worker {index} could not take version {n}:\n{text.rstrip()}" for index, n, text in failures)
            error = WorkerError("\n".join(texts))
            error.worker, _, error.traceback = failures[0]
            raise error

    def _raise_left(self, workers: list[Worker]) -> None:
        if workers:
            text = "; ".join(f"worker {w.index}: {w.died or w.state.value}" for w in workers)
            raise left(f"cannot send {self.publisher.name} to {text}")

    def _raise_late(self, workers: list[Worker], timeout: float | None) -> None:
        has = [f"version {worker.acked}" if worker.state is State.READY else "not connected" for worker in workers]
        text = "; ".join(f"worker {worker.index} has {what}" for worker, what in zip(workers, has))
        if self.publisher.turned_away:
            text += f"; turned away: {self.publisher.turned_away}"
        what = f"{self.publisher.name}, version {self.publisher.newest}"
        raise SyncTimeoutError(f"{what}: no answer within {timeout:g} s: {text}")
