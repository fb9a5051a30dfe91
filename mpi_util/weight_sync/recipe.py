"""What `init_on_sender` is told: whose weights, for which workers. A recipe, not copies."""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import UsageError


class Recipe:
    """Makes each worker's weights when they are sent. Arguments as in `WeightSyncScheme.init_on_sender`.

    Attributes:
        workers: their indices.
    """

    def __init__(
        self,
        model_id: str | None,
        model: Any,
        weights: Any,
        context: Any,
        params_map: dict[int, Any] | None,
        devices: list[Any] | None,
        device_map_fn: Callable[[int, Any], Any] | None,
        num_workers: int | None,
    ):
        given = {
            "params_map": params_map,
            "context": context,
            "model": model,
            "weights": weights,
            "devices": devices,
            "device_map_fn": device_map_fn,
        }
        present = [name for name, value in given.items() if value is not None]
        for leading, excluded in _EXCLUDES.items():
            clash = [name for name in excluded if name in present]
            if leading in present and clash:
                raise UsageError(f"init_on_sender: {leading}= and {clash[0]}= exclude each other; leave one out")
        if not {"params_map", "context", "model", "weights"} & set(present):
            raise UsageError("init_on_sender: give model=, weights=, context= or params_map=")
        if context is not None and model_id is None:
            raise UsageError("init_on_sender: context= needs model_id=, which says where in it the model is")
        if params_map is not None and not all(isinstance(k, int) and k >= 0 for k in params_map):
            raise UsageError(f"init_on_sender: the keys of params_map= are worker indices, not {list(params_map)}")
        self._model_id, self._params_map, self._device_map_fn = model_id or "", params_map, device_map_fn
        self._thing = model if model is not None else weights
        self._context = None if context is None else _weak(context)
        self.workers = self._count(given, num_workers)

    def _count(self, given: dict[str, Any], num_workers: int | None) -> list[int]:
        counts = {"num_workers": num_workers}
        if given["devices"] is not None:
            counts["devices"] = len(given["devices"])
        if given["params_map"] is not None:
            counts["params_map"] = len(given["params_map"])
        if (context := given["context"]) is not None:
            counts["context"] = getattr(context, "num_workers", None)
            devices = getattr(context, "policy_device", None)
            if counts["context"] is None and isinstance(devices, (list, tuple)):
                counts["context"] = len(devices)
        known = {name: count for name, count in counts.items() if count is not None}
        if not known:
            raise UsageError("init_on_sender: how many workers? give num_workers= or devices=")
        if len(set(known.values())) > 1:
            (first, m), (second, n) = list(known.items())[:2]
            raise UsageError(f"init_on_sender: {first}= says {m} workers and {second}= {n}")
        count = next(iter(known.values()))
        if count < 0:
            raise UsageError(f"init_on_sender: num_workers={count}")
        return sorted(self._params_map) if self._params_map is not None else list(range(count))

    def model(self) -> Any:
        """What has the weights now."""
        return self._thing if self._context is None else resolve(self._context(), self._model_id)

    def shares(self, weights: Any, workers: list[int]) -> Iterator[tuple[list[int], Any]]:
        """(workers, what they get): one at a time, so that a copy for one is gone before the next is made.

        Args:
            weights: what `send` was given; None: the model's own.
        """
        if self._device_map_fn is not None:
            base = self.model() if weights is None else weights
            for worker in workers:
                yield [worker], self._device_map_fn(worker, base)
        elif self._params_map is not None and weights is None:
            same: dict[int, list[int]] = {}
            for worker in workers:
                same.setdefault(id(self._params_map[worker]), []).append(worker)
            for group in same.values():
                yield group, self._params_map[group[0]]
        else:
            yield workers, self.model() if weights is None else weights


# An argument of the left says all that those of its right would say.
_EXCLUDES = {
    "params_map": ["context", "model", "weights", "devices", "device_map_fn"],
    "context": ["model", "weights", "devices", "device_map_fn"],
    "model": ["weights"],
    "devices": ["device_map_fn"],
}


def resolve(context: Any, model_id: str) -> Any:
    """The model of that name in a context: what its `get_model` gives, or the attribute at the dotted path."""
    if context is None:
        raise UsageError(f"the context that held the model '{model_id}' is gone")
    if hasattr(context, "get_model"):
        return context.get_model(model_id)
    try:
        return functools.reduce(getattr, model_id.split("."), context)
    except AttributeError as error:
        raise UsageError(f"no model '{model_id}' in the context: {error}") from None


def _weak(context: Any) -> Callable[[], Any]:
    """A context as a rule holds the scheme; the two should not keep each other alive."""
    try:
        return weakref.ref(context)
    except TypeError:
        return lambda: context
