"""The arguments of phase 1, checked: whose weights are sent, and to which workers; which model gets them."""

import functools
from collections.abc import Iterator
from typing import Any

from ..errors import UsageError
from .worker import Worker

_EXCLUDES = {  # argument -> those that would say the same as a part of it
    "params_map": ["context", "model", "weights", "devices", "device_map_fn"],
    "context": ["model", "weights", "devices", "device_map_fn"],
    "model": ["weights"],
    "devices": ["device_map_fn"],
}


class WeightSource:
    """Gives each worker's weights when they are sent. Attribute `workers`: their indices.

    Args: of `WeightSyncScheme.init_on_sender`, and ranks: number of workers, where no argument says that.
    """

    def __init__(self, model_id: str | None, given: dict[str, Any], ranks: int | None):
        given = {name: value for name, value in given.items() if value is not None}
        for name, excluded in _EXCLUDES.items():
            for other in excluded:
                if name in given and other in given:
                    raise UsageError(f"init_on_sender: {name}= and {other}= exclude each other; leave one out")
        if not given.keys() & {"params_map", "context", "model", "weights"}:
            raise UsageError("init_on_sender: give model=, weights=, context= or params_map=")
        if "context" in given and model_id is None:
            raise UsageError("init_on_sender: context= needs model_id=, which says where in it the model is")
        self._params_map: dict[int, Any] | None = given.get("params_map")
        if not all(isinstance(k, int) and k >= 0 for k in self._params_map or ()):
            raise UsageError(f"init_on_sender: the keys of params_map= are worker indices: {[*given['params_map']]}")
        self._model_id, self._device_map_fn = model_id or "", given.get("device_map_fn")
        self._thing = given.get("model", given.get("weights"))
        self._context = given.get("context")
        count = _count(given, ranks)
        self.workers = list(range(count)) if self._params_map is None else sorted(self._params_map)

    def model(self) -> Any:
        """What has the weights now."""
        return self._thing if self._context is None else resolve(self._context, self._model_id)

    def shares(self, weights: Any, workers: list[Worker]) -> Iterator[tuple[list[Worker], Any]]:
        """(workers, what they get), one after another: a copy for one is freed before the next is made."""
        thing = self.model() if weights is None else weights
        if self._device_map_fn is not None:
            for worker in workers:
                yield [worker], self._device_map_fn(worker.index, thing)
        elif self._params_map is not None and weights is None:
            same: dict[int, list[Worker]] = {}
            for worker in workers:
                same.setdefault(id(self._params_map[worker.index]), []).append(worker)
            for group in same.values():
                yield group, self._params_map[group[0].index]
        else:
            yield workers, thing


def _count(given: dict[str, Any], ranks: int | None) -> int:
    """The number of workers, which several arguments may give."""
    known = {"num_workers": given["num_workers"]} if "num_workers" in given else {}
    known |= {name: len(given[name]) for name in ("devices", "params_map") if name in given}
    if (count := getattr(given.get("context"), "num_workers", None)) is not None:
        known["context"] = count
    if not known and ranks is not None:
        return ranks
    if not known:
        raise UsageError("init_on_sender: how many workers? give num_workers= or devices=")
    if len(set(known.values())) > 1:
        (first, m), (second, n) = list(known.items())[:2]
        raise UsageError(f"init_on_sender: {first}= says {m} workers and {second}= {n}")
    (count, *_) = known.values()
    if count < 0:
        raise UsageError(f"init_on_sender: num_workers={count}")
    return int(count)


def name_of(model_id: str | None) -> str:
    """The model, in messages."""
    return f"the model '{model_id}'" if model_id is not None else "the model"


def own_model(model_id: str | None, model: Any, context: Any, worker_idx: int | None) -> tuple[Any, int | None]:
    """A receiver's model and index, from the arguments of `init_on_receiver`."""
    if context is None:
        return model, worker_idx
    if model is not None:
        raise UsageError("init_on_receiver: context= and model= exclude each other; leave one out")
    if model_id is None:
        raise UsageError("init_on_receiver: context= needs model_id=, which says where in it the model is")
    return resolve(context, model_id), getattr(context, "worker_idx", None) if worker_idx is None else worker_idx


def resolve(context: Any, model_id: str) -> Any:
    """The model of that name in a context: the result of its `get_model`, or the attribute at the dotted path."""
    if hasattr(context, "get_model"):
        return context.get_model(model_id)
    try:
        return functools.reduce(getattr, model_id.split("."), context)
    except AttributeError as error:
        raise UsageError(f"no model '{model_id}' in the context: {error}") from None
